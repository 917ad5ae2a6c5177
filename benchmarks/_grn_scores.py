"""What the graphs of grn.py are held against: literature, gene families, gene sets, themselves."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from _network_density import density_test
from _network_metrics import edge_stability, score_edges
from scipy.stats import false_discovery_control, hypergeom

N_PERMUTATIONS, N_BOOTSTRAP, N_RANDOM = 1000, 1000, 1000
N_SHUFFLES = 20
"""Draws of random modules: each asks every module of every set."""
N_BEST = 20
"""Targets of a regulon."""
LEAST_MEMBERS = 3
"""A smaller family is not asked about."""
SIGNIFICANT = 0.05
SIZES = 5, 500
"""Genes of a set that have a module, least and most."""
PAPER_TARGETS = ("HBG1", "HBG2", "MS4A3", "FTH1")
"""Genes that the scDiVa paper names among the 20 that attend most to SPI1."""
PAPER_PAIR = ("TNFSF13B", "TNFRSF13B")
OURS = ("embedding", "attention", "correlation")
REMOVED = ("knockout", "knockout_presence")
"""Methods that `tl.grn` had and has no more: their rows stay as they were recorded."""
"""Arms that are methods of `tl.grn`."""
SIGNED = ("correlation", "spearman")
"""Arms whose weights below 0 are as strong as those above."""
N_EDGES = 100
"""Targets of each source that are edges, as `tl.grn` keeps them by default."""
ALIKE = ("spearman", "jaccard", "jaccard_by_source")
FAMILIES = ("HLA class II", "HLA", "TNF", "interleukin", "CD")


def strength(weights: np.ndarray, arm: str) -> np.ndarray:
    """What edges are ranked by, as `scdiva.get.grn_df` ranks them."""
    return np.abs(weights) if arm in SIGNED else weights


def measured(weights: np.ndarray, arm: str) -> np.ndarray:
    """NaN where `tl.grn` stored nothing, as where no cell holds both genes: that is no weight of 0."""
    return np.where(weights == 0, np.nan, weights) if arm in OURS else weights


def comparable(weights: np.ndarray, arm: str) -> np.ndarray:
    """Strengths of which none is below 0, as `edge_stability` takes the size of what it is given."""
    size = strength(measured(weights, arm), arm)
    return size if arm in SIGNED else size - np.nanmin(size)


def rounded(scores: dict) -> dict:
    """Figures to four digits behind the point, p-values and shares to four that count; what is not defined left out."""
    found = {}
    for key, value in scores.items():
        if isinstance(value, str) or not isinstance(value, int | float | np.number):
            found[key] = value
        elif math.isfinite(value):
            whole = isinstance(value, int | np.integer)
            found[key] = int(value) if whole else float(f"{value:.4g}") if abs(value) < 1 else round(float(value), 4)
    return found


def edge_scores(
    weights: np.ndarray, sources: list[str], targets: list[str], known: pd.DataFrame, means: pd.Series, seed: int
) -> dict:
    """Scores of one reference: its sources by its targets, no gene with itself, the largest weights first."""
    rows, columns = sorted(known["source"].unique()), sorted(known["target"].unique())
    some = weights[np.ix_(pd.Index(sources).get_indexer(rows), pd.Index(targets).get_indexer(columns))].astype(float)
    there = np.zeros(some.shape, dtype=bool)
    there[pd.Index(rows).get_indexer(known["source"]), pd.Index(columns).get_indexer(known["target"])] = True
    candidates = np.array(rows)[:, None] != np.array(columns)[None, :]
    found = score_edges(
        some, there, match=means[columns].to_numpy(float), candidates=candidates,
        n_permutations=N_PERMUTATIONS, n_bootstrap=N_BOOTSTRAP, rng=seed,
    )  # fmt: skip
    return rounded(found)


def family_scores(graph: np.ndarray, genes: list[str], members: list[str], arm: str, seed: int) -> dict:
    """Whether the members of a family are denser within than sets matched by degree: by weight, and by edges alone.

    The second, `edges_...`, is about the network as it is kept and drawn: the share of pairs that are an edge. By
    weight, pairs that `tl.grn` has no weight for are left out.
    """
    rows = np.flatnonzero(np.isin(genes, members))
    found = density_test(measured(graph, arm), rows, n_random=N_RANDOM, rng=seed)
    by_edges = density_test(network(graph, arm), rows, n_random=N_RANDOM, rng=seed)
    return rounded({**found, **{f"edges_{key}": value for key, value in by_edges.items() if key != "n"}})


def network(graph: np.ndarray, arm: str) -> np.ndarray:
    """1 where a pair is among the strongest `N_EDGES` of its source and positive, else 0."""
    size = strength(graph, arm).copy()
    np.fill_diagonal(size, -np.inf)
    least = np.partition(size, -N_EDGES, axis=1)[:, -N_EDGES][:, None] if size.shape[1] > N_EDGES else -np.inf
    return ((size >= least) & (graph > 0) & np.isfinite(size)).astype(float)


def pair_rank(graph: np.ndarray, genes: list[str], pair: tuple[str, str]) -> dict | None:
    """Where a target stands among all targets of its source; None if one of the two is not there."""
    if not set(pair) <= set(genes):
        return None
    source, target = (genes.index(name) for name in pair)
    return {"rank": place(graph[source], target, source), "of": len(genes) - 1}


def place(size: np.ndarray, target: int, source: int | None) -> int:
    """Rank of a target, 1 the best, the source itself left out; ties count as half better."""
    others = np.delete(size, [number for number in (target, source) if number is not None])
    return 1 + int((others > size[target]).sum() + (others == size[target]).sum() // 2)


def module_scores(
    genes: np.ndarray, modules: np.ndarray, strength: np.ndarray, sets: dict[str, list[str]], seed: int
) -> dict:
    """Enriched pairs of module and set, beside modules of the same sizes and degrees that are drawn at random."""
    rng = np.random.default_rng(seed)
    seen = _enriched(genes, modules, sets)
    drawn = [_enriched(genes, exchanged(modules, strength, rng), sets) for _ in range(N_SHUFFLES)]
    pairs, with_one = (np.array([one[key] for one in drawn]) for key in ("n_pairs", "n_enriched"))
    return rounded({
        **seen, "n_modules": len(np.unique(modules)), "n_genes": len(genes),
        "n_pairs_random": float(pairs.mean()), "n_pairs_random_most": int(pairs.max()),
        "n_enriched_random": float(with_one.mean()), "n_enriched_random_most": int(with_one.max()),
        "n_shuffles": N_SHUFFLES,
    })  # fmt: skip


def _enriched(genes: np.ndarray, modules: np.ndarray, sets: dict[str, list[str]]) -> dict:
    """Pairs of module and set below a false discovery rate of 5% over all pairs, and modules that are in one.

    Fisher's exact test, one-sided, against all genes that have a module; sets of `SIZES` of them are asked about.
    """
    universe = set(genes)
    tested = [own for some in sets.values() if SIZES[0] <= len(own := universe & set(some)) <= SIZES[1]]
    if not tested:
        raise ValueError(f"none of {len(sets)} gene sets has {SIZES[0]} to {SIZES[1]} of the {len(universe)} genes.")
    of = [set(genes[modules == name]) for name in np.unique(modules)]
    overlap = np.array([[len(module & some) for some in tested] for module in of])
    n_module, n_set = (np.array([len(some) for some in names]) for names in (of, tested))
    chance = hypergeom.sf(overlap - 1, len(universe), n_set, n_module[:, None])
    # a sum of chances may pass 1 in its last digit
    below = false_discovery_control(chance.clip(0, 1).ravel()).reshape(chance.shape) < SIGNIFICANT
    return {"n_pairs": int(below.sum()), "n_enriched": int(below.any(axis=1).sum())}


def exchanged(modules: np.ndarray, strength: np.ndarray, rng: np.random.Generator, n_bins: int = 10) -> np.ndarray:
    """Modules dealt out anew among the genes of each tenth of the degrees: all sizes stay."""
    found = modules.copy()
    for some in np.array_split(np.argsort(strength, kind="stable"), n_bins):
        found[some] = rng.permutation(modules[some])
    return found


def stability(pairs: list[tuple[np.ndarray, np.ndarray]], itself: np.ndarray) -> dict:
    """How alike two graphs of strengths are, mean and deviation over pairs of them; `itself` marks no edges."""
    found = []
    for one, other in pairs:
        a, b = (np.where(itself, np.nan, graph.astype(float)) for graph in (one, other))
        found.append(edge_stability(a, b, top=max(1, one.size // 100)))
    spread = {}
    for key in ALIKE:
        numbers = [one[key] for one in found if math.isfinite(one[key])]
        if numbers:
            spread |= {key: float(np.mean(numbers)), f"{key}_sd": float(np.std(numbers))}
    return rounded({**spread, "n_pairs": len(found)})


def regulon(weights: np.ndarray, gene: str, targets: list[str], known: dict[str, pd.DataFrame]) -> dict:
    """The `N_BEST` targets of a factor with the mode that each table gives them; where the paper's genes stand.

    For each table: how many of the best it holds, how many of all targets, and the chance of as many among as many
    drawn at random.
    """
    itself = targets.index(gene) if gene in targets else None
    order = [number for number in np.argsort(-weights, kind="stable") if number != itself]
    modes = {name: frame[frame["source"] == gene].set_index("target")["mor"].to_dict() for name, frame in known.items()}
    best = []
    for number in order[:N_BEST]:
        said = {name: int(of[targets[number]]) for name, of in modes.items() if targets[number] in of}
        best.append({"target": targets[number], "weight": float(f"{weights[number]:.4g}"), **said})
    found: dict = {"targets": best, "n_targets": len(order)}
    for name, of in modes.items():
        there = len(set(of) & set(targets) - {gene})
        hits = sum(name in row for row in best)
        chance = hypergeom.sf(hits - 1, len(order), there, min(N_BEST, len(order)))
        found |= {f"{name}_hits": hits, f"{name}_known": there, f"{name}_p": float(f"{chance:.4g}")}
    place_of = {name: number for number, name in enumerate(targets)}
    found["paper"] = {
        name: place(weights, place_of[name], itself) if name in place_of else None for name in PAPER_TARGETS
    }
    return found
