"""Checks of arguments that many calls take, refused by name before any work."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence


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
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


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
        if operator.index(value) < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")


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
