r"""Methods that predict the response to perturbations: simple baselines, and a Gaussian process over conditions.

With a condition c = (perturbed genes, group of cells, dose), the change of a gene's mean expression is taken as

.. math::

    \Delta_c \sim \mathrm{GP}(0,\; \tau^2 k), \qquad
    k(c, c') = a + \bigl(0.7\, B B'^\top + 0.3\, B S B'^\top + 0.05\, p\bigr)\, h(g, g')\, d(c, c')

where B is how strongly each gene is perturbed, S the similarity of two perturbed genes in the model
(:func:`part_similarity`), p is 1 for a combination of several genes with itself, h is the similarity of two groups of
cells, and d that of two doses. The terms are: a, the effect that all perturbations share; B B', effects of single
genes, which add up in combinations; B S B', effects transferred to genes that were not perturbed; and p, the
interaction in a combination. Two groups share a part b of an effect, and 0.6 of the rest in proportion to the cosine of
their states; a group shares all of it with itself. a and b are estimated from the screen (:func:`shared_changes`).

The scale :math:`\tau^2` of each gene is estimated by moments, and shrunk towards that of genes with the same variance.
The noise is a gene's variance within conditions, divided by the number of cells of a condition, and by that of its
group's control cells, which all conditions of the group share; so noisily measured genes follow the pattern of the
others more. The other constants are fixed, because some thirty conditions do not determine them; they were chosen on
the Norman K562, glioma and Kang datasets of `benchmarks/perturbation.py`.

The method for each kind of new condition is chosen by cross-validation over conditions (:func:`validate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import BASELINES, EXPECTED, N_SPECIAL
from scdiva._rng import step_seed
from scdiva._settings import one_blas_thread, progress_bar
from scdiva.data.genes import Species
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.conditions import match_perturbed
from scdiva.perturbation.screen import Conditions, Screen, gene_tokens

COMPONENTS = 10
"""Principal components of gene expression in the linear baseline."""
PENALTY = 0.1
"""Ridge penalty of the linear baseline."""
RELATED, PAIR = 0.3, 0.05
"""Share of an effect that similar genes have in common, and variance of the interaction in a combination."""
SIMILAR_GROUP = 0.6
"""Share of the group-specific effect that follows the similarity of groups."""
GUESS = 5
"""Number of conditions, or pairs of groups, that the prior of :class:`Shared` counts as."""
OWN, LEAST = 0.3, 0.25
"""Weight of a gene's own changes in its scale, compared with the average of genes of its variance; and the minimum of
the scale as a share of that average. No gene is shrunk less than one whose scale is that average."""

Kind = Literal["single", "combination", "group", "measured"]
"""New single perturbation; new combination; perturbation that was measured in other groups only; measured condition."""
KINDS: tuple[Kind, ...] = ("single", "combination", "group")
"""Kinds of conditions that were not measured."""
METHODS = (*BASELINES, EXPECTED)
FOLDS = 5
LEAST_GAIN = 0.005
"""Minimum gain in correlation over the expected response for which a baseline is used."""

Matrix = NDArray[np.float64]


class Similarities(NamedTuple):
    """Similarities of perturbed genes and of groups of cells.

    Attributes
    ----------
    names
        Perturbed genes and labels.
    parts
        `(n_names, n_names)`, see :func:`part_similarity`.
    groups
        `(n_groups, n_groups)`, see :func:`group_similarity`.
    columns
        Column of the screen that measures each perturbed gene, the first of several; None: the column of that name.
    """

    names: tuple[str, ...]
    parts: Matrix
    groups: Matrix
    columns: Mapping[str, int] | None = None


def part_similarity(model: ScDiVa, names: Sequence[str], species: Species = None) -> Matrix:
    r"""Similarity of perturbed genes in the model, `(n, n)` with ones on the diagonal.

    The product of two cosines, of the genes' token embeddings and of their rows in the set encoder's table, each
    around its mean over the vocabulary. Without a set encoder the first is squared. A name that is not a gene of the
    vocabulary is similar to itself only.

    Parameters
    ----------
    model
        The model.
    names
        Perturbed genes, or labels.
    species
        Species of the genes, see :func:`scdiva.perturbation.conditions.species_of`.
    """
    tokens, _ = match_perturbed(names, model.vocabulary, species)
    is_gene = tokens >= N_SPECIAL
    cosines = []
    embedding = model.embedding.gene.weight
    for weight in (embedding, getattr(getattr(model.anchor, "table", None), "weight", embedding)):
        rows = weight.detach().double().cpu().numpy()[N_SPECIAL:]
        vectors = np.zeros((len(names), rows.shape[1]))
        vectors[is_gene] = rows[tokens[is_gene] - N_SPECIAL] - rows.mean(axis=0)
        cosines.append(_cosines(vectors))
    similar: Matrix = cosines[0] * cosines[1]
    np.fill_diagonal(similar, 1.0)
    return similar


def group_similarity(states: NDArray[np.float32], n_measured: int) -> Matrix:
    """Similarity of groups of cells, `(n, n)`: cosines of their control cells' mean states, centred over the screen.

    With two measured groups these cosines are always -1; with fewer than three, each group is similar to itself only.

    Parameters
    ----------
    states
        `(n, state_dim)`, measured groups first.
    n_measured
        Number of measured groups.
    """
    if n_measured < 3:
        return np.eye(len(states))
    similar = _cosines(states.astype(np.float64) - states[:n_measured].mean(axis=0))
    np.fill_diagonal(similar, 1.0)
    return similar


def _cosines(vectors: Matrix) -> Matrix:
    """Cosine similarity of rows; 0 for a row of zeros."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def similarities_of(
    model: ScDiVa, screen: Screen, targets: Conditions, states: NDArray[np.float32], species: Species
) -> Similarities:
    """Similarities of all perturbed genes and groups of a screen and of the conditions to predict.

    Parameters
    ----------
    model
        The model.
    screen, targets
        The screen, and the conditions to predict.
    states
        Mean states of the groups that the screen does not have.
    species
        Species of the genes.
    """
    names = tuple(sorted({*screen.conditions.part_names, *targets.part_names}))
    groups = group_similarity(np.vstack([screen.states, states]), len(screen.groups))
    tokens = gene_tokens(model, screen.genes, species)
    of_token: dict[int, int] = {}
    for j, name in enumerate(screen.genes):
        if name in tokens:
            of_token.setdefault(tokens[name], j)  # the first column of a repeated gene
    columns = {name: of_token[token] for name, token in gene_tokens(model, names, species).items() if token in of_token}
    of_name = {name: j for j, name in enumerate(screen.genes)}
    columns |= {name: of_name[name] for name in names if name in of_name}
    return Similarities(names, part_similarity(model, names, species), groups, columns)


def baselines(screen: Screen, targets: Conditions, columns: Mapping[str, int] | None = None) -> dict[str, Matrix]:
    """Predict the change of mean expression by each simple baseline.

    Only conditions in the group of a target are used if there are any; otherwise those of all groups.

    - ``"no_change"``: zero.
    - ``"train_mean"``: the mean over all conditions.
    - ``"matching_mean"``: the mean over the parts of the mean over conditions that contain the part (Viñas Torné et
      al. 2025, "Systema"); the train mean for a part that no condition contains.
    - ``"additive"``: the sum over the parts of the change by the part alone, at the same dose if measured, else over
      all doses; from other groups if it was not measured in this one. For a part that was never perturbed alone, the
      mean change of single perturbations (Ahlmann-Eltze et al. 2025).
    - ``"linear"``: ridge regression of the changes on principal components of the perturbed gene and of the responding
      gene (Ahlmann-Eltze et al. 2025). Parts add up; a part that the screen does not measure contributes nothing.
    - ``"elsewhere"``: the mean of the same perturbation in other groups, at the same dose if measured; NaN if it was
      not measured there.

    Parameters
    ----------
    screen
        The screen.
    targets
        Conditions to predict.
    columns
        Column of each perturbed gene, for ``"linear"``; see :class:`Similarities`.

    Returns
    -------
    Change by each baseline, float64 `(n_targets, n_genes)`.
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
        for holds in measured.holding(parts).T:
            with_part = usable[row] & holds
            matching[row] += (delta[with_part].mean(axis=0) if with_part.any() else mean[row]) / len(parts)
            measured_alone = _first(
                alone[row] & holds & (measured.dose == targets.dose[row]), alone[row] & holds, single & holds
            )
            additive[row] += alone_mean[row] if measured_alone is None else delta[measured_alone].mean(axis=0)

    other_group = targets.group[:, None] != measured.group
    same, any_dose = targets.same(measured) & other_group, targets.same_parts(measured) & other_group
    elsewhere = np.full_like(mean, np.nan)
    for row in range(len(targets)):
        chosen = _first(same[row], any_dose[row])
        if chosen is not None:
            elsewhere[row] = delta[chosen].mean(axis=0)
    changes = (np.zeros_like(mean), mean, matching, additive, _linear(screen, targets, usable, columns), elsewhere)
    return dict(zip(BASELINES, changes, strict=True))


def _means(chosen: NDArray[np.bool_], delta: Matrix) -> Matrix:
    """Mean over the chosen conditions of each row; zero if there are none."""
    return np.asarray(chosen @ delta / np.maximum(chosen.sum(axis=1, keepdims=True), 1))


def _first(*choices: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """First mask that is not empty."""
    return next((choice for choice in choices if choice.any()), None)


@one_blas_thread()
def _linear(screen: Screen, targets: Conditions, usable: NDArray[np.bool_], column: Mapping[str, int] | None) -> Matrix:
    """Solve Y = b + G W P' by ridge regression; G: loadings of genes, P: their sums over the parts of a condition."""
    if column is None:
        column = {name: j for j, name in enumerate(screen.genes)}
    measured = sorted(column.keys() & {*screen.conditions.part_names, *targets.part_names})
    columns = [column[name] for name in measured]
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
        p, q = of_train[chosen] @ g[columns], of_target[rows] @ g[columns]
        ridge = PENALTY * np.eye(k)
        w = np.linalg.solve(p.T @ p + ridge, p.T @ (y - b) @ g) @ np.linalg.inv(g.T @ g + ridge)
        predicted[rows] = b + q @ w @ g.T
    return predicted


class Shared(NamedTuple):
    """Shared parts of the responses to perturbations.

    Attributes
    ----------
    all
        Variance of the effect that all perturbations share, relative to that of a single perturbation.
    groups
        Share of the effect of a perturbation, 0 to 1, that is the same in any two groups.
    """

    all: float = 0.3
    groups: float = 0.5


GUESSED = Shared()


def covariance(
    one: Conditions, other: Conditions, similarities: Similarities, unit_dose: float = 1.0, shared: Shared = GUESSED
) -> Matrix:
    """Prior covariance of two lists of conditions, in units of tau squared.

    Parameters
    ----------
    one, other
        n and m conditions.
    similarities
        Similarities of their genes and groups.
    unit_dose
        Dose of strength 1; the strength of a dose is log2(1 + dose / unit), and doses are similar by the squared
        exponential of the difference in strength.
    shared
        Shared parts of the responses.

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


@one_blas_thread()
def expected_response(screen: Screen, targets: Conditions, similarities: Similarities) -> tuple[Matrix, Matrix]:
    """Predict the change of mean expression by the Gaussian process.

    Parameters
    ----------
    screen
        The screen.
    targets
        Conditions to predict; the prediction of a measured condition is its smoothed change.
    similarities
        Similarities of all genes and groups of both.

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
    # the sampling error of a group's control mean is in all its changes, and is predicted, too: changes are measured
    # from these control cells
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
    prior_variance = np.array([prior_of(targets.only(row), targets.only(row))[0, 0] for row in rows[:, None]])
    a, b = across @ back, shared @ back
    explained = np.square(a) @ inverse + 2 * ratio * ((a * b) @ inverse) + np.square(ratio) * (np.square(b) @ inverse)
    left = prior_variance[:, None] + ratio * of_control[targets.group][:, None] - explained
    return mean, np.sqrt(np.maximum(left, 0.0) * scale)


def shared_changes(screen: Screen) -> Shared:
    """Estimate the shared parts of responses from products of changes by single perturbations.

    Products are means over genes, corrected for the sampling error of shared control cells, and divided by the mean
    squared change without its sampling error. Different perturbations estimate the part that all share; the same
    perturbation in two groups estimates the part that groups share. Both are shrunk towards a prior.

    Parameters
    ----------
    screen
        The screen.
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

    def shrunk(pairs: NDArray[np.bool_], n: float, prior: float) -> float:
        estimate = float(np.clip(product[pairs].mean() / signal, 0.0, 1.0)) if pairs.any() else 0.0
        return (n * estimate + GUESS * prior) / (n + GUESS)

    apart = once & ~same
    of_all = min(shrunk(apart, len(rows) if apart.any() else 0, GUESSED.all / (1 + GUESSED.all)), 0.95)
    across_groups = once & c.same(c) & ~together
    of_groups = shrunk(across_groups, float(across_groups.sum()), of_all + GUESSED.groups * (1 - of_all))
    return Shared(of_all / (1 - of_all), float(np.clip((of_groups - of_all) / (1 - of_all), 0.0, 1.0)))


def _noise(screen: Screen, prior: Matrix, error: Matrix) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Noise of each gene, its variance over tau squared, and tau squared, `(n_genes,)` each."""
    variance = np.maximum(screen.variance.astype(np.float64), 1e-12)
    squares = np.square(screen.delta, dtype=np.float64).mean(axis=0)
    estimate = (squares - variance * np.diag(error).mean()) / np.diag(prior).mean()
    ratio = max(float(estimate.mean()), 1e-2 * float(squares.mean()), 1e-12) / float(variance.mean())
    scale = np.maximum((1 - OWN) * ratio * variance + OWN * estimate, LEAST * ratio * variance)
    return variance / np.minimum(scale, ratio * variance), scale


def by_every_method(
    screen: Screen, targets: Conditions, similarities: Similarities
) -> tuple[dict[str, Matrix], Matrix]:
    """Predict the change of mean expression by each of :data:`METHODS`.

    Parameters
    ----------
    screen, targets, similarities
        As for :func:`expected_response`.

    Returns
    -------
    Change by each method, and the standard deviation of the expected response.
    """
    expected, sd = expected_response(screen, targets, similarities)
    return {**baselines(screen, targets, similarities.columns), EXPECTED: expected}, sd


def kinds(targets: Conditions, measured: Conditions) -> list[Kind]:
    """Kind of each target: `"measured"` in its group at any dose, else as described for :data:`Kind`.

    Parameters
    ----------
    targets, measured
        Conditions with the same numbers of groups.
    """
    anywhere, in_group = set(measured.parts), set(zip(measured.parts, measured.group.tolist(), strict=True))

    def kind(parts: tuple[str, ...], group: int) -> Kind:
        if (parts, group) in in_group:
            return "measured"
        if parts in anywhere:
            return "group"
        return "combination" if len(parts) > 1 else "single"

    return [kind(parts, group) for parts, group in zip(targets.parts, targets.group.tolist(), strict=True)]


def folds(screen: Screen, kind: Kind, seed: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Split the conditions of a screen for cross-validation: numbers of kept and of predicted conditions.

    `"single"`: a fifth of the single perturbations is held out and predicted; combinations with one of them are held
    out, too. `"combination"`: a fifth of the combinations. `"group"`: all perturbations of one of up to five groups;
    those that were measured in other groups are predicted.

    Parameters
    ----------
    screen
        The screen.
    kind
        Kind of condition to hold out.
    seed
        Seed of the folds.
    """
    c = screen.conditions
    rng = np.random.default_rng(step_seed(seed, KINDS.index(kind), "folds"))
    if kind == "group":
        same = c.same(c)
        for group in rng.permutation(np.unique(c.group))[:FOLDS]:
            training = c.group != group
            predicted = (same & training).any(axis=1) & ~training
            if predicted.any():
                yield np.flatnonzero(training), np.flatnonzero(predicted)
        return
    units = sorted({parts for parts in c.parts if (len(parts) > 1) == (kind == "combination")})
    if len(units) < 2:
        return
    for chosen in np.array_split(rng.permutation(len(units)), min(FOLDS, len(units))):
        fold = {units[i] for i in chosen}
        predicted = np.array([parts in fold for parts in c.parts])
        held_out = predicted
        if kind == "single":
            held_out = c.holding([parts[0] for parts in fold]).sum(axis=1) > 0
        if not held_out.all():
            yield np.flatnonzero(~held_out), np.flatnonzero(predicted)


class Scores(NamedTuple):
    """Scores of held-out conditions.

    Attributes
    ----------
    kind
        Kind of each condition.
    mse, pearson
        `(n, n_methods)`, mean squared error and Pearson correlation of the change. NaN where a method is not defined;
        the correlation of a prediction that is the same for all genes is 0.
    """

    kind: NDArray[np.object_]
    mse: Matrix
    pearson: Matrix


def validate(screen: Screen, similarities: Similarities, seed: int) -> Scores:
    """Cross-validate every method over the conditions of a screen.

    Parameters
    ----------
    screen, similarities
        The screen, and the similarities of its genes and groups.
    seed
        Seed of the folds.
    """
    kind_of, mse, pearson = [], [np.empty((0, len(METHODS)))], [np.empty((0, len(METHODS)))]
    every_fold = [(kind, *fold) for kind in KINDS for fold in folds(screen, kind, seed)]
    for kind, training, held_out in progress_bar(every_fold, desc="validating", unit="fold"):
        changes, _ = by_every_method(screen.only(training), screen.conditions.only(held_out), similarities)
        every = np.stack([changes[name] for name in METHODS], axis=1).astype(np.float32).astype(np.float64)
        for row, predicted in zip(held_out, every, strict=True):
            truth = screen.delta[row].astype(np.float64)
            error = np.square(predicted - truth).mean(axis=1)
            p, t = predicted - predicted.mean(axis=1, keepdims=True), truth - truth.mean()
            size = np.sqrt(np.square(p).sum(axis=1) * np.square(t).sum())
            kind_of.append(kind)
            mse.append(error[None])
            pearson.append(np.where(np.isnan(error), np.nan, (p @ t) / np.maximum(size, 1e-12))[None])
    return Scores(np.array(kind_of, dtype=object), np.vstack(mse), np.vstack(pearson))


def best_base(scores: Scores) -> dict[Kind, str]:
    """Choose the method for each kind of condition.

    The expected response, unless a baseline has a higher correlation by :data:`LEAST_GAIN` plus the standard error of
    the difference. The squared error is not used: it favours "no change" where most of a change is noise.

    Parameters
    ----------
    scores
        Scores of held-out conditions.
    """
    base: dict[Kind, str] = dict.fromkeys(("measured", *KINDS), EXPECTED)
    for kind in KINDS:
        pearson = scores.pearson[scores.kind == kind]
        gain = pearson[:, :-1] - pearson[:, -1:]
        if len(gain) >= 3:
            lower = np.nan_to_num(gain.mean(axis=0) - gain.std(axis=0, ddof=1) / len(gain) ** 0.5, nan=-np.inf)
            if lower.max() > LEAST_GAIN:
                base[kind] = METHODS[int(lower.argmax())]
    return base


def summary(scores: Scores) -> dict[str, NDArray[Any]]:
    """Mean scores by kind and method, as columns of equal length.

    Parameters
    ----------
    scores
        Scores of held-out conditions.
    """
    rows = []
    for kind in KINDS:
        for column, method in enumerate(METHODS):
            defined = (scores.kind == kind) & ~np.isnan(scores.mse[:, column])
            if defined.any():
                means = (part[defined, column].mean() for part in (scores.pearson, scores.mse))
                rows.append((method, kind, *means, int(defined.sum())))
    columns = zip(*rows, strict=True) if rows else ((),) * 5
    types = {"method": object, "kind": object, "pearson_delta": np.float64, "mse": np.float64, "n": np.int64}
    return {name: np.array(part, dtype=types[name]) for name, part in zip(types, columns, strict=True)}
