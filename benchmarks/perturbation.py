r"""Responses to perturbations that were held out: predicted, beside simple baselines and GEARS.

    python benchmarks/perturbation.py --data FOLDER [--sets norman_doubles ...] [--arms ours gears]
        [--seeds 0 1 2] [--gene-sets GMT] [--again] [--strict]
    python benchmarks/perturbation.py --h5ad FILE --perturbation-key K --control C [--groupby G]
        [--by single combination group] [--folds 5] [--layer COUNTS] [--max-cells 0]

- norman_doubles, norman_singles: K562 of Norman's screen. A fifth of the combinations is held out, or of the single
  perturbations with every combination that one of them is part of; five folds, drawn anew for each seed.
- glioma: each of three cell lines is left out but for its control cells.
- kang_ifnb: the same for each cell type and IFN-beta.
- norman_2019_doubles, norman_2019_singles, adamson_2016, kang_2018: the complete screens, as scverse hosts them. By
  default the sets run whose file is in FOLDER; `sd.datasets.norman(download=True)`, `adamson(download=True)` and
  `kang()` download them into `sd.settings.data_dir` (1.7 GB for Norman's). They were not at hand where this was
  written: what the results call norman_doubles and norman_singles are 15 doubles and 18 singles with 500 genes.

ours is `tl.predict_perturbation` by its defaults. The simple baselines are those that its result carries: rows of their
own from the same call. Rows of ours_head and ours_network are of a network that was removed after them: it learned what
is left, or all as in the paper. gears is GEARS (cell-gears 0.1.2), which wants older versions of scipy and pandas and
so an environment of its own:

    pip install torch torch_geometric cell-gears==0.1.2 'scipy<1.14' 'pandas<3'; pip install scdiva
    python benchmarks/perturbation.py --data FOLDER --sets norman_doubles norman_singles --arms gears --seeds 0
        --gene-sets human_reactome.gmt

It downloads nothing here: `_perturbation_gears.py` says what its graph of perturbations is made from instead.

A file of your own holds counts in X or in `--layer`. The screens of the paper:

    python benchmarks/perturbation.py --data FOLDER --sets norman_2019_doubles adamson_2016 --max-cells 100

At most 500 cells of a perturbation in a group are taken, unless `--max-cells` says otherwise: with hundreds of
perturbations and all genes, 100 keep a fold's memory in bounds. Fits run in a process of their own on as many threads
as `--threads` says, one. Rows are written as they are made, and a row that is there with the same cells, folds and
seeds is not made again, unless `--again`. An arm that can't run is left out, and the result says why. The last rows are
goals; a missed one fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
from _perturbation_arms import ARMS
from _perturbation_goals import goals
from _perturbation_scores import DISCRIMINATION, METRICS, NETWORK, summary
from _prepared import fingerprint
from _process import fit, missing, version_of
from _record import commit, machine, record, replaced, rows_so_far
from _screens import CONDITION, GROUP, MAX_CELLS, SCREENS, Screen, need_columns, prepared, read_screen
from _timing import report

from scdiva._constants import BASELINES

NAME = "perturbation"
ARMS_FILE = Path(__file__).parent / "_perturbation_arms.py"
KEYS = ("set", "arm")
ORDER = ("ours", "ours_head", "ours_network", "gears", *BASELINES)


def rows_of(job: dict, scored: list[dict], cost: dict, same: dict) -> list[dict]:
    """A row for the arm, and one for each baseline that its result carries: those of our default alone count."""
    found = []
    for method in dict.fromkeys(row["method"] for row in scored):
        own = method == NETWORK
        if not own and job["arm"] != "ours":
            continue
        row = {"set": job["set"], "arm": job["arm"] if own else method, "split": job["by"], **same}
        row |= {"commit": commit(), "package": version_of(job["arm"]), "processor": machine()["processor"]}
        if own:
            row |= {key: round(value, 2) if isinstance(value, float) else value for key, value in cost.items()}
        found.append(row | summary([one for one in scored if one["method"] == method], job["by"]))
    return found


def keep(new: list[dict], left_out: dict[str, str], **notes: object) -> list[dict]:
    """Write the results with new rows in the place of those that they replace; gives the goals."""
    rows = rows_so_far(NAME)
    for row in new:
        rows = replaced(rows, row, KEYS)
    names = list(dict.fromkeys([*SCREENS, *(row["set"] for row in rows)]))
    rows.sort(key=lambda row: (names.index(row["set"]), ORDER.index(row["arm"])))
    there = {row["arm"] for row in rows}
    judged = goals(rows)
    why = {arm: reason for arm, reason in left_out.items() if arm not in there}
    record(NAME, [*rows, *judged], max_cells=MAX_CELLS, left_out=why, **notes)
    return judged


def in_a_line(row: dict) -> str:
    """A row in a line."""
    scores = " ".join(f"{key} {row[key]:.3f}" for key in (*METRICS[:2], DISCRIMINATION) if key in row)
    cost = f" ({row['cpu_seconds']} s CPU, {row['peak_mib']:.0f} MiB)" if "cpu_seconds" in row else ""
    return f"{row['set']} {row['arm']}: {scores}{cost}"


def own_screens(arguments: argparse.Namespace, adata: ad.AnnData) -> dict[str, Screen]:
    """The splits of a file of the user's: those asked for, or those that its labels allow."""
    need_columns(adata, arguments.perturbation_key)
    labels = adata.obs[arguments.perturbation_key].dropna().astype(str).unique()
    combined = arguments.separator and sum(arguments.separator in label for label in labels) >= arguments.folds
    default = ["group"] if arguments.groupby else ["single", *(["combination"] if combined else [])]
    return {
        f"{arguments.h5ad.stem}, {by}": Screen(
            arguments.h5ad.stem, by, arguments.perturbation_key, arguments.control, arguments.groupby,
            separator=arguments.separator,
        )
        for by in arguments.by or default
    }  # fmt: skip


def sets_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Screen, ad.AnnData]]:
    """The sets asked for, prepared."""
    if arguments.h5ad is not None:
        adata = ad.read_h5ad(arguments.h5ad)
        for name, screen in own_screens(arguments, adata).items():
            yield name, screen, prepared(adata, screen, arguments.layer, arguments.max_cells)
        return
    for name in arguments.sets:
        screen = SCREENS[name]
        yield name, screen, prepared(read_screen(arguments.data, screen), screen, max_cells=arguments.max_cells)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder of the benchmark h5ad files")
    source.add_argument("--h5ad", type=Path, help="a file of your own, with counts")
    parser.add_argument("--perturbation-key", help="column of its perturbations")
    parser.add_argument("--control", default="control", help="their name of control cells")
    parser.add_argument("--groupby", help="column of its cell types or lines; each is left out in turn")
    parser.add_argument("--by", nargs="+", choices=["single", "combination", "group"], help="what is held out")
    parser.add_argument("--separator", default="+", help="between the parts of a combination")
    parser.add_argument("--layer", help="its layer of counts, if X holds something else")
    parser.add_argument("--max-cells", type=int, default=MAX_CELLS, help="of a perturbation in a group; 0: all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=list(SCREENS), help="default: those in --data")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--gene-sets", type=Path, help="GMT file, for the graph of GEARS")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    arguments = parser.parse_args(argv)
    if arguments.sets is None and arguments.data:
        arguments.sets = [name for name, screen in SCREENS.items() if (arguments.data / f"{screen.file}.h5ad").exists()]
    if arguments.h5ad and not arguments.perturbation_key:
        parser.error("--h5ad needs --perturbation-key")
    if "group" in (arguments.by or []) and not arguments.groupby:
        parser.error("--by group needs --groupby")
    return arguments


def why_not(arm: str, arguments: argparse.Namespace) -> str | None:
    """Why an arm can't run here; None where it can."""
    if (why := missing(arm)) is None and arm == "gears" and arguments.gene_sets is None:
        why = "its graph of perturbations needs --gene-sets, a GMT file"
    return why


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    left_out = {arm: why for arm in arguments.arms if (why := why_not(arm, arguments))}
    for name, screen, adata in sets_of(arguments):
        same = {
            "cells": fingerprint(adata, (CONDITION, GROUP)), "folds": arguments.folds, "seeds": arguments.seeds,
            "n_cells": adata.n_obs,
        }  # fmt: skip
        if arguments.max_cells != MAX_CELLS:
            same["max_cells"] = arguments.max_cells
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            adata.write_h5ad(folder / "cells.h5ad")
            for arm in arguments.arms:
                if arm in left_out or (arm == "gears" and screen.by == "group"):
                    continue  # GEARS knows no groups
                place = {"set": name, "arm": arm, **same}
                if not arguments.again and any(
                    all(row.get(key) == place[key] for key in place) for row in rows_so_far(NAME)
                ):
                    continue
                job = {
                    **place, "by": screen.by, "control": screen.control, "separator": screen.separator,
                    "file": str(folder / "cells.h5ad"), "model": arguments.model, "threads": arguments.threads,
                    "gene_sets": str(arguments.gene_sets.resolve()) if arguments.gene_sets else None,
                }  # fmt: skip
                found, cost = fit(job, folder, ARMS_FILE, f"{name} {arm}")
                rows = rows_of(job, json.loads(str(found["rows"])), cost, same)
                keep(rows, left_out, model=arguments.model)
                for row in rows:
                    print(in_a_line(row), flush=True)
    missed = report(keep([], left_out, model=arguments.model))
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
