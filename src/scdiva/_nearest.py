"""What somebody who misspelt a name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


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
    as_written = [one for form in near for one in sorted(forms[form], key=lambda one: _unlike(one, str(name)))]
    return as_written[:n]


def _unlike(one: str, other: str) -> float:
    return -difflib.SequenceMatcher(None, one, other).ratio()


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
