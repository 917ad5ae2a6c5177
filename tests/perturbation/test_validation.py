"""Folds leave out what they say, and what is predicted of a condition never saw it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva.perturbation import response as R
from scdiva.perturbation.response import KINDS, Similarities, baselines, expected_response

LABELS = st.lists(
    st.sampled_from(["A", "B", "C", "D", "E", "F", "A+B", "B+C", "C+D", "D+E", "A@1", "B@1", "A+B@1", "A@2", "F@2"]),
    min_size=1,
    max_size=12,
    unique=True,
)


def similarities_of(screen) -> Similarities:
    n, g = len(screen.conditions.part_names), len(screen.groups)
    return Similarities(screen.conditions.part_names, 0.5 * np.eye(n) + 0.5, np.eye(g))


@given(LABELS, st.integers(0, 3))
def test_folds_of_single_perturbations_leave_every_mention_out(measured, labels, seed):
    c = measured(tuple(labels)).conditions
    predicted = []
    for kept, out in R.folds(measured(tuple(labels)), "single", seed):
        gone = {c.parts[i][0] for i in out}
        assert all(len(c.parts[i]) == 1 for i in out)
        assert not any(gone & set(c.parts[i]) for i in kept)
        assert all(gone & set(c.parts[i]) for i in set(range(len(c))) - set(kept))
        assert not set(kept) & set(out)
        assert len(kept)
        predicted += out.tolist()
    assert len(set(predicted)) == len(predicted)
    singles = {i for i, parts in enumerate(c.parts) if len(parts) == 1}
    assert set(predicted) <= singles
    if len({c.parts[i] for i in singles}) > 1 and singles == set(range(len(c))):
        assert set(predicted) == singles


@given(LABELS, st.integers(0, 3))
def test_folds_of_combinations(measured, labels, seed):
    c = measured(tuple(labels)).conditions
    predicted = []
    for kept, out in R.folds(measured(tuple(labels)), "combination", seed):
        assert all(len(c.parts[i]) > 1 for i in out)
        assert not {c.parts[i] for i in out} & {c.parts[i] for i in kept}  # in no group
        assert sorted([*kept, *out]) == list(range(len(c)))
        predicted += out.tolist()
    assert len(set(predicted)) == len(predicted)


@given(LABELS, st.integers(0, 3))
def test_folds_of_groups(measured, labels, seed):
    c = measured(tuple(labels)).conditions
    for kept, out in R.folds(measured(tuple(labels)), "group", seed):
        (group,) = set(c.group[out].tolist())
        assert set(kept) == set(np.flatnonzero(c.group != group))
        elsewhere = {c.parts[i] for i in kept}
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
    similarities = similarities_of(screen)
    kind, mse, pearson = R.validate(screen, similarities, 3)
    assert set(kind) == set(KINDS)
    assert mse.shape == pearson.shape == (len(kind), len(R.METHODS))
    at = 0
    for named in KINDS:
        for kept, out in R.folds(screen, named, 3):
            delta = screen.delta.copy()
            delta[np.setdiff1d(np.arange(len(delta)), kept)] = 1e6  # nothing of what is left out is read
            known = replace(screen, delta=delta).only(kept)
            for row in out:
                target, truth = screen.conditions.only(np.array([row])), screen.delta[row].astype(float)
                simple = baselines(known, target)
                made = [
                    *(simple[name][0] for name in R.BASELINES),
                    expected_response(known, target, similarities)[0][0],
                ]
                for j, predicted in enumerate(made):
                    if np.isnan(predicted).any():
                        assert np.isnan([mse[at, j], pearson[at, j]]).all()
                        continue
                    flat = np.ptp(predicted) < 1e-9
                    correlation = 0.0 if flat else np.corrcoef(predicted, truth)[0, 1]
                    assert mse[at, j] == pytest.approx(np.mean((predicted - truth) ** 2), rel=1e-4)
                    assert pearson[at, j] == pytest.approx(correlation, abs=1e-4)
                assert kind[at] == named
                at += 1
    assert at == len(kind)


def scored(kind, n, **others) -> R.Scores:
    """n conditions, and correlations with which every method correlates equally, save those named."""
    scores = np.full((n, len(R.METHODS)), 0.4)
    for name, own in others.items():
        scores[:, R.METHODS.index(name)] = own
    return R.Scores(np.array([kind] * n, dtype=object), scores, scores)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ({}, R.EXPECTED),
        ({"additive": [0.6, 0.5, 0.7, 0.5]}, "additive"),
        ({"additive": [0.6, 0.5, 0.7, 0.5], "linear": [0.7, 0.6, 0.8, 0.6]}, "linear"),
        ({"additive": [0.9, -0.2, 0.9, 0.1]}, R.EXPECTED),  # better by less than its standard error
        ({"elsewhere": [0.9, np.nan, 0.9, 0.9]}, R.EXPECTED),  # not defined everywhere
        ({"train_mean": [0.3, 0.3, 0.3, 0.3]}, R.EXPECTED),
    ],
)
def test_the_base_is_the_expected_response_unless_another_is_clearly_better(others, chosen):
    for kind in KINDS:
        found = R.best_base(scored(kind, 4, **others))
        assert found == {k: chosen if k == kind else R.EXPECTED for k in (*KINDS, "measured")}


def test_the_summary_is_a_mean_by_kind_and_method():
    parts = scored("single", 3, additive=[1, 2, 6], elsewhere=[np.nan, 4, 2], linear=np.nan), scored("group", 1)
    kind, scores = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    found = R.summary(R.Scores(kind, scores, scores / 10))
    assert set(found) == {"method", "kind", "pearson_delta", "mse", "n"}
    assert len({len(column) for column in found.values()}) == 1
    rows = {(k, m): i for i, (k, m) in enumerate(zip(found["kind"], found["method"], strict=True))}
    assert ("single", "linear") not in rows
    assert len(rows) == 2 * len(R.METHODS) - 1
    for method, value, n in (("additive", 3, 3), ("elsewhere", 3, 2), (R.EXPECTED, 0.4, 3)):
        at = rows["single", method]
        assert (found["mse"][at], found["n"][at]) == (pytest.approx(value), n)
        assert found["pearson_delta"][at] == pytest.approx(value / 10)
    empty = R.summary(scored("single", 0))
    assert {len(column) for column in empty.values()} == {0}
