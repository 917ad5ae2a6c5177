r"""Mean responses to perturbations that were not measured, from those that were: a Gaussian process over conditions.

With a condition c = (perturbed genes, group of cells, dose), the change of a gene's mean expression is taken as

.. math::

    \Delta_c \sim \mathrm{GP}(0,\; \tau^2 k), \qquad
    k(c, c') = a + \bigl(0.7\, B B'^\top + 0.3\, B S B'^\top + 0.05\, p\bigr)\, h(g, g')\, d(c, c')

where B says how strongly each gene is perturbed, S is the similarity of two perturbed genes by the model
(:func:`scdiva.perturbation.screen.part_similarity`), p is 1 for one combination of several genes with itself, h is the
similarity of two groups of cells, and d that of two doses. So a is what all perturbed cells share, B B' adds up
effects of single genes in combinations, B S B' carries them over to genes that were not perturbed, and p leaves room
for what does not add up. Two groups share a part b of an effect in any case, and 0.6 of the rest by the cosine of their
states; a group shares all with itself. What a and b are, the screen tells (:func:`shared_changes`).

The scale :math:`\tau^2` of each gene is found by moments, and drawn towards that of genes of its variance. Noise is a
gene's variance within conditions, over the number of cells of a condition, and over that of its group's control cells,
which all conditions of the group share; so genes that are measured badly follow the others' pattern more. The other
numbers are fixed, as some thirty conditions tell little of them; they were chosen on the Norman K562, glioma and Kang
sets of `benchmarks/perturbation.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva.perturbation.screen import Conditions, Screen, Similarities

RELATED, PAIR = 0.3, 0.05
"""Share of an effect that similar genes have in common, and what a combination has of its own beside effects of 1."""
SIMILAR_GROUP = 0.6
"""Share, of what two groups need not have in common, that goes by their similarity."""
GUESS = 5
"""Conditions, or pairs of groups, that count as much as the guess of what is shared."""
OWN, LEAST = 0.3, 0.25
"""How much a gene's own changes count for its scale, beside what genes of its variance have on average; and the least
share of the latter. No gene is drawn less towards the others than one whose scale is that average."""

Matrix = NDArray[np.float64]


class Shared(NamedTuple):
    """What changes have in common.

    Attributes
    ----------
    all
        Variance of what all perturbations change in common, where the effect of a single one has 1.
    groups
        Share, 0 to 1, of the effect of a perturbation that is the same in any two groups.
    """

    all: float = 0.3
    groups: float = 0.5


GUESSED = Shared()


def covariance(
    one: Conditions, other: Conditions, similarities: Similarities, unit_dose: float = 1.0, shared: Shared = GUESSED
) -> Matrix:
    """Give the prior covariance of two lists of conditions, in units of tau squared.

    Parameters
    ----------
    one, other
        n and m conditions.
    similarities
        Of all their genes and groups.
    unit_dose
        Dose that counts as a whole perturbation; others count as log(1 + dose / unit) / log 2, and are similar by the
        square exponential of the difference.
    shared
        What changes have in common.

    Returns
    -------
    `(n, m)`.
    """
    strengths = [np.log2(1 + c.dose / unit_dose) for c in (one, other)]
    b, c = (x.holding(similarities.names) * s[:, None] for x, s in zip((one, other), strengths, strict=True))
    effect = (1 - RELATED) * b @ c.T + RELATED * b @ similarities.parts @ c.T
    effect += PAIR * (one.same_parts(other) & (one.n_parts > 1)[:, None])
    same = one.group[:, None] == other.group
    by_state = SIMILAR_GROUP * (1 - shared.groups)
    group = by_state * similarities.groups[np.ix_(one.group, other.group)]
    group += shared.groups + (1 - shared.groups - by_state) * same
    dose = np.exp(-0.5 * (strengths[0][:, None] - strengths[1]) ** 2)
    return shared.all + effect * group * dose


def expected_response(screen: Screen, targets: Conditions, similarities: Similarities) -> tuple[Matrix, Matrix]:
    """Predict the change of mean expression.

    Parameters
    ----------
    screen
        What was measured.
    targets
        What to predict; one that was measured gets its smoothed change.
    similarities
        Of all genes and groups of both.

    Returns
    -------
    Posterior mean and standard deviation, `(n, n_genes)` each.
    """
    unit = float(np.median(screen.conditions.dose))
    measured = screen.conditions
    in_common = shared_changes(screen)

    def prior_of(one: Conditions, other: Conditions) -> Matrix:
        return covariance(one, other, similarities, unit, in_common)

    prior = prior_of(measured, measured)
    # what the control cells of a group miss their true mean by is in all changes of the group, and is to be predicted
    # too: a change is one from these control cells
    of_control = np.zeros(len(similarities.groups))
    of_control[: len(screen.n_control)] = 1 / screen.n_control

    def common(one: Conditions, other: Conditions) -> Matrix:
        found: Matrix = of_control[one.group][:, None] * (one.group[:, None] == other.group)
        return found

    error = common(measured, measured) + np.diag(1 / screen.n_cells)
    ratio, scale = _noise(screen, prior, error)
    # one decomposition for all genes: prior + r error = L (V d V' + r) L' with error = L L'
    half = np.linalg.cholesky(error)
    white = np.linalg.solve(half, np.linalg.solve(half, prior).T)
    value, vector = np.linalg.eigh((white + white.T) / 2)
    back = np.linalg.solve(half.T, vector)  # (prior + r error)^-1 = back diag(1 / (value + r)) back'
    inverse = 1 / (np.maximum(value, 0.0)[:, None] + ratio)
    weight = back @ (inverse * (back.T @ screen.delta.astype(np.float64)))
    across, shared = prior_of(targets, measured), common(targets, measured)
    mean = across @ weight + ratio * (shared @ weight)
    rows = np.arange(len(targets))
    own = np.array([prior_of(targets.only(row), targets.only(row))[0, 0] for row in rows[:, None]])
    a, b = across @ back, shared @ back
    explained = np.square(a) @ inverse + 2 * ratio * ((a * b) @ inverse) + np.square(ratio) * (np.square(b) @ inverse)
    left = own[:, None] + ratio * of_control[targets.group][:, None] - explained
    return mean, np.sqrt(np.maximum(left, 0.0) * scale)


def shared_changes(screen: Screen) -> Shared:
    """Estimate what changes have in common from the products of changes by single perturbations.

    The mean product over all genes, less what the sampling error of the control cells puts into two changes of one
    group: of different perturbations, over the mean square of a change without its error, what all share; of the same
    one in two groups, that and what groups share of its effect. Few conditions are drawn towards a guess.

    Parameters
    ----------
    screen
        What was measured.
    """
    guess = GUESSED
    rows = np.flatnonzero(screen.conditions.n_parts == 1)
    c, delta = screen.conditions.only(rows), screen.delta[rows].astype(np.float64)
    if len(rows) < 2:
        return guess
    variance, by_control = float(screen.variance.mean(dtype=np.float64)), 1 / screen.n_control[c.group]
    together = c.group[:, None] == c.group
    product = delta @ delta.T / delta.shape[1] - variance * by_control[:, None] * together
    signal = float((np.diag(product) - variance / screen.n_cells[rows]).mean())
    same, once = c.same_parts(c), np.triu(np.ones(product.shape, dtype=bool), 1)
    if signal <= 0:
        return guess

    def drawn(pairs: NDArray[np.bool_], n: float, towards: float) -> float:
        found = float(np.clip(product[pairs].mean() / signal, 0.0, 1.0)) if pairs.any() else 0.0
        return (n * found + GUESS * towards) / (n + GUESS)

    apart = once & ~same
    of_all = min(drawn(apart, len(rows) if apart.any() else 0, guess.all / (1 + guess.all)), 0.95)
    both = once & c.same(c) & ~together
    of_groups = drawn(both, float(both.sum()), of_all + guess.groups * (1 - of_all))
    return Shared(of_all / (1 - of_all), float(np.clip((of_groups - of_all) / (1 - of_all), 0.0, 1.0)))


def _noise(screen: Screen, prior: Matrix, error: Matrix) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give how noisy each gene is taken to be, its variance over tau squared, and tau squared itself, `(n_genes,)`."""
    variance = np.maximum(screen.variance.astype(np.float64), 1e-12)
    squares = np.square(screen.delta, dtype=np.float64).mean(axis=0)
    found = (squares - variance * np.diag(error).mean()) / np.diag(prior).mean()
    whole = max(float(found.mean()), 1e-2 * float(squares.mean()), 1e-12) / float(variance.mean())
    scale = np.maximum((1 - OWN) * whole * variance + OWN * found, LEAST * whole * variance)
    return variance / np.minimum(scale, whole * variance), scale
