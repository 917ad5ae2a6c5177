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
    near = difflib.get_close_matches(str(name), [str(one) for one in known if one is not None], n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


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
