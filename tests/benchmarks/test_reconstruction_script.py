"""reconstruction.py: what is taken away comes back as the truth, baselines are the obvious ones, goals judge."""

from __future__ import annotations

from types import SimpleNamespace

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import spearmanr

from scdiva.models import load_model


@pytest.fixture
def cells(script):
    return script("_reconstruction_cells")


@pytest.fixture
def populations(script):
    return script("_reconstruction_populations")


@pytest.fixture
def table(script):
    return script("_reconstruction_table")


@pytest.fixture(scope="module")
def model():
    return load_model("scdiva-mini")


NAMES = ["CD3D", "LYZ", "CD14", "MS4A1", "CD79A", "GNLY", "NKG7", "FTH1", "ACTB", "CD20", "no gene"]


def toy(n=60) -> ad.AnnData:
    """Counts of ten genes, one of them twice (MS4A1 is CD20), and of one that nobody knows."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(3, (n, len(NAMES)))
    counts[:, 9] = 1  # rarer than MS4A1
    counts[:, 8] += 1
    adata = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)))
    adata.var_names = NAMES
    adata.obs["cell_type"] = np.where(np.arange(n) < n // 2, "T", "B")
    adata.obs.loc[adata.obs_names[-1], "cell_type"] = "unlabelled"
    return adata


def work_of(cells, model, adata):
    return cells.Work("toy", cells.prepared(adata, model), model, cells.Sizes(4, 2, 4, 2, 2))


def test_training_and_test_cells_are_apart(cells, model):
    train, test = work_of(cells, model, toy()).split()
    assert not set(train) & set(test)
    assert len(train) + len(test) == 59
    assert len(test) == 12


def test_holes_are_a_tenth_and_the_truth_is_what_was_there(cells, model):
    adata = cells.prepared(toy(), model)
    holes = cells.with_holes(adata, 1)
    assert len(holes.truth) == round(0.1 * adata.X.nnz)
    assert holes.left.X.nnz + len(holes.truth) == adata.X.nnz
    assert (holes.left.X[holes.rows, holes.columns] == 0).all()
    total = np.asarray(holes.left.X.sum(axis=1)).ravel()[holes.rows]
    was = np.asarray(adata.X[holes.rows, holes.columns]).ravel()
    np.testing.assert_allclose(holes.truth, np.log1p(1e4 * was / total))
    told = np.zeros(adata.shape)
    told[holes.rows, holes.columns] = holes.truth
    scores = cells.hole_scores(holes, told)
    assert scores["rmse"] == 0
    # an expectation of many counts holds no zeros; one of nearly none is a single count where there is one
    sure = cells.hole_scores(holes._replace(totals=np.full(adata.n_obs, 1e9)), told)
    assert sure["rmse_shown"] == pytest.approx(0, abs=1e-6)
    rare = cells.hole_scores(holes, 1e-9 * np.random.default_rng(0).random(adata.shape))
    one = np.log1p(1e4 / holes.totals[holes.rows])
    assert rare["rmse_shown"] == pytest.approx(np.sqrt(np.mean((one - holes.truth) ** 2)), rel=1e-4)
    assert scores["spearman_cell"] == pytest.approx(1)
    apart = cells.hole_scores(holes, told + 1, told)  # an arm that says both
    assert (apart["rmse_shown"], apart["rmse"]) == (0, pytest.approx(1))
    told[holes.rows[0], holes.columns[0]] = np.nan
    with pytest.raises(ValueError, match=r"1 of .* imputed values are not finite"):
        cells.hole_scores(holes, told)


def test_rank_correlation_by_group_is_the_mean_of_those_of_the_groups(cells):
    rng = np.random.default_rng(0)
    group, a, b = rng.integers(5, size=80), rng.integers(4, size=80), rng.random(80)
    expected = np.mean([spearmanr(a[group == k], b[group == k]).statistic for k in range(5)])
    assert cells.grouped_spearman(group, a, b) == pytest.approx(expected)
    constant = np.append(group, [9, 9]), np.append(a, [1, 1]), np.append(b, [0.1, 0.2])
    assert cells.grouped_spearman(*constant) == pytest.approx(expected)


def test_baselines_are_means_of_training_cells(cells, model):
    work = work_of(cells, model, toy())
    train = work.split()[0]
    values = cells.log_normalised(work.adata).toarray()[train]
    share, value, group = cells.known_of_training(work, True)
    of_type = values[work.adata.obs["cell_type"].to_numpy()[train] == "T"]
    kind = group[(work.adata.obs["cell_type"] == "T").to_numpy()][0]
    np.testing.assert_allclose(share[kind], (of_type > 0).mean(axis=0))
    np.testing.assert_allclose(value[kind], of_type.sum(axis=0) / (of_type > 0).sum(axis=0), rtol=1e-5)
    share, _, group = cells.known_of_training(work, False)
    np.testing.assert_allclose(share[0], (values > 0).mean(axis=0))
    assert not group.any()


def test_neighbours_and_group_means(cells, model):
    adata = cells.prepared(toy(), model)
    values = cells.log_normalised(adata).toarray()
    counts = np.expm1(values)
    found = cells.neighbors(adata, 1)
    place = values - values.mean(axis=0)  # eight of nine components, which turn cells but for the least of them
    place = place @ np.linalg.svd(place)[2][:8].T
    near = np.argsort(((place[0] - place) ** 2).sum(axis=1))[:30]
    np.testing.assert_allclose(found[0], np.log1p(counts[near].mean(axis=0)), rtol=1e-4)
    is_t = (adata.obs["cell_type"] == "T").to_numpy()
    np.testing.assert_allclose(cells.group_means(adata, True)[0], np.log1p(counts[is_t].mean(axis=0)), rtol=1e-4)
    np.testing.assert_allclose(cells.group_means(adata, False)[0], np.log1p(counts.mean(axis=0)), rtol=1e-4)


def test_masks_are_the_same_for_every_arm_and_values_are_of_hidden_genes(cells, model):
    work = work_of(cells, model, toy())
    first = cells.hidden_cells(work, 0)
    again = cells.cells_of(cells.filled(work, 0, 4, use_places=False, n_steps=2)[0])
    for one, two in zip(first, again, strict=True):
        assert (one.genes == two.genes).all()
        assert (one.hidden == two.hidden).all()
        assert one.hidden.sum() == max(1, round(0.3 * len(one.genes)))
    values = cells.log_normalised(work.adata)[work.split()[1][0]].toarray().ravel()
    np.testing.assert_allclose(first[0].values, values[first[0].genes], rtol=1e-4)
    told = cells.values_told(work, first, True)
    assert [len(part) for part in told] == [cell.hidden.sum() for cell in first]
    hidden_truth = [cell._replace(values=np.where(cell.hidden, 99.0, cell.values)) for cell in first]
    np.testing.assert_allclose(np.concatenate(cells.values_told(work, hidden_truth, True)), np.concatenate(told))


def test_what_is_shuffled_keeps_what_it_should(populations, model, cells):
    counts = cells.prepared(toy(), model).X
    rng = np.random.default_rng(0)
    by_gene = populations.shuffled(counts, rng)
    assert (np.sort(by_gene.toarray(), axis=0) == np.sort(counts.toarray(), axis=0)).all()
    by_cell = populations.other_genes(counts, rng)
    assert (np.sort(by_cell.toarray(), axis=1) == np.sort(counts.toarray(), axis=1)).all()
    assert (by_gene != counts).nnz > 0
    assert (by_cell != counts).nnz > 0


def test_doublets_are_of_two_types_and_as_deep_as_their_mean(populations):
    counts = np.zeros((40, 2), dtype=np.float32)
    counts[:20, 0], counts[20:, 1] = 100, 300
    adata = ad.AnnData(sp.csr_matrix(counts))
    adata.obs["cell_type"] = np.repeat(["a", "b"], 20)
    found = populations.doublets(adata, 30, np.random.default_rng(0)).toarray()
    assert found.shape == (30, 2)
    assert abs(found[:, 0].mean() - 50) < 5
    assert abs(found[:, 1].mean() - 150) < 8


def rows():
    made = {"set": "some", "n_cells": 5, "package": "scdiva 0.1.0"}
    score = {"masked_recall": 0.5, "known_spearman": 0.4, "known_rmse": 0.3}
    drawn = {"forest": 0.7, "mmd": 0.010, "mmd_floor": -0.002, "exact_copies": 0, "share_closer": 0.03}
    return [
        {**made, "part": "masked", "arm": "ours", **score, "masked_recall": 0.9, "masked_recall_sd": 0.01},
        {**made, "part": "masked", "arm": "ours_no_places", **score, "note": "a note"},
        {**made, "part": "masked", "arm": "marginals", **score, "masked_recall": 0.6},
        {**made, "part": "masked", "arm": "ours_8_steps", "masked_recall": 0.5, "seconds_per_cell": 1.0},
        {**made, "part": "paper", "arm": "mask_free", "l_dist": 0.0, "bleu": 1.0, "value_spearman": 1.0},
        {**made, "part": "impute", "arm": "ours", "spearman_cell": 0.5, "rmse_shown": 1.0},
        {**made, "part": "impute", "arm": "knn", "spearman_cell": 0.4, "rmse_shown": 1.2},
        {**made, "part": "population", "arm": "ours", **drawn},
        {**made, "part": "population", "arm": "transformer_1", **drawn},
        {**made, "part": "population", "arm": "transformer_32", **drawn, "mmd": 0.013},
        {**made, "part": "population", "arm": "by_type", "own_type": 0.75, "real_own_type": 0.9,
         "each": {"B": 0.9, "T": 0.6}, "real_each": {"B": 1.0, "T": 0.8}},
        {**made, "part": "likelihood", "arm": "ours", "auroc_shuffled": 1.0, "auroc_doublets": 0.4,
         "bound_real": -5.0, "bound_doublets": -4.9},
    ]  # fmt: skip


def test_goals(table):
    found = {row["what"]: (row["value"], row["met"]) for row in table.goals(rows())}
    assert found == {
        "some: recall at one step, above training cells": (-0.1, False),
        "some: Spearman of hidden values, above training cells": (0.0, None),
        "some: imputation, Spearman per cell above mean of 30 neighbours": (0.1, None),
        "some: imputation, RMSE of what is expressed below mean of 30 neighbours": (0.2, None),
        "some: AUROC of the forest, drawn cells": (0.7, None),
        "some: exact copies": (0.0, True),
        "some: share nearer to a real cell than real ones": (0.03, None),
        "some: MMD² of 32 steps less that of one (at most the larger of floor and spread)": (0.003, False),
        "some: drawn cells named as their type, mean over types": (0.75, None),
        "some: drawn cells named as their type, B": (0.9, None),
        "some: drawn cells named as their type, T": (0.6, None),
        "some: likelihood, scdiva-mini: AUROC of real cells, same counts in other genes": (1.0, None),
        "some: likelihood, scdiva-mini: nats a gene of real cells above doublets": (-0.1, False),
    }
    assert table.goals([]) == []
    # five cells say nothing of a share; of two thousand these do
    many = {row["what"]: row["met"] for row in table.goals([{**row, "n_cells": 2000} for row in rows()])}
    assert many["some: AUROC of the forest, drawn cells"] is True
    assert many["some: share nearer to a real cell than real ones"] is False
    assert many["some: drawn cells named as their type, mean over types"] is False


def test_hidden_genes_are_judged_without_their_ranks(table):
    found = {row["what"]: row for row in table.goals(rows())}
    recall = found["some: recall at one step, above training cells"]
    assert (recall["ours"], recall["theirs"], recall["ranks_given"]) == (0.5, 0.6, 0.9)
    given = [row for row in rows() if row["arm"] != "ours_no_places"]
    assert not [row for row in table.goals(given) if "recall" in row["what"] or "hidden values" in row["what"]]


def test_the_page_has_a_table_for_each_part(script, table):
    page = script("tables").reconstruction({"rows": [*rows(), *table.goals(rows())]})
    assert "| some (5) | scdiva-mini; hidden genes' ranks given | 0.900 ± 0.010 | 0.400 | 0.300 | - |" in page
    assert "| some (5) | scdiva-mini, without the hidden genes' ranks; a note | 0.500 | 0.400 | 0.300 | - |" in page
    assert "| some (5) | 8 steps; hidden genes' ranks given |" in page
    assert "| PBMC12k | scDiVa (paper) | 5 | 0.987 | 0.812 |" in page
    assert page.index("GeneMamba_U (paper)") < page.index("| some | scdiva-mini, mask-free | 0.000 | 1.000 | 1.000 |")
    assert "| some | T | 0.60 | 0.80 |" in page
    assert "| some: exact copies | 0 | counted | ≤ 0 | met |" in page
    assert "**missed**" in page
    titles = [line for line in page.splitlines() if line.startswith("###")]
    assert titles == [*(f"### {title}" for title in table.TITLES.values()), "### Goals of reconstruction"]
    assert script("tables").reconstruction({"rows": []}) == ""


def test_means_over_seeds(script):
    runs = [{"n": 3, "a": 1.0, "b": 1.0, "each": {"B": 0.5}}, {"n": 3, "a": 3.0, "b": float("nan"), "each": {"B": 1.0}}]
    found = script("reconstruction").over_seeds(runs)
    each = {"B": 0.75}
    assert found == {"n": 3, "a": 2.0, "a_sd": pytest.approx(2**0.5, abs=1e-4), "a_seeds": [1.0, 3.0], "each": each}


def test_a_row_is_completed_by_the_seeds_that_it_is_without(script, monkeypatch, tmp_path):
    bench = script("reconstruction")
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path)
    asked = []

    def made(work, seed):
        asked.append(seed)
        return {"rmse": 0.1 * seed, "n_cells": 7}

    monkeypatch.setitem(bench.PARTS, "impute", {"scvi": (made, 3)})
    monkeypatch.setattr(bench, "goals", lambda rows: [])
    monkeypatch.setattr(bench, "version_of", lambda arm: "1")
    work, same = SimpleNamespace(name="pbmc3k_raw"), {"cells": "f"}
    rows = {}
    for seeds, again in (([1], False), ([1, 2], False), ([0, 2], False), ([0, 1, 2, 3], False), ([2], True)):
        rows[tuple(seeds)] = row = bench.row_of(work, "impute", "scvi", seeds, same, again=again)
        bench.record(bench.NAME, [row])
    assert asked == [1, 2, 0, 2]
    assert rows[1,]["rmse"] == 0.1
    whole = rows[0, 2]
    assert whole["seeds"] == [0, 1, 2] == list(range(whole["n_seeds"]))
    assert whole["rmse_seeds"] == [0.0, 0.1, 0.2]
    assert rows[0, 1, 2, 3]["seeds"] == [0, 1, 2, 3]
    assert rows[0, 1, 2, 3]["rmse_seeds"] == [0.0, 0.1, 0.2]
    assert bench.single_runs(rows[0, 1, 2, 3]) == {}, "which of four seeds the three runs were is not known"
    assert rows[2,]["seeds"] == [2]
