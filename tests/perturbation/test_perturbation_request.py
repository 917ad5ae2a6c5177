"""What is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from scdiva.data.genes import InputOptions
from scdiva.models import PerturbationModel
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.predict import Targets, find_targets
from scdiva.perturbation.response import KINDS


@pytest.fixture(scope="module")
def make(one, measured):
    """A fitted model of the perturbations A, B and A+B."""

    def made(groupby="line", dose_key="dose", separator="+", control="control"):
        screen = measured(("A", "B", "A+B", "A@1"), doses=[1, 2, 4, 8], state_dim=one.config.state_dim)
        base = dict.fromkeys((*KINDS, "measured"), "expected")
        return PerturbationModel(
            one, screen, base, ScreenDesign.of("perturbation", control, groupby, dose_key, separator)
        )

    return made


def ask(fitted, predict=None, groups=None, dose=None) -> Targets:
    present = ("line 0", "line 1", "x")
    adata = SimpleNamespace(var=pd.DataFrame(index=[*fitted.screen.genes, "beyond"]))
    return find_targets(fitted, adata, InputOptions(), present, predict, groups, dose)


def test_what_is_left_out_is_all(make):
    found = ask(make())
    assert found.conditions.parts == (("A",), ("A", "B"), ("B",)) * 3
    assert found.names == ["A", "A+B", "B"] * 3
    assert found.groups == ["line 0"] * 3 + ["line 1"] * 3 + ["x"] * 3
    assert found.conditions.group.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert (found.conditions.dose == 3).all()  # the median


def test_one_or_several(make):
    found = ask(make(), "B+A", "line 1", 2)
    assert (found.conditions.parts, found.names, found.groups) == ((("A", "B"),), ["B+A"], ["line 1"])
    assert found.conditions.dose.tolist() == [2]
    found = ask(make(), np.array(["B", "A+control"]), ("x", "line 0"), np.array([1, 2]))
    assert found.conditions.parts == (("B",), ("B",), ("A",), ("A",)) * 2
    assert found.names == ["B", "B", "A+control", "A+control"] * 2
    assert found.groups == ["x"] * 4 + ["line 0"] * 4
    assert found.conditions.dose.tolist() == [1, 2] * 4


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"predict": []}, "predict names no perturbation"),
        ({"predict": "control"}, "predict holds 'control'"),
        ({"predict": ["A", "control+control"]}, r"holds 'control\+control', which is no"),
        ({"predict": ["B+A", "C", "A+B"]}, r"'B\+A' more than once"),
        ({"predict": ["A", "A+control"]}, "holds 'A' more than once"),
        ({"predict": ["A+"]}, r"'A\+' has an empty part"),
        ({"groups": []}, "groups names no group"),
        ({"groups": ["x", "line 0", "x"]}, "groups holds 'x' more than once"),
        ({"dose": [1.0, 2.0, 1]}, "dose holds 1.0 more than once"),
        ({"dose": 0.0}, "dose .*got 0.0"),
        ({"dose": [1, np.nan]}, "dose must be a number above 0"),
        ({"dose": [1, np.inf]}, "dose must be a number above 0"),
        ({"dose": []}, "dose must be a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, arguments, match):
    with pytest.raises(ValueError, match=match):
        ask(make(), **arguments)


def test_groups_and_doses_need_a_screen_that_has_them(make):
    with pytest.raises(ValueError, match="groups requires"):
        ask(make(groupby=""), groups=["a"])
    with pytest.raises(ValueError, match="dose requires"):
        ask(make(dose_key=""), dose=3.0)
