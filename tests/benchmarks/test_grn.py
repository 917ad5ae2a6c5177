"""grn.py: arms give what they are said to give, scores ask about the right pairs, rows are made once."""

from __future__ import annotations

import functools
import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import spearmanr
from sklearn.metrics import mutual_info_score

MODEL = "scdiva-mini"
FACTORS, TARGETS = ["SPI1", "IRF8", "STAT1"], ["CD14", "LYZ", "CD79A", "GNLY", "FTH1"]


@pytest.fixture
def sets(script, monkeypatch):
    """With the vocabulary read once: the table of its names takes a third of a second."""
    module = script("_grn_sets")
    monkeypatch.setattr(module, "load_vocabulary", functools.cache(module.load_vocabulary))
    return module


@pytest.fixture
def arms(script):
    return script("_grn_arms")


@pytest.fixture
def scores(script):
    return script("_grn_scores")


def cells(n=300) -> ad.AnnData:
    """Counts: SPI1 drives CD14 and LYZ, IRF8 drives CD79A, nothing drives GNLY and FTH1; the rest fills the total."""
    rng = np.random.default_rng(0)
    activity = rng.gamma(1, 1, (n, 2))
    rates = [activity[:, 0], activity[:, 1], np.ones(n), 2 * activity[:, 0], 3 * activity[:, 0], 2 * activity[:, 1]]
    counts = rng.poisson(np.stack([*rates, np.ones(n), np.full(n, 5), np.full(n, 500)], axis=1))
    adata = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)))
    adata.var_names = [*FACTORS, *TARGETS, "ACTB"]
    adata.obs["cell_type"] = np.where(np.arange(n) < n // 2, "CD14+ Mono", "B")
    return adata


def job(**more) -> dict:
    return {"part": "edges", "set": "toy", "arm": "", "sources": FACTORS, "targets": TARGETS, "seed": 0,
            "model": MODEL, "threads": 1, **more}  # fmt: skip


def test_genes_take_part_once_and_by_any_name(sets, tmp_path):
    adata = cells()
    more = ad.AnnData(np.zeros((300, 4), dtype=np.float32), obs=adata.obs)
    more.var_names = ["no gene", "GAPDH", "MS4A1", "CD20"]  # the last two are one gene: neither takes part
    more.X[:3, 1], more.X[:9, 2:] = 1, 1  # GAPDH: in 1% of the cells, which is not more than 1%
    found = sets.prepared(ad.concat([adata, more], axis=1, merge="same"), MODEL)
    assert set(sets.genes_of(found)) == {*FACTORS, *TARGETS, "ACTB"}
    lengths = found.X.sum(axis=1)
    expected = np.log1p(found.X[:, 0].toarray() / np.asarray(lengths) * 1e4).mean()
    assert found.var["mean"].iloc[0] == pytest.approx(expected, rel=1e-5)

    table = tmp_path / "known.csv"
    pd.DataFrame({
        "tf": ["PU.1", "SPI1", "SPI1", "SPI1", "IRF8", "GATA1"],
        "target": ["CD14", "CD14", "SPI1", "GAPDH", "ACTB", "LYZ"],
        "mor": [1.0, -1.0, 1.0, 1.0, 0.0, 1.0],
    }).to_csv(table)  # fmt: skip
    known = sets.edges(table, found, MODEL)
    assert known.to_dict("list") == {"source": ["SPI1", "IRF8"], "target": ["CD14", "ACTB"], "mor": [1.0, 0.0]}
    pd.DataFrame({"tf": ["GATA1"], "target": ["LYZ"], "mor": [1]}).to_csv(table)
    with pytest.raises(ValueError, match=r"known\.csv: no edge"):
        sets.edges(table, found, MODEL)
    pd.DataFrame({"source": ["GATA1"], "target": ["LYZ"]}).to_csv(table)
    with pytest.raises(ValueError, match="no column mor, tf"):
        sets.edges(table, found, MODEL)
    (tmp_path / "sets.gmt").write_text("one\turl\tCD14\tGAPDH\tLYZ\ntwo\turl\tCD14\n\n")
    assert sets.gene_sets(tmp_path / "sets.gmt", found, MODEL) == {"one": ["CD14", "LYZ"], "two": ["CD14"]}


def test_rivals_are_what_they_are_said_to_be(sets, arms):
    adata = sets.prepared(cells(), MODEL)
    x, y = arms.values(adata, FACTORS), arms.values(adata, TARGETS)
    expected = [[spearmanr(a, b).statistic for b in y.T] for a in x.T]
    np.testing.assert_allclose(arms.spearman(adata, job()), expected, atol=1e-5)

    bins = [arms.binned(one) for one in (x, y)]
    assert set(np.unique(bins[1])) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(bins[1] == 0, y == 0)
    expected = [[mutual_info_score(a, b) for b in bins[1].T] for a in bins[0].T]
    np.testing.assert_allclose(arms.mutual_information(adata, job()), expected, atol=1e-5)
    twice = job(targets=TARGETS * 40)  # more than a block
    np.testing.assert_allclose(arms.mutual_information(adata, twice), np.tile(expected, 40), atol=1e-5)

    there = adata.X.toarray() > 0
    held = there[:, (adata.var[sets.TOKEN] != -1).to_numpy()].sum(axis=1)
    together = [a[b].sum() - b.sum() * (a * held).sum() / held.sum() for a in (x > 0).T for b in (y > 0).T]
    expected = np.reshape(together, (3, 5)) / ((y > 0).sum(axis=0) + 100)
    np.testing.assert_allclose(arms.cooccurrence(adata, job()), expected, rtol=1e-6)

    np.testing.assert_allclose(arms.expression(adata, job()), np.outer(x.mean(axis=0), y.mean(axis=0)), rtol=1e-6)
    one, other = (arms.chance(adata, job(seed=seed)) for seed in (0, 1))
    assert one.shape == (3, 5)
    assert (one != other).all()
    np.testing.assert_array_equal(one, arms.chance(adata, job()))

    silent = adata.copy()
    silent.X = sp.csr_matrix(silent.X.multiply((silent.var_names != "GNLY").astype(np.float32)))
    for arm in (arms.spearman, arms.mutual_information, arms.forest):
        assert (arm(silent, job())[:, TARGETS.index("GNLY")] == 0).all()


def test_forest_finds_what_drives_a_gene_and_no_gene_drives_itself(sets, arms, monkeypatch):
    monkeypatch.setitem(arms.FOREST, "n_estimators", 20)
    adata = sets.prepared(cells(), MODEL)
    found = arms.forest(adata, job(targets=[*TARGETS, "IRF8"]))
    best = [FACTORS[row] for row in found.argmax(axis=0)]
    assert best[:3] == ["SPI1", "SPI1", "IRF8"]
    assert found[1, -1] == 0
    assert found.sum(axis=0).max() <= 1  # of a variance of 1, not more is taken off


def test_edges_are_scored_among_a_tables_own_genes(scores):
    rng = np.random.default_rng(0)
    sources, targets = [f"s{i}" for i in range(8)], [f"t{i}" for i in range(60)] + ["s0"]
    weights = rng.random((8, 61)) * 0.5
    known = pd.DataFrame([(f"s{i}", f"t{j}") for i in range(1, 7) for j in rng.choice(50, 6, False)],
                         columns=["source", "target"])  # fmt: skip
    known.loc[len(known)] = ["s1", "s0"]
    for source, target in known.itertuples(index=False):
        weights[sources.index(source), targets.index(target)] *= -2
    weights[0] = 1e6  # s0 is no source of this table, nor t50 to t59 targets
    weights[:, 50:60] = 1e6
    means = pd.Series(rng.random(61), index=targets)
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


@pytest.mark.parametrize(
    "arm", ["embedding", "attention", "knockout", "mutual_information", "correlation", "spearman", "knockout_presence"]
)
def test_the_strongest_edges_are_those_that_grn_df_lists_first(scores, arm):
    weights = np.array([[0.5, -0.9, 0.0, 0.7]])
    signed = arm in ("correlation", "spearman")
    order = [1, 3, 0, 2] if signed else [3, 0, 2, 1]
    assert np.argsort(-scores.strength(weights, arm)[0]).tolist() == order
    # what compares graphs takes the size of the weights, and may not take the weakest for the strongest
    size = np.abs(scores.comparable(weights, arm)[0])
    ours = arm not in ("mutual_information", "spearman")
    assert [number for number in np.argsort(-size) if np.isfinite(size[number])] == [
        number for number in order if weights[0, number] or not ours
    ]
    assert np.isnan(size[2]) == ours  # `tl.grn` stored no weight


def test_the_network_holds_the_strongest_pairs_that_go_together(scores, monkeypatch):
    monkeypatch.setattr(scores, "N_EDGES", 2)
    graph = np.array([[9, 1, -3, 2], [4, 9, -5, -6], [0, 0.1, 9, 0.1], [-1, -2, -3, 9]])
    expected = {
        # a strong negative weight is an edge, but not one that says that two genes go together
        "correlation": [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]],
        "embedding": [[0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]],
    }
    for arm, edges in expected.items():
        np.testing.assert_array_equal(scores.network(graph, arm), edges)
    np.testing.assert_array_equal(graph.diagonal(), 9)
    monkeypatch.setattr(scores, "N_EDGES", 50)  # more than there are
    np.testing.assert_array_equal(scores.network(graph, "correlation"), (graph > 0) & ~np.eye(4, dtype=bool))


def test_a_family_is_held_against_its_like_by_weights_and_by_edges(scores, monkeypatch):
    monkeypatch.setattr(scores, "N_EDGES", 10)
    rng = np.random.default_rng(0)
    genes = [f"g{number}" for number in range(120)]
    graph = rng.random((120, 120)) * 0.5
    graph[:6, :6] = np.where(rng.random((6, 6)) < 0.5, 1.0, -2.0)  # strong pairs, and as many that are far apart
    found = scores.family_scores(graph, genes, genes[:6], "embedding", 0)
    assert found["n"] == 6
    assert found["p"] > 0.9
    assert found["edges_p"] == pytest.approx(1 / 1001, rel=1e-3)
    inner = ~np.eye(6, dtype=bool)
    assert found["density"] == pytest.approx(graph[:6, :6][inner].mean(), abs=1e-4)
    assert found["edges_density"] == pytest.approx((graph[:6, :6][inner] == 1).mean(), abs=1e-4)
    assert "edges_n" not in found

    graph[0, 1:6] = graph[1:6, 0] = 0  # never seen together: left out of the mean
    seen = np.delete(np.arange(6), 0)
    density = graph[np.ix_(seen, seen)][~np.eye(5, dtype=bool)].mean()
    for arm, share in (("attention", 1), ("mutual_information", 20 / 30)):
        found = scores.family_scores(graph, genes, genes[:6], arm, 0)
        assert found["density"] == pytest.approx(share * density, abs=1e-4)


def test_rank_of_a_target(scores):
    size = np.array([9.0, 3.0, 5.0, 5.0, 1.0, 5.0])
    assert scores.place(size, 2, 0) == 2  # of three that tie, the one in the middle
    assert scores.place(size, 1, 0) == 4
    assert scores.place(size, 4, None) == 6
    graph = np.diag([9.0, 9.0, 9.0])
    graph[0] = [9, 3, -2]
    assert scores.pair_rank(graph, ["a", "b", "c"], ("a", "b")) == {"rank": 1, "of": 2}
    assert scores.pair_rank(graph, ["a", "b", "c"], ("a", "x")) is None


def test_modules_drawn_at_random_keep_sizes_and_degrees(scores):
    rng = np.random.default_rng(0)
    genes = np.array([f"g{i}" for i in range(200)])
    strength = rng.permutation(200).astype(float)
    modules = np.where(strength < 100, "0", "1")
    drawn = scores.exchanged(modules, strength, rng)
    assert (drawn == "0").sum() == 100
    # each tenth of the degrees is of one module, so nothing can move
    np.testing.assert_array_equal(drawn, modules)
    mixed = rng.permutation(modules)
    moved = scores.exchanged(mixed, strength, rng)
    assert (moved != mixed).any()
    for some in np.array_split(np.argsort(strength), 10):
        assert sorted(moved[some]) == sorted(mixed[some])

    split = np.where(np.arange(200) < 100, "0", "1")
    found = scores.module_scores(genes, split, strength, {"half": genes[:80].tolist(), "few": ["g1"]}, 0)
    assert (found["n_pairs"], found["n_enriched"], found["n_modules"], found["n_genes"]) == (1, 1, 2, 200)
    assert found["n_pairs_random_most"] == 0


def test_stability_is_of_strengths_and_leaves_out_genes_with_themselves(scores):
    rng = np.random.default_rng(0)
    one = rng.random((10, 40))
    itself = np.zeros(one.shape, dtype=bool)
    itself[:, 0] = True
    other = one.copy()
    other[:, 0] = rng.random(10)
    found = scores.stability([(one, other)], itself)
    assert (found["spearman"], found["jaccard"], found["jaccard_by_source"]) == (1, 1, 1)
    found = scores.stability([(one, other), (one, rng.random(one.shape))], itself)
    assert 0.3 < found["spearman"] < 0.7
    assert found["spearman_sd"] > 0.3
    assert found["n_pairs"] == 2


@pytest.fixture
def folders(tmp_path):
    """Data and tables on disk; gives the call."""
    data, tables = tmp_path / "data", tmp_path / "tables"
    data.mkdir()
    tables.mkdir()
    cells().write_h5ad(data / "pbmc3k_raw.h5ad")
    known = {"tf": ["SPI1", "SPI1", "IRF8", "STAT1"], "target": ["CD14", "LYZ", "CD79A", "GNLY"], "mor": [1, 0, -1, 1]}
    for name in ("trrust_hs.csv", "dorothea_hs_ABC.csv"):
        pd.DataFrame(known).to_csv(tables / name)
    for name in ("human_hallmark_v2025.gmt", "human_reactome_v2025.gmt"):
        (tables / name).write_text("one\turl\tCD14\tLYZ\n")
    return ["--data", str(data), "--tables", str(tables), "--sets", "pbmc3k_raw", "--seeds", "0"]


def test_rows_are_made_once_and_written(script, sets, arms, folders, tmp_path, monkeypatch):
    grn = script("grn")
    monkeypatch.setitem(grn.record.__globals__, "RESULTS", tmp_path)
    monkeypatch.setitem(grn.edge_scores.__globals__, "N_PERMUTATIONS", 50)
    monkeypatch.setitem(grn.edge_scores.__globals__, "N_BOOTSTRAP", 50)
    asked = []

    def made(job, *_):
        asked.append(job)
        found, _ = arms.run(job)
        return found, {"cpu_seconds": 1.234, "wall_seconds": 2.0, "peak_mib": 9.0}

    monkeypatch.setattr(grn, "fit", made)
    call = [*folders, "--part", "edges", "stability", "regulon", "--arms", "spearman", "random"]
    assert grn.main(call) == 0
    rows = json.loads((tmp_path / "grn.json").read_text())["rows"]
    assert [(row["part"], row["arm"]) for row in rows[:4]] == [("edges", arm) for arm in ("spearman", "random")
                                                             for _ in range(2)]  # fmt: skip
    assert [row["what"] for row in rows if row["part"] == "stability"] == ["halves", "seeds"] * 2
    of = {(row["arm"], row.get("what")): row for row in rows}
    assert of["spearman", "seeds"]["spearman"] == 1
    assert abs(of["random", "seeds"]["spearman"]) < 1
    edge = rows[0]
    assert (edge["reference"], edge["n_known"], edge["cpu_seconds"]) == ("trrust", 4, 1.23)
    assert edge["auprc_ratio"] > 1.5
    regulon = next(row for row in rows if row["part"] == "regulon")
    # the filler goes down as they go up
    assert {one["target"] for one in regulon["targets"][:3]} == {"CD14", "LYZ", "ACTB"}
    assert (regulon["n_cells"], regulon["group"], regulon["n_targets"]) == (150, "CD14+ Mono", 8)
    *halves, again = [job for job in asked if job["part"] == "stability" and job["arm"] == "spearman"]
    assert sorted(halves[0]["rows"] + halves[1]["rows"]) == list(range(300))
    assert again["rows"] == halves[0]["rows"]
    assert len({job["seed"] for job in (*halves, again)}) == 2
    stable = next(row for row in rows if row["part"] == "stability")
    assert [stable[f"n_{what}"] for what in ("sources", "targets", "cells")] == [3, 4, 300]

    page = script("tables").grn(json.loads((tmp_path / "grn.json").read_text()))
    assert "| pbmc3k_raw, TRRUST (4 of 3 × 4) | Spearman | " in page
    assert "(T+ D+)" in page

    def never(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(grn, "fit", never)
    assert grn.main(call) == 0
    for more in (["--again"], ["--seeds", "1"]):
        with pytest.raises(AssertionError, match="again"):
            grn.main([*call, *more])
