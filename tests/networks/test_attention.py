"""How the genes of one cell attend to each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.models.inference import open_encoder, read_out
from scdiva.networks.methods import attention_ranks


def test_ranks_of_averaged_attention(model, cell):
    ranks = read_out(model, cell, attention_ranks)
    assert (ranks.shape, ranks.dtype) == ((17, 17), torch.float32)
    mean = np.zeros((17, 17))
    for _, _, weights in model.attention_weights(*cell):
        mean += weights[:, 1:, 1:].detach().double().numpy().sum(axis=0)
    order = mean.argsort(axis=1)
    for query in range(17):
        np.testing.assert_allclose(ranks[query, order[query]], np.arange(1, 18) / 17)


def test_ranks_of_the_genes_that_the_transformer_sees(model, cell, longer):
    with pytest.raises(ValueError, match="genes"):
        list(model.attention_weights(*longer))
    seen = longer[0][:20], longer[1][:20], torch.tensor([0, 20], dtype=torch.int32)
    ranks = read_out(model, longer, attention_ranks)
    assert torch.equal(ranks, read_out(model, seen, attention_ranks))
    assert ranks.shape == (20, 20)
    alone = tuple(part[:1] for part in cell[:2])
    assert read_out(model, (*alone, torch.tensor([0, 1], dtype=torch.int32)), attention_ranks).tolist() == [[1.0]]


def test_workers_change_nothing_and_the_model_is_left_as_it_was(model, cell):
    tokens, values, _ = cell
    cells = [(tokens[:n], values[:n], torch.tensor([0, n], dtype=torch.int32)) for n in range(1, 18)]
    with torch.inference_mode():
        expected = [read_out(model, one, attention_ranks).numpy() for one in cells]
    for threads in (1, 3):
        with open_encoder(model, threads=threads, what=attention_ranks) as encode:
            for found, one in zip(encode(lambda c: c, cells), expected, strict=True):
                np.testing.assert_array_equal(found, one)
    assert not model.training
    assert torch.is_grad_enabled()
