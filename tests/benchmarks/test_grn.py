"""grn.py: arms give what they are said to give, scores ask about the right pairs, goals say what the rows say."""

from __future__ import annotations

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
def sets(script):
    return script("_grn_sets")


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


def test_cells_drawn_anew(sets):
    found = sets.resampled(sets.prepared(cells(), MODEL), 500, 4, 0)
    assert found.shape == (500, 4)
    assert set(found.var_names) == {"ACTB", "FTH1", "LYZ", "CD14"} | ({"CD79A"} & set(found.var_names))
    assert (found.X.data == np.round(found.X.data)).all()
    assert found.X[:, -1].mean() == pytest.approx(250, rel=0.05)


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

    np.testing.assert_allclose(arms.expression(adata, job()), np.outer(x.mean(axis=0), y.mean(axis=0)), rtol=1e-6)
    one, other = (arms.chance(adata, job(seed=seed)) for seed in (0, 1))
    assert one.shape == (3, 5)
    assert (one != other).all()
    np.testing.assert_array_equal(one, arms.chance(adata, job()))

    silent = adata.copy()
    silent.X = sp.csr_matrix(silent.X.multiply((silent.var_names != "GNLY").astype(np.float32)))
    for arm in (arms.spearman, arms.mutual_information, arms.forest):
        assert (arm(silent, job())[:, TARGETS.index("GNLY")] == 0).all()


def test_our_arm_gives_every_pair_that_was_asked_for(sets, arms):
    adata = sets.prepared(cells(), MODEL)
    found = arms.ours(adata, job(arm="correlation", targets=[*TARGETS, "SPI1"]))
    x, y = arms.values(adata, FACTORS), arms.values(adata, TARGETS)
    np.testing.assert_allclose(found[:, :-1], np.corrcoef(x.T, y.T)[:3, 3:], atol=1e-4)
    assert found[0, -1] == 0  # no gene with itself
    assert found[1, -1] == pytest.approx(np.corrcoef(x.T)[0, 1], abs=1e-4)


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
    weights[:, 50:60] = -1e6
    means = pd.Series(rng.random(61), index=targets)
    found = scores.edge_scores(weights, sources, targets, known, means, 0)
    n_targets = known["target"].nunique()
    assert (found["n_sources"], found["n_targets"], found["n_known"]) == (6, n_targets, 37)
    assert found["auprc_ratio"] > 2 > 1 > found["auprc_ratio_signed"]
    assert found["auprc_ratio_p"] <= 0.01
    back = rng.permutation(61)
    again = scores.edge_scores(weights[:, back], sources, [targets[i] for i in back], known, means, 0)
    assert again["auprc_ratio"] == found["auprc_ratio"]


def test_rank_of_a_target(scores):
    size = np.array([9.0, 3.0, 5.0, 5.0, 1.0, 5.0])
    assert scores.place(size, 2, 0) == 2  # of three that tie, the one in the middle
    assert scores.place(size, 1, 0) == 4
    assert scores.place(size, 4, None) == 6
    graph = np.diag([9.0, 9.0, 9.0])
    graph[0] = [9, -3, 2]
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


def test_stability_is_of_sizes_and_leaves_out_genes_with_themselves(scores):
    rng = np.random.default_rng(0)
    one = rng.normal(size=(10, 40))
    itself = np.zeros(one.shape, dtype=bool)
    itself[:, 0] = True
    other = -one
    other[:, 0] = rng.normal(size=10)
    found = scores.stability([(one, other)], itself)
    assert (found["spearman"], found["jaccard"], found["jaccard_by_source"]) == (1, 1, 1)
    found = scores.stability([(one, other), (one, rng.normal(size=one.shape))], itself)
    assert 0.3 < found["spearman"] < 0.7
    assert found["spearman_sd"] > 0.3
    assert found["n_pairs"] == 2


def test_a_regulon_says_what_the_tables_say(scores):
    targets = ["SPI1", *(f"t{i}" for i in range(100)), "FTH1"]
    weights = np.concatenate([[99.0], -np.arange(100, 0, -1.0), [95.5]])
    known = {"trrust": pd.DataFrame({"source": ["SPI1", "SPI1", "IRF8"], "target": ["t3", "t90", "t4"],
                                     "mor": [-1.0, 1.0, 1.0]})}  # fmt: skip
    found = scores.regulon(weights, "SPI1", targets, known)
    names = [one["target"] for one in found["targets"]]
    assert names[:6] == ["t0", "t1", "t2", "t3", "t4", "FTH1"]
    assert len(names) == 20
    assert found["targets"][3] == {"target": "t3", "weight": -97.0, "trrust": -1}
    assert "trrust" not in found["targets"][4]
    assert (found["trrust_hits"], found["trrust_known"], found["n_targets"]) == (1, 2, 101)
    assert found["trrust_p"] == pytest.approx(1 - 81 * 80 / (101 * 100), rel=1e-3)
    assert found["paper"] == {"HBG1": None, "HBG2": None, "MS4A3": None, "FTH1": 6}


def test_universe_holds_all_members_and_genes_detected_as_often(script, sets):
    grn = script("grn")
    n_cells = np.arange(90, 9, -10)  # that express each gene
    adata = ad.AnnData(sp.csr_matrix((np.arange(90)[:, None] < n_cells).astype(np.float32)))
    adata.var_names = [*FACTORS, *TARGETS, "ACTB"]
    adata.var[sets.TAKES_PART] = adata.var_names != "CD79A"
    members = {"a": ["IRF8"], "b": ["IRF8", "ACTB"]}
    assert grn.universe_of(adata, members, 1) == ["ACTB", "IRF8"]
    assert grn.universe_of(adata, members, 5) == sorted(["ACTB", "IRF8", "SPI1", "STAT1", "FTH1"])
    assert len(grn.universe_of(adata, members, 100)) == 8


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


def test_rows_are_made_once_and_written(script, arms, folders, tmp_path, monkeypatch):
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
    halves = [job["rows"] for job in asked if job["part"] == "stability" and job["rows"]][:2]
    assert sorted(halves[0] + halves[1]) == list(range(300))

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


def rows_for_goals() -> list[dict]:
    made = {"package": "some 1.0", "commit": "0123456789abcdef", "processor": "Some CPU", "cpu_seconds": 10.0,
            "wall_seconds": 20.0, "peak_mib": 900.0}  # fmt: skip

    def edge(arm, ratio, p):
        both = {f"{key}{end}": ratio for key in ("auprc_ratio", "early_precision")
                for end in ("", "_low", "_high", "_null_mean", "_null_high")}  # fmt: skip
        return {**made, "part": "edges", "set": "pbmc", "arm": arm, "reference": "trrust", "n_known": 9, "n_sources": 3,
                "n_targets": 8, **both, "auprc_ratio_p": p, "early_precision_p": p}  # fmt: skip

    def family(arm, name, p, **more):
        return {
            **made,
            "part": "families",
            "set": "pbmc",
            "arm": arm,
            "family": name,
            "n": 5,
            "z": 3.21,
            "p": p,
            **more,
        }

    def regulon(arm, **paper):
        found = {**made, "part": "regulon", "set": "pbmc", "arm": arm, "gene": "SPI1", "n_cells": 50, "n_targets": 99}
        best = [{"target": "LYZ", "weight": 1.0, "trrust": -1}, {"target": "FTL", "weight": 0.5}]
        said = {f"{name}_{key}": 1 for name in ("trrust", "dorothea") for key in ("hits", "known", "p")}
        return {**found, "targets": best, **said, "paper": paper}

    module = {"n_modules": 4, "n_genes": 2000, "n_pairs": 30, "n_pairs_random": 1.25, "n_pairs_random_most": 3,
              "n_enriched": 3, "n_enriched_random": 0.5, "n_enriched_random_most": 1}  # fmt: skip
    return [
        edge("attention", 1.3, 0.001), edge("embedding", 1.1, 0.2), edge("correlation", 1.2, 0.01),
        family("attention", "HLA class II", 0.001), family("attention", "HLA", 0.002), family("attention", "CD", 0.04),
        family("attention", "TNF", 0.5, pair={"rank": 7, "of": 1999}), family("embedding", "HLA", 0.001),
        family("spearman", "HLA class II", 0.5),
        {**made, "part": "modules", "set": "pbmc", "arm": "embedding", "collection": "hallmark", **module},
        {**made, "part": "stability", "set": "pbmc", "arm": "attention", "what": "seeds", "spearman": 0.9,
         "jaccard": 0.8, "jaccard_by_source": 0.7},
        regulon("attention", HBG1=None, HBG2=None, MS4A3=None, FTH1=12), regulon("spearman", FTH1=1),
        {**made, "part": "speed", "set": "pbmc", "arm": "attention", "n_cells": 10000, "n_genes": 2000,
         "genes_per_cell": 300, "wall_seconds": 700.0},
    ]  # fmt: skip


def test_goals(script):
    goals = script("_grn_goals").goals
    found = {row["what"]: row for row in goals(rows_for_goals())}
    assert {what: (row["value"], row["met"]) for what, row in found.items()} == {
        "pbmc, trrust: p of the AUPRC ratio of attention": (0.001, True),
        "pbmc, trrust: p of the AUPRC ratio of embedding": (0.2, False),
        "pbmc: p of the density of HLA class II, attention": (0.001, True),
        "pbmc: families denser than sets matched by degree, attention": (1, False),
        "attention graph of 10,000 cells, 2,000 genes: seconds": (700, False),
        "attention graph of 10,000 cells, 2,000 genes: peak MiB": (900, True),
    }
    assert found["pbmc, trrust: p of the AUPRC ratio of attention"]["correlation"] == 1.2
    assert found["pbmc: families denser than sets matched by degree, attention"]["which"] == "HLA"
    assert goals([row for row in rows_for_goals() if row["arm"] in ("spearman", "correlation")]) == []


def test_the_page_shows_all_parts_and_marks_what_is_not_ours(script):
    tables, goals = script("tables"), script("_grn_goals").goals
    rows = rows_for_goals()
    page = tables.grn({"rows": [*rows, *goals(rows)]})
    first = "| pbmc, TRRUST (9 of 3 × 8) | `tl.grn`, attention | 1.30 (1.30 to 1.30) | 1.30 (< 1.30) | 0.001 |"
    assert first in page
    assert "| pbmc, HLA class II (5) | - | 3.2 (0.001) | 3.2 (0.50) |" in page
    assert "| pbmc, Hallmark | `tl.grn`, embedding | 4 of 2,000 | 30 | 1.2 (≤ 3) | 3 | 0.5 (≤ 1) |" in page
    assert "| pbmc | `tl.grn`, attention | - | - | - | 0.90 | 0.80 | 0.70 |" in page
    assert "LYZ (T-), FTL |" in page
    assert "10,000 cells × 2,000 genes, all pairs | 300 | 700 | 10.0 | 900 |" in page
    assert "These are the paper's claims" in page
    expected = "| pbmc (99) | `tl.grn`, attention | not expressed | not expressed | not expressed | 12 | 7 of 1,999 |"
    assert expected in page
    assert "families denser than sets matched by degree, attention | 1 | ≥ 2 | **missed** |" in page
    assert tables.grn({"rows": []}) == ""
