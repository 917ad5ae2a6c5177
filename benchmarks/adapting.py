"""`tl.adapt` beside the model as it is and what is fitted to the same cells: PCA, scVI, Harmony.

    python benchmarks/adapting.py --data FOLDER [--sets NAME ...]
        [--corpus FOLDER --base FOLDER ... [--studies NAME ...]] [--arms NAME ...] [--seeds 0 1 2] [--strict]

Sets of the benchmark folder are embedded with the bundled model, mouse cells by their human orthologs. With `--base`,
what `train_mini.py --exclude` wrote without some studies, the labelled ones of these are embedded with that model:
nothing was chosen on those that `DESIGN` does not name, and neither model nor design was made with them.

- zero-shot: the model as it is.
- adapted: `tl.adapt` with its defaults and the `batch_key` of the set, if it has one; for each seed anew.
- adapted without batches: the same without `batch_key`. Only where there are some.
- pca: 2,000 highly variable genes, scaled, 50 components. harmony: on these, where there are batches.
- scvi: default architecture, epochs and early stopping on the same genes; fitted once, with the batches of the set.

All arms are scored alike: 15-NN accuracy and macro-F1 (5 folds), NMI and ARI at the best Leiden resolution, label
silhouette. CPU seconds are those of one fit and embedding on one thread. Each row is written when it is made; rows of
sets and arms that a call does not make stay as they were, each with its commit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import mean

import anndata as ad
import numpy as np
import torch
from _judge import across, judge, over_seeds, share_of_cells
from _record import commit, record, replaced, rows_so_far
from _rivals import NO_SCVI, fit_pca, fit_scvi, has_scvi, scdiva_arm
from _sets import NO_TYPE, load_set, scored, typed
from _timing import report
from zero_shot import SCORES, scores, timed

import scdiva as sd
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa, load_model

SETS = {
    "pbmc3k_raw": None,
    "kang_pbmc_12k_1287g": None,
    "kang_ifnb_2800": None,
    "sc_mixology_cell_lines": "batch",
    "panc8_small_500": "batch",
    "darmanis_brain_320": None,
    "mouse_brain_zeisel_550": None,
    "mouse_pancreas_bastidasponce_739": None,
}
"""Labelled sets, and their column of batches; conditions are none."""
DESIGN = (
    "breast_scdeconr_ref",
    "zilionis_scgate_300",
    "pbmc4k_soupx",
    "celltypist_sample",
    "mudan_reference_pbmc_sorted",
    "pollen2014_c1_299",
    "pollen2015_fetal_cortex_367",
)
"""Held-out studies that design choices of earlier versions of `tl.adapt` were made on."""
LEAST_CELLS = 100
"""Of fewer labelled cells a score says nothing: one cell is more than the margin."""
ARMS = ("zero-shot", "adapted", "adapted without batches", "pca", "harmony", "scvi")
MARGIN = 0.01


def arms_of(
    adata: ad.AnnData, model: ScDiVa, batch_key: str | None, seeds: list[int], wanted: Collection[str] = ARMS
) -> Iterator[tuple[str, list[np.ndarray], dict]]:
    """Yield each arm that is wanted, its embedding for each seed, and notes."""
    once: dict[str, Callable[[], np.ndarray]] = {
        "zero-shot": lambda: scdiva_arm(model)(adata),
        "pca": lambda: fit_pca(adata)(adata),
    }
    adapted: dict[str, str | None] = {"adapted": batch_key}
    if batch_key is not None:
        adapted["adapted without batches"] = None
        once["harmony"] = lambda: _harmony(fit_pca(adata)(adata), adata, batch_key)
    if has_scvi():
        once["scvi"] = lambda: fit_scvi(adata, seeds[0], batch_key=batch_key)(adata)
    for name in (arm for arm in ARMS if arm in wanted and arm in {**once, **adapted}):
        if name in once:
            found, seconds = timed(once[name])
            yield name, [found] * len(seeds), {**seconds, **({"fits": 1} if name == "scvi" else {})}
            continue
        fits, seconds = [], {}
        for seed in seeds:
            own, seconds = timed(
                lambda seed=seed, key=adapted[name]: sd.tl.adapt(adata, model, batch_key=key, rng=seed)
            )
            fits.append(own)
        notes = {"components": fits[0].adaptation["n_components"]}
        yield name, [scdiva_arm(own)(adata) for own in fits], {**seconds, **notes}


def _harmony(pca: np.ndarray, adata: ad.AnnData, batch_key: str) -> np.ndarray:
    from harmonypy import run_harmony

    found = np.asarray(run_harmony(pca, adata.obs, batch_key).Z_corr)
    return found if len(found) == adata.n_obs else found.T


def make_rows(
    name: str,
    adata: ad.AnnData,
    labels: np.ndarray,
    arms: Iterator[tuple[str, list[np.ndarray], dict]],
    seeds: list[int],
) -> Iterator[dict]:
    rows = scored(labels)
    for arm, runs, notes in arms:
        found = [scores(run[rows], labels[rows], seed) for run, seed in zip(runs, seeds, strict=True)]
        row: dict = {"set": name, "arm": arm, "n_cells": found[0]["n_cells"], "n_seeds": len(found)}
        row |= {key: round(value, 1) if key.endswith("seconds") else value for key, value in notes.items()}
        for key in SCORES:
            row |= over_seeds(key, [one[key] for one in found])
        yield row


def held_out(corpus: Path, base: Path) -> Iterator[str]:
    """Labelled studies of the corpus that a model was not trained on."""
    model = load_model(base / "model")
    trained = set(PackedCells(base / "prepared" / "train.h5", model.vocabulary).study_names)
    for file in sorted(corpus.glob("*.h5ad")):
        if file.stem in trained:
            continue
        obs = ad.read_h5ad(file, backed="r").obs
        if "cell_type" not in obs:
            continue
        types = obs["cell_type"].astype(str)
        if len(types) >= LEAST_CELLS and types[~types.isin(NO_TYPE)].nunique() > 1:
            yield file.stem


def goals(rows: list[dict]) -> list[dict]:
    """On every set at or above model and PCA less .01 by accuracy; on average above model, PCA and scVI by .01.

    Means are over the sets of each group, then over all of them, one weight each.
    """
    at = {(row["set"], row["arm"]): row for row in rows}
    groups = _groups(rows)
    found = []
    for group, names in groups.items():
        for name in names:
            if not {(name, "zero-shot"), (name, "pca")} <= at.keys():
                continue
            rival = max(("zero-shot", "pca"), key=lambda arm: at[name, arm]["accuracy"])
            pair = (share_of_cells(at[name, arm], "accuracy") for arm in ("adapted", rival))
            found.append(judge(f"{name}: accuracy above the better of model and PCA", *pair, at_least=-MARGIN))
        found += _means(group, names, at)
    if len(groups) > 1:
        found += _means("all sets", [name for names in groups.values() for name in names], at)
    return found


def _means(of: str, names: list[str], at: dict[tuple[str, str], dict]) -> list[dict]:
    """Mean lead over each rival, over those of the sets that have both; the interval is over sets."""
    found = []
    for rival in ("zero-shot", "pca", "scvi"):
        for key in ("accuracy", "average_bio"):
            pairs = [(at[name, "adapted"], at[name, rival]) for name in names if (name, rival) in at]
            if len(pairs) > 1:
                leads = across([ours[key] - theirs[key] for ours, theirs in pairs], "sets")
                means = [round(mean(row[key] for row in side), 4) for side in zip(*pairs, strict=True)]
                what = f"{of}: mean {key} above {rival}"
                found.append(judge(what, leads, at_least=MARGIN, ours=means[0], rival=means[1]))
    return found


def _groups(rows: list[dict]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["arm"] == "adapted":
            groups.setdefault(row["group"], []).append(row["set"])
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--base", type=Path, nargs="*", default=[], help="folders that train_mini.py --exclude wrote")
    parser.add_argument("--studies", nargs="+", help="of the held-out ones, to make rows of; all by default")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--strict", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads = False, 1
    bundled, seeds = load_model(), arguments.seeds
    work = [
        ("mouse" if name.startswith("mouse") else "benchmark sets", arguments.data, name, bundled, SETS.get(name))
        for name in arguments.sets
    ]
    for base in arguments.base:
        model = load_model(base / "model")
        for name in held_out(arguments.corpus, base):
            if arguments.studies and name not in arguments.studies:
                continue
            group = "held-out studies of the design" if name in DESIGN else "held-out studies"
            work.append((group, arguments.corpus, name, model, None))
    rows, code = rows_so_far("adapting"), commit()
    notes = {"design": list(DESIGN), **({} if has_scvi() else {"left_out": NO_SCVI})}
    for group, folder, name, model, batch_key in work:
        adata, labels = load_set(folder, name)
        labels = typed(labels)
        for made in make_rows(name, adata, labels, arms_of(adata, model, batch_key, seeds, arguments.arms), seeds):
            weights = {} if model is bundled else {"weights_note": "trained as the bundled ones, without these studies"}
            row = {"group": group, **made, **weights, "commit": code}
            rows = replaced(rows_so_far("adapting"), row, ("set", "arm"))
            record("adapting", [*rows, *goals(rows)], **notes)
            print(
                f"{name} {row['arm']}: {row['accuracy']:.3f} / {row['average_bio']:.3f}, {row['cpu_seconds']:.0f} s",
                flush=True,
            )
    if report(goals(rows)) and arguments.strict:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
