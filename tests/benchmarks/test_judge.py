"""A goal is judged by an interval over what was repeated: seeds, types, cells, rounds."""

from __future__ import annotations

from math import sqrt
from statistics import mean, stdev

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel


@pytest.fixture
def judge(script):
    return script("_judge")


ONE, OTHER = (0.80, 0.83, 0.86, 0.81), (0.78, 0.82, 0.83, 0.80)


def row(values, each=True, **more):
    kept = {"a_seeds": list(values)} if each else {}
    return {"a": mean(values), "a_sd": float(np.std(values)), "seeds": list(range(len(values))), **kept, **more}


def between(interval, rel=None):
    return [pytest.approx(float(bound), abs=None if rel else 1e-4, rel=rel) for bound in interval]


def test_seeds_are_paired_where_both_rows_kept_each(judge):
    found = judge.judge("x", judge.of_row(row(ONE), "a"), judge.of_row(row(OTHER), "a"), at_least=0.0)
    assert found["interval"] == between(ttest_rel(ONE, OTHER).confidence_interval(0.95))
    assert (found["met"], found["over"]) == (True, "4 seeds")
    assert judge.over_seeds("a", [np.float32(0.5), 0.75]) == {"a": 0.625, "a_sd": 0.125, "a_seeds": [0.5, 0.75]}


def test_of_means_and_deviations_the_interval_is_that_of_two_means_apart(judge):
    pair = [judge.of_row(row(values, each=False), "a") for values in (ONE, OTHER)]
    found = judge.judge("x", *pair, at_least=0.0)
    assert found["interval"] == between(ttest_ind(ONE, OTHER, equal_var=False).confidence_interval(0.95))
    assert found["met"] is None
    # the deviation of some rows is that of a sample
    sample = {**row(ONE, each=False), "a_sd": stdev(ONE)}
    assert judge.of_row(sample, "a", ddof=1).error == pytest.approx(stdev(ONE) / 2) == pytest.approx(pair[0].error)


def test_a_fit_that_draws_nothing_is_judged_by_its_cells(judge):
    def pair(n_cells):
        same = [{"a": value, "a_sd": 0.0, "seeds": [0, 1, 2], "n_cells": n_cells} for value in (0.91, 0.9)]
        return [judge.share_of_cells(one, "a") for one in same]

    few, many = (judge.judge("x", *pair(n), at_least=0.0) for n in (1000, 100_000))
    width = 1.96 * sqrt(0.91 * 0.09 / 1000 + 0.9 * 0.1 / 1000)
    assert few["interval"] == between((0.01 - width, 0.01 + width), rel=0.02)
    assert (few["met"], few["over"], many["met"]) == (None, "1,000 cells", True)
    # without cells, equal repeats say nothing
    nothing = judge.judge("x", *(one._replace(of_cells=None) for one in pair(1000)), at_least=0.0)
    assert (nothing["met"], "interval" in nothing) == (None, False)


def test_the_wider_of_seeds_and_cells_counts(judge):
    by_seeds, by_cells = (
        judge.judge("x", judge.share_of_cells(row(ONE, n_cells=n), "a"), at_least=0.8) for n in (10**6, 100)
    )
    assert (by_seeds["over"], by_cells["over"]) == ("4 seeds", "100 cells")
    assert by_cells["interval"][0] < by_seeds["interval"][0]


def test_a_perfect_share_of_few_cells_is_not_sure(judge):
    perfect = [judge.judge("x", judge.share_of_cells({"a": 1.0, "n_cells": n}, "a"), at_least=0.95) for n in (10, 1000)]
    assert [one["met"] for one in perfect] == [None, True]
    assert perfect[0]["interval"][1] == 1.0
    assert judge.auroc_error(1.0, 20) > 0.02 > judge.auroc_error(1.0, 2000) > 0
    # Hanley and McNeil 1982, table 1: an area of 0.893 of 51 and 58 cases has an error of 0.032
    assert judge.auroc_error(0.893, 54) == pytest.approx(0.032, abs=0.002)


def test_types_and_groups_are_what_is_repeated(judge):
    for leads, met, over in (([0.2, 0.1, 0.3, 0.2], True, "4 types"), ([0.2], None, "one of types")):
        found = judge.judge("x", judge.across(leads, "types"), at_least=0.0)
        assert (found["met"], found["over"], found["value"]) == (met, over, 0.2)


def test_a_number_of_sets_is_as_sure_as_its_sets(judge):
    def goals(*met):
        return [{"value": 1.0 if one is not False else -1.0, "at_least": 0.0, "met": one} for one in met]

    for met, verdict in (((True, True), True), ((True, None), None), ((True, False), False), ((False, None), False)):
        assert judge.judge_number("x", goals(*met), 2, "sets")["met"] is verdict
    assert judge.judge_number("x", goals(True, None, False), 2, "sets")["interval"] == [1, 2]


def test_times_are_judged_by_their_rounds(judge):
    steady, noisy = [1.0, 1.01, 1.02, 1.01, 1.0], [1.0, 1.6, 2.0, 1.9, 1.8]
    sure = judge.judge_times("x", [3 * spent for spent in steady], steady, at_least=2.5)
    assert (sure["value"], sure["met"], sure["over"]) == (pytest.approx(3), True, "5 rounds")
    for one, other in (([3.0] * 5, noisy), ([3.0], [1.0])):  # one lucky round in five, or one at all
        assert judge.judge_times("x", one, other, at_least=2.5)["met"] is None
    assert judge.judge_times("x", [1.0] * 5, [1.0] * 5, scale=0.5, at_most=0.6)["value"] == 0.5
    assert judge.judge_times("x", [3.0] * 9, steady, at_least=2.5)["over"] == "5 rounds"


def test_a_share_of_the_rival_has_the_error_of_both(judge):
    found = judge.judge("x", judge.Score(0.95, 0.01, 1e9), judge.Score(1.0, 0.02, 1e9), at_least=0.95, share=True)
    width = 1.96 * 0.95 * sqrt((0.01 / 0.95) ** 2 + 0.02**2)
    assert found["interval"] == between((0.95 - width, 0.95 + width))
