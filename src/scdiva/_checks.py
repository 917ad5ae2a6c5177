"""Checks of arguments, names, extras and output paths before a call computes anything; warnings."""

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
import unicodedata
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = str(Path(__file__).parent), contextlib.__file__
_argument: ContextVar[str] = ContextVar("argument", default="adata")
"""The argument that holds the cells; messages are written for `adata`."""
_FIELD_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
}
"""Accepted types of a dataclass field, and their description."""
_DESCRIPTIONS = {
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
"""Annotations that values are checked against, and their description."""
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_COLUMN = "the name of one column"
_TEXTS = {
    "groupby": _COLUMN,
    "gene_ids": _COLUMN,
    "gene_symbols": _COLUMN,
    "condition": "the name of one predicted condition",
}
"""Meaning of text arguments; every argument that ends in ``_key`` is a column."""
_OF_MATCH_GENES = ("gene_ids", "species", "duplicates")
"""Arguments of `pp.match_genes` that hold for the calls after it."""


# --- arguments --------------------------------------------------------------------------------------------------------
def check_arguments(function: F) -> F:
    """Decorate a function to raise TypeError for arguments that do not match their annotation.

    Parameters annotated with text, number, bool, path, or a union of these and None are checked. Numbers are accepted
    as text, because the groups of a column may be numbers. The annotations must be strings
    (``from __future__ import annotations``).
    """
    signature = inspect.signature(function)
    expected: dict[str, list[str]] = {}
    for name, parameter in signature.parameters.items():
        parts = str(parameter.annotation).split(" | ")
        if _DESCRIPTIONS.keys() >= set(parts):
            kinds = list(dict.fromkeys(_DESCRIPTIONS[part] for part in parts))
            if "text" in kinds and {"a path", "one or several names"} & set(kinds):
                kinds.remove("text")  # included in these, without numbers
            expected[name] = kinds
    positional = [name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            if settled := [name for name in unknown if name in _OF_MATCH_GENES and "adata" in signature.parameters]:
                raise TypeError(
                    f"{_public_name(function)}() has no argument {settled[0]!r}: pass it to "
                    f"sd.pp.match_genes(adata, {settled[0]}=...) first."
                ) from None
            near = or_nearest(unknown[0], signature.parameters) if unknown else ""
            raise TypeError(f"{_public_name(function)}() {error}{near}") from None
        for name, value in values.items():
            if name in expected and not any(_matches(value, kind) for kind in expected[name]):
                message = _wrong_type(name, value, expected[name])
                if len(getattr(value, "shape", ())) > 1:  # such as two datasets instead of one and a name
                    message += f" Call {_public_name(function)}({', '.join(positional)})."
                raise TypeError(message)
        return function(*args, **kwargs)

    return cast("F", checked)


def _public_name(function: Callable[..., Any]) -> str:
    """Public name of a function, such as `scdiva.tl.embed`."""
    home, name = function.__module__.split(".")[1], function.__name__
    for part in (home, "pp", "tl"):
        if name in getattr(sys.modules.get(f"scdiva.{part}"), "__all__", ()):
            return f"scdiva.{part}.{name}"
    return f"scdiva.{home}.{name}"


def _matches(value: Any, kind: str) -> bool:
    """Whether a value matches one of the `_DESCRIPTIONS`; numpy scalars count as Python's."""
    if kind == "None" or value is None:
        return kind == "None" and value is None
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    scalar = not getattr(value, "shape", ())
    if kind == "text":
        return isinstance(value, str | os.PathLike | numbers.Number) or (hasattr(value, "dtype") and scalar)
    if kind == "a path":
        return isinstance(value, str | os.PathLike)
    if kind == "one or several names":
        names = value if isinstance(value, Collection) else ()  # a generator can be read only once
        return isinstance(value, Iterable | os.PathLike) and all(isinstance(name, Hashable) for name in names)
    if kind == "True or False":
        return is_bool and scalar
    if is_bool or not scalar or isinstance(value, str):
        return False
    return hasattr(value, "__index__" if kind == "a whole number" else "__float__")


def _wrong_type(name: str, value: Any, kinds: Sequence[str]) -> str:
    """Error message for an argument of another type, with the value to pass where it is clear."""
    if kind := _TEXTS.get(name, _COLUMN if name.endswith("_key") else ""):
        kinds = [f"{kind}, or of several" if kinds[0] == "one or several names" else kind, *kinds[1:]]
    names = [getattr(value, "name", None)] if hasattr(value, "dtype") else value
    suggested = names[0] if isinstance(names, list | tuple) and len(names) == 1 else None
    if isinstance(value, float) and "a whole number" in kinds and value.is_integer():
        suggested = int(value)
    suggested = "figure.png" if name == "save" else suggested
    remedy = f" Pass {name}={suggested!r}." if isinstance(suggested, str | int) else ""
    shape = getattr(value, "shape", ())
    shown = f"{type(value).__name__} of {' × '.join(map(str, shape))}" if shape else f"{value!r:.80}"
    return f"{name} must be {' or '.join(kinds)}; got {shown}.{remedy}"


def check_choices(**arguments: tuple[object, Sequence[object]]) -> None:
    """Raise ValueError for an argument that is not among its choices: `name=(value, choices)`."""
    for name, (value, choices) in arguments.items():
        if getattr(value, "shape", ()) or value not in choices:  # arrays compare element by element
            near = or_nearest(value, map(str, choices)) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r:.80}{near}.")


def check_least(**arguments: tuple[int, int]) -> None:
    """Raise ValueError for an integer below its minimum, TypeError for other types: `name=(value, minimum)`."""
    for name, (value, least) in arguments.items():
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be a whole number; got {value!r:.80}.") from None
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r:.80}.")


def check_positive(**arguments: float | None) -> None:
    """Raise ValueError for a number that is not positive and finite; None is accepted."""
    for name, value in arguments.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


_type_hints = functools.cache(get_type_hints)


def check_fields(config: Any, zero: Collection[str], maxima: Mapping[str, float]) -> None:
    """Check types and ranges of the fields of a dataclass; integers become floats where the field is a float.

    Parameters
    ----------
    config
        The dataclass.
    zero
        Names of numbers that may be 0; all others must be positive.
    maxima
        Maximum of a number, by name.

    Raises
    ------
    TypeError, ValueError
        If a field is of another type, or out of range.
    """
    for name, hint in _type_hints(config.__class__).items():
        value, options = getattr(config, name), get_args(hint)
        expected = options[0] if options else hint  # of `int | None`
        if get_origin(hint) is Literal:
            check_choices(**{name: (value, options)})
        elif value is not None or not options:
            types, description = _FIELD_TYPES[expected]
            if not isinstance(value, types) or isinstance(value, bool) is not (expected is bool):
                raise TypeError(f"{name} must be {description}; got {value!r:.80}.")
            if expected is int:
                check_least(**{name: (value, int(name not in zero))})
            elif expected is float and not (0 < value <= sys.float_info.max or (value == 0 and name in zero)):
                raise ValueError(f"{name} must be finite and positive{' or 0' * (name in zero)}; got {value!r:.80}.")
            if value > maxima.get(name, math.inf):
                raise ValueError(f"{name} must be at most {maxima[name]:,}; got {value!r:.80}.")
            object.__setattr__(config, name, expected(value))


# --- names ------------------------------------------------------------------------------------------------------------
def nearest(name: str, candidates: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Up to `n` known names most similar to a misspelt one (similarity at least `cutoff`), ignoring case."""
    spellings: dict[str, list[str]] = {}
    # anndata 0.13 has a layer None
    for candidate in dict.fromkeys(str(candidate) for candidate in candidates if candidate is not None):
        spellings.setdefault(candidate.lower(), []).append(candidate)
    similar = difflib.get_close_matches(str(name).lower(), list(spellings), n=n, cutoff=cutoff)

    def similarity(candidate: str) -> float:
        return difflib.SequenceMatcher(None, candidate, str(name)).ratio()

    return [candidate for lower in similar for candidate in sorted(spellings[lower], key=similarity, reverse=True)][:n]


def or_nearest(name: str, candidates: Iterable[str]) -> str:
    """Suggest the most similar known name, as the end of a sentence; "" if none is similar."""
    near = nearest(name, candidates, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def no_column(where: str, key: str, columns: Iterable[str]) -> KeyError:
    """Error for a missing column of a data frame, such as ``where="adata.obs"``."""
    columns = list(columns)
    return KeyError(f"{where} has no column {key!r}{or_nearest(key, columns)}; it has {', '.join(map(repr, columns))}.")


def no_entry(where: str, key: str, keys: Iterable[str], call: str) -> KeyError:
    """Error for a missing result, such as ``where="adata.obsm"``, and the call that computes it."""
    existing = ", ".join(repr(one) for one in keys if one is not None)  # anndata 0.13 has a layer None
    what = f"it has {existing}" if existing else "it is empty"
    return KeyError(f"{where} has no {key!r}{or_nearest(key, keys)}, {what}: call {call} first.")


def refuse_absent(
    requested: Sequence[str], existing: Collection[str], lack: str, mend: str = "", kind: type[Exception] = KeyError
) -> None:
    """Raise an error with the number of unknown names, the first one, and the most similar known one.

    Parameters
    ----------
    requested, existing
        Requested and existing names.
    lack
        Predicate of the sentence, such as ``"genes are not in adata.var_names"``.
    mend
        End of the sentence.
    kind
        Class of the error.
    """
    if absent := [name for name in requested if name not in existing]:
        near = or_nearest(str(absent[0]), existing)
        raise kind(f"{len(absent)} of {len(requested)} {lack}, the first is {absent[0]!r}{near}{mend}.")


def refuse_unknown(keys: Iterable[Any], existing: Iterable[str], what: str) -> None:
    """Raise ValueError if `what` has no such keys, with the most similar known one of each."""
    existing = list(existing)
    if unknown := sorted({str(key) for key in keys} - set(existing)):
        raise ValueError(f"{what} has no {', '.join(f'{key}{or_nearest(key, existing)}' for key in unknown)}.")


# --- environment ------------------------------------------------------------------------------------------------------
def from_extra(name: str, extra: str, what: str) -> ModuleType:
    """Import an optional package, before a call computes anything.

    Parameters
    ----------
    name
        Module to import.
    extra
        Extra of scdiva that installs it.
    what
        Beginning of the error, such as ``"Leiden modules need igraph"``.

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
    """Raise the system's OSError if the folder of an output can't be written to or created; nothing is created."""
    folder = out.absolute().parent
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # test by writing, because permissions do not show that a disk is read-only
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        why = "is not a folder" if not folder.is_dir() else "can't be written into"
        raise OSError(
            error.errno, f"{os.strerror(error.errno or 0)}: {str(folder)!r} {why}. Pass another path than", str(out)
        ) from error


# --- messages ---------------------------------------------------------------------------------------------------------
def printable(text: str) -> str:
    r"""Escape terminal control characters as in JSON (``\u001b``), except newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(one):04x}"
        if (unicodedata.category(one) == "Cc" and one not in "\n\t") or one in _BIDIRECTIONAL
        else one
        for one in text
    )


@contextlib.contextmanager
def speaking_of(argument: str) -> Iterator[None]:
    """Name another argument than `adata`, such as `"reference"`, in errors and warnings of a block."""
    outer = _argument.set(argument)
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        error.args = tuple(_about_argument(one) if isinstance(one, str) else one for one in error.args)
        raise
    finally:
        _argument.reset(outer)


def is_second_argument() -> bool:
    """Whether the cells being read are another argument than `adata` (:func:`speaking_of`)."""
    return _argument.get() != "adata"


def _about_argument(message: str) -> str:
    """Replace `adata` in a message by the argument of :func:`speaking_of`."""
    argument = _argument.get()
    if argument == "adata":
        return message
    # layer= and use_raw= apply to both arguments
    message = message.replace(
        "with layer=... or use_raw=True",
        "in adata.X: adata.X = adata.layers['counts'], or adata = adata.raw.to_adata()",
    )
    message = re.sub(r"\badata\b", argument, message)
    return message if argument in message.split(". ")[0] else f"{argument}: {message}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the line that called the package, for the argument of :func:`speaking_of`."""
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(_about_argument(message)), category, stacklevel=level)
