"""Training: modules that hold the losses, and the calls that run them. Loaded when first named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scdiva.train._pretrain import pretrain as pretrain
    from scdiva.train.base import TaskModule as TaskModule
    from scdiva.train.config import OptimiserConfig as OptimiserConfig
    from scdiva.train.config import PretrainingConfig as PretrainingConfig
    from scdiva.train.linear_map import LinearMap as LinearMap
    from scdiva.train.linear_map import fit_linear_map as fit_linear_map
    from scdiva.train.pretraining import PretrainingModule as PretrainingModule
    from scdiva.train.runner import fit as fit

_WHERE = {
    "LinearMap": "linear_map",
    "OptimiserConfig": "config",
    "PretrainingConfig": "config",
    "PretrainingModule": "pretraining",
    "TaskModule": "base",
    "fit": "runner",
    "fit_linear_map": "linear_map",
    "pretrain": "_pretrain",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
