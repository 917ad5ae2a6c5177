"""Where masked genes stand in the controls, and a model that is trained so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.data.packed import pack_files
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer import load_vocabulary


@pytest.fixture
def controls(script):
    return script("denoising_controls")


@pytest.mark.parametrize("behind", [True, False])
def test_masked_genes_are_moved_and_visible_ones_keep_their_order(controls, behind):
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 40, 40, 90], dtype=torch.int32)
    masked = torch.rand(90, generator=generator) < 0.4
    order = controls.moved(masked, bounds, generator, behind=behind)
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


def test_a_population_is_fitted_to_the_cells_that_are_not_asked_about(script, monkeypatch, tmp_path):
    """A model that knows nothing: what the cells of the study express has to come from the others."""
    judge, arms = script("denoising"), script("_denoising_arms")
    file = tmp_path / "study.h5ad"
    cells = sd.datasets.toy(300, 80)
    cells.write_h5ad(file)
    vocabulary = load_vocabulary("human")
    known = vocabulary.match(list(cells.var_names)).tokens
    vocabulary = vocabulary.subset(np.sort(known[known >= 0]))
    packed = pack_files([file], vocabulary, tmp_path / "cells.h5")
    config = ScDiVaConfig(
        n_genes=vocabulary.n_genes, dim=16, n_layers=1, n_heads=2, ffn_dim=24, max_length=100, anchor_linear_dim=8,
        anchor_learned_dim=4, anchor_hidden=16, state_head=True, state_rank=4, anchor_residual=False,
    )  # fmt: skip
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    study = judge.study_of(packed, 0, 80, 0)
    corpus = arms.Corpus(torch.full((vocabulary.n_genes,), 0.5), torch.ones(vocabulary.n_genes))
    fitted, unknown = (judge.scores(arm(study), study.asked) for arm in (arms.population(model), arms.unigram(corpus)))
    assert fitted["average_precision"] > unknown["average_precision"] + 0.05
    assert fitted["rmse"] < unknown["rmse"]
    assert study.asked.token.min() >= N_SPECIAL


def test_log_odds_at_another_depth_are_those_of_poisson_counts(script):
    mean = torch.tensor([[0.1, 1.0, 2.0, 4.0], [0.3, 0.3, 0.2, 5.0]]).double()
    whole, half = (torch.expm1(depth * mean).log() for depth in (1.0, 0.5))
    expected = torch.sigmoid(half).sum(dim=1)
    found = script("_denoising_arms").at_depth(whole, expected)
    torch.testing.assert_close(found, half.float(), atol=1e-4, rtol=0)
