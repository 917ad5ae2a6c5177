"""Predictions at masked positions, and what is made of them: against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion.sampler import PartPredictions, likeliest_cell, predict_in_parts
from scdiva.generation.imputation import chance_and_value

N_GENES, LENGTH = 12, 9


def denoiser(table, by_cell=False, gene_values=None):
    """Logits and values that depend on what is visible and on the position, one cell after the other."""

    def denoise(tokens, values, cu_seqlens, value_mask):
        assert (value_mask == (tokens == MASK)).all()
        assert not values[value_mask].any()
        logits, made = [], []
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            own, shown = tokens[start:stop], values[start:stop]
            total = (shown * (own != MASK)).sum()
            rows = table[: stop - start] * (1 + total)
            logits.append(rows[:1] if by_cell else rows[own == MASK])
            made.append(torch.arange(stop - start) + total)
        found = torch.cat(logits), torch.cat(made)
        return found if gene_values is None else (*found, gene_values.repeat(len(cu_seqlens) - 1, 1))

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
    found = predict_in_parts(denoiser(table, by_cell, gene_values), tokens, values, part, by_cell=by_cell)
    for i in range(LENGTH):
        hidden = part == part[i]
        total = values[~hidden].sum()
        row = table[0 if by_cell else i] * (1 + total)
        row[tokens[~hidden] - N_SPECIAL] = -torch.inf
        torch.testing.assert_close(found.logits[i], row)
        torch.testing.assert_close(found.values[i], i + total)
    genes = torch.arange(LENGTH)
    more = gene_values[0, genes] if by_cell else 0.0
    torch.testing.assert_close(found.values_of(genes), found.values + more)


def test_a_denoiser_that_returns_nan_is_refused(cell):
    tokens, values, part, table = cell
    with pytest.raises(ValueError, match="weights may be damaged"):
        predict_in_parts(lambda *x: (denoiser(table)(*x)[0], x[1] * torch.nan), tokens, values, part)


def test_the_cell_chosen_has_each_gene_once_and_a_true_one_in_its_own_part_only(cell):
    tokens, values, part, table = cell
    made = likeliest_cell(predict_in_parts(denoiser(table), tokens, values, part))
    assert len(set(made.tokens.tolist())) == LENGTH
    for i, gene in enumerate(made.tokens.tolist()):
        at = (tokens == gene).nonzero()
        assert not len(at) or part[at.item()] == part[i]


def test_one_part_takes_the_likeliest_genes_at_the_positions_that_suit_them():
    logits = torch.full((3, 5), -5.0)
    logits[0, 4] = logits[1, 0] = logits[2, 2] = 3.0
    one_part = torch.zeros(3, dtype=torch.int64)
    made = likeliest_cell(PartPredictions(logits, torch.tensor([1.0, -2.0, 3.0]), None, one_part))
    assert (made.tokens - N_SPECIAL).tolist() == [4, 0, 2]
    assert made.values.tolist() == [1.0, 0.0, 3.0]  # no value is below zero


@pytest.mark.parametrize("with_state", [False, True])
def test_chance_and_value_follow_their_formula(cell, with_state):
    tokens, values, part, table = cell
    more = torch.linspace(0, 1, N_GENES)[None] if with_state else None
    found = predict_in_parts(denoiser(table, gene_values=more), tokens, values, part)
    chance, value = chance_and_value(found, tokens - N_SPECIAL)
    p = found.logits.softmax(1).double().numpy()
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
            weighted += sum(p[i, gene] * (float(found.values[i]) + of_gene) for i in hidden)
            total += m
        assert float(chance[gene]) == pytest.approx(np.mean(chances), rel=1e-4)
        assert float(value[gene]) == pytest.approx(weighted / total, rel=1e-4)


def test_chance_is_that_of_genes_expressed_where_genes_are_independent():
    """Genes expressed with known probabilities, a share masked: the share masked of those not visible, inverted."""
    draw = np.random.default_rng(0)
    chance, share, n = np.array([0.05, 0.3, 0.9]), 0.25, 400_000
    expressed = draw.random((n, 3)) < chance
    hidden = draw.random((n, 3)) < share
    m = (expressed & hidden).sum(0) / (~(expressed & ~hidden)).sum(0)  # masked, of those that are not visible
    part = torch.tensor([0, 1, 1, 1])  # a quarter of the positions
    logits = torch.tensor(np.log([*m, 1e-9])).float() + torch.zeros(4, 1)
    # one masked position cannot hold three genes of such chances, so the softmax is made to add up
    logits = torch.cat([logits, torch.full((4, 1), -30.0)], dim=1)
    for gene in range(3):
        alone = torch.full_like(logits, -30.0)
        alone[:, gene], alone[:, 4] = float(np.log(m[gene])), float(np.log1p(-m[gene]))
        alone[1:, gene] = -30.0
        found, _ = chance_and_value(PartPredictions(alone, torch.ones(4), None, part), torch.tensor([gene, 3, 3, 3]))
        assert float(found[gene]) == pytest.approx(chance[gene], rel=0.02)
