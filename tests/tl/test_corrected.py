"""Corrected expression beside dense matrices, and on cells whose markers are known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.metrics import roc_auc_score

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.tl._integrate import corrected_expression
from scdiva.train.adaptation import AdaptationCells

QUICK = {"steps": 6, "rng": 3}
LAYER = "scdiva_corrected"


@pytest.fixture(scope="module")
def corrected(plain, cells):
    """Cells with their integrated states and the corrected expression of all genes."""
    data = cells.copy()
    sd.tl.integrate(data, "batch", model=plain, corrected=True, **QUICK)
    return data


def lognorm(data):
    counts = data.X.toarray().astype(np.float64)
    return np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))


def by_regression(states, x, batch):
    """Ridge regression within batches by dense matrices; predictions around the mean over all cells."""

    def within(a):
        means = np.stack([a[batch == b].mean(axis=0) for b in np.unique(batch)])
        return a - means[np.unique(batch, return_inverse=True)[1]]

    s, y = within(states.astype(np.float64)), within(x)
    penalty = 0.01 * np.trace(s.T @ s) / s.shape[1]
    weight = np.linalg.inv(s.T @ s + penalty * np.eye(s.shape[1])) @ s.T @ y
    return np.maximum(x.mean(axis=0) + (states - states.mean(axis=0)) @ weight, 0)


def test_is_the_regression_by_dense_matrices(corrected, plain):
    """With counts of all genes per ten thousand, whether the model knows them or not."""
    known = plain.vocabulary.match(list(corrected.var_names)).tokens >= N_SPECIAL
    assert 0 < (~known).sum() <= 6
    layer = corrected.layers[LAYER]
    assert layer.dtype == np.float32
    assert layer.shape == corrected.shape
    assert np.isnan(layer[:, ~known]).all()
    expected = by_regression(corrected.obsm["X_scdiva_integrated"], lognorm(corrected), corrected.obs["batch"])
    np.testing.assert_allclose(layer[:, known], expected[:, known], atol=1e-3)
    assert (layer[:, known] >= 0).all()


def test_zeros_are_counted(corrected, plain):
    known = plain.vocabulary.match(list(corrected.var_names)).tokens >= N_SPECIAL
    notes = corrected.uns["scdiva"]["integrate"]
    assert notes["observed_zeros"] == pytest.approx((corrected.X.toarray()[:, known] == 0).mean())
    assert notes["corrected_zeros"] == pytest.approx((corrected.layers[LAYER][:, known] == 0).mean())


def test_means_of_batches_no_longer_differ():
    """States without batch, genes with: of a batch that adds 2 to every cell nothing is left."""
    draw = np.random.default_rng(0)
    batch = np.repeat([0, 1], 60)
    states = draw.normal(size=(120, 3))
    states[60:] = states[:60]
    genes = np.maximum(5 + states @ draw.normal(size=(3, 6)) + 2 * batch[:, None], 0.1).astype(np.float32)
    indptr, tokens = np.arange(0, 121 * 6, 6), np.tile(np.arange(6) + N_SPECIAL, 120)
    made = AdaptationCells(indptr, tokens, genes.ravel(), batch, np.arange(6) + N_SPECIAL, 2)
    found, zeros = corrected_expression(states, made, np.arange(120), np.arange(6) + N_SPECIAL)
    assert zeros == 0
    np.testing.assert_allclose(found[:60], found[60:], atol=1e-6)
    np.testing.assert_allclose(found.mean(axis=0), genes.mean(axis=0), rtol=1e-4)
    for gene in range(6):  # what varies within a batch stays
        assert np.corrcoef(found[:60, gene], genes[:60, gene])[0, 1] > 0.99


def test_rows_order_and_repeated_genes():
    """Rows of the cells in another order than the states; a gene asked for twice; one that no cell has."""
    draw = np.random.default_rng(1)
    states, x = draw.normal(size=(40, 2)), draw.uniform(0.5, 2, size=(40, 3))
    batch, rows = np.repeat([0, 1], 20), draw.permutation(40)
    tokens = np.tile(np.arange(3) + N_SPECIAL, 40)
    made = AdaptationCells(np.arange(0, 121, 3), tokens, x[rows].astype(np.float32).ravel(), batch, tokens[:3], 2)
    asked = np.array([4, 3, 4, 9])
    found, zeros = corrected_expression(states, made, rows, asked)
    of_state = np.empty(40, dtype=int)
    of_state[rows] = batch
    expected = by_regression(states, x, of_state)
    np.testing.assert_allclose(found[:, :3], expected[:, [1, 0, 1]], atol=1e-5)
    np.testing.assert_array_equal(found[:, 3], 0)
    assert zeros == pytest.approx(0.25)


def test_some_genes_are_those_of_all(corrected, cells, plain):
    names = [corrected.var_names[7], corrected.var_names[2]]
    data = cells.copy()
    sd.tl.integrate(data, "batch", model=plain, corrected=names, **QUICK)
    filled = ~np.isnan(data.layers[LAYER]).any(axis=0)
    assert np.flatnonzero(filled).tolist() == [2, 7]
    np.testing.assert_allclose(data.layers[LAYER][:, filled], corrected.layers[LAYER][:, filled], atol=1e-5)
    one = cells.copy()
    sd.tl.integrate(one, "batch", model=plain, corrected=names[0], **QUICK)
    assert np.flatnonzero(~np.isnan(one.layers[LAYER]).any(axis=0)).tolist() == [7]


def test_genes_that_the_model_does_not_know_are_named(cells, plain):
    data, unknown = cells.copy(), cells.var_names[58]
    with pytest.raises(KeyError, match=f"1 of 2 genes are not .* the first is '{unknown}'"):
        sd.tl.integrate(data, "batch", model=plain, corrected=[cells.var_names[0], unknown], **QUICK)
    with pytest.raises(KeyError, match=r"2 of 3 genes .*adata\.var_names.*'A'"):
        sd.tl.integrate(data, "batch", model=plain, corrected=["A", cells.var_names[0], "B"], **QUICK)
    assert not data.obsm
    assert not data.layers


def test_gene_ids_name_the_genes(corrected, cells, plain):
    data = cells.copy()
    data.var["symbol"] = data.var_names
    data.var_names = [f"gene{i}" for i in range(60)]
    sd.tl.integrate(data, "batch", model=plain, gene_ids="symbol", corrected=True, **QUICK)
    np.testing.assert_array_equal(data.layers[LAYER], corrected.layers[LAYER])


def test_columns_of_one_name_are_one_gene(cells, plain):
    data = cells.copy()
    names = list(data.var_names)
    names[1] = names[0]
    data.var_names = names
    sd.tl.integrate(data, "batch", model=plain, corrected=[names[0]], **QUICK)
    layer = data.layers[LAYER]
    assert np.flatnonzero(~np.isnan(layer).any(axis=0)).tolist() == [0, 1]
    np.testing.assert_array_equal(layer[:, 0], layer[:, 1])


def test_of_cells_longer_than_the_model_reads_all_genes_count(build, cells):
    """A transformer reads forty genes of each cell; the expression of the others is none the less not zero."""
    data = cells[:60].copy()
    model = build(anchor="learned")
    known = model.vocabulary.match(list(data.var_names)).tokens >= N_SPECIAL
    lengths = (data.X.toarray()[:, known] > 0).sum(axis=1)
    assert lengths.max() > model.config.input_length
    sd.tl.integrate(data, "batch", model=model, corrected=True, steps=2, rng=0)
    expected = by_regression(data.obsm["X_scdiva_integrated"], lognorm(data), data.obs["batch"])
    np.testing.assert_allclose(data.layers[LAYER][:, known], expected[:, known], atol=1e-3)
    zeros = data.uns["scdiva"]["integrate"]["observed_zeros"]
    assert zeros == pytest.approx((data.X.toarray()[:, known] == 0).mean())


def test_markers_tell_types_better_than_before(plain):
    """Of cells with dropout the corrected markers tell the types better, by the known truth."""
    data = sd.datasets.toy(400, 60, n_batches=2, rng=1)
    counts = data.X.toarray()
    data.X = sp.csr_matrix(np.random.default_rng(0).binomial(counts.astype(int), 0.15).astype(np.float32))
    sd.tl.integrate(data, "batch", model=plain, corrected=True, steps=60, rng=0)
    known = plain.vocabulary.match(list(data.var_names)).tokens >= N_SPECIAL
    before = data.X.toarray()
    before = np.log1p(1e4 * before / before.sum(axis=1, keepdims=True))
    scores = []
    for name, markers in data.uns["truth"]["markers"].items():
        for gene in np.flatnonzero(data.var_names.isin(markers) & known):
            own = data.obs["cell_type"] == name
            scores.append([roc_auc_score(own, x[:, gene]) for x in (before, data.layers[LAYER])])
    first, then = np.mean(scores, axis=0)
    assert first < 0.95
    assert then > first + 0.02
