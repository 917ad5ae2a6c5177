"""The network, its configuration, and its folder on disk. Nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scdiva._loading import load, load_annotator, load_perturbation_model
    from scdiva.models.annotator import Annotator
    from scdiva.models.config import ScDiVaConfig
    from scdiva.models.hub import available, push
    from scdiva.models.network import ScDiVaOutput, init_gene_embedding, save_model
    from scdiva.models.pretrained import load_model
    from scdiva.models.scdiva import ScDiVa
    from scdiva.perturbation.model import PerturbationModel

_WHERE = {
    "Annotator": "annotator",
    "PerturbationModel": "scdiva.perturbation.model",
    "ScDiVa": "scdiva",
    "ScDiVaConfig": "config",
    "ScDiVaOutput": "network",
    "available": "hub",
    "init_gene_embedding": "network",
    "load": "scdiva._loading",
    "load_annotator": "scdiva._loading",
    "load_model": "pretrained",
    "load_perturbation_model": "scdiva._loading",
    "push": "hub",
    "save_model": "network",
}

__all__ = [
    "Annotator",
    "PerturbationModel",
    "ScDiVa",
    "ScDiVaConfig",
    "ScDiVaOutput",
    "available",
    "init_gene_embedding",
    "load",
    "load_annotator",
    "load_model",
    "load_perturbation_model",
    "push",
    "save_model",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _WHERE[name]
    return getattr(import_module(where if "." in where else f"{__name__}.{where}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
