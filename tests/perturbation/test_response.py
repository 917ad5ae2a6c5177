"""The expected response beside the covariance term by term, and beside sklearn's Gaussian process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct

from scdiva.perturbation import response as R
from scdiva.perturbation.response import Similarities, covariance, expected_response
from scdiva.perturbation.screen import Conditions

NAMES = tuple("ABCDE")
PARTS = st.sets(st.sampled_from(NAMES), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
ROWS = st.lists(st.tuples(PARTS, st.integers(0, 3), st.floats(0.01, 100.0)), min_size=1, max_size=10)


def conditions(rows) -> Conditions:
    parts, group, dose = zip(*rows, strict=True)
    return Conditions(tuple(parts), np.array(group, dtype=np.int64), np.array(dose, dtype=np.float64))


def similarities_of(n_groups=4, rng=0) -> Similarities:
    """Correlations of random vectors."""
    draw = np.random.default_rng(rng)
    return Similarities(NAMES, np.corrcoef(draw.normal(size=(5, 9))), np.corrcoef(draw.normal(size=(n_groups, 9))))


def slow_covariance(one, other, similarities, unit, shared=R.GUESSED) -> float:
    """Of two conditions, sum by sum, from the formula at the head of the module."""
    (parts_a, group_a, dose_a), (parts_b, group_b, dose_b) = one, other
    a, b = (np.log(1 + dose / unit) / np.log(2) for dose in (dose_a, dose_b))
    effect = 0.0
    for p in parts_a:
        for q in parts_b:
            similar = similarities.parts[similarities.names.index(p), similarities.names.index(q)]
            effect += a * b * ((1 - R.RELATED) * (p == q) + R.RELATED * similar)
    effect += R.PAIR * (parts_a == parts_b and len(parts_a) > 1)
    rest = 1 - shared.groups
    group = shared.groups + rest * (0.6 * similarities.groups[group_a, group_b] + 0.4 * (group_a == group_b))
    return shared.all + effect * group * np.exp(-((a - b) ** 2) / 2)


@given(ROWS, ROWS, st.sampled_from([0.3, 1.0, 20.0]), st.builds(R.Shared, st.floats(0, 5), st.floats(0, 1)))
def test_covariance_term_by_term(one, other, unit, shared):
    similarities = similarities_of()
    expected = [[slow_covariance(a, b, similarities, unit, shared) for b in other] for a in one]
    found = covariance(conditions(one), conditions(other), similarities, unit, shared)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(ROWS, st.integers(0, 50), st.builds(R.Shared, st.floats(0, 5), st.floats(0, 1)))
def test_a_covariance_is_positive_semidefinite(rows, rng, shared):
    found = covariance(conditions(rows), conditions(rows), similarities_of(rng=rng), 1.0, shared)
    np.testing.assert_allclose(found, found.T)
    assert np.linalg.eigvalsh(found).min() > -1e-9 * np.trace(found)


def tau_squared(screen, prior) -> tuple[np.ndarray, np.ndarray]:
    """By moments, gene by gene, drawn towards what genes of the same variance have, which comes second."""
    n, g = screen.delta.shape
    variance, found = screen.variance.astype(float), np.zeros(g)
    for j in range(g):
        error = [variance[j] / screen.n_cells[i] for i in range(n)]
        error = [e + variance[j] / screen.n_control[screen.conditions.group[i]] for i, e in enumerate(error)]
        found[j] = np.mean(screen.delta[:, j].astype(float) ** 2 - error) / np.mean(np.diag(prior))
    others = found.mean() / variance.mean() * variance
    return np.maximum(R.OWN * found + (1 - R.OWN) * others, R.LEAST * others), others


@pytest.mark.parametrize("doses", [None, [0.5, 1, 2, 1, 1, 3, 1]])
def test_mean_and_sd_are_those_of_a_gaussian_process(measured, doses):
    """Sklearn's knows no covariance given as a matrix; the rows of its root are features that have it.

    The error of a group's control cells is in all changes of the group, measured or not.
    """
    screen = measured(("A", "B", "C@1", "A+B", "B+C@1", "A@1", "D@2"), doses=doses, rng=4)
    targets = conditions([(("A",), 2, 1.0), (("B", "D"), 0, 0.7), (("E",), 1, 1.0), (("A",), 0, 1.0), (("C",), 3, 5.0)])
    similarities, n = similarities_of(), len(screen.conditions)
    both = Conditions(
        (*screen.conditions.parts, *targets.parts),
        np.concatenate([screen.conditions.group, targets.group]),
        np.concatenate([screen.conditions.dose, targets.dose]),
    )
    prior = covariance(both, both, similarities, 1.0, R.shared_changes(screen))
    scale, others = tau_squared(screen, prior[:n, :n])
    shared = np.array([[1 / screen.n_control[g] if g == h < 3 else 0.0 for h in both.group] for g in both.group])
    found, found_sd = expected_response(screen, targets, similarities)
    for j in range(len(screen.genes)):
        noise = screen.variance[j] / min(scale[j], others[j])
        root = np.linalg.cholesky(prior + noise * shared + 1e-10 * np.eye(len(both)))
        regressor = GaussianProcessRegressor(DotProduct(0.0, "fixed"), alpha=noise / screen.n_cells, optimizer=None)
        regressor.fit(root[:n], screen.delta[:, j].astype(np.float64))
        mean, sd = regressor.predict(root[n:], return_std=True)
        np.testing.assert_allclose(found[:, j], mean, atol=1e-6)
        np.testing.assert_allclose(found_sd[:, j], sd * np.sqrt(scale[j]), atol=1e-5)


def screen_of(n_parts, n_groups, share, of_groups, measured, n_genes=3000, rng=0):
    """A screen whose effects are made of a part that all share, one of the perturbation, and one of it in a group."""
    draw = np.random.default_rng(rng)
    labels = [f"P{i}@{g}" for i in range(n_parts) for g in range(n_groups)]
    screen = measured(labels, n_genes=n_genes)
    everyone, own = draw.normal(size=n_genes), draw.normal(size=(n_parts, n_genes))
    c = screen.conditions
    part = np.array([int(parts[0][1:]) for parts in c.parts])
    effect = of_groups**0.5 * own[part] + (1 - of_groups) ** 0.5 * draw.normal(size=(len(c), n_genes))
    n_cells, n_control = np.full(len(c), 50), np.full(n_groups, 60)
    error = draw.normal(size=(len(c), n_genes)) / 50**0.5
    error += (draw.normal(size=(n_groups, n_genes)) / 60**0.5)[c.group]
    delta = share**0.5 * everyone + effect + error
    ones = np.ones(n_genes, dtype=np.float32)
    return replace(screen, delta=delta.astype(np.float32), n_cells=n_cells, n_control=n_control, variance=ones)


@pytest.mark.parametrize(("share", "of_groups"), [(0.0, 0.0), (0.5, 0.3), (1.0, 1.0), (0.2, 0.8)])
def test_what_changes_share_is_found(measured, share, of_groups):
    """Of many conditions; the common error of a group's control cells is not taken for something shared."""
    found = R.shared_changes(screen_of(30, 4, share, of_groups, measured))
    assert found.all == pytest.approx(share, abs=0.15)
    assert found.groups == pytest.approx(of_groups, abs=0.1)
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


def test_effects_add_up_and_carry_over(measured):
    """Of a new pair the expected change is nearer to its parts' sum than to either; of a similar gene, to its."""
    screen = replace(
        measured(("A", "B", "C", "D"), n_genes=200), n_cells=np.full(4, 10**6), n_control=np.array([10**6])
    )
    similarities = similarities_of()
    delta = screen.delta.astype(np.float64)
    pair, _ = expected_response(screen, conditions([(("A", "B"), 0, 1.0)]), similarities)
    gap = [np.square(pair[0] - other).mean() for other in (delta[0] + delta[1], delta[0], delta[1])]
    assert gap[0] < min(gap[1:])
    similar = np.eye(5)
    similar[0, 4] = similar[4, 0] = 0.9
    new, _ = expected_response(screen, conditions([(("E",), 0, 1.0)]), Similarities(NAMES, similar, np.eye(1)))
    nearest = [np.corrcoef(new[0], row)[0, 1] for row in delta]
    assert np.argmax(nearest) == 0


def test_little_to_learn_from_gives_finite_numbers(measured):
    similarities = similarities_of()
    target = conditions([(("D",), 0, 1.0)])
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
