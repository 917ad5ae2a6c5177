"""What calls ask of what they are given, before any work: arguments, names, extras, outputs; and how they warn."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import math
import numbers
import operator
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from scdiva._files import printable

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = str(Path(__file__).parent), contextlib.__file__
_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
}
"""What a field of each type may hold, and how that is called."""
_argument: ContextVar[str] = ContextVar("argument", default="adata")
"""The argument that holds the cells being read; messages are written for `adata`."""

_ANNOTATED = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "PathLike[str]": "a path",
    "os.PathLike[str]": "a path",
    "Path": "a path",
    "Sequence[str]": "one or several names",
    "None": "None",
}
"""Annotations that values can be checked against, and how the kind of value is called."""
_COLUMN = "the name of one column"
_NAMES = {
    "groupby": _COLUMN,
    "gene_ids": _COLUMN,
    "gene_symbols": _COLUMN,
    "condition": "the name of one predicted condition",
}
"""What text is that an argument takes; one that ends in ``_key`` names a column."""


_type_hints = functools.cache(get_type_hints)


def check_arguments(function: F) -> F:
    """Make a function refuse arguments of another type than annotated, by the argument's name, before it begins.

    Checked are parameters annotated as text, number, truth value, path, or a union of these and None. A number may
    stand where text is expected: the groups of a column may be numbers.

    Parameters
    ----------
    function
        The function, in a module whose annotations are text (``from __future__ import annotations``).

    Returns
    -------
    Callable
        The function, which raises TypeError for such an argument.
    """
    signature = inspect.signature(function)
    annotated = {name: str(each.annotation).split(" | ") for name, each in signature.parameters.items()}
    kinds = {
        name: list(dict.fromkeys(_ANNOTATED[part] for part in parts))
        for name, parts in annotated.items()
        if _ANNOTATED.keys() >= set(parts)
    }
    for several in kinds.values():
        if "text" in several and {"a path", "one or several names"} & set(several):
            several.remove("text")  # these take it too, and no number

    first = [name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            near = or_nearest(unknown[0], signature.parameters) if unknown else ""
            raise TypeError(f"{_public_name(function)}() {error}{near}") from None
        for name in given:
            if name in kinds and not any(_is_kind(given[name], kind) for kind in kinds[name]):
                # such as two datasets where one and a name are expected
                order = (
                    f" Call {_public_name(function)}({', '.join(first)})."
                    if len(getattr(given[name], "shape", ())) > 1
                    else ""
                )
                raise TypeError(_wrong_kind(name, given[name], kinds[name]) + order)
        return function(*args, **kwargs)

    return cast("F", checked)


def _public_name(function: Callable[..., Any]) -> str:
    """Return the name that a function is called by, such as `scdiva.tl.embed`, wherever it is defined."""
    home, name = function.__module__.split(".")[1], function.__name__
    for part in (home, "pp", "tl"):
        if name in getattr(sys.modules.get(f"scdiva.{part}"), "__all__", ()):
            return f"scdiva.{part}.{name}"
    return f"scdiva.{home}.{name}"


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a kind of `_ANNOTATED`; numpy's numbers are as good as Python's."""
    if kind == "None" or value is None:
        return kind == "None" and value is None
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    single = not getattr(value, "shape", ())
    if kind == "text":
        return isinstance(value, str | os.PathLike | numbers.Number) or (hasattr(value, "dtype") and single)
    if kind == "a path":
        return isinstance(value, str | os.PathLike)
    if kind == "one or several names":
        each = value if isinstance(value, Collection) else ()  # a generator gives its names only once
        return isinstance(value, Iterable | os.PathLike) and all(isinstance(one, Hashable) for one in each)
    if kind == "True or False":
        return truth and single
    if truth or not single or isinstance(value, str):
        return False
    return hasattr(value, "__index__" if kind == "a whole number" else "__float__")


def _wrong_kind(name: str, value: Any, kinds: Sequence[str]) -> str:
    """Say what an argument must be, and what to pass instead where that can be told."""
    if kind := _NAMES.get(name, _COLUMN if name.endswith("_key") else ""):
        kinds = [f"{kind}, or of several" if kinds[0] == "one or several names" else kind, *kinds[1:]]
    names = [getattr(value, "name", None)] if hasattr(value, "dtype") else value
    only = names[0] if isinstance(names, list | tuple) and len(names) == 1 else None
    if isinstance(value, float) and "a whole number" in kinds and value.is_integer():
        only = int(value)
    only = "figure.png" if name == "save" else only
    mend = f" Pass {name}={only!r}." if isinstance(only, str | int) else ""
    shown = f"{value!r:.80}"
    if shape := getattr(value, "shape", ()):
        shown = f"{type(value).__name__} of {' × '.join(map(str, shape))}"
    return f"{name} must be {' or '.join(kinds)}; got {shown}.{mend}"


def check_choices(**given: tuple[object, Sequence[object]]) -> None:
    """Refuse values that are none of their choices.

    Parameters
    ----------
    **given
        By the argument's name, its value and what it may be.

    Raises
    ------
    ValueError
        If one is none of these.
    """
    for name, (value, choices) in given.items():
        if getattr(value, "shape", ()) or value not in choices:  # an array is equal to a choice element by element
            near = or_nearest(value, map(str, choices)) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r:.80}{near}.")


def check_fields(config: Any, zero: Collection[str], most: Mapping[str, float]) -> None:
    """Refuse fields of a dataclass that are not of their type, and numbers that are out of range.

    Parameters
    ----------
    config
        The dataclass. A whole number, as JSON may have it, becomes a float where the field is one.
    zero
        Names of numbers that may be 0; all others are above it.
    most
        The largest that some may be, by name.

    Raises
    ------
    TypeError, ValueError
        If a field is of another type, or out of range.
    """
    for name, hint in _type_hints(config.__class__).items():
        value, kinds = getattr(config, name), get_args(hint)
        kind = kinds[0] if kinds else hint  # of `int | None`
        if get_origin(hint) is Literal:
            check_choices(**{name: (value, kinds)})
        elif value is not None or not kinds:
            types, which = _KINDS[kind]
            if not isinstance(value, types) or isinstance(value, bool) is not (kind is bool):
                raise TypeError(f"{name} must be {which}; got {value!r:.80}.")
            if kind is int:
                check_least(**{name: (value, int(name not in zero))})
            elif kind is float and not (0 < value <= sys.float_info.max or (value == 0 and name in zero)):
                raise ValueError(f"{name} must be finite and positive{' or 0' * (name in zero)}; got {value!r:.80}.")
            if value > most.get(name, math.inf):
                raise ValueError(f"{name} must be at most {most[name]:,}; got {value!r:.80}.")
            object.__setattr__(config, name, kind(value))


def check_least(**given: tuple[int, int]) -> None:
    """Refuse numbers that are too small.

    Parameters
    ----------
    **given
        By the argument's name, its value and the least that it may be.

    Raises
    ------
    ValueError
        If one is below that.
    TypeError
        If one is no whole number.
    """
    for name, (value, least) in given.items():
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be a whole number; got {value!r:.80}.") from None
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r:.80}.")


def check_positive(**given: float | None) -> None:
    """Refuse numbers that are not above 0, or not finite.

    Parameters
    ----------
    **given
        Values by the argument's name; None stands for no number, and passes.

    Raises
    ------
    ValueError
        If one is out of range.
    """
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def or_nearest(name: str, known: Iterable[str]) -> str:
    """Give the known name that is most like a misspelt one, as the end of a sentence.

    Parameters
    ----------
    name
        What was written.
    known
        What might have been meant.

    Returns
    -------
    ``" (did you mean '...'?)"``, or nothing if no name is like it.
    """
    near = nearest(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def nearest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Give the known names that are most like a misspelt one, each once; capitals do not count.

    Parameters
    ----------
    name
        What was written.
    known
        What might have been meant, in any order and any number of times.
    n
        Names given, at most.
    cutoff
        How similar they have to be, 0 to 1.
    """
    forms: dict[str, list[str]] = {}
    for one in dict.fromkeys(str(one) for one in known if one is not None):  # anndata 0.13 has a layer None
        forms.setdefault(one.lower(), []).append(one)
    near = difflib.get_close_matches(str(name).lower(), list(forms), n=n, cutoff=cutoff)
    similarity = {one: difflib.SequenceMatcher(None, one, str(name)).ratio() for form in near for one in forms[form]}
    return [one for form in near for one in sorted(forms[form], key=lambda one: -similarity[one])][:n]


def no_column(where: str, key: str, columns: Iterable[str]) -> KeyError:
    """Give the error for a column of a data frame that is not there.

    Parameters
    ----------
    where
        The frame, such as ``"adata.obs"``.
    key
        What was asked for.
    columns
        Those that there are.
    """
    columns = list(columns)
    return KeyError(f"{where} has no column {key!r}{or_nearest(key, columns)}; it has {', '.join(map(repr, columns))}.")


def no_entry(where: str, key: str, known: Iterable[str], call: str) -> KeyError:
    """Give the error for what a call would have written, and did not.

    Parameters
    ----------
    where, key
        Where it would be, such as ``"adata.obsm"``, and under which name.
    known
        Names of what there is.
    call
        The call that writes it.
    """
    there = ", ".join(repr(one) for one in known if one is not None) or "nothing"  # anndata 0.13 has a layer None
    return KeyError(f"{where} has no {key!r}{or_nearest(key, known)}, it has {there}: call {call} first.")


def refuse_absent(
    wanted: Sequence[str], known: Collection[str], lack: str, mend: str = "", kind: type[Exception] = KeyError
) -> None:
    """Raise an error that counts the names that are not known, and says the first and the one most like it.

    Parameters
    ----------
    wanted, known
        The names, and those that there are.
    lack
        What they are and lack, such as ``"genes are not in adata.var_names"``.
    mend
        What ends the sentence.
    kind
        Of the error.

    Raises
    ------
    KeyError
        Or of that kind, if there is an unknown one.
    """
    if absent := [name for name in wanted if name not in known]:
        near = or_nearest(str(absent[0]), known)
        raise kind(f"{len(absent)} of {len(wanted)} {lack}, the first is {absent[0]!r}{near}{mend}.")


def refuse_unknown(given: Iterable[Any], known: Iterable[str], what: str) -> None:
    """Raise an error if a key is not known, with the nearest one that is.

    Parameters
    ----------
    given
        The keys.
    known
        Those that there are.
    what
        What they are keys of.

    Raises
    ------
    ValueError
        If there is an unknown one.
    """
    known = list(known)
    unknown = sorted({str(key) for key in given} - set(known))
    if unknown:
        said = ", ".join(f"{key}{or_nearest(key, known)}" for key in unknown)
        raise ValueError(f"{what} has no {said}.")


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


def refuse_unwritable(out: Path) -> None:
    """Refuse a path in a folder that can't be written into, or can't be made.

    Parameters
    ----------
    out
        The file or folder to be. Nothing is left behind.

    Raises
    ------
    OSError
        With the kind and number of the system's own error, and the folder that is in the way.
    """
    folder = out.absolute().parent
    while not os.path.lexists(folder):  # folders above are made by whoever writes
        folder = folder.parent
    try:
        # tried, not asked for: rights alone don't know of read-only disks, nor of what stands where a folder should
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        why = "is no folder" if not folder.is_dir() else "can't be written into"
        raise OSError(
            error.errno, f"{os.strerror(error.errno or 0)}: {str(folder)!r} {why}. Pass another path than", str(out)
        ) from error


@contextlib.contextmanager
def speaking_of(argument: str) -> Iterator[None]:
    """Name another argument than `adata` in the errors and warnings of a block, and in the calls they advise.

    Parameters
    ----------
    argument
        The argument of the public call that holds the cells, such as `"reference"`.
    """
    outer = _argument.set(argument)
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        error.args = tuple(_about_argument(one) if isinstance(one, str) else one for one in error.args)
        raise
    finally:
        _argument.reset(outer)


def is_second_argument() -> bool:
    """Tell whether the cells being read are those of another argument than `adata` (:func:`speaking_of`)."""
    return _argument.get() != "adata"


def _about_argument(message: str) -> str:
    """Name the argument that is read in a message written for `adata`."""
    argument = _argument.get()
    if argument == "adata":
        return message
    # layer= and use_raw= are those of both arguments: what is at fault is mended itself
    message = message.replace(
        "with layer=... or use_raw=True",
        "in adata.X: adata.X = adata.layers['counts'], or adata = adata.raw.to_adata()",
    )
    message = re.sub(r"\badata\b", argument, message)
    return message if argument in message.split(". ")[0] else f"{argument}: {message}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning of the line that called the package. Python shows a text there once.

    Parameters
    ----------
    message
        The text; within :func:`speaking_of` it names the argument of that block.
    category
        Its kind.
    """
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(_about_argument(message)), category, stacklevel=level)
