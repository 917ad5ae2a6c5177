"""Annotation of a query from a labelled reference beside logistic regression, SVM, centroids, 15-NN and scANVI.

    python benchmarks/annotation.py --data FOLDER [--sets kang_ifnb_2800 ...] [--part full few unknown]
        [--arms ours logistic ...] [--shares 0.01 0.05] [--seeds 0 1 2] [--again] [--strict]
    python benchmarks/annotation.py --h5ad FILE --labels-key L --batch-key B --query BATCH [BATCH ...]
        [--layer COUNTS] [--max-cells 0]

All arms see the same cells, at most 6,000 of a set, and rivals the reference's 2,000 most variable genes; the fits of
a row run in a process of their own on as many threads as `--threads` says, one.

- full: all labels of the reference are given.
- few: 1, 5, 10 and 20% of the reference's cells keep their label, others for each seed, the same for all arms.
- unknown: each type in turn is taken out of the reference; are its cells noticed among the query's?

Of panc8_small_500 each technology is the query in turn, and a row is the mean over them. ours is `tl.annotate` with its
default method, ours_knn and the like the other methods. Arms in which nothing is drawn are fitted once, but for a few
labels. scANVI is fitted for all labels and for 1 and 5% of them; its scVI, on reference and query, is fitted once for
all seeds and kept in `--keep`.

Rows are written as they are made, and a row that is there with the same cells, queries and seeds is not made again,
unless `--again`; so arms whose packages do not go together can be run by two environments. An arm whose package is
missing is left out, and the result says why. The last rows are goals; a missed one fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
from _annotation_arms import ALIKE, ARMS, SPLIT, Said, tasks
from _annotation_goals import goals
from _annotation_scores import over_seeds, scored
from _prepared import MAX_CELLS, fingerprint, prepared
from _process import fit, missing, version_of
from _record import commit, machine, record, replaced, rows_so_far
from _timing import report

NAME = "annotation"
PANC8 = ("celseq", "celseq2", "fluidigmc1", "indrop", "smartseq2")
SETS: dict[str, tuple[str, dict[str, list[str]]]] = {
    # the reference is the first four donors by name
    "kang_pbmc_12k_1287g": ("batch", {"the last four donors": ["107", "1244", "1256", "1488"]}),
    "kang_ifnb_2800": ("batch", {"STIM": ["STIM"]}),
    "sc_mixology_cell_lines": ("assay", {"Drop-seq": ["Drop-seq"]}),
    "panc8_small_500": ("assay", {name: [name] for name in PANC8}),
}
"""Sets, their column of splits, and the queries among its values; the other cells are the reference."""
PARTS = ("full", "few", "unknown")
SHARES = (0.01, 0.05, 0.1, 0.2)
SCANVI_SHARES = (0.01, 0.05)
ARMS_FILE = Path(__file__).parent / "_annotation_arms.py"
KEYS = ("part", "set", "share", "arm")


def with_split(adata: ad.AnnData, cells: ad.AnnData, key: str) -> ad.AnnData:
    """The prepared cells with the column of splits beside."""
    cells.obs[SPLIT] = adata.obs[key].astype(str).loc[cells.obs_names].to_numpy()
    return cells


def runs_of(part: str, arm: str, shares: list[float]) -> list[float | None]:
    """The shares of labels that an arm is fitted with in a part; none where it is left out."""
    if part == "few":
        return [share for share in shares if arm != "scanvi" or share in SCANVI_SHARES]
    return [] if (part, arm) == ("unknown", "scanvi") else [None]


def row_of(job: dict, runs: list[dict], cost: dict, same: dict) -> dict:
    """Mean and standard deviation of the scores over the seeds, and what a fit cost."""
    row = {key: job[key] for key in KEYS if job[key] is not None} | same
    row |= {"commit": commit(), "package": version_of(job["arm"]), "processor": machine()["processor"]}
    row |= {key: round(number, 4 if key == "ece_reference" else 2) for key, number in cost.items()}
    return row | over_seeds(runs)


def made(adata: ad.AnnData, job: dict, same: dict, folder: Path) -> dict:
    """Fit an arm for each seed, or once where nothing is drawn, and score it."""
    once = job["arm"] in ALIKE and job["part"] != "few"
    job = {**job, "seeds": same["seeds"][:1] if once else same["seeds"]}
    found, cost = fit(job, folder, ARMS_FILE, " ".join(str(job[key]) for key in KEYS if job[key] is not None))
    runs = []
    for seed in job["seeds"]:
        todo = tasks(adata, {**job, "seed": seed})
        said: list[Said] = [
            {key.rpartition(".")[2]: found[key] for key in found if key.startswith(f"{seed}.{number}.")}
            for number in range(len(todo))
        ]
        runs.append(scored(adata, job["part"], todo, said))
    return row_of(job, runs, cost, same)


def keep(row: dict | None, **notes: object) -> list[dict]:
    """Write the results with a new row in the place of the one that it replaces; gives the goals."""
    rows = rows_so_far(NAME) if row is None else replaced(rows_so_far(NAME), row, KEYS)
    # sets of one's own, and arms that the package had
    names, arms = (
        list(dict.fromkeys([*own, *(row[key] for row in rows)])) for own, key in ((SETS, "set"), (ARMS, "arm"))
    )
    rows.sort(key=lambda row: (PARTS.index(row["part"]), row.get("share", 1.0), names.index(row["set"]),
                               arms.index(row["arm"])))  # fmt: skip
    there = {row["arm"] for row in rows}
    left_out = {arm: why for arm in arms if arm not in there and (why := missing(arm))}
    judged = goals(rows)
    record(NAME, [*rows, *judged], max_cells=MAX_CELLS, left_out=left_out, **notes)
    return judged


def in_a_line(row: dict) -> str:
    """A row in a line."""
    what = " ".join(str(row[key]) for key in KEYS if key in row)
    measures = ("accuracy", "macro_f1", "ece", "ece_pooled", "rejection_auroc")
    scores = " ".join(f"{key} {row[key]:.3f}" for key in measures if key in row)
    return f"{what}: {scores} ({row['cpu_seconds']} s CPU, {row['wall_seconds']} s, {row['peak_mib']:.0f} MiB)"


def sets_of(arguments: argparse.Namespace) -> Iterator[tuple[str, ad.AnnData, dict[str, list[str]]]]:
    """The sets asked for, prepared, with their queries."""
    if arguments.h5ad is not None:
        adata = ad.read_h5ad(arguments.h5ad)
        most = arguments.max_cells or adata.n_obs
        cells = prepared(adata, arguments.batch_key, arguments.labels_key, arguments.layer, most)
        queries = {", ".join(arguments.query): arguments.query}
        yield arguments.h5ad.stem, with_split(adata, cells, arguments.batch_key), queries
        return
    for name in arguments.sets:
        adata = ad.read_h5ad(arguments.data / f"{name}.h5ad")
        split, queries = SETS[name]
        yield name, with_split(adata, prepared(adata, "batch", "cell_type"), split), queries


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder of the benchmark h5ad files")
    source.add_argument("--h5ad", type=Path, help="a file of your own, with counts")
    parser.add_argument("--labels-key", help="column of its types; cells without one may be NaN")
    parser.add_argument("--batch-key", help="column of its batches")
    parser.add_argument("--query", nargs="+", help="the batches to annotate; the others are the reference")
    parser.add_argument("--layer", help="its layer of counts, if X holds something else")
    parser.add_argument("--max-cells", type=int, default=MAX_CELLS, help="of your own file, drawn at random; 0: all")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of labels, in the part few")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("runs/annotation"), help="folder for the fits of scVI")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    arguments = parser.parse_args(argv)
    if arguments.h5ad and not (arguments.batch_key and arguments.labels_key and arguments.query):
        parser.error("--h5ad needs --labels-key, --batch-key and --query")
    return arguments


def jobs(arguments: argparse.Namespace, name: str, queries: dict[str, list[str]], file: Path) -> Iterator[dict]:
    """The jobs asked for of a set, without those of arms that can't run here."""
    for part in arguments.part:
        for arm in arguments.arms:
            if why := missing(arm):
                print(f"{part} {name} {arm} left out: {why}", flush=True)
                continue
            for share in runs_of(part, arm, arguments.shares):
                yield {
                    "part": part, "set": name, "share": share, "arm": arm, "queries": queries, "file": str(file),
                    "model": arguments.model, "keep": str(arguments.keep.resolve()), "threads": arguments.threads,
                }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    for name, adata, queries in sets_of(arguments):
        same = {"cells": fingerprint(adata), "queries": list(queries), "seeds": arguments.seeds}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            adata.write_h5ad(folder / "cells.h5ad")
            for job in jobs(arguments, name, queries, folder / "cells.h5ad"):
                if not arguments.again and any(
                    all(row.get(key) == job[key] for key in KEYS) and all(row[key] == same[key] for key in same)
                    for row in rows_so_far(NAME)
                ):
                    continue
                row = made(adata, job, same, folder)
                keep(row, model=arguments.model)
                print(in_a_line(row), flush=True)
    missed = report(keep(None, model=arguments.model))
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
