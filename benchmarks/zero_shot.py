"""Zero-shot embedding beside what is fitted on the same cells, and beside a linear zero-shot map.

    python benchmarks/zero_shot.py --data FOLDER [--prepared FOLDER] [--sets pbmc3k_raw ...] [--seeds 0 1 2]
        [--keep scvi ...] [--strict]

All arms see the same cells and are scored alike: 15-NN accuracy and macro-F1 (5 folds), NMI and ARI at the best Leiden
resolution, label silhouette. Seeds shuffle the folds, the clusters and the sample of large sets.

- scdiva was trained on none of these cells and fits nothing.
- linear: the part of its set encoder that is a projection on a corpus SVD of its own making, what it started from.
- svd: the plain, study-centred SVD of the corpus (4,000 genes, 64 directions), without any network. It needs the
  corpus as `scripts/train_mini.py` packs it, `--prepared`.
- pca: fitted on the set; 2,000 highly variable genes, scaled, 50 components.
- scvi: fitted on the set; the same genes, raw counts, default architecture, epochs and early stopping, no batch_key, as
  PCA gets no batches either. Needs scvi-tools. Fitted once for each seed where the first fit takes less than a
  minute, else once: its spread is then that of the folds and clusters alone.

With `--keep`, rows of arms that know nothing of the model (svd, pca, scvi) are taken over from the last results, if
they were made with the same seeds and numbers of cells: each says at which commit.

An arm whose package or data is missing is left out, and the result says why. The last rows are goals; a missed one
fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import torch
from _judge import judge, judge_number, of_row, over_seeds, share_of_cells
from _record import kept_rows, record
from _rivals import NO_CORPUS, NO_SCVI, Arm, corpus_svd, fit_pca, fit_scvi, has_scvi, linear_part, scdiva_arm
from _sets import BLOOD, SETS, load_set
from _timing import report

import scdiva as sd
from scdiva.models import ScDiVa

MAX_CELLS = 6000
SCORES = ("accuracy", "macro_f1", "nmi", "ari", "asw", "average_bio")
JUDGED = {"accuracy": "accuracy", "average_bio": "mean of NMI, ARI, ASW"}
RIVALS = {"pca": "PCA", "svd": "the corpus SVD"}
"""The arms that the goals compare with."""
LEAD = 0.02
QUICK = 60.0
"""A fit of scVI that takes fewer seconds is repeated for each seed."""


def scores(embedding: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    cells = np.random.default_rng(seed).permutation(len(labels))[:MAX_CELLS]
    knn = sd.metrics.knn_cross_validation(embedding[cells], labels[cells], rng=seed)
    bio = sd.metrics.avg_bio(embedding[cells], labels[cells], rng=seed)
    return {**knn, "average_bio": bio.pop("avg_bio"), **bio}


def timed(make: object) -> tuple[object, dict[str, float]]:
    """What a call returns, and its CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = make()  # type: ignore[operator]
    return found, {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


def embeddings(
    adata: ad.AnnData, model: ScDiVa, svd: Arm | None, seeds: list[int], kept: tuple[str, ...] = ()
) -> Iterator[tuple[str, list[np.ndarray], dict]]:
    """Yield each arm that is not kept, its embedding for each seed, and the seconds of one fit and embedding."""
    found, seconds = timed(lambda: scdiva_arm(model)(adata))
    yield "scdiva", [found] * len(seeds), seconds
    if (linear := linear_part(found, model)) is not None:
        yield "linear", [linear] * len(seeds), seconds
    if svd is not None and "svd" not in kept:
        found, seconds = timed(lambda: svd(adata))
        yield "svd", [found] * len(seeds), seconds
    if "pca" not in kept:
        found, seconds = timed(lambda: fit_pca(adata)(adata))
        yield "pca", [found] * len(seeds), seconds
    if has_scvi() and "scvi" not in kept:
        arm, seconds = timed(lambda: fit_scvi(adata, seeds[0]))
        fits = [arm]
        if seconds["wall_seconds"] < QUICK:
            fits += [fit_scvi(adata, seed) for seed in seeds[1:]]
        runs = [fit(adata) for fit in fits]
        yield "scvi", (runs if len(fits) == len(seeds) else runs * len(seeds)), {
            **seconds, "fits": len(fits), "epochs": [fit.epochs for fit in fits],
        }  # fmt: skip


def row_of(name: str, arm: str, runs: list[dict[str, float]], notes: dict) -> dict:
    """Mean and standard deviation over the seeds."""
    row: dict = {"set": name, "arm": arm, "n_cells": runs[0]["n_cells"], "n_seeds": len(runs)}
    row |= {key: round(value, 1) if key.endswith("seconds") else value for key, value in notes.items()}
    for key in SCORES:
        row |= over_seeds(key, [run[key] for run in runs])
    return row


def goals(rows: list[dict]) -> list[dict]:
    """On every set of blood at or above PCA and the corpus SVD, and above each by 0.02 on at least two of them."""
    by_arm = {(row["set"], row["arm"]): row for row in rows}
    names = [name for name in BLOOD if (name, "scdiva") in by_arm]
    score = {"accuracy": share_of_cells, "average_bio": of_row}
    found = []
    for rival, said in RIVALS.items():
        for key, measure in JUDGED.items():
            pairs = {
                name: [score[key](by_arm[name, arm], key) for arm in ("scdiva", rival)]
                for name in names
                if (name, rival) in by_arm
            }
            if not pairs:
                continue
            found += [judge(f"{name}: {measure} above {said}", *pair, at_least=0.0) for name, pair in pairs.items()]
            clear = [judge(name, *pair, at_least=LEAD) for name, pair in pairs.items()]
            found.append(judge_number(f"blood sets where {measure} is {LEAD:g} or more above {said}", clear, 2, "sets"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--prepared", type=Path, default=Path("runs/mini/prepared"), help="the packed corpus")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--keep", nargs="+", default=(), choices=("svd", "pca", "scvi"), help="arms not to make anew")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    arguments = parser.parse_args()

    sd.settings.progress = False
    torch.set_num_threads(1)  # all fits alike; two threads of one fit wait for each other on a machine that is shared
    model, svd, seeds = sd.models.load_model(arguments.model), corpus_svd(arguments.prepared), list(arguments.seeds)
    rows: list[dict] = []
    taken_over = kept_rows("zero_shot", arguments.keep, seeds=seeds, max_cells=MAX_CELLS)
    old = {(row["set"], row["arm"]): row for row in taken_over}
    there = {arm for _, arm in old}
    left_out = {
        **({} if svd or "svd" in there else {"svd": NO_CORPUS}),
        **({} if has_scvi() or "scvi" in there else {"scvi": NO_SCVI}),
    }
    for name in arguments.sets:
        adata, labels = load_set(arguments.data, name)
        kept = tuple(arm for of, arm in old if of == name)
        for arm, per_seed, notes in embeddings(adata, model, svd, seeds, kept):
            runs = [scores(found, labels, seed) for found, seed in zip(per_seed, seeds, strict=True)]
            row = row_of(name, arm, runs, notes)
            rows.append(row)
            print(
                f"{name:24s} {arm:7s} accuracy {row['accuracy']:.3f} F1 {row['macro_f1']:.3f} NMI {row['nmi']:.3f} "
                f"ARI {row['ari']:.3f} ASW {row['asw']:.3f} mean {row['average_bio']:.3f} "
                f"({row['cpu_seconds']} s CPU, {row['wall_seconds']} s)",
                flush=True,
            )
        rows += [old[name, arm] for arm in kept]
    judged = goals(rows)
    missed = report(judged)
    for arm, why in left_out.items():
        print(f"{arm} left out: {why}")
    path = record(
        "zero_shot", [*rows, *judged], model=arguments.model, seeds=seeds, max_cells=MAX_CELLS, left_out=left_out
    )
    print(f"written: {path.name}")
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
