"""Networks of knock-outs beside passes of the model, one cell and one source at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva._constants import MASK, N_SPECIAL
from scdiva.networks.knockout import N_CELLS, PRIOR_CELLS


@pytest.fixture
def cells(adata):
    cells = adata[:24].copy()
    cells.obs["kind"] = np.array(["A", "B"])[np.arange(24) % 5 % 2]
    return cells


def predicted(model, tokens, values, hidden, effect) -> dict[int, float]:
    """What the model expects of the genes that are not visible in a cell, by token."""
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    if not hidden.any():
        return {}
    seen, places = set(tokens[~hidden].tolist()), hidden.nonzero().squeeze(1)
    with torch.no_grad():
        out = model(torch.where(hidden, MASK, tokens), values, bounds)
        chance = model.logits(out, hidden).softmax(dim=1)
        found = {}
        for i in range(chance.shape[1]):
            token = i + N_SPECIAL
            if token in seen:
                continue
            found[token] = float(chance[:, i].sum().log())
            if effect == "value":  # of this gene at each place
                there = model.values(out, torch.full_like(places, token), places)
                found[token] = float((chance[:, i] * there).sum() / chance[:, i].sum())
    return found


@pytest.fixture
def by_hand(ranked):
    def falls(cells, model, sources, rows=None, effect="value") -> np.ndarray:
        total, n_cells = np.zeros((2, cells.n_vars, cells.n_vars))
        for row, (columns, tokens, values) in enumerate(ranked(cells, model)):
            if rows is not None and not rows[row]:
                continue
            places = np.flatnonzero(np.isin(columns, sources))
            column = {int(t): i for i, t in enumerate(model.vocabulary.match(list(cells.var_names)).tokens)}
            for place in places:
                hidden = torch.arange(len(tokens)) % 4 == row % 4
                hidden[place] = False
                before = predicted(model, tokens, values, hidden, effect)
                left = torch.arange(len(tokens)) != place
                after = predicted(model, tokens[left], values[left], hidden[left], effect)
                for token in after.keys() & before.keys() & column.keys():
                    total[columns[place], column[token]] += before[token] - after[token]
                    n_cells[columns[place], column[token]] += 1
        found = total / (n_cells + PRIOR_CELLS)
        found[n_cells == 0] = np.nan
        return found

    return falls


def knock_out(cells, model, sources, **options):
    options = {"n_targets": None, "min_fraction": 0, "n_cells": 1000} | options
    sd.tl.grn(cells, "knockout", model=model, sources=list(cells.var_names[sources]), **options)


SOURCES = [3, 8, 20]


@pytest.mark.parametrize("effect", ["value", "presence"])
def test_is_one_pass_for_each_source_and_cell(cells, one, edges, by_hand, effect):
    knock_out(cells, one, SOURCES, effect=effect)
    expected = by_hand(cells, one, SOURCES, effect=effect)
    np.testing.assert_allclose(edges(cells), expected, atol=1e-5)
    assert np.isfinite(expected).sum() > 100
    assert np.nanmax(np.abs(expected)) > 1e-3
    about = cells.uns["scdiva"]["scdiva_grn"]
    assert not about["signed"]
    assert about["effect"] == effect
    assert sorted(about["sources"]) == sorted(cells.var_names[SOURCES])


def test_a_source_beyond_what_the_transformer_sees_has_no_part(cells, build, edges, by_hand):
    model = build(anchor="encoder")
    object.__setattr__(model.config, "max_length", 12)
    knock_out(cells, model, SOURCES)
    expected = by_hand(cells, model, SOURCES)
    assert 0 < np.isfinite(expected).sum() < 100
    np.testing.assert_allclose(edges(cells), expected, atol=1e-5)


def test_of_groups_and_their_difference(cells, one, edges, by_hand):
    a = (cells.obs["kind"] == "A").to_numpy()
    of_a, of_b = (by_hand(cells, one, SOURCES, rows) for rows in (a, ~a))
    knock_out(cells, one, SOURCES, groupby="kind")
    np.testing.assert_allclose(edges(cells, "scdiva_grn_B"), of_b, atol=1e-5)
    knock_out(cells, one, SOURCES, groupby="kind", groups=["A"], key_added="only")
    np.testing.assert_allclose(edges(cells, "only_A"), of_a, atol=1e-5)
    knock_out(cells, one, SOURCES, groupby="kind", reference="B", key_added="d")
    np.testing.assert_allclose(edges(cells, "d_A"), of_a - of_b, atol=1e-5)


def test_cells_are_drawn_among_those_that_express_a_source(cells, one, edges, monkeypatch):
    """Which cells are run, and how often."""
    from scdiva.networks import knockout

    run, plain = [], knockout.knockout_falls

    def counted(targets, effect):
        read = plain(targets, effect)

        def falls(model, tokens, values, bounds, sources, first):
            run.append((tuple(tokens.tolist()), tokens[sources].tolist()))
            return read(model, tokens, values, bounds, sources, first)

        return falls

    monkeypatch.setattr(knockout, "knockout_falls", counted)
    token = one.vocabulary.match(list(cells.var_names[SOURCES])).tokens
    expressing = (cells.X.toarray()[:, SOURCES] > 0).sum(axis=0)
    for n_cells, most in ((4, 4), (None, N_CELLS)):
        run.clear()
        knock_out(cells, one, SOURCES, n_cells=n_cells, rng=3, key_added="first")
        assert len({cell for cell, _ in run}) == len(run)  # each cell once, with all its sources
        asked = [source for _, sources in run for source in sources]
        # a cell that holds the source beyond the 40 genes that are seen is drawn and has nothing to say
        assert all(0 < asked.count(t) <= min(most, n) for t, n in zip(token, expressing, strict=True))
        assert all(t in cell for cell, sources in run for t in sources)
    knock_out(cells, one, SOURCES, n_cells=4, rng=3, key_added="a")
    knock_out(cells, one, SOURCES, n_cells=4, rng=3, key_added="b")
    knock_out(cells, one, SOURCES, n_cells=4, rng=4, key_added="c")
    np.testing.assert_array_equal(edges(cells, "a"), edges(cells, "b"))
    assert not np.array_equal(edges(cells, "a"), edges(cells, "c"), equal_nan=True)
    assert cells.uns["scdiva"]["a"]["cells"].tolist() == [24]
