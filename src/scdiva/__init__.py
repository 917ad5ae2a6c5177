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

import atexit
import importlib
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
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


def _give_numba_a_cache() -> None:
    """Set ``NUMBA_CACHE_DIR`` to a temporary folder where numba, and so scanpy and umap-learn, could not be imported.

    That is where neither the installed packages nor the user's cache can be written to, as in read-only containers. The
    folder is private, as numba runs what it finds there, and is removed at exit.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    places = [cache, Path(sysconfig.get_paths()["purelib"])]
    if os.environ.get("NUMBA_CACHE_DIR") or os.name == "nt" or any(map(_is_writable, places)):
        return
    try:
        folder = tempfile.mkdtemp(prefix="scdiva-numba-")
    except OSError:  # nowhere at all: numba says so when it is needed
        return
    os.environ["NUMBA_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _is_writable(folder: Path) -> bool:
    """Whether a folder can be written to, or made in the nearest one that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


_give_numba_a_cache()


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
