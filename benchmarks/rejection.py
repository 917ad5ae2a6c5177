"""Rejection of unknown cell types across studies: `tl.annotate(reject=...)` on a query of another study.

    python benchmarks/rejection.py --data FOLDER [--pairs NAME ...] [--max-cells 1500]

The threshold is calibrated on held-out cells of the reference (without `batch_key`) or on held-out batches (with it). A
row has the share of cells called unknown among those of types that the reference has, the share of these whose most
probable label is right, and the share called unknown among cells of a type that was removed from the reference, for
each type with at least 10 cells in both studies in turn. Rates are 0.05 and 0.01.

Intervals are at 95%: Wilson's over the query's cells for shares of known types, a bootstrap over the removed types for
their mean.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
from _record import record
from scipy.stats import binomtest

import scdiva as sd

RATES = (0.05, 0.01)
LEAST, DRAWS, KEY = 10, 2000, "predicted"
KANG = {
    "CD14 Mono": "CD14 monocyte", "CD16 Mono": "FCGR3A monocyte", "CD4 Naive T": "CD4 T", "CD4 Memory T": "CD4 T",
    "T activated": "CD4 T", "CD8 T": "CD8 T", "B": "B", "B Activated": "B", "NK": "NK", "DC": "dendritic",
    "Mk": "megakaryocyte", "pDC": "plasmacytoid dendritic", "Eryth": "erythroid",
}  # fmt: skip
PBMC3K = {
    "CD14+ Mono": "CD14 monocyte", "FCGR3A+ Mono": "FCGR3A monocyte", "Naive CD4 T": "CD4 T", "Memory CD4 T": "CD4 T",
    "CD8 T": "CD8 T", "B": "B", "NK": "NK", "DC": "dendritic", "Platelet": "megakaryocyte",
}  # fmt: skip
"""Labels of each study to types that both use; a reference keeps its own labels, cells of other labels are left out."""


def studies(folder: Path, name: str, most: int) -> tuple[ad.AnnData, ad.AnnData, str | None]:
    """Reference and query of a pair, with `cell_type` and `type` in obs, and the batch column of the reference."""
    first, second = name.split(" → ")
    if first.startswith("panc8"):
        cells = ad.read_h5ad(folder / "panc8_small_500.h5ad")
        cells.obs["type"] = cells.obs["cell_type"].astype(str)
        asked = (cells.obs["assay"] == second).to_numpy()
        return drawn(cells[~asked], most), drawn(cells[asked], most), "assay"
    files = {"kang_ifnb": ("kang_ifnb_2800", KANG), "pbmc3k": ("pbmc3k_raw", PBMC3K)}
    found = []
    for study in (first, second.removesuffix(", control")):
        file, types = files[study]
        cells = ad.read_h5ad(folder / f"{file}.h5ad")
        cells.obs["type"] = cells.obs["cell_type"].astype(str).map(types)
        kept = cells.obs["type"].notna().to_numpy()
        if second.endswith(", control") and study != first:
            kept &= (cells.obs["condition"] == "CTRL").to_numpy()
        found.append(drawn(cells[kept], most))
    return found[0], found[1], "batch" if first == "kang_ifnb" else None


PAIRS = ("kang_ifnb → pbmc3k", "pbmc3k → kang_ifnb, control", "panc8, others → indrop", "panc8, others → smartseq2")
"""Reference and query. Of panc8 the studies are its technologies, four of five in the reference."""


def drawn(adata: ad.AnnData, most: int) -> ad.AnnData:
    """At most so many cells, drawn at random, always the same ones."""
    return adata[np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:most])].copy()


def annotated(
    query: ad.AnnData, reference: ad.AnnData, batch_key: str | None
) -> tuple[dict[float, np.ndarray], np.ndarray, dict[float, bool]]:
    """Cells called unknown at each rate, the most probable type of each, and which rates warned."""
    unknown, warned = {}, {}
    fitted: dict = {"labels_key": "cell_type", "reference": reference, "batch_key": batch_key}
    for rate in RATES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            annotator = sd.tl.annotate(query, **fitted, reject=rate, key_added=KEY, rng=0)
        unknown[rate] = (query.obs[KEY] == "unknown").to_numpy()
        warned[rate] = any("shift between query and reference" in str(one.message) for one in caught)
        fitted = {"model": annotator}
    types = dict(zip(reference.obs["cell_type"].astype(str), reference.obs["type"], strict=True))
    best = query.obsm[f"{KEY}_probability"].argmax(axis=1)
    return unknown, np.array([types[name] for name in annotator.names])[best], warned


def wilson(called: np.ndarray) -> list[float]:
    """95% interval of a share of cells."""
    low, high = binomtest(int(called.sum()), len(called)).proportion_ci(method="wilson")
    return [round(float(low), 4), round(float(high), 4)]


def bootstrap(values: np.ndarray) -> list[float]:
    """95% interval of the mean of values drawn again."""
    rows = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    return [round(float(end), 4) for end in np.quantile(values[rows].mean(axis=1), [0.025, 0.975])]


def rows_of(pair: str, reference: ad.AnnData, query: ad.AnnData, batch_key: str | None) -> list[dict]:
    """A row for each rate, calibrated as `batch_key` says."""
    query.obs = query.obs[["type"]].copy()
    truth, known = query.obs["type"].to_numpy(), query.obs["type"].isin(set(reference.obs["type"])).to_numpy()
    unknown, best, warned = annotated(query, reference, batch_key)
    in_both = [reference.obs["type"].value_counts(), query.obs["type"].value_counts()]
    removed: dict[float, dict[str, float]] = {rate: {} for rate in RATES}
    for name in sorted(set(truth[known])):
        if min(counts[name] for counts in in_both) < LEAST:
            continue
        without = annotated(query, reference[(reference.obs["type"] != name).to_numpy()].copy(), batch_key)[0]
        for rate in RATES:
            removed[rate][name] = round(float(without[rate][truth == name].mean()), 4)
    rows = []
    for rate in RATES:
        called, each = unknown[rate][known].astype(float), np.array(list(removed[rate].values()))
        right = (best == truth)[known & unknown[rate]]
        rows.append({
            "pair": pair, "arm": "batches" if batch_key else "cells", "rate": rate, "n_cells": query.n_obs,
            "n_known": int(known.sum()), "known": round(float(called.mean()), 4), "known_interval": wilson(called),
            "right": round(float(right.mean()), 4) if len(right) else None,
            "accuracy": round(float((best == truth)[known].mean()), 4),
            "removed": round(float(each.mean()), 4), "removed_interval": bootstrap(each),
            "removed_types": removed[rate], "warned": warned[rate],
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--max-cells", type=int, default=1500, help="of a study, drawn at random")
    arguments = parser.parse_args(argv)
    rows = []
    with sd.settings.override(progress=False):
        for pair in arguments.pairs:
            reference, query, batch_key = studies(arguments.data, pair, arguments.max_cells)
            for key in (None, batch_key) if batch_key else (None,):
                rows += rows_of(pair, reference, query, key)
                print(*rows[-len(RATES) :], sep="\n", flush=True)
    record("rejection", rows, max_cells=arguments.max_cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
