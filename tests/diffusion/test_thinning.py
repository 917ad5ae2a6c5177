from __future__ import annotations

import pytest
import torch

from scdiva.diffusion.masking import Counts, chosen, counts_of, keep_counts, log_normalised, sum_by_cell

BOUNDS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def packed_counts():
    """Two cells and an empty one between them; 13 counts of the last are of genes that no vocabulary holds."""
    of_token = torch.tensor([1, 3, 2, 40, 1, 1, 7, 2, 300], dtype=torch.float64)
    return Counts(of_token, sum_by_cell(of_token, BOUNDS) + torch.tensor([0.0, 0.0, 13.0]))


def test_counts_come_back_from_log_normalised_values():
    counts = packed_counts()
    found = counts_of(log_normalised(counts, BOUNDS), BOUNDS)
    assert torch.equal(found.of_token, counts.of_token)
    torch.testing.assert_close(found.of_cell[[0, 2]], counts.of_cell[[0, 2]], rtol=1e-5, atol=0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_is_kept(share):
    counts = packed_counts()
    kept = keep_counts(counts, BOUNDS, torch.full((9,), share), torch.Generator().manual_seed(0))
    assert torch.equal(kept.of_token, counts.of_token * share)
    torch.testing.assert_close(kept.of_cell, counts.of_cell * share)


def test_counts_are_kept_as_often_as_the_share_says():
    of_token = torch.full((20_000,), 6.0, dtype=torch.float64)
    bounds = torch.tensor([0, 20_000])
    counts = Counts(of_token, torch.tensor([240_000.0], dtype=torch.float64))
    share = torch.full((20_000,), 0.3)
    kept = keep_counts(counts, bounds, share, torch.Generator().manual_seed(1))
    assert ((kept.of_token >= 0) & (kept.of_token <= 6)).all()
    assert kept.of_token.mean() == pytest.approx(1.8, abs=0.05)
    assert kept.of_token.var() == pytest.approx(6 * 0.3 * 0.7, abs=0.05)
    assert float(kept.of_cell) == pytest.approx(2 * float(kept.of_token.sum()))  # half is of unknown genes
    again = keep_counts(counts, bounds, share, torch.Generator().manual_seed(1))
    assert torch.equal(again.of_token, kept.of_token)


def test_chosen_positions_keep_their_cells():
    kept = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    numbers, bounds = chosen(torch.arange(9), BOUNDS, kept)
    assert numbers.tolist() == [0, 2, 3, 8]
    assert bounds.tolist() == [0, 3, 3, 4]
    assert bounds.dtype == BOUNDS.dtype
