"""Gene networks held against the literature, beside correlations, mutual information and a random forest.

    python benchmarks/grn.py --data FOLDER --tables FOLDER [--sets pbmc3k_raw ...] [--arms attention ...]
        [--part edges families modules stability regulon speed] [--seeds 0 1 2] [--again] [--strict]

`--tables` is a folder of TRRUST (`trrust_hs.csv`) and DoRothEA (`dorothea_hs_ABC.csv`), each with the columns tf,
target and mor (1 activates, -1 represses, 0 unknown), and of the gene sets of MSigDB: `human_hallmark_v2025.gmt` and
`human_reactome_v2025.gmt`. Genes that the model knows and that more than 1% of the cells express take part.

Ours are the methods of `tl.grn`: embedding, attention, correlation.
Rivals: spearman; mutual_information (quantile bins of expressing cells, zero a bin of its own); forest (GENIE3: a
random forest for each target); cooccurrence (which genes the same cells express: attention with all its ranks alike);
expression (product of the means, which knows of no pair); random.

- edges: AUPRC ratio and early precision of each table's factors by its targets, beside a null of targets exchanged for
  others of like expression.
- families: are families of genes denser within than sets matched by degree? Among their members and genes detected
  about as often.
- modules: `tl.grn_modules` of the embedding and of the correlation graph, enrichment in the gene sets, beside random
  modules of the same sizes and degrees.
- stability: graphs of two halves of some cells, drawn and split for each seed, and of two seeds on the same half.
- regulon: the best targets of SPI1 in CD14+ monocytes, with what the tables say of them.
- speed: attention among 10,000 cells by 2,000 genes, drawn from the first set.

Each graph is made in a process of its own on as many threads as `--threads` says, one. Rows are written as they are
made, and a row that is there with the same cells and seeds is not made again, unless `--again`. The last rows are
goals; a missed one fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from _grn_arms import ARMS
from _grn_goals import goals
from _grn_scores import (
    FAMILIES,
    LEAST_MEMBERS,
    PAPER_PAIR,
    REMOVED,
    comparable,
    edge_scores,
    family_scores,
    module_scores,
    pair_rank,
    regulon,
    stability,
    strength,
)
from _grn_sets import (
    COLLECTIONS,
    HELD_OUT,
    MEAN,
    REFERENCES,
    SETS,
    TAKES_PART,
    TYPE,
    edges,
    gene_sets,
    genes_of,
    in_data,
    prepared,
    resampled,
)
from _prepared import fingerprint
from _process import fit, version_of
from _record import commit, machine, record, replaced, rows_so_far
from _timing import report

import scdiva as sd

NAME = "grn"
ARMS_FILE = Path(__file__).parent / "_grn_arms.py"
KEYS = ("part", "set", "arm", "reference", "family", "collection", "what")
GENE, GROUPS = "SPI1", ("CD14+ Mono", "CD14+ Monocytes")
UNIVERSE = 2000
"""Genes among which families are looked at."""
STABLE_SOURCES, STABLE_TARGETS, STABLE_CELLS = 40, 400, 2000
"""At most so many are drawn at random, as the edges are made anew for each half and seed."""
OTHER_SEED = 1000
SPEED_CELLS, SPEED_GENES = 10_000, 2_000


@dataclass(frozen=True)
class Work:
    """A set with what it is held against, and how a graph of it is made."""

    name: str
    adata: ad.AnnData
    known: dict[str, pd.DataFrame]
    sets: dict[str, dict[str, list[str]]]
    seeds: list[int]
    model: str
    make: Callable[[dict], tuple[dict[str, np.ndarray], dict]]

    @property
    def factors(self) -> list[str]:
        """Sources of an edge in either table."""
        return sorted(set().union(*(frame["source"] for frame in self.known.values())))

    @property
    def targets(self) -> list[str]:
        """Targets of an edge in either table."""
        return sorted(set().union(*(frame["target"] for frame in self.known.values())))


def of_edges(work: Work, arm: str) -> list[dict]:
    """A row for each table."""
    sources, targets = work.factors, work.targets
    found, cost = work.make({"arm": arm, "sources": sources, "targets": targets})
    means = work.adata.var[MEAN]
    return [
        {
            "reference": name,
            **edge_scores(strength(found["weights"], arm), sources, targets, frame, means, work.seeds[0]),
            **cost,
        }
        for name, frame in work.known.items()
    ]


def of_families(work: Work, arm: str) -> list[dict]:
    """A row for each family of which three genes or more are expressed."""
    genes = genes_of(work.adata)
    members = {}
    for family in FAMILIES:
        found_genes = in_data(pd.Series(sd.datasets.gene_family(family)), genes, work.model).dropna().tolist()
        if len(found_genes) >= LEAST_MEMBERS:
            members[family] = found_genes
    universe = universe_of(work.adata, members, UNIVERSE)
    found, cost = work.make({"arm": arm, "sources": universe, "targets": universe})
    graph = found["weights"]
    np.fill_diagonal(graph, 0)
    rank = pair_rank(strength(graph, arm), universe, PAPER_PAIR)
    return [
        {"family": family, "n_genes": len(universe), **family_scores(graph, universe, some, arm, work.seeds[0]),
         **({"pair": rank} if family == "TNF" else {}), **cost}
        for family, some in members.items()
    ]  # fmt: skip


def universe_of(adata: ad.AnnData, members: dict[str, list[str]], n_genes: int) -> list[str]:
    """The members of all families and, as many as asked for in all, the genes detected about as often as they are.

    With other genes around, rare members would find none but each other to be matched with.
    """
    some = adata[:, adata.var[TAKES_PART].to_numpy()]
    order = some.var_names[np.argsort(-some.X.getnnz(axis=0), kind="stable")]
    inside = np.flatnonzero(order.isin(sorted(set().union(*members.values()))))
    # how many places each gene is from the nearest member
    away = np.abs(np.arange(len(order))[:, None] - inside[None, :]).min(axis=1)
    return sorted(order[np.argsort(away, kind="stable")[: max(n_genes, len(inside))]])


def of_modules(work: Work, arm: str) -> list[dict]:
    """A row for each collection of gene sets."""
    found, cost = work.make({"arm": arm, "targets": genes_of(work.adata).tolist()})
    parts = found["genes"], found["modules"], found["strength"]
    return [
        {"collection": name, **module_scores(*parts, sets, work.seeds[0]), **cost} for name, sets in work.sets.items()
    ]


def of_stability(work: Work, arm: str) -> list[dict]:
    """A row for halves of the cells, and one for two seeds on one of the halves."""
    rng = np.random.default_rng(0)
    targets = sorted(rng.permutation(work.targets)[:STABLE_TARGETS].tolist())
    sources = sorted(rng.permutation(work.factors)[:STABLE_SOURCES].tolist())
    itself = np.array(sources)[:, None] == np.array(targets)[None, :]
    costs = []

    def graph(seed: int, rows: np.ndarray) -> np.ndarray:
        job = {"arm": arm, "sources": sources, "targets": targets, "seed": seed, "rows": np.sort(rows).tolist()}
        found, cost = work.make(job)
        costs.append(cost)
        return comparable(found["weights"], arm)

    cells = [np.random.default_rng(seed).permutation(work.adata.n_obs)[:STABLE_CELLS] for seed in work.seeds]
    parts = [np.array_split(drawn, 2) for drawn in cells]
    # what draws at random draws anew
    halves = [
        (graph(seed, one), graph(seed + OTHER_SEED, other))
        for seed, (one, other) in zip(work.seeds, parts, strict=True)
    ]
    twice = [(halves[0][0], graph(work.seeds[0] + OTHER_SEED, parts[0][0]))]
    mean = {key: round(float(np.mean([cost[key] for cost in costs])), 2) for key in costs[0]}
    size = {"n_sources": len(sources), "n_targets": len(targets), "n_cells": len(cells[0])}
    return [{"what": what, **size, **stability(pairs, itself), **mean}
            for what, pairs in {"halves": halves, "seeds": twice}.items()]  # fmt: skip


def of_regulon(work: Work, arm: str) -> list[dict]:
    """A row with the best targets; nothing where there are no such cells or the gene is not expressed there."""
    rows = np.flatnonzero(work.adata.obs[TYPE].isin(GROUPS))
    takes_part = work.adata.var[TAKES_PART].to_numpy()
    there = work.adata.var_names[takes_part & (work.adata.X[rows].getnnz(axis=0) > 0.01 * len(rows))].tolist()
    if GENE not in there:
        return []
    found, cost = work.make({"arm": arm, "sources": [GENE], "targets": there, "rows": rows.tolist()})
    weights = strength(found["weights"][0], arm)
    (group,) = work.adata.obs[TYPE].iloc[rows].unique()
    return [{"gene": GENE, "group": group, "n_cells": len(rows), **regulon(weights, GENE, there, work.known), **cost}]


def of_speed(work: Work, arm: str) -> list[dict]:
    """A row with the seconds and the memory of all pairs: the mean over the seeds, and of each."""
    some = work.adata[:, work.adata.var[TAKES_PART].to_numpy()].copy()
    costs = []
    for seed in work.seeds:
        cells = resampled(some, SPEED_CELLS, SPEED_GENES, seed)
        genes = cells.var_names.tolist()
        costs.append(work.make({"arm": arm, "sources": genes, "targets": genes, "cells": cells})[1])
    size = {"n_cells": cells.n_obs, "n_genes": cells.n_vars, "genes_per_cell": round(cells.X.nnz / cells.n_obs)}
    each = {name: [cost[name] for cost in costs] for name in ("cpu_seconds", "wall_seconds", "peak_mib")}
    mean = {name: round(float(np.mean(values)), 2) for name, values in each.items()}
    return [{**size, **costs[0], **mean, **{f"{name}_each": values for name, values in each.items()}}]


OFTEN = tuple(arm for arm in ARMS if arm != "forest")
"""Arms of which more than one graph is made."""
PARTS: dict[str, tuple[Callable[[Work, str], list[dict]], tuple[str, ...]]] = {
    "edges": (of_edges, tuple(ARMS)),
    "families": (of_families, OFTEN),
    "modules": (of_modules, ("embedding", "correlation")),
    "stability": (of_stability, OFTEN),
    "regulon": (of_regulon, OFTEN),
    "speed": (of_speed, ("attention",)),
}
"""What a part does with an arm, and the arms that it is for."""


def keep(new: list[dict], **notes: object) -> list[dict]:
    """Write the results with new rows in the place of those that they replace; gives the goals."""
    rows = rows_so_far(NAME)
    for row in new:
        rows = replaced(rows, row, KEYS)
    first = {key: list(order) for key, order in (("part", PARTS), ("set", SETS), ("arm", (*ARMS, *REMOVED)))}
    rows.sort(key=lambda row: [order.index(row[key]) for key, order in first.items()])
    judged = goals(rows)
    record(NAME, [*rows, *judged], **notes)
    return judged


def in_a_line(row: dict) -> str:
    """A row in a line."""
    what = " ".join(str(row[key]) for key in KEYS if key in row)
    names = ("auprc_ratio", "auprc_ratio_null_high", "auprc_ratio_p", "early_precision", "edges_z", "edges_p", "z", "p",
             "n_pairs", "n_pairs_random", "spearman", "trrust_hits", "dorothea_hits")  # fmt: skip
    scores = " ".join(f"{key} {row[key]:.4g}" for key in names if key in row)
    return f"{what}: {scores} ({row['cpu_seconds']} s CPU, {row['peak_mib']:.0f} MiB)"


def maker(folder: Path, part: str, name: str, file: Path, arguments: argparse.Namespace) -> Callable:
    """What makes a graph of a set, in a process of its own."""

    def make(job: dict) -> tuple[dict[str, np.ndarray], dict]:
        cells = job.pop("cells", None)
        if cells is not None:
            cells.write_h5ad(folder / "others.h5ad")
        order = {
            "part": part, "set": name, "file": str(file if cells is None else folder / "others.h5ad"),
            "seed": arguments.seeds[0], "model": arguments.model, "threads": arguments.threads, **job,
        }  # fmt: skip
        found, cost = fit(order, folder, ARMS_FILE, f"{part} {name} {job['arm']}")
        return found, {key: round(value, 2) for key, value in cost.items()}

    return make


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--tables", type=Path, required=True, help="folder of known edges and gene sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    for name in arguments.sets:
        adata = prepared(ad.read_h5ad(arguments.data / f"{name}.h5ad"), arguments.model)
        tables = {one: arguments.tables / file for one, file in (REFERENCES | COLLECTIONS).items()}
        known = {one: edges(tables[one], adata, arguments.model) for one in REFERENCES}
        sets = {one: gene_sets(tables[one], adata, arguments.model) for one in COLLECTIONS}
        same = {"cells": fingerprint(adata, (TYPE,)), "seeds": arguments.seeds}
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "cells.h5ad"
            adata.write_h5ad(file)
            for part in arguments.part:
                function, arms = PARTS[part]
                make = maker(Path(temporary), part, name, file, arguments)
                work = Work(name, adata, known, sets, arguments.seeds, arguments.model, make)
                for arm in arms:
                    place = {"part": part, "set": name, "arm": arm, **same}
                    there = any(all(row.get(key) == place[key] for key in place) for row in rows_so_far(NAME))
                    skipped = arm not in arguments.arms or (part == "speed" and name != SETS[0])
                    skipped |= name == HELD_OUT and (part != "edges" or arm == "forest")
                    if skipped or (there and not arguments.again):
                        continue
                    made = {"commit": commit(), "package": version_of(arm), "processor": machine()["processor"]}
                    rows = [{**place, **made, **row} for row in function(work, arm)]
                    keep(rows, model=arguments.model)
                    for row in rows:
                        print(in_a_line(row), flush=True)
    missed = report(keep([], model=arguments.model))
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
