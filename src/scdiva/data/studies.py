"""Studies of a corpus: which ones validate, and how often the others are seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from scdiva._nearest import or_nearest


def held_out_studies(names: Sequence[str], asked: float | Sequence[str] | None, seed: int) -> list[str]:
    """Choose the studies that validate instead of being trained on.

    Parameters
    ----------
    names
        All studies.
    asked
        Names, or a share of the studies (not of the cells) between 0 and 1: so many, rounded, but one at least, are
        drawn. None: no study.
    seed
        Of the draw; with the names, in whatever order, it settles it.

    Returns
    -------
    Their names, in the order of `names`.

    Raises
    ------
    ValueError
        If a name is unknown or given twice, the share is not between 0 and 1, or no study would be left to train on.
    """
    if asked is None:
        return []
    if isinstance(asked, str):
        asked = [asked]
    if isinstance(asked, int | float):
        if isinstance(asked, bool) or not 0 < asked < 1:
            raise ValueError(f"validation_studies must be names, or a share between 0 and 1; got {asked!r}.")
        n = max(1, round(asked * len(names)))
        # The second number keeps this draw apart from those of the order.
        drawn = np.random.default_rng([seed, len(names), 0, 3]).permutation(len(names))[:n]
        chosen = {sorted(names)[i] for i in drawn}
    else:
        chosen = set(asked)
        if len(chosen) < len(asked):
            raise ValueError("validation_studies names a study twice.")
        for name in sorted(chosen - set(names)):
            raise ValueError(f"validation_studies: there is no study {name!r}{or_nearest(name, names)}.")
    if len(chosen) == len(names):
        raise ValueError(
            f"all {len(names)} studies would validate and none be trained on; name fewer, or give more files."
        )
    return [name for name in names if name in chosen]


def study_times(weights: Mapping[str, float] | float | None, names: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    """Find how often an epoch holds each cell of each study, on average.

    Parameters
    ----------
    weights
        By name how often; studies that are not named once. Or a power p: a study of n cells then is a share of the
        epoch that goes with n ** p (1: as it is; 0: all studies equal; 0.5 between), and the epoch stays as long as the
        corpus. None: once.
    names
        The training studies.
    sizes
        int (n_studies,), cells of each.

    Returns
    -------
    float64 (n_studies,).

    Raises
    ------
    ValueError
        If a study is unknown, or a weight is not finite or not above zero.
    """
    times = np.ones(len(names))
    if weights is None:
        return times
    if isinstance(weights, Mapping):
        for name, weight in weights.items():
            if name not in names:
                raise ValueError(f"study_weights: there is no training study {name!r}{or_nearest(name, names)}.")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(
                    f"study_weights: the weight of {name!r} must be a finite number above 0, got {weight!r}. A study "
                    "that is not to be trained on is left out of the files."
                )
            times[list(names).index(name)] = weight
        return times
    if isinstance(weights, bool) or not isinstance(weights, int | float) or not 0 <= weights <= 1:
        raise ValueError(f"study_weights must be weights by name, or a power from 0 to 1; got {weights!r}.")
    cells = sizes.astype(np.float64)
    some = cells > 0
    times[some] = cells[some] ** (weights - 1)
    found: np.ndarray = times * cells.sum() / (times * cells).sum()
    return found
