"""`tl.fit_perturbation`: what it finds, what it refuses, and that it leaves everything as it was."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.data.genes import InputOptions
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.response import KINDS
from scdiva.perturbation.screen import open_screen, read_screen, refuse_unknown


def fit(data, model, **arguments):
    return sd.tl.fit_perturbation(data, "perturbation", model=model, **{"rng": 3} | arguments)


def test_what_is_found(one, data, hashed, weights, same):
    before, weights_before = hashed(data), weights(one)
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    fitted = fit(data, one)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert hashed(data) == before
    assert same(weights(one), weights_before)
    assert set(fitted.notes) == {"validation", "labels", "model", "seed", "seconds"}
    assert fitted.notes["model"] == "ScDiVa"
    assert set(fitted.base) == {*KINDS, "measured"}
    assert fitted.design == ScreenDesign("perturbation")
    assert len(fitted.screen.conditions) == 7
    validation = fitted.notes["validation"]
    assert set(validation) == {"method", "kind", "pearson_delta", "mse", "n"}
    assert set(validation["kind"]) == {"single", "combination"}
    assert "elsewhere" not in validation["method"]
    assert np.isfinite(validation["mse"]).all()


def test_the_seed_determines_every_bit(one, data):
    notes = [fit(data, one, rng=rng).notes for rng in (3, 3, 4)]
    assert notes[0]["seed"] == notes[1]["seed"] != notes[2]["seed"]
    np.testing.assert_array_equal(notes[0]["validation"]["mse"], notes[1]["validation"]["mse"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"perturbation_key": "plus"}, r"'CD4\+' has an empty part"),
        ({"control": "DMSO"}, "'DMSO'; it holds .*control="),
        ({"groupby": "hole"}, r"adata\.obs\['hole'\].*3 of 80.*'c40'"),
        ({"groupby": "perturbation"}, "7 of 8 groups .*control cells .first"),
        ({"dose_key": "dose"}, "above 0 for 70 of 70 .*'c10'"),
        ({"dose_key": "line"}, r"is not a number above 0 for 70 of 70"),
        ({"layer": "nan"}, "NaN"),
        ({"finetune": True, "context": 1}, "context=1 leaves no room"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changed(one, data, arguments, match, hashed, weights, same):
    data = data.copy()
    label = data.obs["perturbation"].astype(object)
    data.obs["hole"] = label.where(~np.isin(np.arange(80), [40, 41, 79]), None)
    data.obs["plus"] = label.where(np.arange(80) != 17, "CD4+")
    data.layers["nan"] = data.X.copy()
    data.layers["nan"].data[7] = np.nan
    before, weights_before, state = hashed(data), weights(one), torch.random.get_rng_state()
    with pytest.raises(ValueError, match=match):
        sd.tl.fit_perturbation(data, **{"perturbation_key": "perturbation", "model": one, "rng": 3} | arguments)
    assert hashed(data) == before
    assert same(weights(one), weights_before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_one_condition_is_told(perturbed_cells):
    with pytest.warns(UserWarning, match="screen has only one condition|known genes") as caught:
        fitted = sd.tl.fit_perturbation(perturbed_cells(("control", "0")), "perturbation")
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}
    assert fitted.notes["model"] == "scdiva-mini"
    assert not len(fitted.notes["validation"]["mse"])
    assert set(fitted.base.values()) == {"expected"}


def test_labels_and_genes_that_the_vocabulary_or_the_data_lack(one, perturbed_cells, genes):
    data = perturbed_cells(("control", "0", "1", "drug", "57", "0+drug"))  # gene 57 is not in the vocabulary
    fitted = fit(data, one)
    assert fitted.notes["labels"].tolist() == sorted([genes[57], "drug"])
    without = data[:, genes[1:]].copy()  # what is perturbed was not measured
    fitted = fit(without, one)
    assert genes[0] not in fitted.screen.genes
    assert fitted.notes["labels"].tolist() == sorted([genes[57], "drug"])


def test_groups_and_doses(fitted_groups):
    assert (fitted_groups.design.groupby, fitted_groups.design.dose_key) == ("line", "dose")
    assert fitted_groups.screen.groups == ("a", "b", "c")
    assert len(fitted_groups.screen.conditions) == 18
    assert set(fitted_groups.screen.conditions.dose) == {1, 10}
    assert {"single", "group"} <= set(fitted_groups.notes["validation"]["kind"])
    assert "elsewhere" in fitted_groups.notes["validation"]["method"]


def screen_and_controls(data, model, groupby=None, dose_key=None, control="control"):
    design = ScreenDesign.of("perturbation", control, groupby, dose_key)
    return read_screen(data, open_screen(data, design, None, model, "cpu", InputOptions()), "cpu")


@pytest.mark.parametrize("dose", [0.0, np.nan, np.inf, "much"])
def test_a_dose_that_is_none_is_named(one, perturbed_cells, dose):
    data = perturbed_cells(("control", "0", "1"), n=2, doses=(2.0,))
    doses = data.obs["dose"].astype(object)
    doses.iloc[3] = doses.iloc[5] = dose
    doses.iloc[0] = np.nan  # of a control cell, where it says nothing
    data.obs["dose"] = doses
    with pytest.raises(ValueError, match=r"'dose'\] .*above 0 for 2 of 4 .*'c3'"):
        screen_and_controls(data, one, dose_key="dose")


def test_means_changes_and_variances_beside_dense_arrays(one, perturbed_cells, genes):
    data = perturbed_cells(("0", "control", "drug", "0+1"), ("b", "a"), n=5, doses=(1.0, 10.0), rng=3)
    data = data[np.random.default_rng(0).permutation(data.n_obs)[:-3]].copy()
    screen, controls = screen_and_controls(data, one, "line", "dose")
    values = log_normalised(data)[0].toarray()
    label, group, dose = (data.obs[name].to_numpy() for name in ("perturbation", "line", "dose"))
    assert screen.genes == tuple(genes)
    assert screen.groups == ("a", "b") == controls.groups
    keys = list(zip(screen.conditions.parts, screen.conditions.group, screen.conditions.dose, strict=True))
    assert len(keys) == len(set(keys)) == 12
    left = np.zeros_like(values)
    for i, (parts, number, amount) in enumerate(keys):
        members = (group == screen.groups[number]) & (dose == amount)
        members &= [tuple(sorted(name.split("+"))) == parts for name in label]
        control = values[(label == "control") & (group == screen.groups[number])]
        np.testing.assert_allclose(screen.delta[i], values[members].mean(0) - control.mean(0), atol=1e-5)
        assert screen.n_cells[i] == members.sum()
        left[members] = values[members] - values[members].mean(axis=0)
    for number, name in enumerate(screen.groups):
        members = (label == "control") & (group == name)
        np.testing.assert_allclose(screen.control[number], values[members].mean(0), rtol=1e-5)
        np.testing.assert_allclose(controls.means[number], values[members].mean(0), rtol=1e-5)
        assert screen.n_control[number] == members.sum()
        left[members] = values[members] - values[members].mean(axis=0)
    np.testing.assert_allclose(screen.variance, (left**2).sum(axis=0) / (len(data) - 14), rtol=1e-4, atol=1e-6)
    assert {a.dtype.name for a in (screen.delta, screen.control, screen.states, screen.variance)} == {"float32"}
    assert screen.n_cells.dtype == screen.n_control.dtype == np.int64


def test_control_cells_as_the_model_reads_them(one, perturbed_cells):
    data = perturbed_cells(("0", "control"), ("b", "a"), n=6)
    data.X = sp.diags_array((np.arange(24) != 13).astype(np.float32)) @ data.X  # a control cell without counts
    data.X = sp.csr_matrix(data.X)
    with pytest.warns(UserWarning, match="1 of 12"):
        screen, controls = screen_and_controls(data, one, "line")
    assert controls.names.tolist() == data.obs_names[12:].tolist()
    assert [controls.groups[i] for i in controls.number] == data.obs["line"][12:].tolist()
    assert sorted(controls.rows.tolist()) == [i for i in range(12) if i != 1]
    assert (np.diff(controls.number[controls.rows]) >= 0).all()
    control_cells = data[12:].copy()[controls.rows].copy()
    sd.tl.embed(control_cells, model=one)
    for number in range(2):
        mean = control_cells.obsm["X_scdiva"][controls.number[controls.rows] == number].mean(axis=0)
        np.testing.assert_allclose(controls.states[number], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(screen.states, controls.states)


def test_labels_of_the_same_parts_are_one_condition(one, perturbed_cells, genes):
    data = perturbed_cells(("ctrl", "0+ctrl", "ctrl+0", "0", "1+0", "0+1"), n=4)
    screen, _ = screen_and_controls(data, one, control="ctrl")
    assert screen.conditions.parts == ((genes[0],), tuple(sorted(genes[:2])))
    assert screen.n_cells.tolist() == [12, 8]


def test_what_tells_nothing_is_refused(one, perturbed_cells):
    with pytest.raises(ValueError, match="all 20 cells are control cells"):
        screen_and_controls(perturbed_cells(("control",), n=20), one)
    data = perturbed_cells(("control", "0"), ("a", "b", "c"), n=4)
    lacking = data[~((data.obs["perturbation"] == "control") & data.obs["line"].isin(["b", "c"]))].copy()
    with pytest.raises(ValueError, match=r"2 of 3 groups .*control cells.*'b'"):
        screen_and_controls(lacking, one, "line")
    screen, _ = screen_and_controls(
        data[~((data.obs["perturbation"] == "0") & (data.obs["line"] == "a"))].copy(), one, "line"
    )
    assert screen.groups == ("a", "b", "c")  # one has control cells alone
    zeroed = data.copy()
    zeroed.X = zeroed.X.toarray()
    zeroed.X[(data.obs["line"] == "b").to_numpy(), :-5] = 0
    with (
        pytest.warns(UserWarning, match="4 of 12 cells are left out"),
        pytest.raises(ValueError, match=r"1 of 3 groups .*control .*'b'.*Remove"),
    ):
        screen_and_controls(zeroed, one, "line")


def test_single_cells_of_a_condition_are_told_and_count_little(one, perturbed_cells, genes):
    data = perturbed_cells(("control", "0", "1", "2+1"), n=8)
    mask = np.ones(data.n_obs, dtype=bool)
    mask[17:24] = mask[25:] = False
    with pytest.warns(UserWarning, match=r"2 of 3 conditions .*one cell") as caught:
        screen, _ = screen_and_controls(data[mask].copy(), one)
    assert any(genes[1] in str(one.message) for one in caught)
    assert sorted(screen.n_cells.tolist()) == [1, 1, 8]
    assert np.isfinite(screen.variance).all()
    every = perturbed_cells(("control", "0", "1"), n=1)
    with pytest.raises(ValueError, match=r"each of 2 conditions.*control cells"):
        screen_and_controls(every, one)


def test_unknown_names_are_refused_with_close_ones(one, genes):
    measured = (genes[0], "aspirin")
    refuse_unknown(one, [(genes[3],), ("aspirin", genes[1])], None, measured)
    with pytest.raises(ValueError, match=r"2 of 3 perturbed .*'aspirine'; similar names: 'aspirin'"):
        refuse_unknown(one, [("aspirine", genes[1]), ("zzzzzz",)], None, measured)
    with pytest.raises(ValueError, match=r"vocabulary .*'000000'\)"):
        refuse_unknown(one, [("000000",)], None, ())
