"""Cells with a gene taken away or raised, and what a model says of their other genes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva._constants import N_SPECIAL
from scdiva.perturbation.in_silico import PARTS, Ranked, changed, masked_values
from scdiva.tokenizer.serialize import serialize

FLOOR = np.array([1.0] * N_SPECIAL + [0.3, 0.3, 0.3, 0.5, 0.5, 0.7, 0.9, 0.9, 1.1, 1.3, 0.3, 0.6], np.float32)
"""Denominators of twelve genes; some are equal, so that equal values tie."""
N = len(FLOOR)


def ranked(expression: dict[int, float], turns: dict[int, int] | None = None) -> Ranked:
    """Rank genes as the serialiser does."""
    row = np.zeros((1, N), dtype=np.float32)
    row[0, list(expression)] = list(expression.values())
    _, tokens, values = serialize(sp.csr_matrix(row), FLOOR)
    turn = [(turns or {}).get(int(token), int(token) % PARTS) for token in tokens]
    return Ranked(tokens.astype(np.int64), values, np.array(turn, dtype=np.int64))


def as_rows(cell: Ranked) -> list[tuple[int, float, int]]:
    return [(int(t), float(v), int(turn)) for t, v, turn in zip(*cell, strict=True)]


def slowly(cell: Ranked, sources: list[int], raised: list[float] | None, length: int):
    """`changed`, gene by gene: sources first get their places, then others as long as there are any left."""
    rows = as_rows(cell)
    own = [(t, v, -1) for t, v, _ in rows if t in sources]
    others = [row for row in rows if row[0] not in sources]
    kept = others[: length - len(own)]
    before = [(t, v, -1 if t in sources else turn) for t, v, turn in rows if (t, v, turn) in kept or t in sources]
    if raised is None:
        return before, [row for row in before if row[0] not in sources]
    was = {t: v for t, v, _ in own}
    high = [(s, max(was.get(s, 0.0), r), -1) for s, r in zip(sources, raised, strict=True)]
    after = [*high, *kept[: length - len(sources)]]
    return before, sorted(after, key=lambda row: (-np.float32(row[1]) / FLOOR[row[0]], row[0]))


VALUES = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])
GENES = st.integers(N_SPECIAL, N - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(GENES, VALUES, min_size=1, max_size=12),
    st.lists(st.tuples(GENES, VALUES), min_size=1, max_size=3, unique_by=lambda pair: pair[0]),
    st.integers(3, 14),
    st.booleans(),
)
def test_beside_a_slow_ranking(expression, asked, length, knocked):
    cell, sources = ranked(expression), [token for token, _ in asked]
    raised = None if knocked else [value for _, value in asked]
    found = changed(
        cell, np.array(sources), None if knocked else np.array(raised, dtype=np.float32), FLOOR, max_length=length
    )
    assert tuple(as_rows(part) for part in found) == slowly(cell, sources, raised, length)
    before, after = found
    assert max(len(before.tokens), len(after.tokens)) <= length
    assert set(sources) & set(expression) <= set(before.tokens.tolist())
    assert set(sources) & set(after.tokens.tolist()) == (set() if knocked else set(sources))
    for part in found:
        assert part.expression.dtype == np.float32
        assert len(set(part.tokens.tolist())) == len(part.tokens) == len(part.expression) == len(part.turn)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(GENES, VALUES, min_size=1, max_size=12),
    st.dictionaries(GENES, VALUES, min_size=1, max_size=3),
)
def test_a_cell_that_fits_is_what_the_serialiser_makes_of_the_changed_expression(expression, raised):
    cell = ranked(expression)
    before, gone = changed(cell, np.array(list(raised)), None, FLOOR, max_length=N)
    _, high = changed(cell, np.array(list(raised)), np.array(list(raised.values()), np.float32), FLOOR, max_length=N)
    highest = expression | {token: max(value, expression.get(token, 0.0)) for token, value in raised.items()}
    left = {token: value for token, value in expression.items() if token not in raised}
    for found, expected in ((before, expression), (gone, left), (high, highest)):
        plain = ranked(expected, dict.fromkeys(raised, -1))
        for one, other in zip(found, plain, strict=True):
            np.testing.assert_array_equal(one, other)


def test_by_hand():
    a, b, c, d = range(N_SPECIAL, N_SPECIAL + 4)  # denominators .3 .3 .3 .5
    cell = ranked({a: 3.0, b: 2.0, c: 1.0, d: 0.5}, {a: 0, b: 1, c: 2, d: 3})
    before, after = changed(cell, np.array([b]), None, FLOOR, 10)
    assert as_rows(before) == [(a, 3.0, 0), (b, 2.0, -1), (c, 1.0, 2), (d, 0.5, 3)]
    assert as_rows(after) == [(a, 3.0, 0), (c, 1.0, 2), (d, 0.5, 3)]
    # the last gene, which would not be read, stands in for the one before it
    before, after = changed(cell, np.array([d]), None, FLOOR, 2)
    assert as_rows(before) == [(a, 3.0, 0), (d, 0.5, -1)]
    assert as_rows(after) == [(a, 3.0, 0)]
    # 3.5 / .5 = 7 stands between 10 and 2 / .3 = 6.67
    before, after = changed(cell, np.array([d]), np.array([3.5], np.float32), FLOOR, 10)
    assert as_rows(before)[-1] == (d, 0.5, -1)
    assert as_rows(after) == [(a, 3.0, 0), (d, 3.5, -1), (b, 2.0, 1), (c, 1.0, 2)]


def test_a_raised_gene_that_ranks_last_is_read_in_its_place():
    """And not in front, nor left out for want of room."""
    cell = ranked(dict.fromkeys(range(N_SPECIAL, N_SPECIAL + 8), 3.0))
    low = N_SPECIAL + 9
    before, after = changed(cell, np.array([low]), np.array([0.1], np.float32), FLOOR, 5)
    assert before.tokens.tolist() == cell.tokens[:5].tolist()
    assert after.tokens.tolist() == [*cell.tokens[:4].tolist(), low]


def test_a_gene_that_is_as_high_already_changes_nothing():
    """Not even its place among genes of the same score."""
    a, b, c = range(N_SPECIAL, N_SPECIAL + 3)
    cell = ranked({a: 1.0, b: 1.0, c: 1.0})
    for least in (0.5, 1.0):
        before, after = changed(cell, np.array([c]), np.array([least], np.float32), FLOOR, 3)
        assert as_rows(before) == as_rows(after)
        assert after.tokens.tolist() == [a, b, c]


def test_as_many_sources_as_are_read():
    cell = ranked({token: 1.0 + token for token in range(N_SPECIAL, N_SPECIAL + 6)})
    sources = cell.tokens[[5, 0]]
    before, after = changed(cell, sources, None, FLOOR, 2)
    assert sorted(before.tokens.tolist()) == sorted(sources.tolist())
    assert len(after.tokens) == 0
    before, after = changed(cell, sources, np.array([1.0, 1.0], np.float32), FLOOR, 2)
    assert before.tokens.tolist() == after.tokens.tolist() == cell.tokens[[0, 5]].tolist()


def test_what_is_given_stays_as_it_is():
    cell = ranked(dict.fromkeys(range(N_SPECIAL, N), 2.0))
    held = [part.copy() for part in cell]
    sources, raised = cell.tokens[[3, 7]].copy(), np.array([1.0, 9.0], np.float32)
    changed(cell, sources, raised, FLOOR, 6)
    changed(cell, sources, None, FLOOR, 6)
    for part, was in zip(cell, held, strict=True):
        np.testing.assert_array_equal(part, was)
    assert raised.tolist() == [1.0, 9.0]


@pytest.fixture(scope="module")
def cell(network):
    """A cell of 18 genes, two of them never hidden."""
    model = network()
    draw = np.random.default_rng(3)
    tokens = N_SPECIAL + draw.permutation(model.vocabulary.n_genes)[:18]
    turn = draw.permutation(18) % PARTS
    turn[[2, 11]] = -1
    return Ranked(tokens.astype(np.int64), draw.gamma(2.0, 1.0, 18).astype(np.float32), turn.astype(np.int64))


def one_by_one(model, cell) -> dict[int, float]:
    """Predict each gene by a call of its own."""
    found = {}
    for at in np.flatnonzero(cell.turn >= 0):
        hidden = torch.from_numpy(cell.turn == cell.turn[at])
        with torch.no_grad():
            out = model(
                torch.from_numpy(cell.tokens),
                torch.from_numpy(cell.expression),
                torch.tensor([0, len(cell.tokens)], dtype=torch.int32),
                value_mask=hidden,
            )
            found[int(cell.tokens[at])] = float(
                model.values(out, torch.from_numpy(cell.tokens[at : at + 1]), slice(at, at + 1))
            )
    return found


@pytest.mark.parametrize("fields", [{}, {"anchor": "learned"}])
def test_each_gene_is_predicted_once_with_its_quarter_hidden(network, cell, fields):
    model = network(**fields)
    found, expected = masked_values(model, cell), one_by_one(model, cell)
    assert sorted(found) == sorted(cell.tokens[cell.turn >= 0].tolist())
    assert len(found) == 16
    np.testing.assert_allclose([found[t] for t in expected], list(expected.values()), rtol=1e-4, atol=1e-5)
    assert np.ptp(list(found.values())) > 1e-3


def test_a_hidden_value_is_not_read_and_all_others_are(network, cell):
    model = network()
    found = masked_values(model, cell)
    for turn in (0, 2):
        other = cell._replace(expression=np.where(cell.turn == turn, 7.0, cell.expression).astype(np.float32))
        again = masked_values(model, other)
        for token, of in zip(cell.tokens.tolist(), cell.turn, strict=True):
            if of == turn:
                assert again[token] == pytest.approx(found[token], abs=1e-5)
            elif of >= 0:
                assert abs(again[token] - found[token]) > 1e-5
    # what is never hidden is read for all
    source = cell._replace(expression=np.where(cell.turn < 0, 7.0, cell.expression).astype(np.float32))
    again = masked_values(model, source)
    assert min(abs(again[token] - value) for token, value in found.items()) > 1e-5


def test_nothing_to_hide(network, cell):
    model = network()
    never = cell._replace(turn=np.full(18, -1))
    assert masked_values(model, never) == {}
    assert masked_values(model, Ranked(cell.tokens[:0], cell.expression[:0], cell.turn[:0])) == {}
    alone = Ranked(cell.tokens[:1], cell.expression[:1], np.array([3]))  # a cell of one gene, and that one hidden
    assert list(masked_values(model, alone)) == cell.tokens[:1].tolist()
    assert np.isfinite(list(masked_values(model, alone).values())).all()


def test_the_model_stays_as_it_was(network, cell):
    model = network().train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    once = masked_values(model, cell)
    assert model.training
    assert masked_values(model, cell) == once
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
