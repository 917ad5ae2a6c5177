"""scdiva: single-cell embeddings from a masked discrete diffusion model of genes and their expression.

The package is lazy (PEP 562): importing it loads neither torch nor scanpy nor Lightning; each part is loaded when it is
first named.

Examples
--------
>>> import scdiva as sd
>>> adata = sd.datasets.pbmc3k_small()
>>> sd.tl.embed(adata)
>>> sd.pl.umap(adata, color="cell_type")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import datasets, get, metrics, models, pl, pp, tl, train
    from ._about import cite, print_versions
    from ._settings import settings

_PARTS = ("datasets", "get", "metrics", "models", "pl", "pp", "tl", "train")
_NAMES = {"cite": "_about", "print_versions": "_about", "settings": "_settings"}
"""Other public names, and the module that each is in."""

__all__ = [
    "__version__",
    "cite",
    "datasets",
    "get",
    "metrics",
    "models",
    "pl",
    "pp",
    "print_versions",
    "settings",
    "tl",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
