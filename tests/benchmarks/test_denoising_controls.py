"""Where masked genes stand in the controls, and a model that is trained so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("behind", [True, False])
def test_masked_genes_are_moved_and_visible_ones_keep_their_order(script, behind):
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 40, 40, 90], dtype=torch.int32)
    masked = torch.rand(90, generator=generator) < 0.4
    order = script("denoising_controls").moved(masked, bounds, generator, behind=behind)
    places = []
    for start, end in itertools.pairwise(bounds.tolist()):
        mine = order[start:end]
        assert sorted(mine.tolist()) == list(range(start, end))
        assert (mine[~masked[mine]].diff() > 0).all()
        now = masked[mine].nonzero().squeeze(1)
        assert not behind or now.tolist() == list(range(end - start - len(now), end - start))
        places += [(int(gene), int(place)) for gene, place in zip(mine[masked[mine]] - start, now, strict=True)]
    rank, place = np.array(places).T
    assert abs(np.corrcoef(rank, place)[0, 1]) < 0.75, "the new place would say the rank"
