"""Attention kernels behind one dispatcher, and the softmax of the gene head (`_triton_softmax`).

`rope_attention` and `rope_attention_qkv` apply RoPE and attention in one call, so that a fused backend can compute
both.
"""

from __future__ import annotations

from scdiva.kernels._attention import (
    BACKENDS,
    attention_weights,
    autotune_attention,
    keep_attention_plan,
    resolve_backend,
    rope_attention,
    rope_attention_qkv,
)
from scdiva.kernels._reference import apply_rope, positions, rope_tables

__all__ = [
    "BACKENDS",
    "apply_rope",
    "attention_weights",
    "autotune_attention",
    "keep_attention_plan",
    "positions",
    "resolve_backend",
    "rope_attention",
    "rope_attention_qkv",
    "rope_tables",
]
