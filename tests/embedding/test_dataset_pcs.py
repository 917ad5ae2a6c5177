"""Principal components of a dataset, and the embedding of an adapted model."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import InMemoryCells
from scdiva.embedding import dataset_pcs as D
from scdiva.models.inference import RunConfig, embed_all, read_out

N_GENES = 30  # of the tiny model
N_TOKENS = N_GENES + N_SPECIAL


def encoded(model, cells):
    """Cell states, `(n_cells, state_dim)`."""
    return torch.from_numpy(embed_all(model, cells, RunConfig(None, "cpu", "fp32", "state")))


@pytest.fixture
def tiny(tiny):
    """Without the residual, which starts from zero: the same states, and no transformer is run for them."""
    return functools.partial(tiny, anchor_residual=False)


def as_cells(dense: np.ndarray, batch: np.ndarray) -> InMemoryCells:
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    measured, n_batches = np.arange(dense.shape[1] - N_SPECIAL) + N_SPECIAL, int(batch.max()) + 1
    return InMemoryCells(indptr, columns, dense[rows, columns].astype(np.float32), batch, measured, n_batches)


def make_cells(n: int = 300, n_batches: int = 2, signal: float = 2.0) -> tuple[InMemoryCells, np.ndarray]:
    """Cells along two hidden directions, a shift between batches, and noise; also dense `(n, N_TOKENS)`."""
    draw = np.random.default_rng(0)
    batch = np.sort(np.arange(n) % n_batches)
    loadings = draw.normal(size=(2, N_GENES)) * signal
    dense = np.zeros((n, N_TOKENS), dtype=np.float32)
    raw = draw.normal(size=(n, 2)) @ loadings + draw.normal(size=(n, N_GENES)) + batch[:, None] + 1
    dense[:, N_SPECIAL:] = np.maximum(raw, 0)
    return as_cells(dense, batch), dense


@torch.no_grad()
def embedded(model, cells, rows=None):
    rows = np.arange(cells.n_cells) if rows is None else rows
    return read_out(model, cells.take(rows).packed, "embedding").numpy()


def within(x, batch):
    return x - np.stack([x[batch == b].mean(axis=0) for b in range(batch.max() + 1)])[batch]


def pca(x, batch, n):
    """Coordinates of all cells, minus their mean, on components within batches; the largest loading is positive."""
    loadings = np.linalg.svd(within(x, batch), full_matrices=False)[2][:n].T
    loadings = loadings * np.sign(loadings[np.abs(loadings).argmax(axis=0), np.arange(loadings.shape[1])])
    return (x - x.mean(axis=0)) @ loadings


def unit(x, batch):
    return x / np.sqrt(np.square(within(x, batch)).sum() / len(x))


def by_hand(x, state, batch, n=20, k=15):
    """The whole formula, by singular value decompositions of dense matrices and cell by cell."""
    expression = pca(x, batch, 50)
    expression /= np.linalg.norm(expression, axis=1, keepdims=True)
    joint = pca(np.hstack([unit(expression, batch), 0.7 * unit(pca(state, batch, 50), batch)]), batch, 50)
    y = within(joint, batch)
    varying = y.var(axis=0) > 1e-6 * y.var(axis=0).max()
    y, joint = y[:, varying], joint[:, varying]
    difference = np.empty_like(y)
    for i, cell in enumerate(y[:, :n]):
        distance = np.linalg.norm(y[:, :n] - cell, axis=1)
        distance[i] = np.inf
        difference[i] = y[i] - y[np.argsort(distance)[:k]].mean(axis=0)
    inside = difference.T @ difference / len(y) * k / (k + 1)
    inside += 0.1 * np.diag(inside).mean() * np.eye(len(inside))
    values, vectors = np.linalg.eig(np.linalg.solve(inside, y.T @ y / len(y)))
    order = np.argsort(-values.real)[:n]
    directions = vectors.real[:, order]
    directions /= np.sqrt(np.einsum("ij,ik,kj->j", directions, inside, directions))
    return joint @ directions, values.real[order]


@pytest.mark.parametrize("n_batches", [1, 3])
def test_the_embedding_is_its_formula(tiny, n_batches):
    cells, dense = make_cells(n_batches=n_batches)
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    new, notes = D.with_dataset_components(model, cells)
    state = encoded(model, cells).numpy()
    assert np.array_equal(encoded(new, cells).numpy(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected, ratio = by_hand(dense.astype(np.float64), state.astype(np.float64), cells.batch)
    embedding = embedded(new, cells)
    assert embedding.shape == expected.shape == (300, 20)
    assert (notes["n_components"], notes["n_genes"], new.config.adapted) == (20, N_GENES, 20)
    # the first directions are far apart; distances do not depend on the sign and on rotations among close ones
    for n in (2, 20):
        distance, expected_distance = (np.linalg.norm(x[:, :n] - x[:1, :n], axis=1) for x in (embedding, expected))
        np.testing.assert_allclose(distance, expected_distance, atol=0.01 * expected_distance.max())
    np.testing.assert_allclose(notes["ratio"], ratio, rtol=1e-3)
    assert notes["ratio"] == sorted(notes["ratio"], reverse=True)


@pytest.mark.parametrize(("n", "n_genes", "n_batches"), [(20, 30, 1), (24, 30, 2), (60, 1, 1), (60, 10, 1)])
def test_few_cells_or_genes_give_fewer_components(tiny, n, n_genes, n_batches):
    cells, dense = make_cells(n, n_batches)
    dense[:, N_SPECIAL + n_genes :] = 0
    dense[:, N_SPECIAL] += 1  # no cell is empty
    new, notes = D.with_dataset_components(tiny(), as_cells(dense, cells.batch))
    embedding = embedded(new, cells)
    assert np.isfinite(embedding).all()
    assert embedding.shape[1] == notes["n_components"] <= min(20, n - n_batches)
    if n_genes > 1 and n > 24:
        assert embedding.shape[1] >= 10


@pytest.mark.parametrize(("sizes", "within_batches"), [((200,), False), ((100, 100), True), ((190, 10), False)])
def test_highly_variable_genes_are_scanpys(monkeypatch, sizes, within_batches):
    import scanpy as sc

    cells, dense = make_cells(200)
    cells = as_cells(dense, np.repeat(np.arange(len(sizes)), sizes))
    assert np.array_equal(D.variable_genes(cells, N_TOKENS), cells.measured)  # not more than 2,000: all
    monkeypatch.setattr(D, "N_GENES", 10)
    adata = sc.AnnData(dense[:, N_SPECIAL:])
    adata.obs["batch"] = cells.batch.astype(str)
    options = {"batch_key": "batch"} if within_batches else {}
    listed = sc.pp.highly_variable_genes(adata, n_top_genes=10, inplace=False, **options)["highly_variable"]
    assert set(D.variable_genes(cells, N_TOKENS)) == set(np.flatnonzero(listed) + N_SPECIAL)


def test_the_cells_stay_as_they_were(tiny, monkeypatch):
    """Values are ranked, tokens are not in order: what sorts one and not the other would mix up the genes."""
    monkeypatch.setattr(D, "N_GENES", 20)
    cells, _ = make_cells(150)
    cells = replace(cells, tokens=cells.tokens.astype(np.int32))  # scipy's own type: others it copies anyway
    for start, end in itertools.pairwise(cells.indptr):
        order = np.argsort(-cells.values[start:end], kind="stable")
        cells.tokens[start:end] = cells.tokens[start:end][order]
        cells.values[start:end] = cells.values[start:end][order]
    tokens, values = cells.tokens.copy(), cells.values.copy()
    D.with_dataset_components(tiny(), cells)
    assert np.array_equal(cells.tokens, tokens)
    assert np.array_equal(cells.values, values)


def test_own_directions_find_what_is_hidden_and_leave_the_noise(monkeypatch):
    monkeypatch.setattr(D, "centred", lambda table, cells: table)
    cells, dense = make_cells()
    directions = D.own_directions(cells, N_TOKENS, 6).numpy()
    x = within(dense.astype(np.float64) @ directions, cells.batch)
    variance = (x**2).mean(axis=0)
    assert variance[:2].sum() > 0.9 * variance.sum()
    nothing, flat = make_cells(signal=0.0)
    flat = within(flat @ D.own_directions(nothing, N_TOKENS, 6).numpy(), cells.batch)
    assert (flat**2).mean(axis=0).sum() < 0.2 * variance.sum()
