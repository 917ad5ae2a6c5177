"""Reconstruction, imputation, generation and likelihood of cells, beside marginals, kNN, scVI and resampling.

    python benchmarks/reconstruction.py --data FOLDER [--sets pbmc3k_raw ...] [--arms ours knn ...]
        [--part paper masked impute population likelihood] [--seeds 0 1 2] [--again] [--strict]

- masked: 30% of the genes of test cells hidden (a fifth of the cells is held out); at one step and in more.
- paper: the same, and the mask-free setting, beside what the paper prints.
- impute: a tenth of the entries above zero taken away.
- population: cells drawn from half of the cells, beside the other half.
- likelihood: real cells, the same counts in other genes, doublets.

Ours is zero-shot but for `ours_adapted`, which `tl.adapt` has fitted to the cells without what was taken away. Slow
arms take the cells of `SETS` and fewer seeds. Rows are written as they are made, and a row that is there with the same
cells and seeds is not made again, unless `--again`; an arm whose package is missing is left out, so that scVI can be
run by an environment of its own. The last rows are goals; a missed one fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import torch
from _prepared import fingerprint
from _process import missing, version_of
from _reconstruction_cells import IMPUTE, MASKED, PAPER_ARMS, TYPE, Sizes, Work, prepared
from _reconstruction_populations import LIKELIHOOD, POPULATION
from _reconstruction_table import goals
from _record import commit, machine, record, replaced, rows_so_far
from _timing import report

import scdiva as sd
from scdiva.models import load_model

NAME = "reconstruction"
SETS: dict[str, tuple[int | None, Sizes]] = {
    "kang_pbmc_12k_1287g": (4000, Sizes(hidden=150, steps=30, generated=60, alone=16, likely=60)),
    "pbmc3k_raw": (None, Sizes(hidden=40, steps=6, generated=16, alone=6, likely=30)),
}
"""Most cells of a set, and what slow arms take of them: a pass over the many genes of the second takes long."""
REMOVED = ("ours_8_random", "ours_8_remdm", "transformer_1", "transformer_32", "no_state_32", "no_state_transformer_32",
           "ours")  # fmt: skip
"""Arms of options that the package had and has no more: their rows stay as they were recorded. `"ours"` is of the
likelihood with the transformer."""
PARTS = {"masked": MASKED, "paper": PAPER_ARMS, "impute": IMPUTE, "population": POPULATION, "likelihood": LIKELIHOOD}
KEYS = ("part", "set", "arm")


def over_seeds(runs: list[dict]) -> dict:
    """Mean of each score over the seeds, and its standard deviation; of scores by type the mean alone."""
    found: dict = {}
    for name, first in runs[0].items():
        if isinstance(first, dict):
            found[name] = {key: round(float(np.mean([run[name][key] for run in runs])), 4) for key in first}
            continue
        values = [run[name] for run in runs]
        if not np.isfinite(values).all():  # not defined, such as a correlation with a constant
            continue
        found[name] = round(float(np.mean(values)), 5) if isinstance(first, float) else first
        if isinstance(first, float) and len(values) > 1:
            found[f"{name}_sd"] = round(float(np.std(values, ddof=1)), 5)
            found[f"{name}_seeds"] = [round(value, 5) for value in values]
    return found


def row_of(work: Work, part: str, arm: str, seeds: list[int], same: dict, *, again: bool) -> dict:
    """The scores of an arm, with what made them; a row of some of the seeds is completed, if no score is by type."""

    def before() -> dict[int, dict]:
        return {} if again else single_runs(there(part, work, arm, same))

    make, most = PARTS[part][arm]
    old = before()
    made = {seed: make(work, seed) for seed in seeds[:most] if seed not in old}
    runs = before() | made  # asked again: another process may have made others
    about = {"commit": commit(), "package": version_of(arm), "processor": machine()["processor"]}
    row = {"part": part, "set": work.name, "arm": arm, "n_seeds": len(runs), **about}
    return {**row, **over_seeds([runs[seed] for seed in sorted(runs)]), **same, "seeds": sorted({*runs, *seeds})}


def there(part: str, work: Work, arm: str, same: dict) -> dict:
    """The row of an arm on these cells; empty if there is none."""
    asked = {"part": part, "set": work.name, "arm": arm, **same}
    return next((row for row in rows_so_far(NAME) if asked.items() <= row.items()), {})


def single_runs(row: dict) -> dict[int, dict]:
    """The scores of each seed of a row; none if they can't be separated from those of the others."""
    if any(isinstance(value, dict) for value in row.values()) or len(row.get("seeds", ())) != row.get("n_seeds"):
        return {}
    scores = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "n_seeds"}
    scores = {name: value for name, value in scores.items() if not name.endswith("_sd")}
    return {
        seed: {name: row[f"{name}_seeds"][i] if f"{name}_seeds" in row else value for name, value in scores.items()}
        for i, seed in enumerate(row["seeds"])
    }


def keep(row: dict | None, **notes: object) -> list[dict]:
    """Write the results with a new row in the place of the one that it replaces; gives the goals."""
    rows = rows_so_far(NAME) if row is None else replaced(rows_so_far(NAME), row, KEYS)
    names = list(dict.fromkeys([*SETS, *(row["set"] for row in rows)]))
    rows.sort(key=lambda row: (list(PARTS).index(row["part"]), names.index(row["set"]),
                               [*PARTS[row["part"]], *REMOVED].index(row["arm"])))  # fmt: skip
    there = {row["arm"] for row in rows}
    left_out = {"scvi": why} if "scvi" not in there and (why := missing("scvi")) else {}
    judged = goals(rows)
    record(NAME, [*rows, *judged], left_out=left_out, **notes)
    return judged


def in_a_line(row: dict) -> str:
    """A row in a line."""
    rest = {key: value for key, value in row.items() if isinstance(value, int | float) and not key.endswith("_sd")}
    return f"{' '.join(row[key] for key in KEYS)}: {' '.join(f'{key} {value:.4g}' for key, value in rest.items())}"


def parsed(argv: list[str] | None) -> argparse.Namespace:
    arms = list(dict.fromkeys(arm for arms in PARTS.values() for arm in arms))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--arms", nargs="+", default=arms, choices=arms)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    return parser.parse_args(argv)


def run_set(work: Work, arguments: argparse.Namespace) -> None:
    """Make the rows asked for that are not there, or not of all seeds."""
    same = {"cells": fingerprint(work.adata, (TYPE,))}
    for part in arguments.part:
        for arm in PARTS[part]:
            done = there(part, work, arm, same).get("seeds") == arguments.seeds
            if arm not in arguments.arms or (done and not arguments.again):
                continue
            if why := missing(arm):
                print(f"{part} {work.name} {arm} left out: {why}", flush=True)
                continue
            row = row_of(work, part, arm, arguments.seeds, same, again=arguments.again)
            keep(row, model=arguments.model)
            print(in_a_line(row), flush=True)


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    torch.set_num_threads(arguments.threads)
    sd.settings.progress, sd.settings.threads = False, arguments.threads
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = load_model(arguments.model)
    for name in arguments.sets:
        most, sizes = SETS[name]
        adata = prepared(ad.read_h5ad(arguments.data / f"{name}.h5ad"), model, most)
        run_set(Work(name, adata, model, sizes), arguments)
    missed = report(keep(None, model=arguments.model))
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
