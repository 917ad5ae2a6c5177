from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import pearsonr, ttest_ind

from scdiva.metrics import de_scores, discrimination, discrimination_matrix, hit_rate, perturbation_response
from scdiva.metrics.perturbation import WMSE_ALPHA

STEPS = st.integers(-8, 8).map(lambda n: n / 4)
"""Changes that tie often."""


def slow_hit_rate(change, score, k):
    """The mean over all orders in which ties may be broken."""
    genes = range(len(change))
    true = set(sorted(genes, key=lambda g: (-abs(score[g]), g))[:k])
    shares = []
    for order in itertools.permutations(genes):
        position = {g: i for i, g in enumerate(order)}
        shares.append(len(true & set(sorted(genes, key=lambda g: (-abs(change[g]), position[g]))[:k])) / k)
    return np.mean(shares)


def slow_response(p, o, ref, score, v, top):
    """Every score of a condition in plain loops."""
    n = len(p)
    change, truth = [p[g] - ref[g] for g in range(n)], [o[g] - ref[g] for g in range(n)]
    score = truth if score is None else score
    order = sorted(range(n), key=lambda g: (-abs(score[g]), g))

    def correlation(genes):
        a, b = [change[g] for g in genes], [truth[g] for g in genes]
        return 0.0 if len(set(a)) == 1 or len(set(b)) == 1 else pearsonr(a, b).statistic

    def error(genes):
        return sum((p[g] - o[g]) ** 2 for g in genes) / len(genes)

    total = sum(v[g] + WMSE_ALPHA for g in range(n))
    scores = {
        "pearson_delta": correlation(range(n)),
        "mse": error(range(n)),
        "wmse": sum((v[g] + WMSE_ALPHA) / total * (change[g] - truth[g]) ** 2 for g in range(n)),
        "sign_accuracy": np.mean(
            [0.5 if change[g] * truth[g] == 0 else float(change[g] * truth[g] > 0) for g in order[: top[0]]]
        ),
    }
    for k in top:
        scores[f"pearson_delta_top{k}"] = correlation(order[:k])
        scores[f"mse_top{k}"] = error(order[:k])
        scores[f"hit_rate_{k}"] = slow_hit_rate(change, score, min(k, n))
    return scores


@st.composite
def condition(draw):
    n = draw(st.integers(2, 5))
    p, o, score = (draw(arrays(float, n, elements=STEPS)) for _ in range(3))
    ref, v = (draw(arrays(float, n, elements=STEPS.map(abs))) for _ in range(2))
    return p, o, ref, draw(st.sampled_from([None, score])), v


@given(condition(), st.sampled_from([(1,), (2, 4), (3, 20)]))
@settings(deadline=None, max_examples=40)
def test_equals_loops(inputs, top):
    p, o, ref, score, v = inputs
    result = perturbation_response(p, o, ref, de_score=score, weights=v, top=top)
    assert result == pytest.approx(slow_response(p, o, ref, score, v, top), abs=1e-12)
    assert all(type(value) is float for value in result.values())


def test_the_truth_scores_best_and_no_change_what_chance_does():
    rng = np.random.default_rng(0)
    reference, truth = rng.gamma(1.0, size=200), rng.gamma(1.0, size=200)
    best = perturbation_response(truth, truth, reference)
    ones = {name for name, value in best.items() if value == pytest.approx(1.0)}
    assert ones == {
        "pearson_delta", "pearson_delta_top20", "pearson_delta_top100", "hit_rate_20", "hit_rate_100", "sign_accuracy",
    }  # fmt: skip
    assert {value for name, value in best.items() if name not in ones} == {0.0}
    none = perturbation_response(reference.astype(np.float32), truth, reference)  # as means are stored
    assert none["pearson_delta"] == none["pearson_delta_top20"] == 0.0
    assert (none["hit_rate_20"], none["hit_rate_100"], none["sign_accuracy"]) == pytest.approx((0.1, 0.5, 0.5))
    shifted = perturbation_response(reference + 0.3, truth, reference)
    assert shifted["pearson_delta"] == 0.0
    assert shifted["mse"] > 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1.0, 2.0], [1.0], [1.0, 2.0]), {}, r"same shape .*'observed': \(1,\)"),
        (([], [], []), {}, "same shape"),
        (([1.0, np.nan], [1.0, 2.0], [0.0, 0.0]), {}, r"1 of 2 values of predicted .* number 1"),
        (([1.0, 2.0], [1.0, 2.0], [0.0, 0.0]), {"weights": [0.0, -1.0]}, "1 of 2 weights are negative"),
        (([1.0, 2.0], [1.0, 2.0], [0.0, 0.0]), {"de_score": [np.inf, 0.0]}, "de_score are not finite"),
        (([1.0, 2.0], [1.0, 2.0], [0.0, 0.0]), {"top": (0,)}, "top must"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        perturbation_response(*arguments, **options)


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(*[arrays(float, n, elements=STEPS)] * 2)))
@settings(deadline=None, max_examples=40)
def test_hit_rate_equals_all_ways_to_break_ties(vectors):
    change, score = vectors
    k = np.arange(1, len(change) + 3)
    expected = [slow_hit_rate(change, score, min(n, len(change))) for n in k]
    np.testing.assert_allclose(hit_rate(change, score, k), expected, atol=1e-12)
    assert hit_rate(change, score, k)[-1] == 1.0


def test_other_numbers_of_genes_are_refused():
    for k, message in ((0, "k must be 1 or more, got 0"), ([5.7], r"k must be whole numbers of genes, got \[5.7\]")):
        with pytest.raises(ValueError, match=message):
            hit_rate([1.0], [1.0], k)


def slow_discrimination(p, o, metric):
    """Rank of the true condition, ties averaged, from a loop over pairs."""
    distance = {
        "l1": lambda a, b: np.abs(a - b).mean(),
        "l2": lambda a, b: math.sqrt(((a - b) ** 2).sum()),
        "cosine": lambda a, b: 0.0 if not (a.any() and b.any()) else -(a @ b) / math.sqrt((a @ a) * (b @ b)),
    }[metric]
    scores = []
    for i in range(len(p)):
        d = np.round([distance(p[i], o[j]) for j in range(len(o))], 12)
        rank = (d < d[i]).sum() + ((d == d[i]).sum() + 1) / 2
        scores.append(1 - (rank - 1) / (len(p) - 1))
    return scores


@pytest.mark.parametrize("metric", ["l1", "l2", "cosine"])
def test_discrimination_equals_loops(metric):
    rng = np.random.default_rng(2)
    p, o = rng.normal(size=(2, 7, 5))
    p[3] = 0
    np.testing.assert_allclose(discrimination(p, o, metric=metric), slow_discrimination(p, o, metric))
    np.testing.assert_allclose(discrimination(o, o, metric=metric), 1.0)
    constant = np.repeat(rng.normal(size=(1, 5)), 7, axis=0)
    assert discrimination(constant, o, metric=metric).mean() == pytest.approx(0.5)
    ranks = discrimination_matrix(p, o, metric=metric)
    np.testing.assert_allclose(ranks.mean(axis=1), 0.5)
    near = discrimination_matrix(p, o, metric=metric, values="similarity")
    moving = [0, 1, 2, 4, 5, 6]  # of zeros the cosine ties
    np.testing.assert_array_equal(near.argmax(axis=1)[moving], ranks.argmax(axis=1)[moving])
    if metric == "cosine":
        np.testing.assert_array_equal(ranks[3], 0.5)


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(*[arrays(float, (n, 3), elements=STEPS)] * 2)))
@settings(deadline=None, max_examples=40)
def test_discrimination_averages_tied_ranks(profiles):
    np.testing.assert_allclose(discrimination(*profiles), slow_discrimination(*profiles, "l1"))


def test_similarities_by_hand():
    observed, predicted = np.array([[0.0], [1.0], [5.0]]), np.array([[0.9], [1.0], [5.0]])
    similarity = discrimination_matrix(predicted, observed, values="similarity")
    np.testing.assert_allclose(similarity[0], [-0.9, -0.1, -4.1])
    assert np.isnan(discrimination(observed[:1], observed[:1])).all()


def test_discrimination_refuses_what_it_cannot_compare():
    one = np.ones((3, 4))
    with pytest.raises(ValueError, match=r"same shape .*\(3, 4\).*\(2, 4\)"):
        discrimination(one, one[:2])
    with pytest.raises(ValueError, match="n_conditions, n_genes"):
        discrimination(one[0], one[0])
    with pytest.raises(ValueError, match=r"1 of 12 values of observed .* number 0, 1"):
        discrimination(one, np.where(np.arange(12).reshape(3, 4) == 1, np.nan, 1))
    with pytest.raises(ValueError, match="metric must"):
        discrimination(one, one, metric="l3")
    with pytest.raises(ValueError, match="values must"):
        discrimination_matrix(one, one, values="ranks")


def test_de_scores_are_welchs():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(5, 6)), rng.normal(1.0, 2.0, size=(9, 6))
    a[:, 0] = b[:, 0] = 0.0
    a[:, 1], b[:, 1] = 1.0, 2.0
    scores = de_scores(a.mean(0), a.var(0, ddof=1), 5, b.mean(0), b.var(0, ddof=1), 9)
    np.testing.assert_array_equal(scores[:2], 0.0)
    np.testing.assert_allclose(scores[2:], ttest_ind(a[:, 2:], b[:, 2:], equal_var=False).statistic)
