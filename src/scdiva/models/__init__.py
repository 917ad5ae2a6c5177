"""The network, its configuration, and its folder on disk. Nothing is imported before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scdiva._lazy import lazily

if TYPE_CHECKING:
    from scdiva._loading import load as load
    from scdiva.models.annotator import Annotator as Annotator
    from scdiva.models.config import ScDiVaConfig as ScDiVaConfig
    from scdiva.models.hub import available as available
    from scdiva.models.hub import push as push
    from scdiva.models.network import ScDiVaOutput as ScDiVaOutput
    from scdiva.models.network import init_gene_embedding as init_gene_embedding
    from scdiva.models.network import save_model as save_model
    from scdiva.models.pretrained import load_model as load_model
    from scdiva.models.scdiva import ScDiVa as ScDiVa
    from scdiva.perturbation.model import PerturbationModel as PerturbationModel

_WHERE = {
    "Annotator": "annotator",
    "PerturbationModel": "scdiva.perturbation.model",
    "ScDiVa": "scdiva",
    "ScDiVaConfig": "config",
    "ScDiVaOutput": "network",
    "available": "hub",
    "init_gene_embedding": "network",
    "load": "scdiva._loading",
    "load_model": "pretrained",
    "push": "hub",
    "save_model": "network",
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
