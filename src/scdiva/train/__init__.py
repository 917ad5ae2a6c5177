"""Training: modules with the losses, and functions that run them. Imported on first access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scdiva._lazy import lazily

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
__getattr__, __dir__ = lazily(__name__, _WHERE)
