"""The parts of the network: layers and blocks, the set encoder, output heads."""

from __future__ import annotations

from scdiva.nn.annotation import AnnotationHead
from scdiva.nn.encoder import SetEncoder
from scdiva.nn.heads import DatasetComponents, DualHeads, IntegrationHead, StateHead
from scdiva.nn.layers import Attention, Block, Blocks, GeneValueEmbedding, SwiGLU
from scdiva.nn.queries import QueryHead

__all__ = [
    "AnnotationHead",
    "Attention",
    "Block",
    "Blocks",
    "DatasetComponents",
    "DualHeads",
    "GeneValueEmbedding",
    "IntegrationHead",
    "QueryHead",
    "SetEncoder",
    "StateHead",
    "SwiGLU",
]
