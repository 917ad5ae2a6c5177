"""Names of the packages: imported when they are first asked for (PEP 562), and those of the version before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Give a package its `__getattr__` and `__dir__`.

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


def renamed(old: str, new: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that stands under the name `old` for one version more: it warns that it is called `new` now."""

    def warned(*args: Any, **options: Any) -> Any:
        warnings.warn(f"{old} will go: it is called {new} now.", DeprecationWarning, stacklevel=2)
        return call(*args, **options)

    warned.__name__, warned.__doc__ = old.rpartition(".")[2], f"Call `{new}`, which has had this name. Deprecated."
    return warned
