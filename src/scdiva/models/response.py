r"""Mean responses to perturbations that were not measured, from those that were: a Gaussian process over conditions.

With a condition c = (perturbed genes, group of cells, dose), the change of a gene's mean expression is taken as

.. math::

    \Delta_c \sim \mathrm{GP}(0,\; \tau^2 k), \qquad
    k(c, c') = 1 + \bigl(0.3\, n n' + 0.7\, B B'^\top + 0.3\, B S B'^\top\bigr)\, h(g, g')\, d(c, c')

where B says how strongly each gene is perturbed and n is the sum of that, S is how alike the model holds two perturbed
genes to be (:func:`scdiva.models.screen.part_similarity`), and h how alike it holds two groups of cells to be: 0.5 for
any two, 0.3 by the cosine of their states, 0.2 for a group with itself. So the constant is what all perturbed cells
share (and what the sampling error of the control cells puts into all), n n' what grows with the number of perturbed
genes, B B' adds up effects of single genes in combinations, and B S B' carries them over to genes that were not
perturbed. The scale :math:`\tau^2` and the noise of each condition, the variance within conditions over its number of
cells, are found by moments; the other numbers are fixed, as some thirty conditions tell little of them. They were
chosen on the Norman K562, glioma and Kang sets of `benchmarks/perturbation.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva.models.screen import Conditions, Screen

SHARED, COUNT, RELATED = 1.0, 0.3, 0.3
"""Weights of the constant, of the number of perturbed genes, and of what similar genes share."""
ANY_GROUP, ALIKE_GROUP = 0.5, 0.3
"""What two groups share in any case, and by how alike they are; a group with itself has the rest too."""

Matrix = NDArray[np.float64]


class Alike(NamedTuple):
    """What the model holds to be alike.

    Attributes
    ----------
    names
        Perturbed genes and labels.
    parts
        `(n_names, n_names)`, see :func:`scdiva.models.screen.part_similarity`.
    groups
        `(n_groups, n_groups)`, see :func:`scdiva.models.screen.group_similarity`.
    """

    names: tuple[str, ...]
    parts: Matrix
    groups: Matrix


def covariance(one: Conditions, other: Conditions, alike: Alike, unit_dose: float = 1.0) -> Matrix:
    """Give the prior covariance of two lists of conditions, in units of tau squared.

    Parameters
    ----------
    one, other
        n and m conditions.
    alike
        Of all their genes and groups.
    unit_dose
        Dose that counts as a whole perturbation; others count as log(1 + dose / unit) / log 2, and are alike by the
        square exponential of the difference.

    Returns
    -------
    `(n, m)`.
    """
    strengths = [np.log2(1 + c.dose / unit_dose) for c in (one, other)]
    b, c = (x.holding(alike.names) * s[:, None] for x, s in zip((one, other), strengths, strict=True))
    effect = COUNT * np.outer(b.sum(axis=1), c.sum(axis=1)) + (1 - RELATED) * b @ c.T + RELATED * b @ alike.parts @ c.T
    same = one.group[:, None] == other.group
    group = ALIKE_GROUP * alike.groups[np.ix_(one.group, other.group)]
    group += ANY_GROUP + (1 - ANY_GROUP - ALIKE_GROUP) * same
    dose = np.exp(-0.5 * (strengths[0][:, None] - strengths[1]) ** 2)
    return SHARED + effect * group * dose


def expected_response(screen: Screen, targets: Conditions, alike: Alike) -> tuple[Matrix, Matrix]:
    """Predict the change of mean expression.

    Parameters
    ----------
    screen
        What was measured.
    targets
        What to predict; one that was measured gets its smoothed change.
    alike
        Of all genes and groups of both.

    Returns
    -------
    Posterior mean and standard deviation, `(n, n_genes)` each.
    """
    unit = float(np.median(screen.conditions.dose))
    prior = covariance(screen.conditions, screen.conditions, alike, unit)
    error = screen.variance.astype(np.float64) / screen.n_cells[:, None]
    scale = _scale(np.square(screen.delta, dtype=np.float64), error, prior)
    noise = error.mean(axis=1) / max(float(scale.mean()), 1e-12)
    across = covariance(targets, screen.conditions, alike, unit)
    solved = np.linalg.solve(prior + np.diag(noise + 1e-9), np.hstack([screen.delta, across.T]))
    mean = across @ solved[:, : screen.delta.shape[1]]
    rows = np.arange(len(targets))
    own = np.array([covariance(targets.only(row), targets.only(row), alike, unit)[0, 0] for row in rows[:, None]])
    left = np.maximum(own - np.einsum("ij,ji->i", across, solved[:, screen.delta.shape[1] :]), 0.0)
    return mean, np.sqrt(left[:, None] * scale)


def _scale(squares: Matrix, error: Matrix, prior: Matrix) -> Matrix:
    """Give tau squared of each gene, from what its squared changes exceed their sampling error by."""
    found = (squares.mean(axis=0) - error.mean(axis=0)) / np.diag(prior).mean()
    whole = max(float(found.mean()), 1e-3 * float(squares.mean()) + 1e-12)
    scale: Matrix = np.maximum(found, 0.1 * whole)
    return scale * (whole / scale.mean())
