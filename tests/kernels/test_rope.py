from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scdiva.kernels import apply_rope, rope_tables


@pytest.mark.parametrize("head_dim", [8, 64])
def test_tables_hold_the_papers_angles(head_dim):
    cos, sin = rope_tables(1201, head_dim, 10_000.0)
    assert cos.shape == sin.shape == (1201, head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for pos in (0, 1, 7, 1200):
        for j in range(head_dim // 2):
            angle = pos * 10_000.0 ** (-2 * j / head_dim)
            assert cos[pos, j].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[pos, j].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotation_is_the_papers_after_permuting_to_half_split():
    """The paper rotates neighbours (x0, x1), (x2, x3), ...; ours rotates (x0, x4), (x1, x5), ... of a head of 8."""
    rng = np.random.default_rng(0)
    head_dim, length = 8, 11
    x = rng.normal(size=(length, head_dim))
    paper = np.empty_like(x)
    for pos in range(length):
        rotation = np.zeros((head_dim, head_dim))
        for j in range(head_dim // 2):
            angle = pos * 10_000.0 ** (-2 * j / head_dim)
            block = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            rotation[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = block
        paper[pos] = rotation @ x[pos]
    half_split = np.r_[0:head_dim:2, 1:head_dim:2]
    cos, sin = rope_tables(length, head_dim, 10_000.0)
    rotated = apply_rope(torch.from_numpy(x[:, None, half_split]), cos.double(), sin.double())[:, 0].numpy()
    np.testing.assert_allclose(rotated, paper[:, half_split], atol=1e-6)


@pytest.mark.parametrize(("max_pos", "head_dim", "message"), [(4, 7, "even"), (4, 0, "even"), (-1, 8, "negative")])
def test_tables_refuse_impossible_shapes(max_pos, head_dim, message):
    with pytest.raises(ValueError, match=message):
        rope_tables(max_pos, head_dim)
