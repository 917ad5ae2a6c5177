"""Baselines, similarities, the expected response and its validation, compared with plain formulas and sklearn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct

from scdiva._constants import BASELINES, N_SPECIAL
from scdiva.perturbation import response as R
from scdiva.perturbation.response import (
    KINDS,
    Similarities,
    baselines,
    covariance,
    expected_response,
    group_similarity,
    kinds,
    part_similarity,
)
from scdiva.perturbation.screen import Conditions

NAMES = tuple("ABCDE")
PARTS = st.sets(st.sampled_from(NAMES), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
ROWS = st.lists(st.tuples(PARTS, st.integers(0, 3), st.floats(0.01, 100.0)), min_size=1, max_size=10)


def similarities_of(n_groups=4, rng=0) -> Similarities:
    """Correlations of random vectors."""
    draw = np.random.default_rng(rng)
    return Similarities(NAMES, np.corrcoef(draw.normal(size=(5, 9))), np.corrcoef(draw.normal(size=(n_groups, 9))))


def slow_covariance(first, second, similarities, unit, shared=R.GUESSED) -> float:
    """Of two conditions, sum by sum, from the formula at the head of the module."""
    (parts_a, group_a, dose_a), (parts_b, group_b, dose_b) = first, second
    a, b = (np.log(1 + dose / unit) / np.log(2) for dose in (dose_a, dose_b))
    effect = 0.0
    for p in parts_a:
        for q in parts_b:
            similar = similarities.parts[similarities.names.index(p), similarities.names.index(q)]
            effect += a * b * ((1 - R.RELATED) * (p == q) + R.RELATED * similar)
    effect += R.PAIR * (parts_a == parts_b and len(parts_a) > 1)
    unshared = 1 - shared.groups
    group = shared.groups + unshared * (0.6 * similarities.groups[group_a, group_b] + 0.4 * (group_a == group_b))
    return shared.all + effect * group * np.exp(-((a - b) ** 2) / 2)


@given(ROWS, ROWS, st.sampled_from([0.3, 1.0, 20.0]), st.builds(R.Shared, st.floats(0, 5), st.floats(0, 1)))
def test_covariance_term_by_term(rows, columns, unit, shared):
    similarities = similarities_of()
    expected = [[slow_covariance(a, b, similarities, unit, shared) for b in columns] for a in rows]
    actual = covariance(Conditions.of(rows), Conditions.of(columns), similarities, unit, shared)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


@given(ROWS, st.integers(0, 50), st.builds(R.Shared, st.floats(0, 5), st.floats(0, 1)))
def test_a_covariance_is_positive_semidefinite(rows, rng, shared):
    matrix = covariance(Conditions.of(rows), Conditions.of(rows), similarities_of(rng=rng), 1.0, shared)
    np.testing.assert_allclose(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > -1e-9 * np.trace(matrix)


def tau_squared(screen, prior) -> tuple[np.ndarray, np.ndarray]:
    """By moments, gene by gene, drawn towards what genes of the same variance have, which comes second."""
    n, g = screen.delta.shape
    variance, estimate = screen.variance.astype(float), np.zeros(g)
    for j in range(g):
        error = [variance[j] / screen.n_cells[i] for i in range(n)]
        error = [e + variance[j] / screen.n_control[screen.conditions.group[i]] for i, e in enumerate(error)]
        estimate[j] = np.mean(screen.delta[:, j].astype(float) ** 2 - error) / np.mean(np.diag(prior))
    pooled = estimate.mean() / variance.mean() * variance
    return np.maximum(R.OWN * estimate + (1 - R.OWN) * pooled, R.LEAST * pooled), pooled


@pytest.mark.parametrize("doses", [None, [0.5, 1, 2, 1, 1, 3, 1]])
def test_mean_and_sd_are_those_of_a_gaussian_process(measured, doses):
    """sklearn does not accept a covariance matrix; the rows of its square root are features with this covariance.

    The error of a group's control cells is in all changes of the group, measured or not.
    """
    screen = measured(("A", "B", "C@1", "A+B", "B+C@1", "A@1", "D@2"), doses=doses, rng=4)
    targets = Conditions.of(
        [(("A",), 2, 1.0), (("B", "D"), 0, 0.7), (("E",), 1, 1.0), (("A",), 0, 1.0), (("C",), 3, 5.0)]
    )
    similarities, n = similarities_of(), len(screen.conditions)
    conditions = Conditions(
        (*screen.conditions.parts, *targets.parts),
        np.concatenate([screen.conditions.group, targets.group]),
        np.concatenate([screen.conditions.dose, targets.dose]),
    )
    prior = covariance(conditions, conditions, similarities, 1.0, R.shared_changes(screen))
    scale, pooled = tau_squared(screen, prior[:n, :n])
    shared = np.array(
        [[1 / screen.n_control[g] if g == h < 3 else 0.0 for h in conditions.group] for g in conditions.group]
    )
    response, response_sd = expected_response(screen, targets, similarities)
    for j in range(len(screen.genes)):
        noise = screen.variance[j] / min(scale[j], pooled[j])
        root = np.linalg.cholesky(prior + noise * shared + 1e-10 * np.eye(len(conditions)))
        regressor = GaussianProcessRegressor(DotProduct(0.0, "fixed"), alpha=noise / screen.n_cells, optimizer=None)
        regressor.fit(root[:n], screen.delta[:, j].astype(np.float64))
        mean, sd = regressor.predict(root[n:], return_std=True)
        np.testing.assert_allclose(response[:, j], mean, atol=1e-6)
        np.testing.assert_allclose(response_sd[:, j], sd * np.sqrt(scale[j]), atol=1e-5)


def screen_of(n_parts, n_groups, share, of_groups, measured, n_genes=3000, rng=0):
    """A screen whose effects are made of a part that all share, one of the perturbation, and one of it in a group."""
    draw = np.random.default_rng(rng)
    labels = [f"P{i}@{g}" for i in range(n_parts) for g in range(n_groups)]
    screen = measured(labels, n_genes=n_genes)
    everyone, part_effects = draw.normal(size=n_genes), draw.normal(size=(n_parts, n_genes))
    c = screen.conditions
    part = np.array([int(parts[0][1:]) for parts in c.parts])
    effect = of_groups**0.5 * part_effects[part] + (1 - of_groups) ** 0.5 * draw.normal(size=(len(c), n_genes))
    n_cells, n_control = np.full(len(c), 50), np.full(n_groups, 60)
    error = draw.normal(size=(len(c), n_genes)) / 50**0.5
    error += (draw.normal(size=(n_groups, n_genes)) / 60**0.5)[c.group]
    delta = share**0.5 * everyone + effect + error
    ones = np.ones(n_genes, dtype=np.float32)
    return replace(screen, delta=delta.astype(np.float32), n_cells=n_cells, n_control=n_control, variance=ones)


@pytest.mark.parametrize(("share", "of_groups"), [(0.0, 0.0), (0.5, 0.3), (1.0, 1.0), (0.2, 0.8)])
def test_what_changes_share_is_found(measured, share, of_groups):
    """Of many conditions; the common error of a group's control cells is not taken for something shared."""
    shared = R.shared_changes(screen_of(30, 4, share, of_groups, measured))
    assert shared.all == pytest.approx(share, abs=0.15)
    assert shared.groups == pytest.approx(of_groups, abs=0.1)
    one_group = R.shared_changes(screen_of(60, 1, share, 0.5, measured))
    assert one_group.all == pytest.approx(share, abs=0.15)
    assert one_group.groups == pytest.approx(R.GUESSED.groups)


def test_of_few_conditions_what_is_shared_is_a_guess(measured):
    assert R.shared_changes(measured(("A",))) == R.GUESSED
    assert R.shared_changes(measured(("A+B", "B+C", "A+C"))) == R.GUESSED
    assert R.shared_changes(replace(measured(), delta=np.zeros((5, 12), dtype=np.float32))) == R.GUESSED
    one = R.shared_changes(screen_of(1, 6, 0.0, 0.9, measured))  # one perturbation says nothing of what others share
    assert one.all == pytest.approx(R.GUESSED.all)
    assert one.groups > 0.6


def test_little_to_learn_from_gives_finite_numbers(measured):
    similarities = similarities_of()
    target = Conditions.of([(("D",), 0, 1.0)])
    one = measured(("A",))
    mean, sd = expected_response(one, target, similarities)
    assert np.isfinite(mean).all()
    assert (sd > 0).all()
    assert np.corrcoef(mean[0], one.delta[0])[0, 1] > 0.99  # what the only one changed, weaker
    assert np.abs(mean).mean() < np.abs(one.delta).mean()
    still = replace(measured(), delta=np.zeros((5, 12), dtype=np.float32))
    mean, sd = expected_response(still, target, similarities)
    assert not mean.any()
    assert np.isfinite(sd).all()
    certain = replace(measured(), variance=np.zeros(12, dtype=np.float32))
    assert np.isfinite(expected_response(certain, target, similarities)[0]).all()


LABELS = ("A", "B", "A+B", "B+C")


def conditions_of(*labels, doses=None) -> Conditions:
    parts, _, group = zip(*(label.partition("@") for label in labels), strict=True)
    of = (tuple(sorted(label.split("+"))) for label in parts)
    return Conditions.of(zip(of, [int(g or 0) for g in group], doses or [1.0] * len(labels), strict=True))


def held(predictions, name, expected):
    np.testing.assert_allclose(predictions[name][0], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_group(measured):
    a, b, ab, bc = measured(LABELS).delta.astype(float)
    screen, mean, alone = measured(LABELS), (a + b + ab + bc) / 4, (a + b) / 2
    for label, matching, additive in [
        ("A+B", ((a + ab) / 2 + (b + ab + bc) / 3) / 2, a + b),
        ("A+C", ((a + ab) / 2 + bc) / 2, a + alone),  # C was never alone
        ("A", (a + ab) / 2, a),
        ("D", mean, alone),
        ("A+D", ((a + ab) / 2 + mean) / 2, a + alone),
        ("A+B+C", ((a + ab) / 2 + (b + ab + bc) / 3 + bc) / 3, a + b + alone),
    ]:
        predictions = baselines(screen, conditions_of(label))
        held(predictions, "train_mean", mean)
        held(predictions, "matching_mean", matching)
        held(predictions, "additive", additive)
    assert tuple(predictions) == BASELINES
    assert not predictions["no_change"].any()
    assert np.isnan(predictions["elsewhere"]).all()
    pairs = measured(("A+B", "B+C"))  # nothing was measured alone
    predictions = baselines(pairs, conditions_of("A+C"))
    held(predictions, "additive", 2 * pairs.delta.mean(axis=0))
    held(predictions, "matching_mean", pairs.delta.mean(axis=0))


def test_conditions_of_the_same_group_count_where_there_are_any(measured):
    screen = measured(("A", "B", "A+B", "A@1", "C@1", "C@2"))
    a, b, ab, a1, c1, c2 = screen.delta.astype(float)
    predictions = baselines(screen, conditions_of("A+C"))
    held(predictions, "train_mean", (a + b + ab) / 3)
    held(predictions, "matching_mean", ((a + ab) / 2 + (a + b + ab) / 3) / 2)
    held(predictions, "additive", a + (c1 + c2) / 2)  # C was alone elsewhere
    predictions = baselines(screen, conditions_of("A@3"))  # a group in which nothing was done
    held(predictions, "train_mean", (a + b + ab + a1 + c1 + c2) / 6)
    held(predictions, "matching_mean", (a + ab + a1) / 3)
    held(predictions, "additive", (a + a1) / 2)
    held(predictions, "elsewhere", (a + a1) / 2)
    held(baselines(screen, conditions_of("A")), "elsewhere", a1)
    held(baselines(screen, conditions_of("C@1")), "elsewhere", c2)
    held(baselines(screen, conditions_of("A+B@1")), "elsewhere", ab)
    assert np.isnan(baselines(screen, conditions_of("B"))["elsewhere"]).all()


def test_the_same_dose_counts_where_there_is_one(measured):
    screen = measured(("A", "A", "B", "A@1", "A@1"), doses=[1, 10, 1, 10, 100])
    a1, a10, b, e10, e100 = screen.delta.astype(float)
    held(baselines(screen, conditions_of("A", doses=[10])), "additive", a10)
    held(baselines(screen, conditions_of("A", doses=[3])), "additive", (a1 + a10) / 2)
    held(baselines(screen, conditions_of("A+B", doses=[10])), "additive", a10 + b)
    held(baselines(screen, conditions_of("A", doses=[10])), "elsewhere", e10)
    held(baselines(screen, conditions_of("A", doses=[1])), "elsewhere", (e10 + e100) / 2)
    held(baselines(screen, conditions_of("A", doses=[10])), "train_mean", (a1 + a10 + b) / 3)


def slow_linear(screen, targets, penalty=R.PENALTY):
    """min |Y - b - G W P'|² + penalty (|G W|² + |W P'|² + penalty |W|²), as one least-squares problem in vec(W)."""
    delta = screen.delta.astype(float)
    expression = delta + screen.control[screen.conditions.group]
    _, size, right = np.linalg.svd(expression - expression.mean(axis=0), full_matrices=False)
    k = min(R.COMPONENTS, int((size > 1e-8 * size[0]).sum()))
    g = (right[:k] * size[:k, None]).T  # genes × components
    genes = list(screen.genes)

    def sums(conditions):
        return np.array([
            np.sum([g[genes.index(p)] for p in parts if p in genes], axis=0) if set(parts) & set(genes) else np.zeros(k)
            for parts in conditions.parts
        ])  # fmt: skip

    p, b, root = sums(screen.conditions), delta.mean(axis=0), penalty**0.5 * np.eye(k)
    one, two = np.vstack([g, root]), np.vstack([p, root])
    y = np.zeros((len(one), len(two)))
    y[: len(g), : len(p)] = (delta - b).T
    w = np.linalg.lstsq(np.kron(one, two), y.ravel(), rcond=None)[0].reshape(k, k)
    return b + sums(targets) @ w.T @ g.T


@pytest.mark.parametrize("n_genes", [6, 14])
def test_linear_beside_least_squares(measured, n_genes):
    genes = [*"ABCDE", *(f"G{j}" for j in range(n_genes))]
    screen = measured(("A", "B", "C", "A+B", "D", "drug"), n_genes=len(genes), genes=genes)
    targets = conditions_of("A", "E", "B+C", "A+drug", "unheard")
    actual = baselines(screen, targets)["linear"]
    np.testing.assert_allclose(actual, slow_linear(screen, targets), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(actual[4], screen.delta.astype(float).mean(axis=0), atol=1e-6)  # no column of the data


def test_linear_where_there_is_little(measured):
    genes = ["A", "B", "G0", "G1"]
    one = measured(("A",), n_genes=4, genes=genes)
    held(baselines(one, conditions_of("B")), "linear", one.delta[0])
    no_gene = measured(("x", "y"), n_genes=4, genes=genes)
    held(baselines(no_gene, conditions_of("z")), "linear", no_gene.delta.mean(axis=0))
    same = measured(("A", "B"), n_genes=4, genes=genes)
    same = replace(same, delta=same.delta[[0, 0]])
    held(baselines(same, conditions_of("A+B")), "linear", same.delta[0])


CONDITIONS = st.lists(st.tuples(PARTS, st.integers(0, 2), st.just(1.0)), min_size=1, max_size=8)


@given(CONDITIONS, CONDITIONS)
def test_what_is_new_about_a_condition(targets, measured):
    actual = kinds(Conditions.of(targets), Conditions.of(measured))
    for (parts, group, _), kind in zip(targets, actual, strict=True):
        groups = {g for p, g, _ in measured if p == parts}
        if groups:
            assert kind == ("measured" if group in groups else "group")
        else:
            assert kind == ("single" if len(parts) == 1 else "combination")


@pytest.mark.parametrize("anchor", ["encoder", "learned"])
def test_similarity_of_genes_beside_loops(network, anchor):
    model = network(anchor=anchor)
    genes = list(model.vocabulary.symbols[[4, 0, 17, 9]])
    names = [genes[0], "aspirin", *genes[1:], "ethanol"]
    tables = [model.embedding.gene.weight, model.anchor.table.weight if anchor == "encoder" else None]
    expected = np.eye(len(names))
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            if i == j or not {first, second} <= set(genes):
                continue
            product = 1.0
            for table in tables:
                rows = (tables[0] if table is None else table).detach().double().numpy()[N_SPECIAL:]
                a, b = (
                    rows[list(model.vocabulary.symbols).index(name)] - rows.mean(axis=0) for name in (first, second)
                )
                product *= a @ b / np.sqrt((a @ a) * (b @ b))
            expected[i, j] = product
    similarity = part_similarity(model, names)
    np.testing.assert_allclose(similarity, expected, atol=1e-12)
    assert np.abs(similarity - np.eye(len(names))).max() > 0.01
    # of two genes it is the same whoever else is asked for
    np.testing.assert_allclose(part_similarity(model, names[::-1]), expected[::-1, ::-1], atol=1e-12)
    np.testing.assert_allclose(part_similarity(model, names[2:4]), expected[2:4, 2:4], atol=1e-12)


@pytest.mark.parametrize(("n", "n_measured"), [(3, 3), (5, 5), (6, 4)])
def test_similarity_of_groups_beside_loops(n, n_measured):
    states = np.random.default_rng(n).normal(size=(n, 7)).astype(np.float32)
    centred = states.astype(np.float64) - states[:n_measured].astype(np.float64).mean(axis=0)
    expected = [[a @ b / np.sqrt((a @ a) * (b @ b)) for b in centred] for a in centred]
    similarity = group_similarity(states, n_measured)
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    measured_similarity = group_similarity(states[:n_measured], n_measured)  # what is new says nothing of what is known
    np.testing.assert_array_equal(similarity[:n_measured, :n_measured], measured_similarity)
    assert np.linalg.eigvalsh(similarity).min() > -1e-9
    assert (np.diag(similarity) == 1).all()


def test_groups_of_which_nothing_is_known():
    assert group_similarity(np.ones((1, 4), dtype=np.float32), 1).tolist() == [[1]]
    assert group_similarity(np.eye(2, 4, dtype=np.float32), 2).tolist() == [[1, 0], [0, 1]]
    np.testing.assert_array_equal(group_similarity(np.eye(3, 4, dtype=np.float32), 2), np.eye(3))
    np.testing.assert_array_equal(group_similarity(np.ones((3, 4), dtype=np.float32), 3), np.eye(3))  # all the same


SCREENS = st.lists(
    st.sampled_from(["A", "B", "C", "D", "E", "F", "A+B", "B+C", "C+D", "D+E", "A@1", "B@1", "A+B@1", "A@2", "F@2"]),
    min_size=1,
    max_size=12,
    unique=True,
)


def plain_similarities(screen) -> Similarities:
    n, g = len(screen.conditions.part_names), len(screen.groups)
    return Similarities(screen.conditions.part_names, 0.5 * np.eye(n) + 0.5, np.eye(g))


@given(SCREENS, st.integers(0, 3))
def test_folds_of_single_perturbations_leave_every_mention_out(measured, labels, seed):
    c = measured(tuple(labels)).conditions
    predicted = []
    for train, out in R.folds(measured(tuple(labels)), "single", seed):
        left_out = {c.parts[i][0] for i in out}
        assert all(len(c.parts[i]) == 1 for i in out)
        assert not any(left_out & set(c.parts[i]) for i in train)
        assert all(left_out & set(c.parts[i]) for i in set(range(len(c))) - set(train))
        assert not set(train) & set(out)
        assert len(train)
        predicted += out.tolist()
    assert len(set(predicted)) == len(predicted)
    singles = {i for i, parts in enumerate(c.parts) if len(parts) == 1}
    assert set(predicted) <= singles
    if len({c.parts[i] for i in singles}) > 1 and singles == set(range(len(c))):
        assert set(predicted) == singles


@given(SCREENS, st.integers(0, 3))
def test_folds_of_combinations(measured, labels, seed):
    c = measured(tuple(labels)).conditions
    predicted = []
    for train, out in R.folds(measured(tuple(labels)), "combination", seed):
        assert all(len(c.parts[i]) > 1 for i in out)
        assert not {c.parts[i] for i in out} & {c.parts[i] for i in train}  # in no group
        assert sorted([*train, *out]) == list(range(len(c)))
        predicted += out.tolist()
    assert len(set(predicted)) == len(predicted)


@given(SCREENS, st.integers(0, 3))
def test_folds_of_groups(measured, labels, seed):
    c = measured(tuple(labels)).conditions
    for train, out in R.folds(measured(tuple(labels)), "group", seed):
        (group,) = set(c.group[out].tolist())
        assert set(train) == set(np.flatnonzero(c.group != group))
        elsewhere = {c.parts[i] for i in train}
        assert set(out) == {i for i in np.flatnonzero(c.group == group) if c.parts[i] in elsewhere}


def test_there_are_five_folds_or_as_many_as_there_are_units(measured):
    many = measured(tuple("ABCDEFGH"))
    assert [len(out) for _, out in R.folds(many, "single", 0)] == [2, 2, 2, 1, 1]
    assert [len(out) for _, out in R.folds(measured(("A", "B", "C")), "single", 0)] == [1, 1, 1]
    assert list(R.folds(measured(("A",)), "single", 0)) == []
    assert list(R.folds(measured(("A", "B+C")), "combination", 0)) == []
    assert list(R.folds(many, "combination", 0)) == []
    assert list(R.folds(many, "group", 0)) == []
    groups = measured(tuple(f"A@{i}" for i in range(7)))
    assert len(list(R.folds(groups, "group", 0))) == R.FOLDS


SCREEN = ("A", "B", "C", "D", "A+B", "B+C", "C+D", "A@1", "B@1", "A+B@1")


def test_what_is_predicted_of_a_condition_never_saw_it_beside_plain_formulas(measured):
    screen = measured(SCREEN)
    similarities = plain_similarities(screen)
    kind, mse, pearson = R.validate(screen, similarities, 3)
    assert set(kind) == set(KINDS)
    assert mse.shape == pearson.shape == (len(kind), len(R.METHODS))
    at = 0
    for kind_name in KINDS:
        for train, out in R.folds(screen, kind_name, 3):
            delta = screen.delta.copy()
            delta[np.setdiff1d(np.arange(len(delta)), train)] = 1e6  # nothing of what is left out is read
            train_screen = replace(screen, delta=delta).only(train)
            for row in out:
                target, truth = screen.conditions.only(np.array([row])), screen.delta[row].astype(float)
                simple = baselines(train_screen, target)
                predictions = [
                    *(simple[name][0] for name in R.BASELINES),
                    expected_response(train_screen, target, similarities)[0][0],
                ]
                for j, predicted in enumerate(predictions):
                    if np.isnan(predicted).any():
                        assert np.isnan([mse[at, j], pearson[at, j]]).all()
                        continue
                    flat = np.ptp(predicted) < 1e-9
                    correlation = 0.0 if flat else np.corrcoef(predicted, truth)[0, 1]
                    assert mse[at, j] == pytest.approx(np.mean((predicted - truth) ** 2), rel=1e-4)
                    assert pearson[at, j] == pytest.approx(correlation, abs=1e-4)
                assert kind[at] == kind_name
                at += 1
    assert at == len(kind)


def scored(kind, n, **correlations) -> R.Scores:
    """n conditions, and correlations with which every method correlates equally, save those named."""
    scores = np.full((n, len(R.METHODS)), 0.4)
    for name, values in correlations.items():
        scores[:, R.METHODS.index(name)] = values
    return R.Scores(np.array([kind] * n, dtype=object), scores, scores)


@pytest.mark.parametrize(
    ("correlations", "chosen"),
    [
        ({}, R.EXPECTED),
        ({"additive": [0.6, 0.5, 0.7, 0.5]}, "additive"),
        ({"additive": [0.6, 0.5, 0.7, 0.5], "linear": [0.7, 0.6, 0.8, 0.6]}, "linear"),
        ({"additive": [0.9, -0.2, 0.9, 0.1]}, R.EXPECTED),  # better by less than its standard error
        ({"elsewhere": [0.9, np.nan, 0.9, 0.9]}, R.EXPECTED),  # not defined everywhere
        ({"train_mean": [0.3, 0.3, 0.3, 0.3]}, R.EXPECTED),
    ],
)
def test_the_base_is_the_expected_response_unless_another_is_clearly_better(correlations, chosen):
    for kind in KINDS:
        base = R.best_base(scored(kind, 4, **correlations))
        assert base == {k: chosen if k == kind else R.EXPECTED for k in (*KINDS, "measured")}


def test_the_summary_is_a_mean_by_kind_and_method():
    parts = scored("single", 3, additive=[1, 2, 6], elsewhere=[np.nan, 4, 2], linear=np.nan), scored("group", 1)
    kind, scores = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    summary = R.summary(R.Scores(kind, scores, scores / 10))
    assert set(summary) == {"method", "kind", "pearson_delta", "mse", "n"}
    assert len({len(column) for column in summary.values()}) == 1
    rows = {(k, m): i for i, (k, m) in enumerate(zip(summary["kind"], summary["method"], strict=True))}
    assert ("single", "linear") not in rows
    assert len(rows) == 2 * len(R.METHODS) - 1
    for method, value, n in (("additive", 3, 3), ("elsewhere", 3, 2), (R.EXPECTED, 0.4, 3)):
        at = rows["single", method]
        assert (summary["mse"][at], summary["n"][at]) == (pytest.approx(value), n)
        assert summary["pearson_delta"][at] == pytest.approx(value / 10)
    empty = R.summary(scored("single", 0))
    assert {len(column) for column in empty.values()} == {0}
