"""Which simple prediction of a response is best, found by predicting conditions that were left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import BASELINES
from scdiva._rng import step_seed
from scdiva.perturbation.baselines import baselines
from scdiva.perturbation.model import EXPECTED
from scdiva.perturbation.response import Similarities, expected_response
from scdiva.perturbation.screen import KINDS, Kind, Screen

FOLDS = 5
LEAST_GAIN = 0.005
"""Correlation that a baseline has to be better by, if it is to be used."""
METHODS = (*BASELINES, EXPECTED)


class LeftOut(NamedTuple):
    """A condition predicted from others.

    Attributes
    ----------
    kind, fold, row
        What was left out, in which turn, and the number of the condition.
    predicted
        `(n_methods, n_genes)`, the change by each of `METHODS`; NaN where one is not defined.
    """

    kind: Kind
    fold: int
    row: int
    predicted: NDArray[np.float32]


def folds(screen: Screen, kind: Kind, seed: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Leave conditions out as predictions of a kind do: numbers of those kept, and of those left out.

    `"single"`: a fifth of the genes and labels that were perturbed alone, with every combination that holds one; only
    the single ones are predicted. `"combination"`: a fifth of the combinations. `"group"`: what was done to one group
    of cells, of at most five; predicted is what was done to others too.

    Parameters
    ----------
    screen
        What was measured.
    kind
        What to leave out.
    seed
        Of the choice.
    """
    c = screen.conditions
    rng = np.random.default_rng(step_seed(seed, KINDS.index(kind), "folds"))
    if kind == "group":
        same = c.same(c)
        for group in rng.permutation(np.unique(c.group))[:FOLDS]:
            kept = c.group != group
            told = (same & kept).any(axis=1) & ~kept
            if told.any():
                yield np.flatnonzero(kept), np.flatnonzero(told)
        return
    units = sorted({parts for parts in c.parts if (len(parts) > 1) == (kind == "combination")})
    if len(units) < 2:
        return
    for chosen in np.array_split(rng.permutation(len(units)), min(FOLDS, len(units))):
        out = {units[i] for i in chosen}
        told = np.array([parts in out for parts in c.parts])
        gone = told
        if kind == "single":
            gone = c.holding([parts[0] for parts in out]).sum(axis=1) > 0
        if not gone.all():
            yield np.flatnonzero(~gone), np.flatnonzero(told)


def predict_left_out(screen: Screen, similarities: Similarities, asked: set[Kind], seed: int) -> list[LeftOut]:
    """Predict every condition that can be left out, by every method.

    Parameters
    ----------
    screen, similarities
        What was measured, and the similarities that the model gives.
    asked
        Kinds of conditions that will be predicted.
    seed
        Of the folds.
    """
    found = []
    for kind in KINDS:
        for fold, (kept, out) in enumerate(folds(screen, kind, seed) if kind in asked else ()):
            known, targets = screen.only(kept), screen.conditions.only(out)
            simple = baselines(known, targets)
            made = [*(simple[name] for name in BASELINES), expected_response(known, targets, similarities)[0]]
            for i, row in enumerate(out):
                predicted = np.stack([part[i] for part in made]).astype(np.float32)
                found.append(LeftOut(kind, fold, int(row), predicted))
    return found


def errors(screen: Screen, left_out: list[LeftOut]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Score predictions of conditions that were left out.

    Parameters
    ----------
    screen
        What was measured.
    left_out
        Predictions.

    Returns
    -------
    Mean squared error and Pearson correlation of the change, `(n, n_methods)` each; NaN where a method is not defined,
    and a correlation of 0 where a prediction is the same for all genes.
    """
    mse, pearson = (np.full((len(left_out), len(METHODS)), np.nan) for _ in range(2))
    for i, one in enumerate(left_out):
        truth = screen.delta[one.row].astype(np.float64)
        predicted = one.predicted.astype(np.float64)
        mse[i] = np.square(predicted - truth).mean(axis=1)
        p, t = predicted - predicted.mean(axis=1, keepdims=True), truth - truth.mean()
        size = np.sqrt(np.square(p).sum(axis=1) * np.square(t).sum())
        pearson[i] = np.where(np.isnan(mse[i]), np.nan, (p @ t) / np.maximum(size, 1e-12))
    return mse, pearson


def best_base(left_out: list[LeftOut], pearson: NDArray[np.float64]) -> dict[Kind, str]:
    """Choose for each kind what the network's part is added to.

    The expected response, unless a baseline correlates clearly better with what was measured: by
    :data:`LEAST_GAIN` and the standard error of the difference. (By squared error no change at all wins where most of a
    change is noise.)

    Parameters
    ----------
    left_out, pearson
        Predictions and their correlations.
    """
    chosen: dict[Kind, str] = {"measured": EXPECTED}
    for kind in KINDS:
        of = np.array([one.kind == kind for one in left_out], dtype=bool)
        best, name = LEAST_GAIN, EXPECTED
        for column, method in enumerate(METHODS[:-1]):
            gain = pearson[of, column] - pearson[of, -1]
            if len(gain) < 3 or np.isnan(gain).any():
                continue
            over = float(gain.mean() - gain.std(ddof=1) / len(gain) ** 0.5)
            if over > best:
                best, name = over, method
        chosen[kind] = name
    return chosen


def summary(left_out: list[LeftOut], mse: NDArray[np.float64], pearson: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Mean scores by kind and method, as columns of equal length.

    Parameters
    ----------
    left_out, mse, pearson
        Predictions and their scores.
    """
    rows = []
    for kind in KINDS:
        of = np.array([one.kind == kind for one in left_out], dtype=bool)
        for column, method in enumerate(METHODS):
            there = of & ~np.isnan(mse[:, column]) if len(mse) else of
            if there.any():
                rows.append((method, kind, pearson[there, column].mean(), mse[there, column].mean(), int(there.sum())))
    return {
        "method": np.array([row[0] for row in rows], dtype=object),
        "kind": np.array([row[1] for row in rows], dtype=object),
        "pearson_delta": np.array([row[2] for row in rows], dtype=np.float64),
        "mse": np.array([row[3] for row in rows], dtype=np.float64),
        "n": np.array([row[4] for row in rows], dtype=np.int64),
    }
