"""`tl.fit_perturbation`: what it finds, what it refuses, and that it leaves everything as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.response import KINDS

NOTES = {"validation", "labels", "model", "seed", "seconds"}


@pytest.fixture(scope="module")
def data(perturbed_cells):
    return perturbed_cells()


def fit(data, model, *args, **arguments):
    return sd.tl.fit_perturbation(data, *(args or ("perturbation",)), model=model, **{"rng": 3} | arguments)


def test_what_is_found(one, data, contents, weights, same):
    before, theirs = contents(data), weights(one)
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    fitted = fit(data, one)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert contents(data) == before
    assert same(weights(one), theirs)
    assert not one.training
    assert all(p.requires_grad for p in one.parameters())
    assert set(fitted.notes) == NOTES
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
    found = [fit(data, one, rng=rng).notes for rng in (3, 3, 4)]
    assert found[0]["seed"] == found[1]["seed"] != found[2]["seed"]
    np.testing.assert_array_equal(found[0]["validation"]["mse"], found[1]["validation"]["mse"])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"perturbation_key": "nowhere"}, KeyError, r"adata\.obs.*'nowhere'.*'perturbation'"),
        (
            {"perturbation_key": "hole"},
            ValueError,
            r"adata\.obs\['hole'\].*3 of 80.*'c40'",
        ),
        ({"control": "DMSO"}, ValueError, "'DMSO'; it holds .*control="),
        ({"perturbation_key": "plus"}, ValueError, r"'CD4\+' has an empty part"),
        ({"groupby": "nowhere"}, KeyError, r"adata\.obs has no column 'nowhere'"),
        ({"groupby": "hole"}, ValueError, r"adata\.obs\['hole'\].*3 of 80"),
        ({"groupby": "perturbation"}, ValueError, "7 of 8 groups .*control cells .first"),
        ({"dose_key": "nowhere"}, KeyError, r"adata\.obs has no column 'nowhere'"),
        ({"dose_key": "dose"}, ValueError, "above 0 for 70 of 70 .*'c10'"),
        ({"dose_key": "line"}, ValueError, r"is not a number above 0 for 70 of 70"),
        ({"layer": "nan"}, ValueError, "NaN"),
        ({"use_raw": True}, ValueError, "raw"),
        ({"model": "nowhere"}, FileNotFoundError, "no model 'nowhere'"),
        ({"device": "abacus"}, ValueError, "abacus"),
        ({"rng": -1}, ValueError, "-1"),
        ({"rng": "a"}, TypeError, "rng must be"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changed(
    one, data, arguments, error, match, contents, weights, same
):
    data = data.copy()
    label = data.obs["perturbation"].astype(object)
    data.obs["hole"] = label.where(~np.isin(np.arange(80), [40, 41, 79]), None)
    data.obs["plus"] = label.where(np.arange(80) != 17, "CD4+")
    data.layers["nan"] = data.X.copy()
    data.layers["nan"].data[7] = np.nan
    before, theirs, state = contents(data), weights(one), torch.random.get_rng_state()
    given = {
        "perturbation_key": "perturbation",
        "model": one,
        "rng": 3,
    } | arguments
    with pytest.raises(error, match=match):
        sd.tl.fit_perturbation(data, given.pop("perturbation_key"), **given)
    assert contents(data) == before
    assert same(weights(one), theirs)
    assert not one.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_one_condition_is_told(one, perturbed_cells, genes):
    with pytest.warns(UserWarning, match="screen has only one condition"):
        fitted = fit(perturbed_cells(("control", "0")), one)
    assert not len(fitted.notes["validation"]["mse"])
    assert set(fitted.base.values()) == {"expected"}


def test_one_cell_of_a_condition_is_told(one, data, genes):
    few = data[[*range(20), 20, *range(30, 80)]]
    with pytest.warns(UserWarning, match=f"1 of 7 conditions .*one cell .*'{genes[1]}'") as caught:
        fitted = fit(few, one)
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}
    assert fitted.screen.n_cells.min() == 1


def test_labels_and_genes_that_the_vocabulary_or_the_data_lack(one, perturbed_cells, genes):
    data = perturbed_cells(("control", "0", "1", "drug", "57", "0+drug"))  # gene 57 is not in the vocabulary
    fitted = fit(data, one)
    assert fitted.notes["labels"].tolist() == sorted([genes[57], "drug"])
    without = data[:, genes[1:]].copy()  # what is perturbed was not measured
    fitted = fit(without, one)
    assert genes[0] not in fitted.screen.genes
    assert fitted.notes["labels"].tolist() == sorted([genes[57], "drug"])


def test_groups_and_doses(one, perturbed_cells):
    data = perturbed_cells(("control", "0", "1", "0+1"), ("b", "a"), n=4, doses=(1.0, 10.0))
    fitted = fit(data, one, groupby="line", dose_key="dose")
    assert (fitted.design.groupby, fitted.design.dose_key) == ("line", "dose")
    assert fitted.screen.groups == ("a", "b")
    assert len(fitted.screen.conditions) == 12
    assert set(fitted.screen.conditions.dose) == {1, 10}
    assert {"single", "group"} <= set(fitted.notes["validation"]["kind"])
    assert "elsewhere" in fitted.notes["validation"]["method"]


def test_a_bundled_model_by_name(perturbed_cells):
    data = perturbed_cells(("control", "0"), n=3)
    with pytest.warns(UserWarning, match="one condition|known genes"):
        fitted = sd.tl.fit_perturbation(data, "perturbation")
    assert fitted.notes["model"] == "scdiva-mini"
