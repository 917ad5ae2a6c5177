"""The parts of the network: layers, joint embedding, anchors of `[LAT]`, output heads."""

from __future__ import annotations

from scdiva.nn.anchor import PooledAnchor, SetEncoder
from scdiva.nn.annotation import AnnotationHead
from scdiva.nn.embedding import GeneValueEmbedding, TimeEmbedding
from scdiva.nn.heads import DualHeads, StateHead
from scdiva.nn.integration import IntegrationHead
from scdiva.nn.layers import Attention, Block, RMSNorm, SwiGLU
from scdiva.nn.own_components import OwnComponents
from scdiva.nn.queries import QueryHead

__all__ = [
    "AnnotationHead",
    "Attention",
    "Block",
    "DualHeads",
    "GeneValueEmbedding",
    "IntegrationHead",
    "OwnComponents",
    "PooledAnchor",
    "QueryHead",
    "RMSNorm",
    "SetEncoder",
    "StateHead",
    "SwiGLU",
    "TimeEmbedding",
]
