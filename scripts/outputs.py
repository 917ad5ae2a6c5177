"""Store the outputs of every public call, and compare them with those of another commit.

    python scripts/outputs.py --out before [--parts embed grn ...]       on one commit
    python scripts/outputs.py --out after --against before               on the other

Each call runs on simulated cells and on scanpy's `pbmc68k_reduced`, with fixed seeds and few steps. Arrays are compared
bit by bit; a difference is reported with its size, and what is missing or new by name. Exit 1 if anything differs by
more than `--tolerance` of its scale. Seconds, versions and addresses are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
import scipy.sparse as sp

import scdiva as sd

Outputs = dict[str, np.ndarray]
LEFT_OUT = ("seconds", "version", "written", "created", "commit", "path")
"""Entries whose names hold one of these are not the same in two runs."""


def flat(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every array within a result with its path."""
    if any(part in name.rsplit("/", 1)[-1] for part in LEFT_OUT) or value is None:
        return
    if isinstance(value, ad.AnnData):
        parts = ("X", "obs", "var", "obsm", "varm", "varp", "obsp", "layers", "uns")
        value = {part: getattr(value, part) for part in parts}
    if isinstance(value, pd.DataFrame):
        value = {"index": value.index, **value}
    if isinstance(value, Mapping):
        for key in value:
            yield from flat(f"{name}/{key}", value[key])
        return
    array = value.toarray() if sp.issparse(value) else np.asarray(value)
    if not array.dtype.names:  # such as scanpy's tables of ranked genes
        yield name, array.astype(str) if array.dtype.kind in "OUST" else array


def cells(name: str) -> tuple[ad.AnnData, dict[str, Any]]:
    """A dataset, and how its expression is read."""
    if name == "toy":
        return sd.datasets.toy(160, 300), {}
    adata = sc.datasets.pbmc68k_reduced()
    adata.obs["cell_type"] = adata.obs["bulk_labels"]
    adata.obs["batch"] = np.where(np.arange(adata.n_obs) % 2, "a", "b")
    return adata[::3].copy(), {"use_raw": True}


def screen(adata: ad.AnnData) -> ad.AnnData:
    """Give cells perturbations, singles and doubles, and two states."""
    genes = [str(name) for name in adata.var_names[:3]]
    conditions = ["control", genes[0], genes[1], f"{genes[0]}+{genes[1]}", genes[2], f"{genes[1]}+{genes[2]}"]
    adata.obs["perturbation"] = np.resize(conditions, adata.n_obs)
    adata.obs["state"] = np.resize(["now", "other", "wanted"], adata.n_obs)
    return adata


def prepare(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    sd.pp.match_genes(adata, **({"use_raw": True} if how else {}))
    yield adata
    sd.pp.entropy_serialize(adata, **how)
    yield sd.get.serialized_df(adata).head(2000)


def embed(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    sd.tl.embed(adata, **how)
    yield adata
    with tempfile.TemporaryDirectory() as folder:
        adata.write_h5ad(f"{folder}/cells.h5ad")
        out = sd.tl.embed_file(f"{folder}/cells.h5ad", f"{folder}/out.h5ad", key_added="from_file", **how)
        yield ad.read_h5ad(out).obsm["from_file"]


def integrate(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    query = adata[:20].copy()
    model = sd.tl.integrate(adata, "batch", steps=30, **how)
    yield adata
    sd.tl.corrected_expression(adata, "batch", list(adata.var_names[:3]), **how)
    yield adata
    sd.tl.embed(query, model, **how)
    yield query
    sd.tl.integrate(adata, "batch", "cell_type", steps=30, key_added="with_labels", **how)
    yield adata


def annotate(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    reference, query = adata[::2].copy(), adata[1::2].copy()
    for method in ("linear", "knn"):
        copy = query.copy()
        sd.tl.annotate(copy, "cell_type", reference, method=method, reject=0.05, key_added="predicted", **how)
        yield copy
        yield sd.get.annotation_df(copy, key="predicted")


def adapt(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    model = sd.tl.adapt(adata, **how)
    sd.tl.embed(adata, model, **how)
    yield adata
    yield model.adaptation


def impute(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    sd.tl.impute(adata, list(adata.var_names[:3]), **how)
    yield adata


def reconstruct(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    adata = adata[:24].copy()
    sd.tl.reconstruct(adata, n_steps=2, **how)
    yield sd.get.reconstruction_df(adata)
    sd.tl.reconstruct(adata, use_ranks=True, key_added="by_rank", **how)
    yield adata


def generate(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    yield sd.tl.generate(adata, 4, groupby="cell_type", **how)
    yield sd.tl.generate(adata, 4, from_state=False, **how)


def likelihood(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    adata = adata[:24].copy()
    sd.tl.log_likelihood(adata, n_samples=2, **how)
    yield adata


def perturb(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    adata = screen(adata)
    double = sorted(set(adata.obs["perturbation"][adata.obs["perturbation"].str.contains("+", regex=False)]))[0]
    train = adata[adata.obs["perturbation"] != double].copy()
    sd.pp.split_perturbations(adata, "perturbation", by="combination", n_splits=2)
    yield adata.obs["scdiva_split"]
    predicted = sd.tl.predict_perturbation(train, "perturbation", predict=[double], n_cells=30, **how)
    yield predicted
    yield train.uns["scdiva_perturbation"]
    yield sd.get.perturbation_df(predicted, top=20)
    yield sd.tl.score_perturbation(predicted, adata, **how)
    fitted = sd.tl.fit_perturbation(adata, "perturbation", **how)
    yield sd.tl.rank_perturbations(adata, "state", "now", target="wanted", model=fitted, **how)


def networks(adata: ad.AnnData, how: dict[str, Any]) -> Iterator[Any]:
    gene = str(adata.var_names[np.asarray((adata.X > 0).sum(axis=0)).ravel().argmax()])
    sd.tl.grn(adata, **how)
    sd.tl.grn_modules(adata)
    yield adata
    yield sd.get.grn_df(adata, top=200)
    yield sd.tl.regulon(adata, gene, **how)
    for method in ("correlation", "attention"):
        few = adata[:16].copy()
        sources = {} if method == "correlation" else {"sources": [gene]}
        sd.tl.grn(few, method, key_added="few", **sources, **how)
        yield few.varp["few"]
    sd.tl.gene_embedding(adata, **how)
    yield dict(adata.varm)


PARTS = {
    part.__name__: part
    for part in (
        prepare, embed, integrate, annotate, adapt, impute, reconstruct, generate, likelihood, perturb, networks,
    )
}  # fmt: skip


def run(part: str) -> Outputs:
    """Results of a part on both datasets."""
    arrays: Outputs = {}
    for name in ("toy", "blood"):
        for number, value in enumerate(PARTS[part](*cells(name))):
            arrays |= dict(flat(f"{part}/{name}/{number}", value))
    print(f"{part}: {len(arrays)} arrays", flush=True)
    return arrays


def difference(ours: np.ndarray | None, theirs: np.ndarray | None) -> float:
    """Largest difference as a share of the largest value; infinite if types, shapes or missing values differ."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return np.inf
    if not (np.issubdtype(ours.dtype, np.number) and np.issubdtype(theirs.dtype, np.number)):
        return 0.0 if np.array_equal(ours, theirs) else np.inf
    if np.array_equal(ours, theirs, equal_nan=True):
        return 0.0
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if (np.isfinite(ours) != np.isfinite(theirs)).any():
        return np.inf
    return float(np.nanmax(np.abs(ours - theirs)) / max(np.nanmax(np.abs(theirs)), 1e-12))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--against", type=Path, help="folder of the other commit")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tolerance", type=float, default=0.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    sd.settings.progress = False
    arguments.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    for part in arguments.parts:
        ours = run(part)
        np.savez_compressed(arguments.out / f"{part}.npz", **{key.replace("/", "|"): ours[key] for key in ours})
        if arguments.against is None:
            continue
        with np.load(arguments.against / f"{part}.npz") as saved:
            theirs = {key.replace("|", "/"): saved[key] for key in saved.files}
        sizes = {key: difference(ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys())}
        for key in (key for key in sizes if sizes[key] > 0):
            print(f"  {key}: {'only here' if key not in theirs else 'missing' if key not in ours else sizes[key]}")
        bad += sum(size > arguments.tolerance for size in sizes.values())
        print(f"  {sum(size == 0 for size in sizes.values())} of {len(sizes)} the same bit by bit")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
