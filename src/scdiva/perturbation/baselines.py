"""Simple predictions of the response to a perturbation, which a model has to beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import BASELINES
from scdiva.perturbation.screen import Conditions, Screen

COMPONENTS = 10
"""Principal components of genes that the linear baseline knows a perturbed gene by."""
PENALTY = 0.1
"""Of its ridge regression."""

Matrix = NDArray[np.float64]


def baselines(screen: Screen, targets: Conditions) -> dict[str, Matrix]:
    """Predict the change of mean expression by each simple baseline.

    Where the group of a target was perturbed at all, only conditions in that group count; else those of all groups.

    - ``"no_change"``: none.
    - ``"train_mean"``: the mean over all conditions.
    - ``"matching_mean"``: the mean over the parts of the mean over conditions that hold the part (Viñas Torné et al.
      2025, "Systema"); a part that none holds counts as the train mean.
    - ``"additive"``: the sum over the parts of the part's own change, of the same dose if it was given alone at that,
      else of all its doses; in other groups if not in this one; of a part that was never perturbed alone, the mean
      change by a part alone (Ahlmann-Eltze et al. 2025).
    - ``"linear"``: ridge regression of the changes on principal components of the perturbed gene and of the gene that
      responds (Ahlmann-Eltze et al. 2025); several parts add up, and a part that is no column counts as zero.
    - ``"elsewhere"``: the mean of the same perturbation, at the same dose if there is, in other groups; NaN if there
      is none.

    Parameters
    ----------
    screen
        What was measured.
    targets
        What to predict.

    Returns
    -------
    By name, float64 `(n_targets, n_genes)`.
    """
    measured, delta = screen.conditions, screen.delta.astype(np.float64)
    usable = targets.group[:, None] == measured.group
    usable[~usable.any(axis=1)] = True
    mean = _means(usable, delta)
    single = measured.n_parts == 1
    alone = usable & single
    alone_mean = np.where(alone.any(axis=1)[:, None], _means(alone, delta), mean)

    matching, additive = np.zeros_like(mean), np.zeros_like(mean)
    for row, parts in enumerate(targets.parts):
        holds = measured.holding(parts)
        for j in range(len(parts)):
            of_part = usable[row] & holds[:, j]
            matching[row] += (delta[of_part].mean(axis=0) if of_part.any() else mean[row]) / len(parts)
            own = _first(
                alone[row] & holds[:, j] & (measured.dose == targets.dose[row]),
                alone[row] & holds[:, j],
                single & holds[:, j],
            )
            additive[row] += alone_mean[row] if own is None else delta[own].mean(axis=0)

    same = targets.same(measured)
    other_dose = targets.same_parts(measured)
    away = targets.group[:, None] != measured.group
    elsewhere = np.full_like(mean, np.nan)
    for row in range(len(targets)):
        found = _first(same[row] & away[row], other_dose[row] & away[row])
        if found is not None:
            elsewhere[row] = delta[found].mean(axis=0)
    made = (np.zeros_like(mean), mean, matching, additive, _linear(screen, targets, usable), elsewhere)
    return dict(zip(BASELINES, made, strict=True))


def _means(chosen: NDArray[np.bool_], delta: Matrix) -> Matrix:
    """Mean over the chosen conditions of each row; zero where none is."""
    found: Matrix = chosen @ delta / np.maximum(chosen.sum(axis=1, keepdims=True), 1)
    return found


def _first(*choices: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Return the first choice that holds anything."""
    return next((choice for choice in choices if choice.any()), None)


def _linear(screen: Screen, targets: Conditions, usable: NDArray[np.bool_]) -> Matrix:
    """Solve Y = b + G W P' by ridge regression, with G the loadings of genes, and P the sums of them over parts."""
    column = {name: j for j, name in enumerate(screen.genes)}
    names = {part for c in (screen.conditions, targets) for parts in c.parts for part in parts}
    measured = sorted(name for name in names if name in column)
    places = [column[name] for name in measured]
    of_train, of_target = screen.conditions.holding(measured), targets.holding(measured)
    predicted = np.zeros((len(targets), len(screen.genes)))
    for chosen in np.unique(usable, axis=0):
        rows = np.flatnonzero((usable == chosen).all(axis=1))
        y = screen.delta[chosen].astype(np.float64)
        expression = y + screen.control[screen.conditions.group[chosen]]
        centred = expression - expression.mean(axis=0)
        b = y.mean(axis=0)
        predicted[rows] = b
        if not measured or len(y) < 2:
            continue
        _, size, right = np.linalg.svd(centred, full_matrices=False)
        k = min(COMPONENTS, int((size > 1e-8 * max(size[0], 1e-12)).sum()))
        g = right[:k].T * size[:k]
        p, q = of_train[chosen] @ g[places], of_target[rows] @ g[places]
        ridge = PENALTY * np.eye(k)
        w = np.linalg.solve(p.T @ p + ridge, p.T @ (y - b) @ g) @ np.linalg.inv(g.T @ g + ridge)
        predicted[rows] = b + q @ w @ g.T
    return predicted
