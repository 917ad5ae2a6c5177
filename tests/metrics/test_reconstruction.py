from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from scdiva.metrics import bleu, l_dist, marginal_recall, reconstruction_scores, value_spearman

CELL = st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)
"""The genes of a cell, each once."""
TOLD = st.lists(st.integers(0, 30), max_size=15)
"""A prediction, which may hold genes more than once."""
REPETITIVE = st.lists(st.integers(0, 2), min_size=1, max_size=12)
"""Sequences that share long n-grams."""
same = pytest.approx


def slow_l_dist(true, predicted):
    """Places by search, gene by gene."""
    moved = [abs(k - predicted.index(gene)) for k, gene in enumerate(true) if gene in predicted]
    return (sum(moved) / len(moved) if moved else math.nan), len(moved) / len(true)


def slow_bleu(true, predicted, max_n):
    """Each n-gram of the prediction crosses out one of the true ones."""
    if len(true) < max_n:
        return math.nan
    product = 1.0
    for n in range(1, max_n + 1):
        left = [true[i : i + n] for i in range(len(true) - n + 1)]
        grams = [predicted[i : i + n] for i in range(len(predicted) - n + 1)]
        right = 0
        for gram in grams:
            if gram in left:
                left.remove(gram)
                right += 1
        if not right:
            return 0.0
        product *= (right / len(grams)) ** (1 / max_n)
    return product * (1.0 if len(predicted) > len(true) else math.exp(1 - len(true) / len(predicted)))


def slow_spearman(a, b):
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    x, y = rankdata(a), rankdata(b)
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())


@given(CELL, TOLD)
def test_l_dist_equals_a_search(true, predicted):
    result = l_dist(np.array(true), predicted)
    expected, coverage = slow_l_dist(true, predicted)
    assert (result.l_dist, result.coverage) == same((expected, coverage), nan_ok=True)
    assert result.by_length == same(expected / len(true), nan_ok=True)


@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_chance_of_l_dist_is_its_mean_over_all_orders(length):
    true = list(range(10, 10 + length))
    distances = [l_dist(true, order).l_dist for order in itertools.permutations(true)]
    assert l_dist(true, true).chance == same(np.mean(distances))


@given(REPETITIVE, st.lists(st.integers(0, 2), max_size=12), st.integers(1, 5))
def test_bleu_equals_crossing_out(true, predicted, max_n):
    score = bleu(true, predicted, max_n)
    assert score == same(slow_bleu(true, predicted, max_n), nan_ok=True)
    assert np.isnan(score) or 0 <= score <= 1 + 1e-12


VALUES = st.integers(-3, 3).map(lambda n: n / 2)


@given(st.lists(st.tuples(VALUES, VALUES), max_size=12))
def test_value_spearman_equals_pearson_of_mean_ranks(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    correlation = value_spearman(a, b)
    assert correlation == same(slow_spearman(a, b), nan_ok=True, abs=1e-12)
    assert value_spearman(b, a) == same(correlation, nan_ok=True, abs=1e-12)
    assert value_spearman(np.exp(a), b) == same(correlation, nan_ok=True, abs=1e-12)
    assert value_spearman(a, [-v for v in b]) == same(-correlation, nan_ok=True, abs=1e-12)


@given(CELL, st.data())
def test_marginal_recall_equals_taking_genes_one_by_one(cell, data):
    frequency = data.draw(st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=31, max_size=31))
    n_shown = data.draw(st.integers(0, len(cell) - 1))
    visible, hidden = cell[:n_shown], cell[n_shown:]
    left, guesses = [g for g in range(31) if g not in visible], []
    for _ in hidden:
        best = max(left, key=lambda g: (frequency[g], -g))
        guesses.append(best)
        left.remove(best)
    recall = marginal_recall(hidden, visible, frequency)
    assert recall == same(len(set(hidden) & set(guesses)) / len(hidden))


@st.composite
def reconstructed(draw):
    true = draw(CELL)
    n = len(true)
    lists = [draw(st.lists(VALUES, min_size=n, max_size=n)) for _ in range(2)]
    masked = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    guessed = draw(st.lists(st.sampled_from([*true, 31, 32]), min_size=n, max_size=n))
    return true, [t if m else g for g, t, m in zip(true, guessed, masked, strict=True)], *lists, masked


def slow_at(true, predicted, values, predicted_values, where):
    """Scores of some positions, from lists."""
    if not where:
        return [0, math.nan, math.nan, math.nan, math.nan]
    genes, guesses = [true[i] for i in where], [predicted[i] for i in where]
    return [
        len(where),
        sum(g in guesses for g in genes) / len(where),
        sum(g == t for g, t in zip(genes, guesses, strict=True)) / len(where),
        slow_spearman([values[i] for i in where], [predicted_values[i] for i in where]),
        math.sqrt(sum((values[i] - predicted_values[i]) ** 2 for i in where) / len(where)),
    ]


@given(reconstructed())
@settings(deadline=None)
def test_scores_of_a_cell_equal_loops(cell):
    true, predicted, values, predicted_values, masked = cell
    scores = reconstruction_scores(true, predicted, values, predicted_values, masked)
    hidden = [i for i, m in enumerate(masked) if m]
    visible = [i for i, m in enumerate(masked) if not m]
    common = [g for g in true if g in predicted]
    moved = l_dist(true, predicted)
    expected = [
        *slow_at(true, predicted, values, predicted_values, hidden),
        *slow_at(true, predicted, values, predicted_values, visible),
        moved.l_dist,
        moved.chance,
        moved.by_length,
        moved.coverage,
        slow_bleu(true, predicted, 4),
        slow_spearman([values[true.index(g)] for g in common], [predicted_values[predicted.index(g)] for g in common]),
    ]
    assert list(scores) == same(expected, nan_ok=True, abs=1e-12)
    assert scores.n_visible == 0 or scores.visible_match == 1


@pytest.mark.parametrize("function", [l_dist, bleu])
@pytest.mark.parametrize(
    ("true", "predicted", "error", "message"),
    [
        ([], [1], ValueError, "true holds no gene"),
        ([1, 2], [[1, 2]], ValueError, r"predicted has shape \(1, 2\)"),
        ([1.0, 2.0], [1, 2], TypeError, "true .*integers, not float64"),
        ([1, 2], ["CD4", "CD8A"], TypeError, "predicted must hold genes as integers"),
        ([1, 2, 3, 4], [1, -1, 2, -1], ValueError, "2 of 4 genes of predicted .*number 1"),
    ],
)
def test_sequences_that_are_none_are_refused(function, true, predicted, error, message):
    with pytest.raises(error, match=message):
        function(true, predicted)


def test_repeated_genes_and_other_numbers_are_refused():
    with pytest.raises(ValueError, match=r"1 of 2 genes of true .*gene 4\)"):
        l_dist([4, 5, 4], [4, 5])
    with pytest.raises(ValueError, match=r"same shape .*\(2,\).*\(3,\)"):
        value_spearman([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match=r"1 of 2 values of predicted .*number 1\)"):
        value_spearman([1, 2], [1, np.nan])


@pytest.mark.parametrize(
    ("true", "shown", "frequency", "message"),
    [
        ([], [1], [1, 1], "true holds no gene"),
        ([0], [1, 1], [1, 1], "genes of shown occur"),
        ([0, 1], [1], [1, 1], r"1 of 2 masked .*visible .*gene 1\)"),
        ([2, 0], [], [1, 1], "1 of 2 genes of true .*frequency, which has 2 .first: 2"),
        ([0], [5], [1, 1], "1 of 1 genes of shown .*frequency"),
        ([0], [], [[1, 1]], r"frequency has shape \(1, 2\)"),
        ([0], [], [1, np.nan], r"1 of 2 frequencies .*number 1\)"),
    ],
)
def test_marginal_recall_refuses_what_it_cannot_rank(true, shown, frequency, message):
    with pytest.raises(ValueError, match=message):
        marginal_recall(true, shown, frequency)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"predicted": [1, 2]}, r"same positions, shape \(L,\), got .*'predicted': \(2,\)"),
        ({"true_values": [1, 2], "predicted_values": [1, 2]}, r"'values': \(2,\)"),
        ({"masked": [0, 1, 2]}, "masked .*truth values, not int64"),
        ({"true_values": [1, 2, np.inf]}, r"1 of 3 values of true_values .*number 2\)"),
    ],
)
def test_scores_of_a_cell_refuse_what_does_not_fit(changed, message):
    fit = {"true": [1, 2, 3], "predicted": [1, 2, 3], "true_values": [1, 2, 3], "predicted_values": [1, 2, 3]}
    with pytest.raises(ValueError, match=message):
        reconstruction_scores(**{**fit, "masked": [0, 1, 1], **changed})
