"""Which loops rank and count: those compiled by numba, or numpy."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np

Backend = Literal["auto", "numba", "numpy"]
"""`"auto"` takes numba where it can be imported, and says once in the log why where it can't; `"numba"` takes it or
raises; `"numpy"` does without. All give the same bits."""


def kernels(backend: Backend = "auto") -> ModuleType | None:
    """Return the compiled loops, which the first call loads (and compiles, where no earlier process did).

    Parameters
    ----------
    backend
        See :data:`Backend`.

    Returns
    -------
    :mod:`scdiva.tokenizer._kernels`, or None where numpy does the work.

    Raises
    ------
    ImportError
        If `backend` is ``"numba"`` and numba can't be used.
    ValueError
        If there is no such backend.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}.")
    if backend == "numpy":
        return None
    found = _loaded()
    if isinstance(found, ModuleType):
        return found
    if backend == "numba":
        raise ImportError(
            f"backend='numba', but numba can't be used: {found}. Mend that, or pass backend='auto'."
        ) from found
    return None


@functools.cache  # also of a failure: an import that fails is slow, and is asked for with every block of rows
def _loaded() -> ModuleType | ImportError:
    try:
        from scdiva.tokenizer import _kernels
    except ImportError as error:
        logging.getLogger("scdiva").warning("genes are ranked by numpy, not by numba, which is slower: %s", error)
        return error
    return _kernels


def plain(array: Any, dtype: Any) -> np.ndarray:
    """Return an array as the kernels take it, of this type, contiguous and aligned; itself where it is so already."""
    return np.require(array, dtype, ["C", "A"])
