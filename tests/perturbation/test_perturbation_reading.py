"""What is read of a screen, beside plain means over dense arrays."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from scdiva.data.cells import log_normalised
from scdiva.data.genes import InputOptions
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.screen import open_screen, read_screen, refuse_unknown


def read(data, model, groupby=None, dose_key=None, separator="+", control="control", key="perturbation", **reading):
    design = ScreenDesign.of(key, control, groupby, dose_key, separator)
    return read_screen(data, open_screen(data, design, None, model, "cpu", InputOptions(**reading)), "cpu")


@pytest.mark.parametrize("dose", [0.0, -1.0, np.nan, np.inf, "much"])
def test_a_dose_that_is_none_is_named(one, perturbed_cells, dose):
    data = perturbed_cells(("control", "0", "1"), n=2, doses=(2.0,))
    given = data.obs["dose"].astype(object)
    given.iloc[3] = given.iloc[5] = dose
    given.iloc[0] = np.nan  # of a control cell, where it says nothing
    data.obs["dose"] = given
    with pytest.raises(ValueError, match=r"'dose'\] .*above 0 for 2 of 4 .*'c3'"):
        read(data, one, dose_key="dose")


def test_means_changes_and_variances_beside_dense_arrays(one, perturbed_cells, genes):
    data = perturbed_cells(("0", "control", "drug", "0+1"), ("b", "a"), n=5, doses=(1.0, 10.0), rng=3)
    data = data[np.random.default_rng(0).permutation(data.n_obs)[:-3]].copy()
    screen, controls = read(data, one, "line", "dose")
    values = log_normalised(data)[0].toarray()
    label, group, dose = (data.obs[name].to_numpy() for name in ("perturbation", "line", "dose"))
    assert screen.genes == tuple(genes)
    assert screen.groups == ("a", "b") == controls.groups
    keys = list(zip(screen.conditions.parts, screen.conditions.group, screen.conditions.dose, strict=True))
    assert len(keys) == len(set(keys)) == 12
    left = np.zeros_like(values)
    for i, (parts, number, amount) in enumerate(keys):
        own = (group == screen.groups[number]) & (dose == amount)
        own &= [tuple(sorted(name.split("+"))) == parts for name in label]
        control = values[(label == "control") & (group == screen.groups[number])]
        np.testing.assert_allclose(screen.delta[i], values[own].mean(0) - control.mean(0), atol=1e-5)
        assert screen.n_cells[i] == own.sum()
        left[own] = values[own] - values[own].mean(axis=0)
    for number, name in enumerate(screen.groups):
        own = (label == "control") & (group == name)
        np.testing.assert_allclose(screen.control[number], values[own].mean(0), rtol=1e-5)
        np.testing.assert_allclose(controls.means[number], values[own].mean(0), rtol=1e-5)
        assert screen.n_control[number] == own.sum()
        left[own] = values[own] - values[own].mean(axis=0)
    np.testing.assert_allclose(screen.variance, (left**2).sum(axis=0) / (len(data) - 14), rtol=1e-4, atol=1e-6)
    assert {a.dtype.name for a in (screen.delta, screen.control, screen.states, screen.variance)} == {"float32"}
    assert screen.n_cells.dtype == screen.n_control.dtype == np.int64


def test_control_cells_as_the_model_reads_them(one, perturbed_cells):
    import scdiva as sd

    data = perturbed_cells(("0", "control"), ("b", "a"), n=6)
    data.X = sp.diags_array((np.arange(24) != 13).astype(np.float32)) @ data.X  # a control cell without counts
    data.X = sp.csr_matrix(data.X)
    with pytest.warns(UserWarning, match="1 of 12"):
        screen, controls = read(data, one, "line")
    assert controls.names.tolist() == data.obs_names[12:].tolist()
    assert [controls.groups[i] for i in controls.number] == data.obs["line"][12:].tolist()
    assert sorted(controls.rows.tolist()) == [i for i in range(12) if i != 1]
    assert (np.diff(controls.number[controls.rows]) >= 0).all()
    own = data[12:].copy()[controls.rows].copy()
    sd.tl.embed(own, model=one)
    for number in range(2):
        mean = own.obsm["X_scdiva"][controls.number[controls.rows] == number].mean(axis=0)
        np.testing.assert_allclose(controls.states[number], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(screen.states, controls.states)


def test_labels_of_the_same_parts_are_one_condition(one, perturbed_cells, genes):
    data = perturbed_cells(("ctrl", "0+ctrl", "ctrl+0", "0", "1+0", "0+1"), n=4)
    screen, _ = read(data, one, control="ctrl")
    assert screen.conditions.parts == ((genes[0],), tuple(sorted(genes[:2])))
    assert screen.n_cells.tolist() == [12, 8]


def test_what_tells_nothing_is_refused(one, perturbed_cells):
    with pytest.raises(ValueError, match="all 20 cells are control cells"):
        read(perturbed_cells(("control",), n=20), one)
    data = perturbed_cells(("control", "0"), ("a", "b", "c"), n=4)
    lacking = data[~((data.obs["perturbation"] == "control") & data.obs["line"].isin(["b", "c"]))].copy()
    with pytest.raises(ValueError, match=r"2 of 3 groups .*control cells.*'b'"):
        read(lacking, one, "line")
    unread = data.copy()
    unread.X = unread.X.toarray()
    unread.X[(data.obs["line"] == "b").to_numpy(), :-5] = 0
    with (
        pytest.warns(UserWarning, match="4 of 12 cells are left out"),
        pytest.raises(ValueError, match=r"1 of 3 groups .*control .*'b'.*Remove"),
    ):
        read(unread, one, "line")
    twice = data.copy()
    twice.var_names = [twice.var_names[3], *twice.var_names[1:4], twice.var_names[3], *twice.var_names[5:]]
    with pytest.raises(ValueError, match=r"2 of 60 genes .*repeat.*var_names_make_unique"):
        read(twice, one)


def test_a_group_that_has_control_cells_alone_is_read(one, perturbed_cells):
    data = perturbed_cells(("control", "0", "1"), ("a", "b"), n=4)
    data = data[(data.obs["perturbation"] == "control") | (data.obs["line"] == "b")].copy()
    screen, _ = read(data, one, "line")
    assert screen.groups == ("a", "b")
    assert screen.conditions.group.tolist() == [1, 1]


def test_single_cells_of_a_condition_are_told_and_count_little(one, perturbed_cells, genes):
    data = perturbed_cells(("control", "0", "1", "2+1"), n=8)
    kept = np.ones(data.n_obs, dtype=bool)
    kept[17:24] = kept[25:] = False
    with pytest.warns(UserWarning, match=r"2 of 3 conditions .*one cell") as caught:
        screen, _ = read(data[kept].copy(), one)
    assert any(genes[1] in str(one.message) for one in caught)
    assert sorted(screen.n_cells.tolist()) == [1, 1, 8]
    assert np.isfinite(screen.variance).all()
    every = perturbed_cells(("control", "0", "1"), n=1)
    with pytest.raises(ValueError, match=r"each of 2 conditions.*control cells"):
        read(every, one)


def test_unknown_names_are_refused_with_close_ones(one, genes):
    measured = (genes[0], "aspirin")
    refuse_unknown(one, [(genes[3],), ("aspirin", genes[1])], None, measured)
    with pytest.raises(ValueError, match=r"2 of 3 perturbed .*'aspirine'; similar names: 'aspirin'"):
        refuse_unknown(one, [("aspirine", genes[1]), ("zzzzzz",)], None, measured)
    with pytest.raises(ValueError, match=r"vocabulary .*'000000'\)"):
        refuse_unknown(one, [("000000",)], None, ())
