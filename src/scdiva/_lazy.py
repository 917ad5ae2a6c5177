"""Public names of the packages, which are imported on first access (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are imported on first use.

    Parameters
    ----------
    package
        Its `__name__`.
    where
        The module of each public name: one of the package, or with a dot one of another's.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(where))}")
        module = where[name]
        return getattr(import_module(module if "." in module else f"{package}.{module}"), name)

    return get, lambda: sorted(where)
