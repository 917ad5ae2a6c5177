from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva._labels import read_labels
from scdiva.perturbation.conditions import ScreenDesign, perturbations

GENES = st.lists(st.sampled_from(["A", "B", "KLF1", "ctrl"]), min_size=1, max_size=4)


def cells(labels):
    return ad.AnnData(
        np.zeros((len(labels), 1), dtype=np.float32),
        obs=pd.DataFrame({"p": labels}, index=[f"c{i}" for i in range(len(labels))]),
    )


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("ctrl", ()),
        ("ctrl+ctrl", ()),
        ("A", ("A",)),
        ("A+ctrl", ("A",)),
        ("ctrl+A", ("A",)),
        ("B+A", ("A", "B")),
        ("A + B", ("A", "B")),
        ("A+A", ("A",)),
        ("IFN-beta", ("IFN-beta",)),
    ],
)
def test_labels_are_split(label, parts):
    assert ScreenDesign("", ("ctrl",)).parts(label) == parts


@given(GENES)
def test_the_order_of_parts_means_nothing(parts):
    found = ScreenDesign("", ("ctrl",)).parts("+".join(parts))
    assert found == ScreenDesign("", ("ctrl",)).parts("+".join(reversed(parts)))
    assert set(found) == set(parts) - {"ctrl"}
    assert ScreenDesign("", ("ctrl",), "_").parts("_".join(parts)) == found


def test_a_separator_may_be_another_or_none():
    assert ScreenDesign("", ("ctrl",), "").parts("A+B") == ("A+B",)
    assert ScreenDesign("", ("+",)).parts("+") == ()  # the control's own name is never split
    with pytest.raises(ValueError, match=r"'CD4\+' has an empty part"):
        ScreenDesign("").parts("CD4+")


def test_cells_are_numbered_by_what_was_done_to_them():
    found = perturbations(cells(["B+A", "B", "ctrl", "A+B", "A+ctrl", "A"]), ScreenDesign.of("p", "ctrl"))
    assert found.parts == ((), ("A",), ("B",), ("A", "B"))
    assert found.code.tolist() == [3, 2, 0, 3, 1, 1]
    assert found.is_control.tolist() == [False, False, True, False, False, False]


def test_what_names_no_perturbation_is_refused():
    with pytest.raises(KeyError, match="no column 'q'; it has 'p'"):
        perturbations(cells(["ctrl"]), ScreenDesign("q"))
    with pytest.raises(ValueError, match=r"query.obs\['p'\] .*2 of 3 .*'c1'"):
        read_labels(cells(["A", None, np.nan]), "p", where="query")
    with pytest.raises(ValueError, match=r"'control'.*'A', 'ctrl'.*adata\.obs\['p'\] = .*replace\('ctrl', 'control'\)"):
        perturbations(cells(["A", "ctrl"]), ScreenDesign("p"))
    with pytest.raises(ValueError, match=r"replace\('Control', 'control'\)\."):
        perturbations(cells(["KLF1", "Control"]), ScreenDesign("p"))
