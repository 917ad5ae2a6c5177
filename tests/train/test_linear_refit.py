"""The linear part refitted on one data set, number by number beside dense matrices."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.train import linear_refit as R
from scdiva.train.adaptation import AdaptationCells

N_GENES = 30  # of the tiny model
N_TOKENS = N_GENES + N_SPECIAL


def make_cells(n: int = 300, n_batches: int = 2, signal: float = 2.0) -> tuple[AdaptationCells, np.ndarray]:
    """Cells along two hidden directions, a shift between batches, and noise; also dense `(n, N_TOKENS)`."""
    draw = np.random.default_rng(0)
    batch = np.sort(np.arange(n) % n_batches)
    loadings = draw.normal(size=(2, N_GENES)) * signal
    dense = np.zeros((n, N_TOKENS), dtype=np.float32)
    raw = draw.normal(size=(n, 2)) @ loadings + draw.normal(size=(n, N_GENES)) + batch[:, None] + 1
    dense[:, N_SPECIAL:] = np.maximum(raw, 0)
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
    measured = np.arange(N_GENES) + N_SPECIAL
    return AdaptationCells(indptr, columns, dense[rows, columns], batch, measured, n_batches), dense


def coordinates(encoder, dense):
    return (dense @ encoder.table.weight.numpy(force=True) + encoder.bias.numpy(force=True)).astype(np.float64)


def within(x, batch):
    return x - np.stack([x[batch == b].mean(axis=0) for b in range(batch.max() + 1)])[batch]


@pytest.fixture
def encoder(tiny):
    return tiny(anchor_linear_dim=12).anchor


def test_the_two_sets_of_directions(encoder):
    cells, dense = make_cells()
    old = copy.deepcopy(encoder)
    found = R.refit_linear(encoder, cells)
    n, own = found["corpus_directions"], found["own_directions"]
    assert 2 <= own <= 6
    assert n == 12 - own
    x, y = within(coordinates(old, dense), cells.batch), coordinates(encoder, dense)
    assert np.allclose(y.mean(axis=0), 0, atol=1e-5)
    assert encoder.full_total.item() == pytest.approx(0.5 * dense.sum(axis=1).mean(), rel=1e-6)
    _, s, vt = np.linalg.svd(x, full_matrices=False)
    assert found["corpus_share"] == pytest.approx((s[:n] ** 2).sum() / (s**2).sum(), rel=1e-5)
    y = within(y, cells.batch)
    expected = x @ vt[:n].T
    expected /= np.sqrt((expected**2).sum(axis=1).mean())
    np.testing.assert_allclose(np.abs(y[:, :n]), np.abs(expected), atol=1e-4)
    assert (y[:, n : n + own] ** 2).sum(axis=1).mean() == pytest.approx(1, rel=1e-4)
    assert not encoder.table.weight[:, n + own :].any()


def test_own_directions_find_what_is_hidden_and_leave_the_noise():
    cells, dense = make_cells()
    own = R.own_directions(cells, N_TOKENS, 6).numpy()
    x = within(dense.astype(np.float64) @ own, cells.batch)
    variance = (x**2).mean(axis=0)
    assert variance[:2].sum() > 0.9 * variance.sum()
    nothing, _ = make_cells(signal=0.0)
    flat = within(make_cells(signal=0.0)[1] @ R.own_directions(nothing, N_TOKENS, 6).numpy(), cells.batch)
    assert (flat**2).mean(axis=0).sum() < 0.2 * variance.sum()


def test_the_learned_part_reads_what_it_read_before(encoder):
    """Of cells that vary in few directions the turned first layer sees the same, but for length and centre."""
    cells, dense = make_cells()
    encoder.bias.data = -torch.from_numpy(dense.mean(axis=0) @ encoder.table.weight.numpy(force=True))
    old = copy.deepcopy(encoder)
    n = R.refit_linear(encoder, cells)["corpus_directions"]
    first = encoder.mlp[0].weight.numpy(force=True)
    assert not first[:, n:].any()
    new = coordinates(encoder, dense)[:, :n] @ first[:, :n].T
    x = within(coordinates(old, dense), cells.batch)
    _, _, vt = np.linalg.svd(x, full_matrices=False)
    before = (coordinates(old, dense) @ vt[:n].T @ vt[:n]) @ old.mlp[0].weight.numpy(force=True).T
    ratio = (new * before).sum() / (before**2).sum()
    np.testing.assert_allclose(new, ratio * before, atol=1e-3 * np.abs(new).max())


def test_few_cells_get_no_directions_of_their_own(encoder):
    cells, dense = make_cells(n=8)
    found = R.refit_linear(encoder, cells)
    assert found["own_directions"] == 0
    assert found["corpus_directions"] == 12
    assert np.isfinite(coordinates(encoder, dense)).all()


def test_carried_variance_by_hand(encoder):
    cells, dense = make_cells()
    split = cells.split(0.2, 0)
    found = R.carried_variance(encoder, cells, split)
    batch = cells.take(np.arange(cells.n_cells))
    state = encoder(batch.tokens, batch.values, batch.cu_seqlens, torch.ones_like(batch.tokens, dtype=torch.bool))
    state, values = state.detach().double().numpy(), dense[:, N_SPECIAL:].astype(np.float64)
    parts = []
    for number in range(2):
        train = split.training[cells.batch[split.training] == number]
        held = split.held_out[cells.batch[split.held_out] == number]
        parts.append([a[rows] - a[train].mean(axis=0) for a in (state, values) for rows in (train, held)])
    x, x_held, y, y_held = (np.concatenate(part) for part in zip(*parts, strict=True))
    deviation = values[split.training].std(axis=0) + 0.05
    y, y_held = (np.clip(a / deviation, -10, 10) for a in (y, y_held))
    leading = np.linalg.svd(x, full_matrices=False)[2][:20].T
    x, x_held = x @ leading, x_held @ leading
    penalty = 0.01 * (x**2).sum() / x.shape[1]
    weight = np.linalg.inv(x.T @ x + penalty * np.eye(x.shape[1])) @ x.T @ y
    assert found == pytest.approx(1 - ((y_held - x_held @ weight) ** 2).sum() / (y_held**2).sum(), rel=1e-4)


def test_refitting_helps_cells_unlike_the_corpus(encoder):
    cells, _ = make_cells()
    split = cells.split(0.2, 0)
    before = R.carried_variance(encoder, cells, split)
    R.refit_linear(encoder, cells.subset(split.training))
    assert R.carried_variance(encoder, cells, split) > before + 0.05


def test_the_cells_stay_as_they_were(encoder):
    """Values are ranked, tokens are not in order: what sorts one and not the other would mix up the genes."""
    cells, _ = make_cells()
    cells = replace(cells, tokens=cells.tokens.astype(np.int32))  # scipy's own type: others it copies anyway
    for start, end in itertools.pairwise(cells.indptr):
        order = np.argsort(-cells.values[start:end], kind="stable")
        cells.tokens[start:end] = cells.tokens[start:end][order]
        cells.values[start:end] = cells.values[start:end][order]
    tokens, values = cells.tokens.copy(), cells.values.copy()
    R.refit_linear(encoder, cells)
    R.carried_variance(encoder, cells, cells.split(0.2, 0))
    assert np.array_equal(cells.tokens, tokens)
    assert np.array_equal(cells.values, values)
