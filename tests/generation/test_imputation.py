"""Predictions at masked positions, and what is made of them: against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion.sampler import PartPredictions, likeliest_cell, predict_in_parts
from scdiva.generation.imputation import Predicted, _truncated_mean, chance_and_value, expected_values

N_GENES, LENGTH = 12, 9


def denoiser(table, by_cell=False, gene_values=None):
    """Logits and values that depend on what is visible and on the position, one cell after the other."""

    def denoise(tokens, values, cu_seqlens, value_mask):
        assert (value_mask == (tokens == MASK)).all()
        assert not values[value_mask].any()
        logits, predicted = [], []
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            cell_tokens, cell_values = tokens[start:stop], values[start:stop]
            total = (cell_values * (cell_tokens != MASK)).sum()
            rows = table[: stop - start] * (1 + total)
            logits.append(rows[:1] if by_cell else rows[cell_tokens == MASK])
            predicted.append(torch.arange(stop - start) + total)
        outputs = torch.cat(logits), torch.cat(predicted)
        return outputs if gene_values is None else (*outputs, gene_values.repeat(len(cu_seqlens) - 1, 1))

    return denoise


@pytest.fixture
def cell():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randperm(N_GENES, generator=draw)[:LENGTH] + N_SPECIAL
    values = torch.rand(LENGTH, generator=draw).sort(descending=True).values + 0.1
    part = torch.randperm(LENGTH, generator=draw) % 4
    return tokens, values, part, torch.randn(LENGTH, N_GENES, generator=draw)


@pytest.mark.parametrize("by_cell", [False, True])
def test_each_part_is_predicted_from_the_others(cell, by_cell):
    tokens, values, part, table = cell
    gene_values = torch.linspace(0, 1, N_GENES)[None] if by_cell else None
    predictions = predict_in_parts(denoiser(table, by_cell, gene_values), tokens, values, part, by_cell=by_cell)
    for i in range(LENGTH):
        hidden = part == part[i]
        total = values[~hidden].sum()
        row = table[0 if by_cell else i] * (1 + total)
        row[tokens[~hidden] - N_SPECIAL] = -torch.inf
        torch.testing.assert_close(predictions.logits[i], row)
        torch.testing.assert_close(predictions.values[i], i + total)
    genes = torch.arange(LENGTH)
    more = gene_values[0, genes] if by_cell else 0.0
    torch.testing.assert_close(predictions.values_of(genes), predictions.values + more)


def test_a_denoiser_that_returns_nan_is_refused(cell):
    tokens, values, part, table = cell
    with pytest.raises(ValueError, match="weights may be damaged"):
        predict_in_parts(lambda *x: (denoiser(table)(*x)[0], x[1] * torch.nan), tokens, values, part)


def test_the_cell_chosen_has_each_gene_once_and_a_true_one_in_its_own_part_only(cell):
    tokens, values, part, table = cell
    chosen = likeliest_cell(predict_in_parts(denoiser(table), tokens, values, part))
    assert len(set(chosen.tokens.tolist())) == LENGTH
    for i, gene in enumerate(chosen.tokens.tolist()):
        at = (tokens == gene).nonzero()
        assert not len(at) or part[at.item()] == part[i]


def test_one_part_takes_the_likeliest_genes_at_the_positions_that_suit_them():
    logits = torch.full((3, 5), -5.0)
    logits[0, 4] = logits[1, 0] = logits[2, 2] = 3.0
    one_part = torch.zeros(3, dtype=torch.int64)
    chosen = likeliest_cell(PartPredictions(logits, torch.tensor([1.0, -2.0, 3.0]), None, one_part))
    assert (chosen.tokens - N_SPECIAL).tolist() == [4, 0, 2]
    assert chosen.values.tolist() == [1.0, 0.0, 3.0]  # no value is below zero


@pytest.mark.parametrize("with_state", [False, True])
def test_chance_and_value_follow_their_formula(cell, with_state):
    tokens, values, part, table = cell
    more = torch.linspace(0, 1, N_GENES)[None] if with_state else None
    predictions = predict_in_parts(denoiser(table, gene_values=more), tokens, values, part)
    chance, value = chance_and_value(predictions, tokens - N_SPECIAL)
    p = predictions.logits.softmax(1).double().numpy()
    for gene in range(N_GENES):
        at = np.flatnonzero((tokens - N_SPECIAL).numpy() == gene)
        chances, weighted, total = [], 0.0, 0.0
        for number in range(4):
            if len(at) and part[at[0]] != number:
                continue  # visible there
            hidden = np.flatnonzero((part == number).numpy())
            m, share = sum(p[i, gene] for i in hidden), len(hidden) / LENGTH
            chances.append(min(m, 1) / (share + (1 - share) * min(m, 1)))
            of_gene = float(more[0, gene]) if with_state else 0.0
            weighted += sum(p[i, gene] * (float(predictions.values[i]) + of_gene) for i in hidden)
            total += m
        assert float(chance[gene]) == pytest.approx(np.mean(chances), rel=1e-4)
        assert float(value[gene]) == pytest.approx(weighted / total, rel=1e-4)


def test_mean_and_spread_are_those_of_a_log_normal_variable_with_a_zero_beside_it():
    """Compared with random draws. Observed values have the expected mean, so no correction applies."""
    n, chance, value, width = 200_000, 0.3, 2.0, 0.5
    draw = np.random.default_rng(0)
    drawn = np.where(draw.random((n, 2)) < chance, draw.normal(value, width, (n, 2)), 0.0).astype(np.float32)
    predicted = np.full((n, 2), chance, dtype=np.float32), np.full((n, 2), value, dtype=np.float32)
    mean, spread = expected_values(Predicted(None, *predicted, np.full(2, width, np.float32), np.zeros(n), drawn))
    expected = np.log1p(np.expm1(drawn).mean())
    np.testing.assert_allclose(mean, expected, rtol=5e-3)
    np.testing.assert_allclose(spread, np.sqrt(np.square(drawn - expected).mean()), rtol=5e-3)


def test_counts_add_up_and_a_gene_follows_the_depth_of_cells_as_its_own_values_do():
    """One gene's values rise as those of all genes do in shallow cells, another's do not at all."""
    n, draw = 4000, np.random.default_rng(0)
    depth = draw.normal(0.3, 0.4, n)
    follows = np.array([1.0, 0.0])
    truth = 2.0 + follows * (depth - 0.3)[:, None] + 0.3 + draw.normal(0, 0.2, (n, 2))
    observed = np.where(draw.random((n, 2)) < 0.6, truth, 0).astype(np.float32)
    predicted = np.full((n, 2), 0.4, dtype=np.float32), np.full((n, 2), 2.0, dtype=np.float32)
    mean, _ = expected_values(Predicted(None, *predicted, np.full(2, 0.2, np.float32), depth, observed))
    slope = [np.polyfit(depth, mean[:, gene], 1)[0] for gene in range(2)]
    np.testing.assert_allclose(slope, follows, atol=0.1)
    np.testing.assert_allclose(np.expm1(mean).mean(axis=0), np.expm1(observed).mean(axis=0), rtol=0.01)


def test_what_is_expressed_is_a_poisson_variable_without_its_zeros():
    draw = np.random.default_rng(0)
    unit, rate = np.array([2.0, 7.0]), np.array([0.05, 0.4, 3.0])
    counts = draw.poisson(rate, (400_000, 3))
    means = [counts[:, gene][counts[:, gene] > 0].mean() for gene in range(3)]
    predicted = _truncated_mean(np.log1p(unit[:, None] * rate), unit)
    np.testing.assert_allclose(predicted, np.log1p(unit[:, None] * means), rtol=5e-3)
    of_none = _truncated_mean(np.zeros((2, 1)), unit)
    np.testing.assert_allclose(of_none[:, 0], np.log1p(unit), rtol=1e-5)
