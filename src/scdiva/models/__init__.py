"""The network, its layers and configuration, and its storage. Modules are imported on first access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scdiva._lazy import lazily

if TYPE_CHECKING:
    from scdiva.annotation.annotator import Annotator as Annotator
    from scdiva.models.config import ScDiVaConfig as ScDiVaConfig
    from scdiva.models.heads import DatasetComponents as DatasetComponents
    from scdiva.models.heads import DualHeads as DualHeads
    from scdiva.models.heads import IntegrationHead as IntegrationHead
    from scdiva.models.heads import StateHead as StateHead
    from scdiva.models.layers import Attention as Attention
    from scdiva.models.layers import Block as Block
    from scdiva.models.layers import Blocks as Blocks
    from scdiva.models.layers import GeneValueEmbedding as GeneValueEmbedding
    from scdiva.models.layers import SetEncoder as SetEncoder
    from scdiva.models.layers import SwiGLU as SwiGLU
    from scdiva.models.pretrained import load as load
    from scdiva.models.pretrained import load_model as load_model
    from scdiva.models.queries import QueryHead as QueryHead
    from scdiva.models.scdiva import ScDiVa as ScDiVa
    from scdiva.models.scdiva import ScDiVaOutput as ScDiVaOutput
    from scdiva.models.scdiva import init_gene_embedding as init_gene_embedding
    from scdiva.models.storage import available as available
    from scdiva.models.storage import push as push
    from scdiva.models.storage import save_model as save_model
    from scdiva.perturbation.model import PerturbationModel as PerturbationModel

_WHERE = {
    "Annotator": "scdiva.annotation.annotator",
    "Attention": "layers",
    "Block": "layers",
    "Blocks": "layers",
    "DatasetComponents": "heads",
    "DualHeads": "heads",
    "GeneValueEmbedding": "layers",
    "IntegrationHead": "heads",
    "PerturbationModel": "scdiva.perturbation.model",
    "QueryHead": "queries",
    "ScDiVa": "scdiva",
    "ScDiVaConfig": "config",
    "ScDiVaOutput": "scdiva",
    "SetEncoder": "layers",
    "StateHead": "heads",
    "SwiGLU": "layers",
    "available": "storage",
    "init_gene_embedding": "scdiva",
    "load": "pretrained",
    "load_model": "pretrained",
    "push": "storage",
    "save_model": "storage",
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
