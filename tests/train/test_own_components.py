"""Components of the user's own cells: found beside noise, weighed by what neighbours predict of counts not seen."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.models.inference import read_out
from scdiva.train import own_components as O
from scdiva.train.adaptation import AdaptationCells, encoded

N_GENES = 30  # of the tiny model
N_TOKENS = N_GENES + N_SPECIAL


@pytest.fixture
def tiny(tiny):
    """Without the residual, which starts from zero: the same states, and no transformer is run for them."""
    return functools.partial(tiny, anchor_residual=False)


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


def make_counts(n: int = 400, n_batches: int = 1, signal: float = 1.2, seed: int = 0) -> AdaptationCells:
    """Poisson counts of two types that differ in ten genes; log-normalised."""
    draw = np.random.default_rng(seed)
    batch, kind = np.sort(np.arange(n) % n_batches), np.arange(n) // n_batches % 2
    rate = np.full((n, N_GENES), 3.0)
    rate[:, :10] *= np.exp(signal * np.where(kind, 1, -1))[:, None]
    rate[:, 10:20] *= np.exp(np.where(batch % 2, 1, -1))[:, None]
    counts = draw.poisson(rate)
    values = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    rows, columns = np.nonzero(counts)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
    measured = np.arange(N_GENES) + N_SPECIAL
    return AdaptationCells(indptr, columns + N_SPECIAL, values[rows, columns], batch, measured, n_batches)


@torch.no_grad()
def embedded(model, cells):
    return read_out(model, cells.take(np.arange(cells.n_cells)).packed, "embedding")


def within(x, batch):
    return x - np.stack([x[batch == b].mean(axis=0) for b in range(batch.max() + 1)])[batch]


def test_own_directions_find_what_is_hidden_and_leave_the_noise(monkeypatch):
    monkeypatch.setattr(O, "centred", lambda table, cells: table)
    cells, dense = make_cells()
    own = O.own_directions(cells, N_TOKENS, 6).numpy()
    x = within(dense.astype(np.float64) @ own, cells.batch)
    variance = (x**2).mean(axis=0)
    assert variance[:2].sum() > 0.9 * variance.sum()
    nothing, flat = make_cells(signal=0.0)
    flat = within(flat @ O.own_directions(nothing, N_TOKENS, 6).numpy(), cells.batch)
    assert (flat**2).mean(axis=0).sum() < 0.2 * variance.sum()


@pytest.mark.parametrize(("n", "least"), [(300, 20), (80, 10)])
def test_a_component_that_a_few_cells_make_is_left_out(monkeypatch, n, least):
    """Each component reads one gene, which so many cells express."""
    makers = [3, least - 2, least + 2, n // 2]
    dense = np.zeros((n, N_TOKENS), dtype=np.float32)
    dense[:, N_SPECIAL] = 1  # no cell is empty
    for number, many in enumerate(makers):
        dense[:many, N_SPECIAL + 1 + number] = 2
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
    measured = np.arange(N_GENES) + N_SPECIAL
    cells = AdaptationCells(indptr, columns, dense[rows, columns], np.zeros(n, dtype=np.int64), measured, 1)
    table = torch.zeros(N_TOKENS, len(makers))
    table[N_SPECIAL + 1 + torch.arange(len(makers)), torch.arange(len(makers))] = 1
    monkeypatch.setattr(O, "own_directions", lambda *_: table)
    # of cells at one length the coordinates are 0 or alike, and the number is that of the cells that express the gene
    monkeypatch.setattr(O, "_by_root_of_length", lambda table, cells: O.project(table, cells).numpy())
    torch.testing.assert_close(O.components_of(cells, N_TOKENS), table[:, 2:])


def test_genes_vary_most_by_dispersion_or_among_genes_of_similar_expression(monkeypatch):
    import scanpy as sc

    cells = make_counts()
    assert np.array_equal(O.variable_genes(cells, N_TOKENS), cells.measured)
    monkeypatch.setattr(O, "N_GENES", 10)
    matrix = cells.matrix(N_TOKENS)[:, N_SPECIAL:]
    listed = sc.pp.highly_variable_genes(sc.AnnData(matrix), n_top_genes=10, inplace=False)["highly_variable"]
    dense = matrix.toarray()
    dispersed = np.argsort(-dense.var(axis=0) / dense.mean(axis=0))[:10]
    genes = O.variable_genes(cells, N_TOKENS)
    assert set(genes) == {*(np.flatnonzero(listed) + N_SPECIAL), *(dispersed + N_SPECIAL)}
    own = O.components_of(cells, N_TOKENS)
    assert own.shape[1] > 0
    new = cells.keeping(np.isin(cells.tokens, [N_SPECIAL + 2, N_SPECIAL + 5]))
    assert set(new.tokens) == {N_SPECIAL + 2, N_SPECIAL + 5}
    assert new.n_cells == cells.n_cells


def test_few_cells_get_no_directions_of_their_own(tiny):
    cells, _ = make_cells(n=8)
    assert O.own_directions(cells, N_TOKENS, 6).shape == (N_TOKENS, 0)
    found = O.compare_weights(tiny(), cells, 0)
    assert not found.found.any()
    assert found.n_cells == 0
    assert O.with_own_components(tiny(), cells, 1.0).config.adapted == "no"


def test_parts_show_together_what_the_cell_shows():
    cells = make_counts(50)
    one, other, rows = O._split(cells, step_generator(0, 0, "split"))
    assert np.array_equal(rows, np.arange(50))
    for i in range(50):
        of = [set(part.tokens[part.indptr[i] : part.indptr[i + 1]]) for part in (one, other, cells)]
        assert of[0] | of[1] == of[2]
        assert of[0] != of[1]
        for part in (one, other):
            amount = np.expm1(part.values[part.indptr[i] : part.indptr[i + 1]].astype(float))
            assert amount.sum() == pytest.approx(1e4, rel=1e-4)


def test_neighbours_predict_as_by_hand():
    rng = np.random.default_rng(0)
    batch = np.repeat([0, 1], [40, 25])
    state, own = rng.normal(size=(65, 3)), rng.normal(size=(65, 2))
    target = torch.from_numpy(rng.normal(size=(65, 4)) + state[:, :1] + own[:, :1]).float()
    found = O._predicted_by_neighbors(state, own, target, batch)
    for weight, of_genes in zip(O.WEIGHTS, found, strict=True):
        x = own if np.isinf(weight) else np.hstack([state, weight * own])
        predicted = np.zeros((65, 4))
        for i in range(65):
            distance = np.linalg.norm(x - x[i], axis=1)
            distance[i] = np.inf
            distance[batch != batch[i]] = np.inf
            predicted[i] = target[np.argsort(distance)[: {0: 5, 1: 3}[batch[i]]]].mean(dim=0)
        p, t = within(predicted, batch), within(target.double().numpy(), batch)
        expected = (p * t).sum(axis=0) / np.sqrt((p**2).sum(axis=0) * (t**2).sum(axis=0))
        np.testing.assert_allclose(of_genes, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("found", "error", "chosen"),
    [
        ([0, 1, 2, 3, 4, 3, 2, 1, 0], 0.1, 1.5),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], 0.1, np.inf),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], 1.1, 3.0),  # within two errors of the best
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], 0.1, 0.0),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], 3.0, 1.5),
    ],
)
def test_another_weight_than_the_usual_needs_to_be_clearly_better(found, error, chosen):
    agreement = O.Agreement(np.array(found, dtype=float), np.full(9, error), 100)
    assert O.WEIGHTS[agreement.chosen] == chosen
    assert agreement._replace(n_cells=0).chosen == 0


def test_a_model_that_knows_nothing_leaves_it_to_the_components(tiny):
    cells = make_counts()
    found = O.compare_weights(tiny(), cells, 0)
    assert found.n_cells == 400
    assert found.found[-1] > found.found[0] + 0.04
    assert found.found.argmax() >= O.WEIGHTS.index(1.0)
    few = make_counts(150)
    one, again, other = (O.compare_weights(tiny(), few, seed).found for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_what_parts_batches_is_no_reason_for_components(tiny):
    """Types do not differ, batches do: within them there is nothing to find."""
    cells = make_counts(n_batches=2, signal=0.0)
    inside = O.compare_weights(tiny(), cells, 0).found
    across = O.compare_weights(tiny(), replace(cells, batch=np.zeros(400, dtype=np.int64), n_batches=1), 0).found
    assert across[-1] > 0.1
    assert inside[-1] < 0.05


@pytest.mark.parametrize("weight", [2.0, np.inf])
def test_the_embedding_is_the_join_at_its_weight(tiny, weight):
    cells, model = make_counts(150), tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    new = O.with_own_components(model, cells, weight)
    state, joined = encoded(model, cells).double().numpy(), embedded(new, cells).double().numpy()
    assert np.array_equal(encoded(new, cells).numpy(), encoded(model, cells).numpy())
    own = joined if np.isinf(weight) else joined[:, state.shape[1] :]
    assert own.shape[1] == new.config.adapted_dim
    unit = 1 if np.isinf(weight) else weight * O.spread_within(state, cells.batch)
    assert O.spread_within(own, cells.batch) == pytest.approx(unit, rel=1e-4)
    x = O.project(new.own.table.weight.detach(), cells).numpy()
    lengths = np.sqrt(np.linalg.norm(x, axis=1))
    np.testing.assert_allclose(own, new.config.adapted_scale * x / lengths[:, None], rtol=1e-4, atol=1e-6)
    if not np.isinf(weight):
        assert np.array_equal(joined[:, : state.shape[1]], state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = O.with_own_components(new, cells, 1.0)  # of a model that has components, they are replaced
    assert again.config.adapted == "joined"
    assert embedded(again, cells).shape[1] == state.shape[1] + again.config.adapted_dim
    assert O.with_own_components(new, cells, 0.0).config == model.config


def test_a_cell_is_embedded_alone_as_among_others(tiny):
    cells = make_counts()
    new = O.with_own_components(tiny(), cells, 1.0)
    with torch.no_grad():
        whole = read_out(new, cells.take(np.arange(20)).packed, "embedding")
        alone = torch.cat([read_out(new, cells.take(np.array([i])).packed, "embedding") for i in range(20)])
    torch.testing.assert_close(whole, alone)


def test_the_cells_stay_as_they_were(tiny):
    """Values are ranked, tokens are not in order: what sorts one and not the other would mix up the genes."""
    cells = make_counts(150)
    cells = replace(cells, tokens=cells.tokens.astype(np.int32))  # scipy's own type: others it copies anyway
    for start, end in itertools.pairwise(cells.indptr):
        order = np.argsort(-cells.values[start:end], kind="stable")
        cells.tokens[start:end] = cells.tokens[start:end][order]
        cells.values[start:end] = cells.values[start:end][order]
    tokens, values = cells.tokens.copy(), cells.values.copy()
    O.compare_weights(tiny(), cells, 0)
    O.with_own_components(tiny(), cells, 1.0)
    assert np.array_equal(cells.tokens, tokens)
    assert np.array_equal(cells.values, values)
