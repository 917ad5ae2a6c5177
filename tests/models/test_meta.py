from __future__ import annotations

import pytest

from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.pretrained import without_memory

SMALL = {"n_genes": 12, "dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"anchor": "learned"}, {"tie_gene_head": True}, {"state_head": True},
        {"integrated": True, "adapted": 5}, {"anchor_residual": False}, {"position": "none"},
    ],
)  # fmt: skip
def test_it_has_the_names_shapes_and_types_of_the_network(fields):
    config = ScDiVaConfig(**SMALL | fields)
    found, real = without_memory(config).state_dict(), ScDiVa(config).state_dict()
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in real.items()
    }
    assert {value.device.type for value in found.values()} == {"meta"}
