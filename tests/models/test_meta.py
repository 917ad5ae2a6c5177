from __future__ import annotations

import pytest
import torch

from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.pretrained import without_memory

SMALL = {"n_genes": 12, "dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"anchor": "learned"}, {"tie_gene_head": True}, {"state_head": True},
        {"integrated": True}, {"anchor_residual": False}, {"position": "none"},
    ],
)  # fmt: skip
def test_it_has_the_names_shapes_and_types_of_the_network(fields):
    config = ScDiVaConfig(**SMALL | fields)
    found, real = without_memory(config).state_dict(), ScDiVa(config).state_dict()
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in real.items()
    }
    assert {value.device.type for value in found.values()} == {"meta"}


def test_no_size_takes_memory_and_some_are_too_large():
    assert without_memory(ScDiVaConfig(**SMALL | {"ffn_dim": 2**40})).blocks[0] is not None
    with pytest.raises(ValueError, match="no network has these sizes"):
        without_memory(ScDiVaConfig(**SMALL | {"ffn_dim": 2**70}))


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    without_memory(ScDiVaConfig(**SMALL))
    assert torch.equal(torch.get_rng_state(), before)
