"""The forward process against the paper's kernel; statistics bounded at about 5 standard deviations, seeds fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion import cell_of_token, mask_tokens, stratified_times

SIGMAS = 5.0


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ragged(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = sum(lengths)
    generator = rng(seed)
    tokens = torch.randint(N_SPECIAL, 500, (total,), generator=generator)
    values = torch.rand(total, generator=generator) * 5 + 0.1
    return tokens, values, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def within(count: int, n: int, p: float) -> bool:
    return abs(count - n * p) <= SIGMAS * max(np.sqrt(n * p * (1 - p)), 1e-9)


def test_marginal_is_the_papers_kernel():
    lengths = [20_000, 1, 15_000, 30_000, 10_000]
    times = torch.tensor([0.05, 0.5, 0.37, 0.9, 0.999])
    tokens, values, cu = ragged(lengths)
    out = mask_tokens(tokens, values, cu, times, rng(1))
    for b, n in enumerate(lengths):
        part = slice(int(cu[b]), int(cu[b + 1]))
        assert n == 1 or within(int(out.masked[part].sum()), n, float(times[b]))
    # the state is x_0 or [MASK], nothing else, and masked says which
    assert torch.equal(out.tokens, torch.where(out.masked, MASK, tokens))
    assert torch.equal(out.values, torch.where(out.masked, 0.0, values))
    assert torch.equal(out.value_mask, out.masked)


def test_dropout_theorem():
    """φ([MASK]) = 0 turns the corruption into zero inflation of x_0 and of the value, and into zeros as t -> 1."""
    t, n = 0.4, 60_000
    tokens, values, cu = ragged([n])
    out = mask_tokens(tokens, values, cu, torch.tensor([t]), rng(3))
    observed = torch.where(out.tokens == MASK, 0, out.tokens)
    assert set(torch.unique(observed[observed != tokens]).tolist()) == {0}
    assert within(int((observed == 0).sum()), n, t)
    assert within(int((observed == tokens).sum()), n, 1 - t)
    # (1 - t) δ(ṽ, v) + t δ(ṽ, 0): kept values are the cell's own, and the chance of zero does not depend on v
    kept = out.values != 0
    assert torch.equal(out.values[kept], values[kept])
    for low, high in ((0, 1.5), (1.5, 3.5), (3.5, 6)):
        group = (values >= low) & (values < high)
        assert within(int((~kept & group).sum()), int(group.sum()), t)
    assert bool(mask_tokens(tokens, values, cu, torch.tensor([1.0]), rng(4)).masked.all())
    assert not bool(mask_tokens(tokens, values, cu, torch.tensor([0.0]), rng(4)).masked.any())


def test_value_masks_leave_the_identity():
    n = 50_000
    tokens, values, cu = ragged([n])
    t, rate = 0.3, 0.2
    out = mask_tokens(tokens, values, cu, torch.tensor([t]), rng(6), value_mask_rate=rate)
    only_value = out.value_mask & ~out.masked
    assert within(int(out.masked.sum()), n, t)
    assert within(int(only_value.sum()), n, (1 - t) * rate)
    assert torch.equal(out.tokens[only_value], tokens[only_value])
    assert bool((out.values[out.value_mask] == 0).all())
    assert bool((out.masked <= out.value_mask).all())


def test_masks_are_a_function_of_the_generator_and_leave_the_input():
    tokens, values, cu = ragged([30, 1, 50])
    before = tokens.clone(), values.clone()
    times = torch.tensor([0.5, 0.5, 0.5])
    first, again, other = (mask_tokens(tokens, values, cu, times, rng(s)) for s in (7, 7, 8))
    assert torch.equal(first.masked, again.masked)
    assert not torch.equal(first.masked, other.masked)
    assert torch.equal(tokens, before[0])
    assert torch.equal(values, before[1])


def test_times_are_stratified_and_each_uniform():
    n_cells, n_draws = 16, 3000
    generator = rng(9)
    draws = torch.stack([stratified_times(n_cells, generator, min_time=0.0) for _ in range(n_draws)])
    # one time in each stratum, in every batch
    strata = torch.sort((draws.double() * n_cells).floor().long().clamp_max(n_cells - 1)).values
    assert (strata == torch.arange(n_cells)).float().mean() > 0.999  # float32 may round up to a border
    # yet the time of any one cell is uniform on (0, 1)
    for cell in (0, 7, 15):
        assert stats.kstest(draws[:, cell].numpy(), "uniform").pvalue > 1e-6
    # anywhere in its stratum
    place = (draws.double() * n_cells).remainder(1.0).flatten()
    assert stats.kstest(place.numpy(), "uniform").pvalue > 1e-6
    # and the mean over a batch varies far less than that of independent draws, sqrt(1 / 12 / n)
    assert draws.mean(1).std() < 0.1 * np.sqrt(1 / 12 / n_cells)


def test_cell_of_token_counts_empty_cells():
    assert cell_of_token(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.tensor([3, MASK, 5])}, r"1 of 3 tokens are no genes .first: 1"),
        ({"tokens": torch.tensor([3.0, 4.0, 5.0])}, "integer tokens"),
        ({"values": torch.ones(2)}, "one shape"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 4, 3]), "times": torch.tensor([0.5, 0.5])}, "rise from 0"),
        ({"times": torch.tensor([0.5, 0.5])}, "One time per cell"),
        ({"times": torch.tensor([1.5])}, r"\[0, 1\]"),
        ({"times": torch.tensor([float("nan")])}, r"\[0, 1\]"),
        ({"value_mask_rate": -0.1}, "value_mask_rate"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {
        "tokens": torch.tensor([3, 4, 5]),
        "values": torch.ones(3),
        "cu_seqlens": torch.tensor([0, 3]),
        "times": torch.tensor([0.5]),
        "generator": rng(0),
    } | change
    with pytest.raises(ValueError, match=message):
        mask_tokens(**arguments)


def test_bad_times_are_refused():
    with pytest.raises(ValueError, match="at least one cell"):
        stratified_times(0, rng(0))
    with pytest.raises(ValueError, match="min_time"):
        stratified_times(3, rng(0), min_time=1.0)
