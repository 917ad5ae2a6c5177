"""Log-prior of genes given their ranks, compared with a loop over cells, ranks and genes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion import rank_log_prior, values_at_ranks
from scdiva.diffusion.ranks import FLOOR, GRID, SPREAD

N_GENES = 12


def ranked_cells(lengths, *, counts: bool, n_genes: int = N_GENES, seed: int = 0):
    """Cells sorted by score; values as of counts, or all unlike; the denominator they are sorted by."""
    rng = np.random.default_rng(seed)
    denominator = np.concatenate([np.ones(N_SPECIAL), rng.uniform(0.3, 2.0, n_genes)]).astype(np.float32)
    tokens, values = [], []
    for length in lengths:
        genes = rng.permutation(n_genes)[:length] + N_SPECIAL
        x = np.log1p(rng.integers(1, 5, length)) if counts else rng.gamma(3.0, 0.5, length)
        order = np.argsort(-(x / denominator[genes]), kind="stable")
        tokens.append(genes[order])
        values.append(x[order])
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(values)).float()
    return *packed, cu, torch.from_numpy(denominator)


def split(n: int, seed: int = 1):
    """Positions that are asked about, visible, or neither (of which only the value is hidden)."""
    draw = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return draw < 0.4, draw > 0.5


def slow(tokens, values, hidden, visible, cu, expected, denominator):
    """Every place and gene by itself, in float64."""
    rows = []
    for cell, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        visible_positions = [i for i in range(start, stop) if visible[i]]
        visible_values = sorted(float(values[i]) for i in visible_positions)
        if len(set(visible_values)) > GRID:  # even groups, each by its mean
            groups = [[] for _ in range(GRID)]
            for number, x in enumerate(visible_values):
                groups[number * GRID // len(visible_values)].append(x)
            grid = [(sum(group) / len(group), len(group)) for group in groups]
        else:
            grid = [(x, visible_values.count(x)) for x in sorted(set(visible_values))]
        for position in range(start, stop):
            if not hidden[position]:
                continue
            before = [i for i in visible_positions if i < position]
            behind = [i for i in visible_positions if i > position]
            above = float(values[before[-1]] / denominator[tokens[before[-1]]]) if before else math.inf
            below = float(values[behind[0]] / denominator[tokens[behind[0]]]) if behind else 0.0
            row = []
            for gene in range(expected.shape[1]):
                h, mu = float(denominator[N_SPECIAL + gene]), float(expected[cell, gene])
                weights = [n * math.exp(-((x - mu) ** 2) / (2 * SPREAD**2)) for x, n in grid]
                inside = sum(
                    w
                    for (x, _), w in zip(grid, weights, strict=True)
                    if below * h * (1 - 1e-5) <= x <= above * h * (1 + 1e-5)
                )
                row.append(math.log(FLOOR + (1 - FLOOR) * inside / sum(weights)) if visible_positions else 0.0)
            rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("counts", [True, False])
def test_the_prior_is_its_formula(counts):
    tokens, values, cu, denominator = ranked_cells([9, 1, 12, 6], counts=counts)
    hidden, visible = split(len(tokens))
    expected = torch.rand(4, N_GENES, generator=torch.Generator().manual_seed(2)) * 2
    log_prior = rank_log_prior(tokens, values, hidden, visible, cu, expected, denominator)
    assert log_prior.dtype == torch.float32
    exact = slow(tokens, values, hidden, visible, cu, expected, denominator)
    np.testing.assert_allclose(log_prior.numpy(), exact, atol=1e-3, rtol=1e-3)


def test_many_unlike_values_are_grouped():
    tokens, values, cu, denominator = ranked_cells([290, 40], counts=False, n_genes=300)
    hidden, visible = split(len(tokens))
    assert int(visible[:290].sum()) > 2 * GRID
    expected = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) * 2
    log_prior = rank_log_prior(tokens, values, hidden, visible, cu, expected, denominator)
    exact = slow(tokens, values, hidden, visible, cu, expected, denominator)
    # a group on an end that rounding moves counts or does not: where they differ, by one group
    close = np.isclose(log_prior.numpy(), exact, atol=2e-2)
    assert close.mean() > 0.995


def test_genes_asked_for_are_columns_and_what_is_hidden_is_not_read():
    tokens, values, cu, denominator = ranked_cells([9, 12], counts=True)
    hidden, visible = split(len(tokens))
    expected, genes = torch.rand(2, N_GENES), torch.tensor([9, 3, 4])
    every = rank_log_prior(tokens, values, hidden, visible, cu, expected, denominator)
    of_genes = rank_log_prior(tokens, values, hidden, visible, cu, expected[:, genes - N_SPECIAL], denominator, genes)
    torch.testing.assert_close(of_genes, every[:, genes - N_SPECIAL])
    blank = tokens.masked_fill(~visible, MASK), values.masked_fill(~visible, torch.nan)
    assert torch.equal(rank_log_prior(*blank, hidden, visible, cu, expected, denominator), every)


def test_without_anything_visible_places_say_nothing():
    tokens, values, cu, denominator = ranked_cells([3, 4], counts=True)
    hidden = torch.tensor([True, True, True, False, False, True, True])
    arguments = tokens, values, hidden
    log_prior = rank_log_prior(*arguments, ~hidden, cu, torch.rand(2, N_GENES), denominator)
    assert log_prior.shape == (5, N_GENES)
    assert (log_prior[:3] == 0).all()
    assert (log_prior[3:] < 0).any()
    with pytest.raises(ValueError, match="5 positions are both visible and predicted"):
        rank_log_prior(*arguments, hidden, cu, torch.rand(2, N_GENES), denominator)


def test_values_move_to_their_places_by_the_spread_at_most():
    tokens, values, cu, denominator = ranked_cells([9, 1, 12, 6], counts=False)
    hidden, visible = split(len(tokens))
    noisy = torch.where(hidden, values + torch.randn(len(values), generator=torch.Generator().manual_seed(3)), values)
    before = noisy.clone()
    ranked_values = values_at_ranks(tokens, noisy, hidden, visible, cu, denominator)
    assert torch.equal(noisy, before)
    moved = 0
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for i in range(start, stop):
            value, h = float(noisy[i]), float(denominator[tokens[i]])
            if hidden[i]:
                above = [float(values[j] / denominator[tokens[j]]) for j in range(start, i) if visible[j]]
                below = [float(values[j] / denominator[tokens[j]]) for j in range(i + 1, stop) if visible[j]]
                value = min(max(value, h * below[0] if below else 0.0), h * above[-1] if above else math.inf)
                value = min(max(value, float(noisy[i]) - SPREAD), float(noisy[i]) + SPREAD)
                moved += value != float(noisy[i])
            assert float(ranked_values[i]) == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert moved > 3
