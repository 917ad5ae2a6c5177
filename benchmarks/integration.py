"""Integration of batches beside Harmony, scVI, scANVI, scArches, ComBat and PCA.

    python benchmarks/integration.py --data FOLDER [--sets kang_pbmc_12k_1287g ...] [--part unlabelled labelled query]
        [--arms ours harmony ...] [--seeds 0 1 2] [--again] [--strict]
    python benchmarks/integration.py --h5ad FILE --batch-key B --labels-key L [--layer COUNTS]

All arms see the same cells, at most 6,000 of a set, and rivals the same 2,000 highly variable genes; each fit runs in a
process of its own on as many threads as `--threads` says, one.

- unlabelled: no arm gets labels. ours (`tl.integrate`), ours_hvg (on the rivals' genes alone), own_components
  (the same head on components of these cells, without the model), teacher (the corrected input that the head learns
  from, nothing trained), scdiva (the model as it is, no batches), pca, combat, harmony, scvi.
- labelled: half of the labels are hidden, another half for each seed, and only hidden cells are scored. ours, scanvi.
- query: a batch is left out and comes later, up to three of a set, from the largest to the smallest. ours embeds it
  with the model fitted on the others; scarches is scANVI surgery. Labels are carried over by the 15 nearest
  neighbours; scArches' own classifier is scored too.

A fit that takes more than a minute is made for the first seed alone, if it is a rival's or a query's: then the spread
is that of folds and clusters. Fits of scVI are kept in `--keep`.

Rows are written as they are made, and a row that is there with the same cells and seeds is not made again, unless
`--again`; so arms whose packages do not go together can be run by two environments. An arm whose package is missing is
left out, and the result says why. The last rows are goals; a missed one fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
import numpy as np
from _integration_arms import ALIKE, ARMS, hidden_half
from _integration_goals import goals
from _integration_scores import carried, conserved, integrated, named
from _judge import over_seeds
from _prepared import BATCH, LABELS, MAX_CELLS, fingerprint, prepared
from _process import fit, missing, version_of
from _record import commit, machine, record, replaced, rows_so_far
from _timing import report

from scdiva.metrics.annotation import labelled

NAME = "integration"
SETS = {
    "kang_pbmc_12k_1287g": "batch",
    "sc_mixology_cell_lines": "batch",
    "panc8_small_500": "batch",
    "kang_ifnb_2800": "batch",
}
"""Sets and their column of batches: donors, plates and technologies, technologies and donors, stimulation."""
QUICK = 60.0
"""A fit that takes fewer seconds is repeated for each seed."""
N_QUERIES, LEAST_QUERY = 3, 50
ARMS_FILE = Path(__file__).parent / "_integration_arms.py"
KEYS = ("part", "set", "arm", "left_out")


def queries(adata: ad.AnnData) -> list[str]:
    """Batches to leave out: up to three of at least 50 cells, from the largest to the smallest, evenly apart."""
    sizes = adata.obs[BATCH].astype(str).value_counts()
    names = sorted(sizes.index[sizes >= LEAST_QUERY], key=lambda name: (-sizes[name], name))
    return [names[i] for i in np.unique(np.linspace(0, len(names) - 1, min(N_QUERIES, len(names))).round().astype(int))]


def scored(adata: ad.AnnData, job: dict, found: dict[str, np.ndarray]) -> dict[str, float]:
    """The scores of a job's part."""
    batches, labels = (adata.obs[key].astype(str).to_numpy() for key in (BATCH, LABELS))
    if job["part"] == "unlabelled":
        return integrated(found["embedding"], batches, labels, job["seed"])
    if job["part"] == "labelled":
        asked = hidden_half(labels, job["seed"])
        known = np.setdiff1d(np.flatnonzero(labelled(labels)), asked)
        given, later = found["embedding"], found["embedding"][asked]
        predicted = found["predicted"][asked] if "predicted" in found else None
        scores = conserved(later, labels[asked], job["seed"])
    else:
        out = batches == job["left_out"]
        given, rows = found["embedding"], np.flatnonzero(~out)
        known = np.flatnonzero(labelled(labels[rows]))
        # a type that no other batch has can't be carried over by anyone
        keep = np.isin(labels[out], labels[rows][known])
        asked, later = np.flatnonzero(out)[keep], found["query"][keep]
        predicted = found["predicted"][keep] if "predicted" in found else None
        labels = np.concatenate([labels[rows], labels[asked]])
        asked = np.arange(len(rows), len(labels))
        scores = {}
    scores |= carried(given[known], labels[known], later, labels[asked])
    if predicted is not None:
        scores |= {f"own_{key}": value for key, value in named(predicted, labels[asked]).items()}
    return {**scores, "n_cells": len(asked)}


def row_of(job: dict, runs: list[dict[str, float]], costs: list[dict], seeds: list[int], cells: str) -> dict:
    """Mean and standard deviation of the scores over the seeds, mean of the costs over the fits."""
    row = {key: job[key] for key in KEYS if job.get(key)}
    row |= {"cells": cells, "seeds": seeds, "fits": len(costs), "commit": commit(), "package": version_of(job["arm"])}
    row |= {"processor": machine()["processor"], "n_cells": runs[0]["n_cells"]}
    for key in ("cpu_seconds", "wall_seconds", "peak_mib"):
        row[key] = round(float(np.mean([cost[key] for cost in costs])), 1)
    row |= {key: [cost[key] for cost in costs] for key in ("epochs", "strategy") if key in costs[0]}
    for key in (key for key in runs[0] if key != "n_cells"):
        row |= over_seeds(key, [run[key] for run in runs])
    return row


def made(adata: ad.AnnData, job: dict, seeds: list[int], folder: Path, cells: str) -> dict:
    """Fit an arm for each seed, or once where that is said above, score it for each seed."""
    runs: list[dict[str, float]] = []
    costs: list[dict] = []
    once = False
    for seed in seeds:
        now = {**job, "seed": seed, "base_seed": seeds[0]}
        if not once:
            what = " ".join(str(job[key]) for key in KEYS if job.get(key))
            found, cost = fit(now, folder, ARMS_FILE, f"{what}, seed {seed}")
            costs.append(cost)
            slow = cost["cpu_seconds"] > QUICK and not (job["part"] == "unlabelled" and job["arm"].startswith("ours"))
            # another half of the labels asks for another fit
            once = job["part"] != "labelled" and (slow or job["arm"] in ALIKE)
        runs.append(scored(adata, now, found))
    return row_of(job, runs, costs, seeds, cells)


def keep(row: dict | None, **notes: object) -> list[dict]:
    """Write the results with a new row in the place of the one that it replaces; gives the goals."""
    rows = rows_so_far(NAME) if row is None else replaced(rows_so_far(NAME), row, KEYS)
    parts = list(ARMS)
    arms = [arm for part in parts for arm in ARMS[part]]
    names = list(dict.fromkeys([*SETS, *(row["set"] for row in rows)]))
    rows.sort(key=lambda row: (parts.index(row["part"]), names.index(row["set"]), row.get("left_out", ""),
                               arms.index(row["arm"])))  # fmt: skip
    there = {row["arm"] for row in rows}
    left_out = {arm: why for arm in dict.fromkeys(arms) if arm not in there and (why := missing(arm))}
    judged = goals(rows)
    record(NAME, [*rows, *judged], max_cells=MAX_CELLS, left_out=left_out, **notes)
    return judged


def in_a_line(row: dict) -> str:
    """A row in a line."""
    what = " ".join(str(row[key]) for key in KEYS if key in row)
    measures = ("accuracy", "own_accuracy", "macro_f1", "average_bio", "ilisi", "batch_asw")
    scores = " ".join(f"{key} {row[key]:.3f}" for key in measures if key in row)
    return f"{what}: {scores} ({row['cpu_seconds']} s CPU, {row['wall_seconds']} s, {row['peak_mib']:.0f} MiB)"


def sets_of(arguments: argparse.Namespace) -> Iterator[tuple[str, ad.AnnData]]:
    """The sets asked for, prepared."""
    if arguments.h5ad is not None:
        adata = ad.read_h5ad(arguments.h5ad)
        yield arguments.h5ad.stem, prepared(adata, arguments.batch_key, arguments.labels_key, arguments.layer)
        return
    for name in arguments.sets:
        yield name, prepared(ad.read_h5ad(arguments.data / f"{name}.h5ad"), SETS[name], "cell_type")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder of the benchmark h5ad files")
    source.add_argument("--h5ad", type=Path, help="a file of your own, with counts")
    parser.add_argument("--batch-key", help="column of its batches")
    parser.add_argument("--labels-key", help="column of its types; cells without one may be NaN")
    parser.add_argument("--layer", help="its layer of counts, if X holds something else")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--part", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--arms", nargs="+", choices=sorted({arm for part in ARMS.values() for arm in part}))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("runs/integration"), help="folder for the fits of scVI")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    arguments = parser.parse_args(argv)
    if arguments.h5ad and not (arguments.batch_key and arguments.labels_key):
        parser.error("--h5ad needs --batch-key and --labels-key")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    for name, adata in sets_of(arguments):
        cells = fingerprint(adata)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            adata.write_h5ad(folder / "cells.h5ad")
            for part in arguments.part:
                for arm in ARMS[part]:
                    if arguments.arms and arm not in arguments.arms:
                        continue
                    if why := missing(arm):
                        print(f"{part} {name} {arm} left out: {why}", flush=True)
                        continue
                    for left_out in queries(adata) if part == "query" else [None]:
                        job = {
                            "part": part, "set": name, "arm": arm, "left_out": left_out, "model": arguments.model,
                            "file": str(folder / "cells.h5ad"), "keep": str(arguments.keep.resolve()),
                            "threads": arguments.threads,
                        }  # fmt: skip
                        place = [job[key] for key in KEYS]
                        same = {"cells": cells, "seeds": arguments.seeds}
                        if not arguments.again and any(
                            [row.get(key) for key in KEYS] == place and all(row[key] == same[key] for key in same)
                            for row in rows_so_far(NAME)
                        ):
                            continue
                        row = made(adata, job, arguments.seeds, folder, cells)
                        keep(row, model=arguments.model)
                        print(in_a_line(row), flush=True)
    missed = report(keep(None, model=arguments.model))
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
