"""Training: modules that hold the losses, and the one function that runs them. Loaded when first named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scdiva.perturbation.training import PerturbationModule
    from scdiva.train._pretrain import pretrain
    from scdiva.train.anchor import AnchorModule
    from scdiva.train.base import TaskModule
    from scdiva.train.config import AnchorConfig, OptimiserConfig, PretrainingConfig
    from scdiva.train.finetuning import AnnotationModule
    from scdiva.train.integration import IntegrationModule
    from scdiva.train.linear_map import LinearMap, fit_linear_map
    from scdiva.train.pretraining import PretrainingModule
    from scdiva.train.runner import fit
    from scdiva.train.state_head import StateHeadModule
    from scdiva.train.task_config import AnnotationConfig, IntegrationConfig, PerturbationConfig, StateHeadConfig

_WHERE = {
    "AnchorConfig": "config",
    "AnchorModule": "anchor",
    "AnnotationConfig": "task_config",
    "AnnotationModule": "finetuning",
    "IntegrationConfig": "task_config",
    "IntegrationModule": "integration",
    "LinearMap": "linear_map",
    "OptimiserConfig": "config",
    "PerturbationConfig": "task_config",
    "PerturbationModule": "scdiva.perturbation.training",
    "PretrainingConfig": "config",
    "PretrainingModule": "pretraining",
    "StateHeadConfig": "task_config",
    "StateHeadModule": "state_head",
    "TaskModule": "base",
    "fit": "runner",
    "fit_linear_map": "linear_map",
    "pretrain": "_pretrain",
}

__all__ = [
    "AnchorConfig",
    "AnchorModule",
    "AnnotationConfig",
    "AnnotationModule",
    "IntegrationConfig",
    "IntegrationModule",
    "LinearMap",
    "OptimiserConfig",
    "PerturbationConfig",
    "PerturbationModule",
    "PretrainingConfig",
    "PretrainingModule",
    "StateHeadConfig",
    "StateHeadModule",
    "TaskModule",
    "fit",
    "fit_linear_map",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _WHERE[name]
    return getattr(import_module(where if "." in where else f"{__name__}.{where}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
