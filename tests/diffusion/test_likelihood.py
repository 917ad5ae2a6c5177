"""The Monte-Carlo bound against enumeration of every order and every mask of a toy with 4 genes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from scdiva._constants import MASK
from scdiva.diffusion import log_likelihood


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def enumerated_bound(toy, table, cell) -> float:
    """L · mean over m of the mean over all masks of size m of 1/m Σ log p: the paper's bound, without sampling."""
    per_size = []
    for m in range(1, toy.LENGTH + 1):
        masks = list(itertools.combinations(range(toy.LENGTH), m))
        visible = [set(range(toy.LENGTH)) - set(mask) for mask in masks]
        per_size.append(
            np.mean(
                [
                    np.mean([toy.conditional(table, cell, s, i) for i in mask])
                    for mask, s in zip(masks, visible, strict=True)
                ]
            )
        )
    return toy.LENGTH * float(np.mean(per_size))


def test_estimate_matches_enumeration_within_its_error(toy):
    table = toy.random_table(0)
    tokens, values, cu = toy.pack(toy.CELLS)
    bound, error = log_likelihood(toy.table_denoiser(table), tokens, values, cu, 1000, generator=rng(1))
    exact = torch.tensor([enumerated_bound(toy, table, cell) for cell in toy.CELLS], dtype=torch.float64)
    z = (bound - exact) / error
    assert z.abs().max() < 5
    assert 0.5 < z.square().mean() < 2  # the error is neither too large nor too small: mean of 24 squares, sd 0.29
    assert error.max() < 0.2


def test_the_number_of_masked_genes_is_stratified(toy):
    """With as many strata as genes each number is drawn twice, in every cell."""
    tokens, values, cu = toy.pack([(0, 1, 2), (3, 1, 0)])
    n_masked = []

    def denoiser(tokens, values, cu_seqlens, value_mask):
        n_masked.append(value_mask.view(2, 3).sum(1).tolist())
        return torch.zeros(int(value_mask.sum()), 4), values

    log_likelihood(denoiser, tokens, values, cu, 6, generator=rng(7))
    assert n_masked == [[1, 1], [1, 1], [2, 2], [2, 2], [3, 3], [3, 3]]


def test_bound_is_exact_for_the_optimal_denoiser(toy):
    """True conditionals make every order give log p(x), so the bound is the log-likelihood itself."""
    joint, table = toy.joint_and_table(3)
    tokens, values, cu = toy.pack(toy.CELLS)
    for cell in toy.CELLS:
        assert enumerated_bound(toy, table, cell) == pytest.approx(math.log(joint[cell]), abs=1e-10)
    bound, error = log_likelihood(toy.table_denoiser(table), tokens, values, cu, 1000, generator=rng(3))
    truth = torch.tensor([math.log(joint[cell]) for cell in toy.CELLS], dtype=torch.float64)
    assert ((bound - truth) / error).abs().max() < 5


def test_ragged_cells_and_empty_ones(toy):
    """A denoiser uniform over 4 genes: with exclusion every order gives 1 / (4 · 3 · ...)."""
    tokens = torch.tensor([3, 5, 6, 4, 3, 6, 5])
    cu = torch.tensor([0, 1, 1, 3, 7], dtype=torch.int32)
    n_masked = []

    def denoiser(tokens, values, cu_seqlens, value_mask):
        n_masked.append((tokens == MASK).sum().item())
        assert torch.equal(tokens == MASK, value_mask)
        assert (values[value_mask] == 0).all()
        return torch.zeros(int(value_mask.sum()), 4), values

    bound, error = log_likelihood(denoiser, tokens, torch.ones(7), cu, 400, generator=rng(6))
    exact = torch.tensor([-math.log(4), 0.0, -math.log(12), -math.log(24)], dtype=torch.float64)
    # any-order with exclusion: the first of L has 4 choices, the next 3, ...
    assert ((bound - exact).abs() <= 5 * error + 1e-12).all()
    assert error[:2].tolist() == [0, 0]
    assert max(n_masked) <= 7
    assert len(n_masked) == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_samples": 3}, "even"),
        ({"tokens": torch.tensor([3, MASK, 5])}, "complete cells"),
        ({"tokens": torch.tensor([3, 4, 3])}, "1 genes occur more than once"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "rise from 0"),
    ],
)
def test_bad_input_is_refused(change, message, toy):
    arguments = {
        "denoiser": toy.table_denoiser(toy.random_table(0)),
        "tokens": torch.tensor([3, 4, 5]),
        "values": torch.ones(3, dtype=torch.float64),
        "cu_seqlens": torch.tensor([0, 3]),
        "n_samples": 2,
        "generator": rng(0),
    } | change
    with pytest.raises(ValueError, match=message):
        log_likelihood(**arguments)


def test_damaged_denoiser_is_refused(toy):
    tokens, values, cu = toy.pack(toy.CELLS)
    broken = toy.table_denoiser(toy.random_table(0) * torch.nan)
    for exclude in (True, False):
        with pytest.raises(ValueError, match="NaN"):
            log_likelihood(broken, tokens, values, cu, 2, exclude_shown=exclude, generator=rng(0))
