"""Parameter descriptions that several public functions share, written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

_SHARED = {
    "ax": """\
ax
    The matplotlib axes to draw on; None makes a figure.""",
    "return_fig": """\
return_fig
    Whether to return the figure.""",
    "save": """\
save
    A file to write the figure to; its ending names the format. None writes none.""",
    "rng": """\
rng
    Seed of the random numbers; None takes `scdiva.settings.seed`. Global random state is never touched.""",
}


def with_shared_docs(function: F) -> F:
    """Replace each line ``%(name)s`` of a docstring by the shared description of that parameter.

    Parameters
    ----------
    function
        The function; its docstring is changed in place.

    Returns
    -------
    Callable
        The same function.

    Raises
    ------
    KeyError
        If the docstring names a description that does not exist.
    """
    text = inspect.getdoc(function)
    if text is not None:
        for line in text.splitlines():
            if line.startswith("%("):
                text = text.replace(line, _SHARED[line.removeprefix("%(").removesuffix(")s")])
        function.__doc__ = text
    return function
