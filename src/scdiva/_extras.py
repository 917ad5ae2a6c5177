"""Packages that only an extra installs: asked for before any work, and named with the line that installs them."""

from __future__ import annotations

import importlib
from types import ModuleType


def from_extra(name: str, extra: str, what: str) -> ModuleType:
    """Import a package that is no part of a plain install.

    Every call that needs one begins with this, so that nobody waits for a result that can't be finished.

    Parameters
    ----------
    name
        What is imported.
    extra
        The extra of scdiva that brings it.
    what
        What is missing without it, such as ``"Leiden modules need igraph"``.

    Returns
    -------
    The module.

    Raises
    ------
    ImportError
        If it is not installed, or can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'scdiva[{extra}]'") from error
