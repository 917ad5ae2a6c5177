"""What docstrings say of each argument, as plain text for `--help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", flags=re.M)
_ROLE = re.compile(r":\w+:`~?(?:([^`<]+) <[^`]*>|(?:[\w.]+\.)?([\w]+))`")
_VALUES = {"None": "null", "True": "true", "False": "false"}
"""How values are written on a command line and in YAML."""
_LED_ON = re.compile(r":func:`(?:scdiva\.\w+\.)?(\w+)`")


def summary(thing: Any) -> str:
    """Give the first paragraph of a docstring.

    Parameters
    ----------
    thing
        A function or class.
    """
    return plain((inspect.getdoc(thing) or "").split("\n\n")[0])


def arguments(thing: Any, others: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, str]:
    """Say what each argument of a function, or each field of a dataclass, means.

    Parameters
    ----------
    thing
        Function or class with a numpydoc docstring; of a class those it comes from are read too.
    others
        Functions by name to which a description may lead on ("as in :func:`embed`"): what they say of the argument is
        said instead.

    Returns
    -------
    Text without markup, by name. Of several names described together each gets the common text.
    """
    said: dict[str, str] = {}
    for one in reversed(inspect.getmro(thing)) if inspect.isclass(thing) else [thing]:
        for names, text in _entries(inspect.getdoc(one) or ""):
            led_on = _LED_ON.search(text)
            function = (others or {}).get(led_on[1]) if led_on else None
            there = arguments(function, others) if function is not None and function is not thing else {}
            if len(names) == 1 and "see :func:" not in " ".join(text.lower().split()):
                there = {}  # a remark on what is described here
            said |= {name: there.get(name, plain(text)) for name in names}
    return said


def plain(text: str) -> str:
    """Take the markup out of a description, put it on one line, and write values as a command line does.

    Parameters
    ----------
    text
        reStructuredText as docstrings hold it.
    """
    text = _ROLE.sub(lambda role: (role[1] or role[2]).strip(), text)
    text = re.sub(r"\s*\[\d+\]_", "", text).replace("``", "").replace("`", "")
    for value, written in _VALUES.items():
        text = re.sub(rf"\b{value}\b", written, text)
    return " ".join(text.split())


def _entries(docstring: str) -> list[tuple[list[str], str]]:
    """Split the sections of arguments into names and description."""
    parts = _SECTION.split(docstring)
    found = []
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Parameters", "Attributes"):
            for entry in re.split(r"\n(?=\S)", body.strip("\n")):
                names, _, text = entry.partition("\n")
                found.append((re.split(r", *", names.split(" : ")[0].strip()), text))
    return found
