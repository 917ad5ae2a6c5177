"""The start of the gene embeddings from gene vectors, such as an SVD's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.models import ScDiVa, ScDiVaConfig, init_gene_embedding


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build() -> ScDiVa:
    config = ScDiVaConfig(n_genes=40, dim=16, n_layers=1, n_heads=2, ffn_dim=24, anchor="learned")
    return ScDiVa(config, generator=seeded(0))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_gene_vectors_keep_their_geometry(kind):
    model = build()
    vectors = np.random.default_rng(0).normal(size=(40, 5)) * np.array([9, 5, 3, 1, 0.5])
    vectors[7] = 0
    before = model.embedding.gene.weight.detach().clone()
    init_gene_embedding(model, torch.from_numpy(vectors) if kind == "torch" else vectors, generator=seeded(0))
    has_vector = np.arange(40) != 7
    rows = model.embedding.gene.weight.detach()[N_SPECIAL:].double().numpy()[has_vector]
    ratio = rows[:, :5] / vectors[has_vector]
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-5)  # one factor for all
    assert np.sqrt((rows[:, :5] ** 2).sum(axis=1).mean()) == pytest.approx(0.02 * np.sqrt(16), rel=1e-5)
    assert 0 < np.abs(rows[:, 5:]).max() < 0.01
    after = model.embedding.gene.weight.detach()
    assert torch.equal(after[:N_SPECIAL], before[:N_SPECIAL])
    assert torch.equal(after[N_SPECIAL + 7], before[N_SPECIAL + 7])


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((39, 4)), r"must be \(40, k\)"),
        (np.ones((40, 17)), r"1 <= k <= dim = 16; got \(40, 17\)"),
        (np.ones(40), r"must be \(40, k\)"),
        (np.where(np.arange(40)[:, None] == 6, np.nan, np.ones((40, 4))), "first in row 6"),
        (np.zeros((40, 4)), "only zeros"),
    ],
)
def test_bad_gene_vectors_are_refused_and_change_nothing(matrix, message):
    model = build()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        init_gene_embedding(model, matrix)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
