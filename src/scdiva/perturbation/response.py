r"""Mean responses to perturbations that were not measured: simple baselines, and a Gaussian process over conditions.

With a condition c = (perturbed genes, group of cells, dose), the change of a gene's mean expression is taken as

.. math::

    \Delta_c \sim \mathrm{GP}(0,\; \tau^2 k), \qquad
    k(c, c') = a + \bigl(0.7\, B B'^\top + 0.3\, B S B'^\top + 0.05\, p\bigr)\, h(g, g')\, d(c, c')

where B says how strongly each gene is perturbed, S is the similarity of two perturbed genes by the model
(:func:`part_similarity`), p is 1 for one combination of several genes with itself, h is the
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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import BASELINES, N_SPECIAL
from scdiva.data.options import Species
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.conditions import match_perturbed
from scdiva.perturbation.screen import Conditions, Screen

COMPONENTS = 10
"""Principal components of genes that the linear baseline knows a perturbed gene by."""
PENALTY = 0.1
"""Of its ridge regression."""
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


class Similarities(NamedTuple):
    """Similarities that the model gives.

    Attributes
    ----------
    names
        Perturbed genes and labels.
    parts
        `(n_names, n_names)`, see :func:`part_similarity`.
    groups
        `(n_groups, n_groups)`, see :func:`group_similarity`.
    """

    names: tuple[str, ...]
    parts: Matrix
    groups: Matrix


def part_similarity(model: ScDiVa, names: Sequence[str], species: Species = None) -> Matrix:
    r"""Similarity of perturbed genes by the model, `(n, n)` with ones on the diagonal.

    The product of two cosines, of the genes' token embeddings and of their rows in the set encoder's table, each
    around its mean over the vocabulary: both have to agree. Without a set encoder the first is squared. A name that is
    no gene of the vocabulary is like none but itself.

    Parameters
    ----------
    model
        The model.
    names
        Perturbed genes, or labels.
    species
        Whose genes they are, see :func:`scdiva.perturbation.conditions.species_of`.
    """
    tokens, _ = match_perturbed(names, model.vocabulary, species)
    known = tokens >= N_SPECIAL
    cosines = []
    embedding = model.embedding.gene.weight
    for weight in (embedding, getattr(getattr(model.anchor, "table", None), "weight", embedding)):
        rows = weight.detach().double().cpu().numpy()[N_SPECIAL:]
        own = np.zeros((len(names), rows.shape[1]))
        own[known] = rows[tokens[known] - N_SPECIAL] - rows.mean(axis=0)
        own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12)
        cosines.append(own @ own.T)
    similar: Matrix = cosines[0] * cosines[1]
    np.fill_diagonal(similar, 1.0)
    return similar


def group_similarity(states: NDArray[np.float32], n_measured: int) -> Matrix:
    """Similarity of groups of cells, `(n, n)`: cosines of their control cells' mean states around those of the screen.

    Of two groups such cosines are always -1, which carries no information: of fewer than three measured, each is like
    itself alone.

    Parameters
    ----------
    states
        `(n, state_dim)`, those that the screen measured first.
    n_measured
        Their number.
    """
    if n_measured < 3:
        return np.eye(len(states))
    own = states.astype(np.float64) - states[:n_measured].mean(axis=0)
    own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12)
    similar: Matrix = own @ own.T
    np.fill_diagonal(similar, 1.0)
    return similar


def similarities_of(
    model: ScDiVa, screen: Screen, targets: Conditions, states: NDArray[np.float32], species: Species
) -> Similarities:
    """Give the similarities of all perturbed genes, and of all groups, of a screen and of what is predicted.

    Parameters
    ----------
    model
        The model.
    screen, targets
        What was measured, and what is predicted.
    states
        Of the groups that `targets` has beyond those of the screen.
    species
        Whose genes are perturbed.
    """
    names = tuple(sorted({*screen.conditions.part_names, *targets.part_names}))
    groups = group_similarity(np.vstack([screen.states, states]), len(screen.groups))
    return Similarities(names, part_similarity(model, names, species), groups)


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
    return np.asarray(chosen @ delta / np.maximum(chosen.sum(axis=1, keepdims=True), 1))


def _first(*choices: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Return the first choice that holds anything."""
    return next((choice for choice in choices if choice.any()), None)


def _linear(screen: Screen, targets: Conditions, usable: NDArray[np.bool_]) -> Matrix:
    """Solve Y = b + G W P' by ridge regression, with G the loadings of genes, and P the sums of them over parts."""
    column = {name: j for j, name in enumerate(screen.genes)}
    measured = sorted(column.keys() & {*screen.conditions.part_names, *targets.part_names})
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
        return of_control[one.group][:, None] * np.equal.outer(one.group, other.group)

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
    rows = np.flatnonzero(screen.conditions.n_parts == 1)
    c, delta = screen.conditions.only(rows), screen.delta[rows].astype(np.float64)
    if len(rows) < 2:
        return GUESSED
    variance, by_control = float(screen.variance.mean(dtype=np.float64)), 1 / screen.n_control[c.group]
    together = c.group[:, None] == c.group
    product = delta @ delta.T / delta.shape[1] - variance * by_control[:, None] * together
    signal = float((np.diag(product) - variance / screen.n_cells[rows]).mean())
    same, once = c.same_parts(c), np.triu(np.ones(product.shape, dtype=bool), 1)
    if signal <= 0:
        return GUESSED

    def drawn(pairs: NDArray[np.bool_], n: float, towards: float) -> float:
        found = float(np.clip(product[pairs].mean() / signal, 0.0, 1.0)) if pairs.any() else 0.0
        return (n * found + GUESS * towards) / (n + GUESS)

    apart = once & ~same
    of_all = min(drawn(apart, len(rows) if apart.any() else 0, GUESSED.all / (1 + GUESSED.all)), 0.95)
    both = once & c.same(c) & ~together
    of_groups = drawn(both, float(both.sum()), of_all + GUESSED.groups * (1 - of_all))
    return Shared(of_all / (1 - of_all), float(np.clip((of_groups - of_all) / (1 - of_all), 0.0, 1.0)))


def _noise(screen: Screen, prior: Matrix, error: Matrix) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give how noisy each gene is taken to be, its variance over tau squared, and tau squared itself, `(n_genes,)`."""
    variance = np.maximum(screen.variance.astype(np.float64), 1e-12)
    squares = np.square(screen.delta, dtype=np.float64).mean(axis=0)
    found = (squares - variance * np.diag(error).mean()) / np.diag(prior).mean()
    whole = max(float(found.mean()), 1e-2 * float(squares.mean()), 1e-12) / float(variance.mean())
    scale = np.maximum((1 - OWN) * whole * variance + OWN * found, LEAST * whole * variance)
    return variance / np.minimum(scale, whole * variance), scale
