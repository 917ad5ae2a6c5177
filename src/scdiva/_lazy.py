"""Public names of packages, imported on first access (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, where: Mapping[str, str | None]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names are imported on first access.

    Parameters
    ----------
    package
        Its `__name__`.
    where
        Module of each public name: relative to the package, or absolute if it contains a dot. None: the name is a
        module of the package.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(where))}")
        module = where[name]
        if module is None:
            return import_module(f"{package}.{name}")
        return getattr(import_module(module if "." in module else f"{package}.{module}"), name)

    return get, lambda: sorted(where)
