"""Corrected expression compared with a regression by dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.integration.corrected_expression import predict_within

LAYER = "scdiva_corrected"


@pytest.fixture(scope="module")
def integrated(plain, cells):
    """Cells with their integrated states."""
    data = cells.copy()
    sd.tl.integrate(data, "batch", model=plain, steps=6, rng=3)
    return data


@pytest.fixture(scope="module")
def model_genes(plain, cells):
    """Names of the genes that the model knows: all but a few."""
    tokens = plain.vocabulary.match(list(cells.var_names)).tokens
    assert 0 < (tokens < N_SPECIAL).sum() <= 6
    return list(cells.var_names[tokens >= N_SPECIAL])


@pytest.fixture(scope="module")
def corrected(plain, integrated, model_genes):
    """Cells with the corrected expression of these genes in `obsm`."""
    data = integrated.copy()
    sd.tl.corrected_expression(data, "batch", model_genes, model=plain)
    return data


def lognorm(data):
    counts = data.X.toarray().astype(np.float64)
    return np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))


def by_regression(states, x, batch, at=None):
    """Ridge regression within batches by dense matrices; predictions around the mean of a batch, or over all cells."""

    def within(a):
        means = np.stack([a[batch == b].mean(axis=0) for b in np.unique(batch)])
        return a - means[np.unique(batch, return_inverse=True)[1]]

    def predicted(y):
        return y[here].mean(axis=0) + (states - states[here].mean(axis=0)) @ inverse @ s.T @ within(y)

    states, batch = states.astype(np.float64), np.asarray(batch)
    here, s = np.ones(len(x), dtype=bool) if at is None else batch == at, within(states)
    inverse = np.linalg.inv(s.T @ s + 0.1 * np.trace(s.T @ s) / s.shape[1] * np.eye(s.shape[1]))
    missed = (x - np.maximum(x - within(x) + s @ inverse @ s.T @ within(x), 0)) ** 2
    spread = np.sqrt(np.maximum(predicted(missed), 0.1 * missed[here].mean(axis=0)))
    return np.maximum(predicted(x), 0), spread


@pytest.mark.parametrize("at", [None, 0, 1])
def test_is_the_regression_by_dense_matrices(integrated, plain, model_genes, at):
    """Totals include all genes, also those outside the vocabulary of the model."""
    data = integrated.copy()
    data.obs["batch"] = (data.obs["batch"] == data.obs["batch"].iloc[0]).astype(int)
    sd.tl.corrected_expression(data, "batch", model_genes, transform_batch=at, model=plain)
    expected = by_regression(data.obsm["X_scdiva_integrated"], lognorm(data), data.obs["batch"], at)
    for key, by_hand in zip((LAYER, f"{LAYER}_sd"), expected, strict=True):
        assert (data.obsm[key].dtypes == np.float32).all()
        assert (data.obsm[key] >= 0).all(axis=None)
        np.testing.assert_allclose(data.obsm[key], by_hand[:, data.var_names.isin(model_genes)], atol=1e-3)
    assert data.uns["scdiva"][LAYER]["transform_batch"] == ("" if at is None else str(at))


def test_a_batch_that_adds_to_every_gene_is_given_and_taken():
    """States have no batch effect, genes have one: predictions are equal in both batches, at the chosen level."""
    draw = np.random.default_rng(0)
    batch = np.repeat([0, 1], 60)
    states = draw.normal(size=(120, 3))
    states[60:] = states[:60]
    genes = 50 + states @ draw.normal(size=(3, 300)) + 2 * batch[:, None] + draw.normal(0, 0.5, size=(120, 300))
    for at in (0, 1):
        predicted, spread = predict_within(states, sp.csr_matrix(genes), batch, batch == at)
        np.testing.assert_allclose(predicted[:60], predicted[60:], atol=1e-6)
        np.testing.assert_allclose(predicted.mean(axis=0), genes[batch == at].mean(axis=0), rtol=1e-3)
        assert spread.mean() == pytest.approx(0.5, abs=0.05)
    for gene in range(6):  # variation within a batch is preserved
        assert np.corrcoef(predicted[:60, gene], genes[:60, gene])[0, 1] > 0.9


def test_a_batch_of_one_cell_has_no_spread_of_its_own():
    draw = np.random.default_rng(0)
    states, genes = draw.normal(size=(41, 3)), draw.normal(5, 1, size=(41, 2))
    batch = np.repeat([0, 1, 2], [20, 20, 1])
    expected, _ = predict_within(states, sp.csr_matrix(genes), batch, batch == 2)
    assert np.isfinite(expected).all()
    assert np.isnan(predict_within(states, sp.csr_matrix(genes), batch, batch == 2)[1]).all()
    spread = predict_within(states, sp.csr_matrix(genes), batch, batch < 3)[1]
    np.testing.assert_allclose(spread.mean(), 0.9, atol=0.15)


def test_some_genes_are_those_of_all_in_the_order_asked_for(corrected, integrated, plain, model_genes):
    data, names = integrated.copy(), [model_genes[7], model_genes[2]]
    sd.tl.corrected_expression(data, "batch", names, model=plain)
    for key in (LAYER, f"{LAYER}_sd"):
        assert list(data.obsm[key].columns) == names
        np.testing.assert_allclose(data.obsm[key], corrected.obsm[key][names], atol=1e-5)
    sd.tl.corrected_expression(data, "batch", names[0], model=plain)
    assert data.obsm[LAYER].shape == (data.n_obs, 1)


def test_a_cell_without_a_state_gets_none(integrated, corrected, plain):
    data = integrated.copy()
    data.obsm["X_scdiva_integrated"][3] = np.nan
    data.obs_names = ["one", *data.obs_names[1:-1], "one"]
    sd.tl.corrected_expression(data, "batch", data.var_names[0], model=plain)
    assert np.isnan(data.obsm[LAYER].to_numpy()).ravel().nonzero()[0].tolist() == [3]


def test_what_is_not_there_is_named(integrated, cells, plain):
    data, unknown, gene = integrated.copy(), cells.var_names[58], cells.var_names[0]
    for wrong, error, message in [
        ({"genes": [gene, unknown]}, KeyError, f"1 of 2 genes are not .* the first is '{unknown}'"),
        ({"genes": gene, "transform_batch": "nowhere"}, KeyError, r"1 of 1 batches are not .*'nowhere'"),
        ({"genes": f"{gene}/x"}, ValueError, "slash"),
    ]:
        with pytest.raises(error, match=message):
            sd.tl.corrected_expression(data, "batch", model=plain, **wrong)
    with pytest.raises(KeyError, match=r"no 'X_scdiva_integrated'.*sd\.tl\.integrate"):
        sd.tl.corrected_expression(cells.copy(), "batch", gene, model=plain)
    assert LAYER not in data.obsm


def test_genes_of_raw(corrected, integrated, plain, model_genes):
    data = integrated.copy()
    data.raw = data
    data = data[:, :5].copy()
    with pytest.raises(KeyError, match=r"adata\.raw has it: pass use_raw=True"):
        sd.tl.corrected_expression(data, "batch", model_genes, model=plain)
    sd.tl.corrected_expression(data, "batch", model_genes, model=plain, use_raw=True)
    np.testing.assert_array_equal(data.obsm[LAYER], corrected.obsm[LAYER])


def test_of_cells_longer_than_the_model_reads_all_genes_count(build, cells, model_genes):
    """The transformer reads forty genes of each cell, but the expression of its other genes is not treated as zero."""
    data, model = cells[:60].copy(), build(anchor="learned")
    assert (data[:, model_genes].X.toarray() > 0).sum(axis=1).max() > model.config.input_length
    sd.tl.integrate(data, "batch", model=model, steps=2, rng=0)
    sd.tl.corrected_expression(data, "batch", model_genes, model=model)
    expected, _ = by_regression(data.obsm["X_scdiva_integrated"], lognorm(data), data.obs["batch"])
    np.testing.assert_allclose(data.obsm[LAYER], expected[:, data.var_names.isin(model_genes)], atol=1e-3)
