"""Likeness of genes beside its formulas, written out with scikit-learn's ridge regression."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import Ridge

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.networks.methods import RIDGE, whitened
from scdiva.tokenizer.vocabulary import Vocabulary


def standardised(matrix):
    return (matrix - matrix.mean()) / matrix.std()


def of_states(cells, model, columns, rows=slice(None)) -> np.ndarray:
    """Covariance of what a ridge regression on the cell states predicts of each gene's standardised expression."""
    counts = np.asarray(sp.csr_matrix(cells.X).todense(), dtype=np.float64)
    values = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))[rows][:, columns]
    states = sd.tl.embed(cells, model, copy=True).obsm["X_scdiva"].astype(np.float64)[rows]
    values = (values - values.mean(axis=0)) / values.std(axis=0)
    largest = np.linalg.eigvalsh(np.cov(states.T, bias=True)).max()
    predicted = Ridge(alpha=len(states) * RIDGE * largest).fit(states, values).predict(states)
    return np.cov(predicted.T, bias=True)


def cosines(model) -> np.ndarray:
    """Of the genes' whitened embeddings: inner products by the inverse of the covariance."""
    table = model.embedding.gene.weight.detach().double().numpy()[N_SPECIAL:]
    table = table - table.mean(axis=0)
    inner = table @ np.linalg.pinv(table.T @ table) @ table.T
    return inner / np.sqrt(np.outer(np.diag(inner), np.diag(inner)))


def expected(cells, model, columns, rows=slice(None)):
    """Genes × genes of the columns given, the diagonal among them."""
    genes = model.vocabulary.match(list(cells.var_names[columns])).tokens - N_SPECIAL
    static = cosines(model)[np.ix_(genes, genes)]
    return (standardised(static) + standardised(of_states(cells, model, columns, rows))) / 2


@pytest.fixture
def cells(adata):
    cells = adata.copy()
    cells.obs["kind"] = np.array(["A", "B"])[np.arange(90) % 7 % 2]
    return cells


@pytest.fixture
def columns(cells, one):
    return np.flatnonzero(one.vocabulary.match(list(cells.var_names)).tokens >= 0)


@pytest.mark.parametrize("kind", ["one", "plain"])
def test_is_its_formula(cells, columns, one, plain, edges, kind):
    model = one if kind == "one" else plain
    sd.tl.grn(cells, model=model, n_targets=None, min_fraction=0)
    found = edges(cells)[np.ix_(columns, columns)]
    off = ~np.eye(len(columns), dtype=bool)
    np.testing.assert_allclose(found[off], expected(cells, model, columns)[off], atol=1e-3)
    assert np.isnan(found[~off]).all()
    assert np.isfinite(edges(cells)).sum() == off.sum()
    about = cells.uns["scdiva"]["scdiva_grn"]
    assert about["method"] == "embedding"
    assert not about["signed"]
    assert cells.varp["scdiva_grn"].data.min() < 0 < cells.varp["scdiva_grn"].data.max()


def test_of_groups_and_against_another(cells, columns, plain, edges):
    a = (cells.obs["kind"] == "A").to_numpy()
    options = {"model": plain, "n_targets": None, "min_fraction": 0, "groupby": "kind"}
    sd.tl.grn(cells, **options)
    sd.tl.grn(cells, **options, reference="A", key_added="d")
    of_a, of_b = expected(cells, plain, columns, a), expected(cells, plain, columns, ~a)
    off, at = ~np.eye(len(columns), dtype=bool), np.ix_(columns, columns)
    np.testing.assert_allclose(edges(cells, "scdiva_grn_A")[at][off], of_a[off], atol=1e-3)
    np.testing.assert_allclose(edges(cells, "d_B")[at][off], (of_b - of_a)[off], atol=1e-3)


def test_sources_and_targets_are_a_part_of_the_genes(cells, columns, plain, edges):
    """Standard deviations are over the genes that take part, whichever way the edges go."""
    names = cells.var_names
    some, others = columns[[2, 5, 9]], columns[[1, 2, 30, 31]]
    sd.tl.grn(cells, model=plain, sources=list(names[some]), targets=list(names[others]), min_fraction=0)
    there = np.union1d(some, others)
    by_hand = np.full((60, 60), np.nan)
    by_hand[np.ix_(there, there)] = expected(cells, plain, there)
    np.fill_diagonal(by_hand, np.nan)
    asked = np.zeros((60, 60), dtype=bool)
    asked[np.ix_(some, others)] = True
    np.testing.assert_allclose(edges(cells), np.where(asked, by_hand, np.nan), atol=1e-3)


def test_whitened_vectors(one, vocabulary):
    table = vocabulary.table.copy()
    table.loc[table.index[4], "entropy"] = np.nan
    one.vocabulary = Vocabulary(table)
    try:
        white = whitened(one)
    finally:
        one.vocabulary = vocabulary
    seen = np.r_[np.zeros(N_SPECIAL, bool), np.arange(len(table)) != 4]
    assert (white[~seen] == 0).all()
    np.testing.assert_allclose(np.linalg.norm(white[seen], axis=1), 1)
    full = whitened(one)[N_SPECIAL:]
    np.testing.assert_allclose(full @ full.T, cosines(one), atol=1e-9)
    assert np.abs(white[seen] @ white[seen].T - np.delete(np.delete(cosines(one), 4, 0), 4, 1)).max() > 1e-6


def test_a_gene_that_does_not_vary_goes_by_the_model_alone(cells, columns, plain, edges):
    """The same count in each cell, and cells of one depth."""
    counts = cells.X.toarray()
    counts[:, columns[0]] = 1
    counts[:, columns[1]] += counts.sum(axis=1).max() - counts.sum(axis=1)
    cells.X = counts
    sd.tl.grn(cells, model=plain, n_targets=None, min_fraction=0)
    found = edges(cells)[columns[0], columns[1:]]
    genes = plain.vocabulary.match(list(cells.var_names[columns])).tokens - N_SPECIAL
    static = standardised(cosines(plain)[np.ix_(genes, genes)])
    assert np.isfinite(found).all()
    assert np.ptp(found - static[0, 1:] / 2) < 1e-4  # what the states add is the same for all
