"""scdiva: single-cell embeddings from a masked discrete diffusion model of genes and their expression.

Submodules are imported on first access (PEP 562): `import scdiva` imports neither torch nor scanpy nor Lightning.

Examples
--------
>>> import scdiva as sd
>>> adata = sd.datasets.pbmc3k_small()
>>> sd.tl.embed(adata)
>>> sd.pl.umap(adata, color="cell_type")
"""

from __future__ import annotations

import atexit
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scdiva._lazy import lazily
from scdiva._version import __version__ as __version__

if TYPE_CHECKING:
    from scdiva import datasets as datasets
    from scdiva import get as get
    from scdiva import metrics as metrics
    from scdiva import models as models
    from scdiva import pl as pl
    from scdiva import pp as pp
    from scdiva import tl as tl
    from scdiva import train as train
    from scdiva._about import cite as cite
    from scdiva._about import print_versions as print_versions
    from scdiva._settings import settings as settings

_WHERE = {
    **dict.fromkeys(("datasets", "get", "metrics", "models", "pl", "pp", "tl", "train")),
    "__version__": "_version",
    "cite": "_about",
    "print_versions": "_about",
    "settings": "_settings",
}
__all__ = sorted(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)


def _set_numba_cache() -> None:
    """Set ``NUMBA_CACHE_DIR`` to a temporary folder if neither site-packages nor the user's cache is writable.

    Otherwise numba, and so scanpy and umap-learn, can't be imported in read-only containers. The folder is private,
    because numba executes its content, and is removed at exit.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    folders = [cache, Path(sysconfig.get_paths()["purelib"])]
    if os.environ.get("NUMBA_CACHE_DIR") or os.name == "nt" or any(map(_is_writable, folders)):
        return
    try:
        folder = tempfile.mkdtemp(prefix="scdiva-numba-")
    except OSError:  # numba raises an error when it is imported
        return
    os.environ["NUMBA_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _is_writable(folder: Path) -> bool:
    """Whether a folder, or its nearest existing parent, is writable."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


_set_numba_cache()
