from __future__ import annotations

import torch

from scdiva.models import ScDiVa, ScDiVaConfig

CU = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
TOKENS = torch.arange(3, 15)
VALUES = torch.linspace(0.5, 3.0, 12)


def build(**fields) -> ScDiVa:
    config = ScDiVaConfig(**{
        "n_genes": 12, "dim": 16, "n_layers": 3, "n_heads": 2, "ffn_dim": 20, "max_length": 9, "anchor": "learned",
        **fields,
    })  # fmt: skip
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)  # attention that is far from even
    return model


def test_weights_are_those_that_the_network_uses():
    """Layer by layer: the recorded input of a block gives the same weights, and those times V its attention."""
    model = build()
    inputs, attended = {}, {}
    for number, block in enumerate(model.blocks):

        def record(_, arguments, out, number=number):
            inputs[number], attended[number] = arguments[0], out

        block.attention.register_forward_hook(record)
    model(TOKENS, VALUES, CU)
    pairs = []
    for layer, cell, weights in model.attention_weights(TOKENS, VALUES, CU):
        pairs.append((layer, cell))
        rows = slice(int(CU[cell]) + cell, int(CU[cell + 1]) + cell + 1)  # one [LAT] a cell
        assert weights.shape == (2, rows.stop - rows.start, rows.stop - rows.start)
        attention = model.blocks[layer].attention
        v = attention.project(inputs[layer])[rows, 2]
        heads = torch.einsum("hqk,khd->qhd", weights, v).flatten(start_dim=1)
        torch.testing.assert_close(attention.out(heads), attended[layer][rows], atol=1e-5, rtol=1e-5)
    assert pairs == [(layer, cell) for layer in range(3) for cell in range(3)]


def test_tables_of_rotation_are_made_once_and_never_rounded():
    model = build()
    with torch.inference_mode():
        model(TOKENS, VALUES, CU)
    model(TOKENS, VALUES, CU).hidden.sum().backward()  # tables of inference would refuse
    before = model.blocks._rotations(torch.device("cpu"))
    assert model.blocks._rotations(torch.device("cpu")) is before
    assert model.to(torch.bfloat16).blocks._rotations(torch.device("cpu"))[0].dtype == torch.float32
    assert build(position="none").blocks._rotations(torch.device("cpu")) == (None, None)
