from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva.data.corpus import held_out_studies, study_times

NAMES = ["lung", "blood", "skin", "colon", "brain"]


@given(st.floats(0.01, 0.85), st.integers(0, 50), st.permutations(NAMES))
def test_a_share_is_drawn_from_the_seed_whatever_the_order_of_files(share, seed, names):
    held = held_out_studies(names, share, seed)
    assert len(held) == max(1, round(share * 5))
    assert set(held) == set(held_out_studies(NAMES, share, seed))
    assert held == [name for name in names if name in held]


def test_seeds_draw_different_studies():
    assert len({held_out_studies(NAMES, 0.2, seed)[0] for seed in range(60)}) == 5


def test_names_are_taken_as_they_are():
    assert held_out_studies(NAMES, None, 0) == []
    assert held_out_studies(NAMES, ["skin", "lung"], 3) == ["lung", "skin"]
    assert held_out_studies(NAMES, "skin", 3) == ["skin"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["blod"], r"no study 'blod' \(did you mean 'blood'\?\)"),
        (["liver x"], r"no study 'liver x'\.$"),
        (["skin", "skin"], "names a study twice"),
        (NAMES, "all 5 studies would validate"),
        (0.95, "all 5 studies would validate"),
        (1.0, "share between 0 and 1; got 1.0"),
        (0, "share between 0 and 1; got 0"),
        (True, "got True"),
    ],
)
def test_impossible_splits_are_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        held_out_studies(NAMES, asked, 0)


def test_times_by_name_and_by_size():
    sizes = np.array([100, 10, 1000, 1, 50])
    np.testing.assert_array_equal(study_times(None, NAMES, sizes), 1)
    np.testing.assert_array_equal(study_times({"skin": 0.5, "brain": 3}, NAMES, sizes), [1, 1, 0.5, 1, 3])
    np.testing.assert_allclose(study_times(1, NAMES, sizes), 1)
    np.testing.assert_allclose(study_times(0.0, NAMES, sizes) * sizes, sizes.sum() / 5)
    half = study_times(0.5, NAMES, sizes) * sizes
    np.testing.assert_allclose(half / half[0], np.sqrt(sizes / 100))
    assert half.sum() == pytest.approx(sizes.sum())
    # studies without a usable cell do not count
    assert study_times(0.0, NAMES[:3], np.array([10, 0, 30]))[[0, 2]] @ [10, 30] == pytest.approx(40)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"skim": 2}, r"no training study 'skim' \(did you mean 'skin'\?\)"),
        ({"skin": 0}, "weight of 'skin' must be a finite number above 0, got 0"),
        ({"skin": float("nan")}, "got nan"),
        ({"skin": "2"}, "got '2'"),
        (1.5, "power from 0 to 1; got 1.5"),
        (-0.1, "got -0.1"),
        (True, "got True"),
    ],
)
def test_impossible_weights_are_refused(weights, said):
    with pytest.raises(ValueError, match=said):
        study_times(weights, NAMES, np.ones(5, int))
