"""Learning curve of the linear cell state: quality of the embedding against cells and tissues of the corpus.

    python benchmarks/learning_curve.py --data FOLDER [--out FOLDER] [--sets NAME ...] [--seeds 0 1 2] [--workers 4]

FOLDER holds `corpus` and `corpus_mouse`. Each labelled study is embedded by the corpus SVD (`fit_linear_map`, 128
directions of 2,000 genes, cells at length 1, nothing else fitted) of other studies. Studies of blood are held out with
their publication, all others with their publication and their tissue (`scripts/corpus.csv`).

- cells: random subsamples of the remaining corpus.
- tissues: 3,000 cells of blood; of blood and marrow; and of further tissues in random order, equally many of each where
  it has them.
- same_tissue: all cells, where other publications of the dataset's tissue are not held out.
- pca20: 20 components of the dataset itself, see `embedding.py`, which also defines the scores.

Each row is one dataset at one point of a curve, with the mean over subsamples. Rows of part "trend" are straight lines
through the mean differences from pca20, with bootstrap intervals over datasets.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _record import record, recorded_rows, replaced
from _run import cell_types, labelled_datasets, over_seeds, parser_of, pca, prepared
from embedding import score

import scdiva as sd
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import load_model
from scdiva.train import LinearMap, fit_linear_map

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from corpus import STUDIES
from train_mini import MIN_GENES_PER_CELL, clean

NAME = "learning_curve"
CURVES = ("pca20", "cells", "tissues", "same_tissue")
CELLS = (1000, 4000, 12_000)
TISSUES = (1, 2, 4, 8)
"""Points of the curves; the last point of each is all that remains."""
CELLS_OF_TISSUES = 3000
NEAR = ("blood", "bone marrow")
"""The group "blood"; the other datasets are the group "other"."""
N_DIMS, N_GENES, DRAWS = 128, 2000, 4000
ALL_GENES, NEVER = 100_000, 99.0
KEPT = ("n_cells", "n_types", "accuracy", "accuracy_sd", "average_bio", "average_bio_sd")


@dataclass(frozen=True)
class Cells:
    """Cells in memory, with what `fit_linear_map` reads; a subset shares the matrix."""

    matrix: sp.csr_matrix
    rows: np.ndarray
    study: np.ndarray
    study_names: list[str]
    measured: np.ndarray

    @property
    def n_tokens(self) -> int:
        return self.matrix.shape[1]

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        part = self.matrix[self.rows[start:stop]]
        return part.indptr, part.indices, part.data

    def subset(self, chosen: np.ndarray) -> Cells:
        return replace(self, rows=self.rows[chosen], study=self.study[chosen])


CORPUS: dict[Path, Cells] = {}
"""The corpus, which processes share."""


def corpus_cells(data: Path, out: Path) -> Cells:
    """The human and mouse corpus with the genes of scdiva-mini, packed at the first call."""
    if not (out / "packed").exists():
        files = [*clean(data / "corpus", out / "clean"), *sorted((data / "corpus_mouse").glob("*.h5ad"))]
        pack_files(files, load_model("scdiva-mini").vocabulary, out / "packed", max_length=ALL_GENES).close()
    packed = PackedCells(out / "packed")
    indptr, tokens, values = packed.read(0, packed.n_obs)
    matrix = sp.csr_matrix((values, tokens, indptr), shape=(packed.n_obs, packed.n_tokens))
    return Cells(matrix, np.arange(packed.n_obs), packed.study, packed.study_names, packed.measured)


def embedded(linear: LinearMap, matrix: sp.csr_matrix) -> np.ndarray:
    """The linear part of the cell state, at length 1."""
    share = np.minimum(1.0, np.asarray(matrix.sum(axis=1)).ravel() / linear.full_total)
    state = matrix @ linear.weight + share[:, None] * linear.bias
    return state / np.maximum(np.linalg.norm(state, axis=1, keepdims=True), 1e-12)


def held_out(name: str, *, with_tissue: bool = True) -> frozenset[str]:
    """Studies that may not train the embedding of a dataset."""
    tissue, publication = STUDIES.loc[name, ["tissue", "publication"]]
    same = STUDIES["publication"] == publication
    if with_tissue and tissue != "blood":
        same |= STUDIES["tissue"] == tissue
    return frozenset(STUDIES.index[same])


def shares(available: np.ndarray, n: int) -> np.ndarray:
    """Numbers of cells, as equal as the tissues allow, with the sum `n`."""
    taken = np.zeros(len(available), dtype=int)
    for place, number in enumerate(order := np.argsort(available, kind="stable")):
        taken[number] = min(available[number], (n - taken.sum()) // (len(order) - place))
    return taken


def of_tissues(tissue: np.ndarray, n_tissues: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """`n` cells of blood, then marrow, then other tissues in random order."""
    names = np.unique(tissue)
    chosen = [*(name for name in NEAR if name in names), *rng.permutation([t for t in names if t not in NEAR])]
    rows = [np.flatnonzero(tissue == name) for name in chosen[:n_tissues]]
    counts = shares(np.array([len(some) for some in rows]), n)
    return np.concatenate([rng.choice(some, k, replace=False) for some, k in zip(rows, counts, strict=True)])


def draws(tissue: np.ndarray, curve: str, at: int, seed: int) -> np.ndarray:
    """The cells of a point of a curve, ascending; `tissue` is that of the cells that may train."""
    rng = np.random.default_rng([seed, at])
    if curve == "tissues":
        return np.sort(of_tissues(tissue, at, CELLS_OF_TISSUES, rng))
    return np.sort(rng.permutation(len(tissue))[:at])


def points(tissue: np.ndarray, curve: str) -> list[int]:
    """Cells or tissues at each point of a curve; the last is all that there is."""
    some, last = (TISSUES, len(np.unique(tissue))) if curve == "tissues" else (CELLS, len(tissue))
    return [last] if curve == "same_tissue" else [*(at for at in some if at < last), last]


def dataset(data: Path, name: str, cells: Cells, max_cells: int) -> tuple[ad.AnnData, sp.csr_matrix, np.ndarray]:
    """Labelled cells of a study: counts, serialised expression and cell types."""
    (file,) = data.glob(f"corpus*/{name}.h5ad")
    adata = ad.read_h5ad(file)
    adata.obs["row"] = np.arange(adata.n_obs)
    adata = prepared(adata[cell_types(adata.obs) != ""], max_cells, "row")
    rows = np.flatnonzero(cells.study == cells.study_names.index(name))[adata.obs["row"].astype(int)]
    return adata, cells.matrix[rows], cell_types(adata.obs)


def rows_of_task(names: list[str], excluded: frozenset[str], curves: tuple[str, ...], options: Namespace) -> list[dict]:
    """Rows of datasets whose embeddings are trained on the same studies."""
    cells = CORPUS[options.out]
    of_study = np.array(cells.study_names)[cells.study]
    kept = (np.diff(cells.matrix.indptr) >= MIN_GENES_PER_CELL) & ~np.isin(of_study, list(excluded))
    training = cells.subset(np.flatnonzero(kept))
    tissue = STUDIES["tissue"][of_study[kept]].to_numpy(dtype=str)
    datasets = {name: dataset(options.data, name, cells, options.max_cells) for name in names}
    runs: dict[tuple[str, str, int], list[dict]] = {}
    for name, (adata, _, labels) in datasets.items():
        if "pca20" in curves:
            runs["pca20", name, 0] = [score(pca(adata, 20, scale=False), labels)]
    for curve, seed in product([curve for curve in curves if curve != "pca20"], options.seeds):
        for at in points(tissue, curve):
            if at == len(tissue) and seed != options.seeds[0]:
                continue  # the same cells
            chosen = training.subset(draws(tissue, curve, at, seed))
            linear = fit_linear_map(chosen, N_DIMS, n_genes=N_GENES, fewer=True)
            for name, (_, matrix, labels) in datasets.items():
                runs.setdefault((curve, name, at), []).append(score(embedded(linear, matrix), labels))
    rows = []
    for (curve, name, at), some in runs.items():
        group = "blood" if STUDIES["tissue"][name] in NEAR else "other"
        place = {"curve": curve, "set": name, "group": group, "at": at}
        means = {key: value for key, value in over_seeds(some).items() if key in KEPT}
        rows.append({**place, "n_draws": len(some), **means})
    return rows


def results(tasks: dict, options: Namespace) -> Iterator[list[dict]]:
    """Rows of each task as it ends."""
    if options.workers == 1:
        yield from (rows_of_task(names, *task, options) for task, names in tasks.items())
        return
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        jobs = [pool.submit(rows_of_task, names, *task, options) for task, names in tasks.items()]
        yield from (job.result() for job in as_completed(jobs))


def trend(rows: list[dict], curve: str, group: str, key: str) -> dict:
    """Straight line of the mean difference from pca20 over log10 of the cells or tissues, and where it is 0.

    `at_zero` (a log10) is None if the difference does not rise with 95% confidence: then no number can be given.
    """
    base = {row["set"]: row[key] for row in rows if row["curve"] == "pca20" and row["group"] == group}
    table = pd.DataFrame([row for row in rows if row["curve"] == curve and row["group"] == group])
    table["gap"] = table[key] - table["set"].map(base)
    table["point"] = table.groupby("set")["at"].rank()
    gaps = table.pivot_table("gap", "set", "point").dropna(axis=1)
    x = np.log10(table.groupby("point")["at"].mean()[gaps.columns].to_numpy())
    drawn = np.random.default_rng(0).integers(len(gaps), size=(DRAWS, len(gaps)))
    means = np.vstack([gaps.to_numpy().mean(axis=0), gaps.to_numpy()[drawn].mean(axis=1)])
    slope, start = np.polyfit(x, means.T, 1)
    zero = np.where(slope > 0, -start / np.where(slope > 0, slope, 1.0), NEVER)
    low, high = np.quantile(slope[1:], [0.025, 0.975])
    row = {
        "part": "trend", "curve": curve, "group": group, "score": key, "n_sets": len(gaps), "slope": float(slope[0]),
        "slope_interval": [float(low), float(high)], "last_at": float(x[-1]), "last": float(means[0, -1]),
        "at_zero": None, "at_zero_interval": None,
    }  # fmt: skip
    if low > 0:
        row |= {"at_zero": float(zero[0]), "at_zero_interval": np.quantile(zero[1:], [0.025, 0.975]).tolist()}
    return row


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, (), CURVES, ("curve",))
    parser.add_argument("--out", type=Path, default=Path("runs/learning_curve"), help="folder of the packed corpus")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.set_defaults(max_cells=1000)
    options = parser.parse_args(argv)
    sd.settings.progress = False
    CORPUS[options.out] = corpus_cells(options.data, options.out)
    folders = (options.data / "corpus", options.data / "corpus_mouse")
    names = options.sets or [name for folder in folders for name in labelled_datasets(folder)]
    tasks: dict[tuple[frozenset[str], tuple[str, ...]], list[str]] = {}
    for name in names:
        near = STUDIES["tissue"][name] == "blood"
        curves = tuple(curve for curve in options.arms if curve != "same_tissue")
        tasks.setdefault((held_out(name), curves), []).append(name)
        if "same_tissue" in options.arms and not near:
            tasks.setdefault((held_out(name, with_tissue=False), ("same_tissue",)), []).append(name)
    tasks = dict(sorted(tasks.items(), key=lambda task: "same_tissue" in task[0][1]))
    for found in results(tasks, options):
        rows = [row for row in recorded_rows(NAME) if row.get("part") != "trend"]
        for row in found:
            rows = replaced(rows, row, ("curve", "set", "at"))
            print(*row.values(), flush=True)
        record(NAME, rows)
    groups = sorted({row["group"] for row in rows})
    measured = [curve for curve in ("cells", "tissues") if {curve, "pca20"} <= {row["curve"] for row in rows}]
    combinations = product(measured, groups, ("accuracy", "average_bio"))
    record(NAME, [*rows, *(trend(rows, *one) for one in combinations)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
