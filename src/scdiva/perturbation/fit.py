"""Fit a perturbation model: what predicts conditions that are left out best, and a network if one is asked for."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import BASELINES
from scdiva._rng import step_seed
from scdiva._settings import logger, settings, torch_threads_kept
from scdiva.perturbation.baselines import baselines
from scdiva.perturbation.model import EXPECTED, PerturbationModel
from scdiva.perturbation.response import expected_response
from scdiva.perturbation.screen import KINDS, Examples, Kind, Screen, Similarities, similarities_of
from scdiva.train.adaptation import AdaptationCells
from scdiva.train.config import PerturbationConfig
from scdiva.train.loop import Limits

FOLDS = 5
LEAST_GAIN = 0.005
"""Correlation that a baseline has to be better by, if it is to be used."""
METHODS = (*BASELINES, EXPECTED)
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "residual": ("auto", EXPECTED, *BASELINES, None),
    "loss": ("wmse", "de", "mse"),
    "strategy": ("auto", "none", "head", "lora", "full"),
}
_LEAST = {"max_epochs": 1, "patience": 1, "batch_size": 2}


@dataclass(frozen=True)
class FitOptions:
    """How a model is fitted, as for :func:`scdiva.tl.fit_perturbation`.

    Raises
    ------
    ValueError, TypeError
        If something is out of range.
    """

    residual: str | None
    loss: Literal["wmse", "de", "mse"]
    strategy: Literal["auto", "none", "head", "lora", "full"]
    max_epochs: int
    patience: int
    minutes: float | None
    batch_size: int
    learning_rate: float

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {listed}; got {getattr(self, name)!r}.")
        if self.residual is None and self.strategy == "none":
            raise ValueError(
                'residual=None leaves the prediction to the network, and strategy="none" does without one.'
            )
        if self.minutes is not None and not 0 < self.minutes < np.inf:
            raise ValueError(f"minutes must be a number above 0, or None for no limit; got {self.minutes!r}.")
        if not 0 < self.learning_rate < np.inf:
            raise ValueError(f"learning_rate must be a number above 0, got {self.learning_rate!r}.")
        for name, least in _LEAST.items():
            if operator.index(getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")

    def strategy_on(self, device: str) -> Literal["none", "head", "lora", "full"]:
        """Say what is trained: a network only if it is asked for, by a strategy or to predict alone."""
        if self.strategy != "auto":
            return self.strategy
        return "none" if self.residual is not None else "head" if device == "cpu" else "lora"


def fit(
    opened: PerturbationModel, controls: AdaptationCells, options: FitOptions, seed: int, device: str
) -> PerturbationModel:
    """Choose what to predict from by predicting conditions that are left out; train a network on what that leaves.

    Parameters
    ----------
    opened, controls
        The model before it is fitted, which stays as it is, and the control cells, `batch` the numbers of their groups.
    options
        How.
    seed
        Of folds and network.
    device
        Torch device of the network.
    """
    begun, screen, strategy = time.monotonic(), opened.screen, options.strategy_on(device)
    logger.info(
        "fitting %d conditions of %d groups, %d genes, strategy %r; %d labels are no genes of the vocabulary",
        len(screen.conditions), len(screen.groups), len(screen.genes), strategy, len(opened.labels),
    )  # fmt: skip
    with torch_threads_kept(1 if device == "cpu" else None):  # products too small to share
        similarities = similarities_of(opened.model, screen)
        scores = scored(screen, predict_left_out(screen, similarities, seed))
        if options.residual == "auto":
            base = best_base(scores)
        else:
            base = dict.fromkeys((*KINDS, "measured"), options.residual or "no_change")
        fitted = replace(opened, base=base)
        notes: dict[str, Any] = {"network": "not asked for"}
        if strategy != "none":
            from scdiva.perturbation.training import train_network

            config = PerturbationConfig(
                batch_size=options.batch_size, learning_rate=options.learning_rate, seed=seed, loss=options.loss
            )
            seconds = np.inf if options.minutes is None else 60 * options.minutes
            limits = Limits(options.max_epochs, options.patience, seconds)
            examples = left_over(screen, list(predict_left_out(screen, similarities, seed)), base)
            alone = options.residual is None  # then the network is what was asked for, however good it is
            model, head, notes = train_network(
                opened.model, screen, controls, examples, strategy, config, limits, alone=alone, device=device,
                progress=settings.progress,
            )  # fmt: skip
            fitted = replace(fitted, model=model, head=head)
    notes |= {"validation": summary(scores), "strategy": strategy, "seed": str(seed)}
    seconds = opened.notes["seconds"] + time.monotonic() - begun
    return replace(fitted, notes={**notes, **opened.notes, "seconds": seconds})


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
    the single ones are predicted. `"combination"`: a fifth of the combinations. `"group"`: all perturbations of one
    group of cells, of at most five; predicted are those that other groups had too.

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
            elsewhere = (same & kept).any(axis=1) & ~kept
            if elsewhere.any():
                yield np.flatnonzero(kept), np.flatnonzero(elsewhere)
        return
    units = sorted({parts for parts in c.parts if (len(parts) > 1) == (kind == "combination")})
    if len(units) < 2:
        return
    for chosen in np.array_split(rng.permutation(len(units)), min(FOLDS, len(units))):
        out = {units[i] for i in chosen}
        predicted = np.array([parts in out for parts in c.parts])
        gone = predicted
        if kind == "single":
            gone = c.holding([parts[0] for parts in out]).sum(axis=1) > 0
        if not gone.all():
            yield np.flatnonzero(~gone), np.flatnonzero(predicted)


def predict_left_out(screen: Screen, similarities: Similarities, seed: int) -> Iterator[LeftOut]:
    """Predict every condition that can be left out, by every method, one fold at a time.

    Parameters
    ----------
    screen, similarities
        What was measured, and the similarities that the model gives.
    seed
        Of the folds.
    """
    for kind in KINDS:
        for fold, (kept, out) in enumerate(folds(screen, kind, seed)):
            known, targets = screen.only(kept), screen.conditions.only(out)
            simple = baselines(known, targets)
            made = [*(simple[name] for name in BASELINES), expected_response(known, targets, similarities)[0]]
            for i, row in enumerate(out):
                yield LeftOut(kind, fold, int(row), np.stack([part[i] for part in made]).astype(np.float32))


class Scores(NamedTuple):
    """Scores of conditions that were left out.

    Attributes
    ----------
    kind
        What was left out with each.
    mse, pearson
        `(n, n_methods)`, mean squared error and Pearson correlation of the change; NaN where a method is not defined,
        and a correlation of 0 where a prediction is the same for all genes.
    """

    kind: NDArray[np.object_]
    mse: NDArray[np.float64]
    pearson: NDArray[np.float64]


def scored(screen: Screen, left_out: Iterable[LeftOut]) -> Scores:
    """Score predictions of conditions that were left out.

    Parameters
    ----------
    screen
        What was measured.
    left_out
        Predictions; each is needed once.
    """
    kind, mse, pearson = [], [np.empty((0, len(METHODS)))], [np.empty((0, len(METHODS)))]
    for one in left_out:
        truth, predicted = screen.delta[one.row].astype(np.float64), one.predicted.astype(np.float64)
        error = np.square(predicted - truth).mean(axis=1)
        p, t = predicted - predicted.mean(axis=1, keepdims=True), truth - truth.mean()
        size = np.sqrt(np.square(p).sum(axis=1) * np.square(t).sum())
        kind.append(one.kind)
        mse.append(error[None])
        pearson.append(np.where(np.isnan(error), np.nan, (p @ t) / np.maximum(size, 1e-12))[None])
    return Scores(np.array(kind, dtype=object), np.vstack(mse), np.vstack(pearson))


def best_base(scores: Scores) -> dict[Kind, str]:
    """Choose for each kind what the network's part is added to.

    The expected response, unless a baseline correlates clearly better with what was measured: by
    :data:`LEAST_GAIN` and the standard error of the difference. (By squared error no change at all wins where most of a
    change is noise.)

    Parameters
    ----------
    scores
        Of conditions that were left out.
    """
    chosen: dict[Kind, str] = {"measured": EXPECTED}
    for kind in KINDS:
        pearson = scores.pearson[scores.kind == kind]
        best, name = LEAST_GAIN, EXPECTED
        for column, method in enumerate(METHODS[:-1]):
            gain = pearson[:, column] - pearson[:, -1]
            if len(gain) < 3 or np.isnan(gain).any():
                continue
            over = float(gain.mean() - gain.std(ddof=1) / len(gain) ** 0.5)
            if over > best:
                best, name = over, method
        chosen[kind] = name
    return chosen


def summary(scores: Scores) -> dict[str, NDArray[Any]]:
    """Mean scores by kind and method, as columns of equal length.

    Parameters
    ----------
    scores
        Of conditions that were left out.
    """
    rows = []
    for kind in KINDS:
        for column, method in enumerate(METHODS):
            there = (scores.kind == kind) & ~np.isnan(scores.mse[:, column])
            if there.any():
                means = (part[there, column].mean() for part in (scores.pearson, scores.mse))
                rows.append((method, kind, *means, int(there.sum())))
    columns = zip(*rows, strict=True) if rows else ((),) * 5
    types = {"method": object, "kind": object, "pearson_delta": np.float64, "mse": np.float64, "n": np.int64}
    return {name: np.array(part, dtype=types[name]) for name, part in zip(types, columns, strict=True)}


def left_over(screen: Screen, left_out: list[LeftOut], base: dict[Kind, str]) -> Examples:
    """Give what the base, fitted without a condition, leaves of it; one fold of each kind is held out."""
    c = screen.conditions
    last: dict[Kind, int] = {}
    for one in left_out:
        last[one.kind] = max(last.get(one.kind, 0), one.fold)
    held = sorted({one.row for one in left_out if one.fold == last[one.kind]})
    new_parts = {c.parts[one.row][0] for one in left_out if one.kind == "single" and one.fold == last["single"]}
    near = c.holding(sorted(new_parts)).sum(axis=1) > 0
    rows, residuals, looked = [], [], []
    for one in left_out:
        looking = one.fold == last[one.kind]
        left = screen.delta[one.row] - one.predicted[METHODS.index(base[one.kind])]
        if np.isnan(left).any() or (not looking and (one.row in held or near[one.row])):
            continue
        rows.append(one.row)
        residuals.append(left)
        looked.append(looking)
    n_genes = len(screen.genes)
    return Examples(
        np.array(rows, dtype=np.int64),
        np.array(residuals, dtype=np.float32).reshape(len(rows), n_genes),
        np.array(looked, dtype=bool),
    )
