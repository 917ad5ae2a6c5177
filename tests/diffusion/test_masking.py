"""The forward process against the paper's kernel; statistics bounded at about 5 standard deviations, seeds fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion import cell_of_token, mask_tokens, stratified_times
from scdiva.diffusion.masking import Counts, chosen, counts_of, keep_counts, log_normalised, sum_by_cell

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
    """Each token is masked with the chance of its cell's time, whatever its value; what is kept is as it was."""
    lengths = [20_000, 1, 15_000, 30_000, 10_000, 5, 5]
    times = torch.tensor([0.05, 0.5, 0.37, 0.9, 0.999, 0.0, 1.0])
    tokens, values, cu = ragged(lengths)
    before = tokens.clone(), values.clone()
    out = mask_tokens(tokens, values, cu, times, rng(1))
    for b, n in enumerate(lengths):
        masked, t = out.masked[int(cu[b]) : int(cu[b + 1])], float(times[b])
        assert n == 1 or within(int(masked.sum()), n, t)
        for low, high in ((0, 1.5), (1.5, 3.5), (3.5, 6)):
            group = (values >= low)[int(cu[b]) : int(cu[b + 1])] & (values < high)[int(cu[b]) : int(cu[b + 1])]
            assert n == 1 or within(int((masked & group).sum()), int(group.sum()), t)
    # the state is x_0 or [MASK], nothing else, and masked says which
    assert torch.equal(out.tokens, torch.where(out.masked, MASK, tokens))
    assert torch.equal(out.values, torch.where(out.masked, 0.0, values))
    assert torch.equal(out.value_mask, out.masked)
    again, redrawn = (mask_tokens(tokens, values, cu, times, rng(seed)) for seed in (1, 2))
    assert torch.equal(out.masked, again.masked)
    assert not torch.equal(out.masked, redrawn.masked)
    assert all(map(torch.equal, (tokens, values), before))


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
    offset = (draws.double() * n_cells).remainder(1.0).flatten()
    assert stats.kstest(offset.numpy(), "uniform").pvalue > 1e-6
    # and the mean over a batch varies far less than that of independent draws, sqrt(1 / 12 / n)
    assert draws.mean(1).std() < 0.1 * np.sqrt(1 / 12 / n_cells)


def test_cell_of_token_counts_empty_cells():
    assert cell_of_token(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.tensor([3, MASK, 5])}, r"1 of 3 tokens are not genes .first: 1"),
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


BOUNDS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def packed_counts():
    """Two cells and an empty one between them; 13 counts of the last are of genes that no vocabulary holds."""
    of_token = torch.tensor([1, 3, 2, 40, 1, 1, 7, 2, 300], dtype=torch.float64)
    return Counts(of_token, sum_by_cell(of_token, BOUNDS) + torch.tensor([0.0, 0.0, 13.0]))


def test_counts_come_back_from_log_normalised_values():
    counts = packed_counts()
    restored = counts_of(log_normalised(counts, BOUNDS), BOUNDS)
    assert torch.equal(restored.of_token, counts.of_token)
    torch.testing.assert_close(restored.of_cell[[0, 2]], counts.of_cell[[0, 2]], rtol=1e-5, atol=0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_is_kept(share):
    counts = packed_counts()
    thinned = keep_counts(counts, BOUNDS, torch.full((9,), share), torch.Generator().manual_seed(0))
    assert torch.equal(thinned.of_token, counts.of_token * share)
    torch.testing.assert_close(thinned.of_cell, counts.of_cell * share)


def test_counts_are_kept_as_often_as_the_share_says():
    of_token = torch.full((20_000,), 6.0, dtype=torch.float64)
    bounds = torch.tensor([0, 20_000])
    counts = Counts(of_token, torch.tensor([240_000.0], dtype=torch.float64))
    share = torch.full((20_000,), 0.3)
    thinned = keep_counts(counts, bounds, share, torch.Generator().manual_seed(1))
    assert ((thinned.of_token >= 0) & (thinned.of_token <= 6)).all()
    assert thinned.of_token.mean() == pytest.approx(1.8, abs=0.05)
    assert thinned.of_token.var() == pytest.approx(6 * 0.3 * 0.7, abs=0.05)
    assert float(thinned.of_cell) == pytest.approx(2 * float(thinned.of_token.sum()))  # half is of unknown genes
    again = keep_counts(counts, bounds, share, torch.Generator().manual_seed(1))
    assert torch.equal(again.of_token, thinned.of_token)


def test_chosen_positions_keep_their_cells():
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    numbers, bounds = chosen(torch.arange(9), BOUNDS, mask)
    assert numbers.tolist() == [0, 2, 3, 8]
    assert bounds.tolist() == [0, 3, 3, 4]
    assert bounds.dtype == BOUNDS.dtype
