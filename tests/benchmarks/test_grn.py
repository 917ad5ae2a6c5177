"""grn.py: scores ask about the right pairs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import false_discovery_control, fisher_exact


@pytest.fixture
def scores(script):
    return script("_grn_scores")


def test_edges_are_scored_among_a_tables_own_genes(scores):
    rng = np.random.default_rng(0)
    sources, targets = [f"s{i}" for i in range(8)], [f"t{i}" for i in range(60)] + ["s0"]
    weights = rng.random((8, 61)) * 0.5
    pairs = [(f"s{i}", f"t{j}") for i in range(1, 7) for j in rng.choice(50, 6, False)] + [("s1", "s0")]
    for source, target in pairs:
        weights[sources.index(source), targets.index(target)] *= -2
    weights[0] = weights[:, 50:60] = 1e6  # s0 is no source of this table, nor t50 to t59 targets
    known, means = pd.DataFrame(pairs, columns=["source", "target"]), pd.Series(rng.random(61), index=targets)
    found = scores.edge_scores(scores.strength(weights, "correlation"), sources, targets, known, means, 0)
    n_targets = known["target"].nunique()
    assert (found["n_sources"], found["n_targets"], found["n_known"]) == (6, n_targets, 37)
    assert found["auprc_ratio"] > 2
    assert found["auprc_ratio_p"] <= 0.01
    back = rng.permutation(61)
    again = scores.edge_scores(np.abs(weights[:, back]), sources, [targets[i] for i in back], known, means, 0)
    assert again["auprc_ratio"] == found["auprc_ratio"]
    # the known ones are below 0, where weights without a sign are weakest
    as_they_stand = scores.edge_scores(scores.strength(weights, "embedding"), sources, targets, known, means, 0)
    assert as_they_stand["auprc_ratio"] < 1


def test_a_family_is_held_against_its_like_by_weights_and_by_edges(scores, monkeypatch):
    monkeypatch.setattr(scores, "N_EDGES", 10)
    rng = np.random.default_rng(0)
    genes, inner = [f"g{number}" for number in range(120)], ~np.eye(6, dtype=bool)
    graph = rng.random((120, 120)) * 0.5
    graph[:6, :6] = np.where(rng.random((6, 6)) < 0.5, 1.0, -2.0)  # strong pairs, and as many that are far apart
    found = scores.family_scores(graph, genes, genes[:6], "embedding", 0)
    assert found["p"] > 0.9
    assert found["edges_p"] == pytest.approx(1 / 1001, rel=1e-3)
    assert found["density"] == pytest.approx(graph[:6, :6][inner].mean(), abs=1e-4)
    assert found["edges_density"] == pytest.approx((graph[:6, :6][inner] == 1).mean(), abs=1e-4)

    graph[0, 1:6] = graph[1:6, 0] = 0  # never seen together: left out of the mean
    density = graph[1:6, 1:6][inner[1:, 1:]].mean()
    for arm, share in (("attention", 1), ("mutual_information", 20 / 30)):
        found = scores.family_scores(graph, genes, genes[:6], arm, 0)
        assert found["density"] == pytest.approx(share * density, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_sets_of_modules_by_fishers_test(scores, seed):
    """Counted pair by pair; sets with too few or too many genes are not asked about, nor genes without a module."""
    rng = np.random.default_rng(seed)
    genes = np.array([f"g{number}" for number in range(600)])
    modules = rng.choice(["a", "b", "c"], 600, p=[0.6, 0.3, 0.1])
    sets = {f"{name}{n}": [*rng.choice(genes[modules == name], n), "absent"] for name in "abc" for n in (20, 7)}
    sets |= {"few": genes[modules == "c"][:4], "many": genes[:501], "drawn": rng.choice(genes, 40, False)}
    p = {}
    for name in "abc":
        own = set(genes[modules == name])
        for key in set(sets) - {"few", "many"}:
            some = set(sets[key]) - {"absent"}
            if len(some) >= 5:
                both, rest = len(own & some), len(own | some)
                table = [[both, len(own - some)], [len(some - own), 600 - rest]]
                p[name, key] = fisher_exact(table, alternative="greater").pvalue
    below = [pair for pair, q in zip(p, false_discovery_control(list(p.values())), strict=True) if q < 0.05]
    found = scores._enriched(genes, modules, sets)
    assert found == {"n_pairs": len(below), "n_enriched": len({name for name, _ in below})}
    assert found["n_enriched"] >= 2
    with pytest.raises(ValueError, match="none of 1 gene sets has 5 to 500 of the 600 genes"):
        scores._enriched(genes, modules, {"few": genes[:4]})


def test_rank_of_a_target(scores):
    size = np.array([9.0, 3.0, 5.0, 5.0, 1.0, 5.0])
    # of three that tie, the one in the middle; a source is not its own target
    assert [scores.place(size, *of) for of in ((2, 0), (1, 0), (4, None))] == [2, 4, 6]
    graph = np.array([[9, 3, -2], [0, 9, 0], [0, 0, 9]])
    assert scores.pair_rank(graph, ["a", "b", "c"], ("a", "b")) == {"rank": 1, "of": 2}
