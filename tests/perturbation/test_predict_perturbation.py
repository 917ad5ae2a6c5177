"""`tl.predict_perturbation`: what it returns, what that depends on, and what it refuses."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva._constants import BASELINES
from scdiva.data.cells import log_normalised

from .conftest import alike, predict

OF_CONDITIONS = {
    "condition": "O", "perturbation": "O", "group": "O", "dose": "f", "n_parts": "i", "n_seen": "i", "trained": "b",
    "base": "O",
}  # fmt: skip
VARM = {"scdiva_mean", "scdiva_sd", "scdiva_control", *(f"scdiva_baseline_{name}" for name in BASELINES)}


def notes_of(predicted) -> dict:
    return predicted.uns["scdiva"]["perturbation"]


def test_what_is_documented_is_there_and_nothing_else(one, data, genes, hashed, weights, same, tmp_path):
    cells, weights_before, state = data.copy(), weights(one), torch.random.get_rng_state()
    names = [genes[0], f"{genes[0]}+{genes[4]}", f"drug+{genes[3]}+{genes[1]}"]
    predicted = sd.tl.predict_perturbation(cells, "perturbation", predict=names, model=one, n_cells=7, rng=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    stored = cells.uns.pop("scdiva_perturbation")
    assert set(cells.uns.pop("scdiva")) == {"written"}
    assert hashed(cells) == hashed(data)  # and nothing else was written
    assert same(weights(one), weights_before)
    assert (predicted.shape, predicted.X.dtype) == ((21, 60), np.float32)
    assert np.isfinite(predicted.X).all()
    assert predicted.X.min() == 0
    pd.testing.assert_frame_equal(predicted.var, data.var)
    assert set(predicted.obs) == {"scdiva_condition", "perturbation", "scdiva_control_cell"}
    assert predicted.obs_names.is_unique
    for key in ("scdiva_condition", "perturbation"):
        assert list(predicted.obs[key].cat.categories) == names
        assert predicted.obs[key].tolist() == [name for name in names for _ in range(7)]
    assert (data.obs["perturbation"][predicted.obs["scdiva_control_cell"]] == "control").all()
    assert set(predicted.varm) == VARM
    assert {(value.shape, value.dtype.name) for value in predicted.varm.values()} == {((60, 3), "float32")}
    for key, value in predicted.varm.items():
        assert (np.isnan if key == "scdiva_baseline_elsewhere" else np.isfinite)(value).all()
    of_cells = np.stack([predicted.X[7 * i : 7 * i + 7].mean(axis=0) for i in range(3)], axis=1)
    np.testing.assert_allclose(of_cells, predicted.varm["scdiva_mean"], atol=1e-4)
    assert {key: set(value) for key, value in predicted.uns.items()} == {"scdiva": {"perturbation"}}
    notes = notes_of(predicted)
    assert {key: notes[key].dtype.kind for key in OF_CONDITIONS} == OF_CONDITIONS
    assert notes["condition"].tolist() == notes["perturbation"].tolist() == names
    assert notes["group"].tolist() == [""] * 3
    assert notes["dose"].tolist() == [1.0] * 3
    assert notes["n_parts"].tolist() == [1, 2, 3]
    assert notes["n_seen"].tolist() == [1, 1, 3]
    assert notes["trained"].tolist() == [True, False, False]
    of_call = {
        "perturbation_key": "perturbation",
        "control": "control",
        "groupby": "",
        "dose_key": "",
        "separator": "+",
    }
    assert {key: notes[key] for key in of_call} == of_call
    assert {"validation", "labels", "model", "seed", "seconds"} <= set(notes)
    predicted.write_h5ad(tmp_path / "predicted.h5ad")
    from_file = ad.read_h5ad(tmp_path / "predicted.h5ad")
    alike(from_file, predicted)
    pd.testing.assert_frame_equal(from_file.obs, predicted.obs)
    assert set(notes_of(from_file)) == set(notes)
    for key in OF_CONDITIONS:
        assert notes_of(from_file)[key].tolist() == notes[key].tolist()
    assert set(stored) == set(notes) | {"genes", "mean", "change", "sd", "control_mean", "baselines"}
    assert stored["genes"].tolist() == genes
    for name, key in (("mean", "mean"), ("sd", "sd"), ("control_mean", "control")):
        np.testing.assert_array_equal(stored[name], predicted.varm[f"scdiva_{key}"].T)
    np.testing.assert_array_equal(stored["change"], stored["mean"] - stored["control_mean"])
    assert set(stored["baselines"]) == set(BASELINES) - {"elsewhere"}  # which is defined of nothing here


def test_controls_and_baselines_beside_plain_means(fitted, data, genes):
    predicted = predict(data, fitted)
    values, label = log_normalised(data)[0].toarray(), data.obs["perturbation"].to_numpy()
    mean = {name: values[label == name].mean(axis=0) for name in set(label)}
    at = {name: i for i, name in enumerate(notes_of(predicted)["perturbation"])}
    pair = "+".join(sorted(genes[:2]))
    perturbed_means = [m for name, m in mean.items() if name != "control"]
    for name in ("scdiva_control", "scdiva_baseline_no_change"):
        np.testing.assert_allclose(predicted.varm[name][:, 0], mean["control"], atol=1e-5)
    np.testing.assert_allclose(
        predicted.varm["scdiva_baseline_train_mean"][:, 3], np.mean(perturbed_means, axis=0), atol=1e-5
    )
    expected = np.maximum(mean[genes[0]] + mean[genes[1]] - mean["control"], 0)
    np.testing.assert_allclose(predicted.varm["scdiva_baseline_additive"][:, at[pair]], expected, atol=1e-5)


def test_a_condition_does_not_depend_on_which_others_are_asked_for(fitted, data, genes):
    names = [genes[4], f"{genes[1]}+{genes[5]}", "drug", f"{genes[0]}+{genes[1]}+{genes[2]}"]
    together = predict(data, fitted, names[::-1])
    for i, name in enumerate(names):
        alone = predict(data, fitted, [name])
        np.testing.assert_array_equal(alone.X, together[together.obs["perturbation"] == name].X)
        for key in VARM:
            np.testing.assert_allclose(alone.varm[key][:, 0], together.varm[key][:, 3 - i], rtol=1e-5, atol=1e-6)
    a, b = genes[:2]
    one = predict(data, fitted, f"{a}+{b}")
    for label in (f"{b}+{a}", f"{a}+control+{b}", f"{b} + {a}"):
        predicted = predict(data, fitted, label)
        alike(predicted, one)
        assert notes_of(predicted)["condition"].tolist() == [label]  # as it was asked for


def test_the_same_seed_takes_the_same_control_cells(fitted, data, genes):
    one, two, other_seed = (predict(data, fitted, genes[:3], n_cells=4, rng=rng) for rng in (5, 5, 6))
    alike(one, two)
    pd.testing.assert_frame_equal(one.obs, two.obs)
    assert one.obs["scdiva_control_cell"].tolist() != other_seed.obs["scdiva_control_cell"].tolist()
    with sd.settings.override(seed=5):
        alike(predict(data, fitted, genes[:3], n_cells=4, rng=None), one)


def test_other_control_cells_in_another_form(fitted, perturbed_cells, genes):
    """Later: control cells alone, genes in another order, others among them, no column of perturbations."""
    new = perturbed_cells(("control",), n=30)
    new.obs_names = [f"new{i}" for i in range(30)]
    expected = predict(new, fitted, [genes[0], "drug"], n_cells=5)
    assert list(expected.var_names) == genes
    order = np.random.default_rng(0).permutation(60)
    more = sp.csr_matrix(np.zeros((30, 4), dtype=np.float32))
    cells = ad.AnnData(
        sp.hstack([new.X[:, order], more], format="csr"),
        obs=new.obs[["line"]],
        var=pd.DataFrame({"n": range(64)}, index=[*new.var_names[order], *"wxyz"]),
    )
    predicted = predict(cells, fitted, [genes[0], "drug"], n_cells=5)
    assert list(predicted.var_names) == genes
    assert predicted.var["n"].tolist() == [int(np.flatnonzero(order == j)[0]) for j in range(60)]
    assert set(predicted.obs["scdiva_control_cell"]) <= set(new.obs_names)
    np.testing.assert_allclose(predicted.X, expected.X, atol=1e-4)
    np.testing.assert_allclose(predicted.varm["scdiva_mean"], expected.varm["scdiva_mean"], atol=1e-4)
    with pytest.raises(ValueError, match=f"2 of 60 genes .*adata.var_names, .*'{genes[3]}'"):
        predict(new[:, [i for i in range(60) if i not in (3, 8)]].copy(), fitted)


def test_groups_and_doses(fitted_groups, of_groups, genes):
    pair = f"{genes[1]}+{genes[0]}"
    predicted = predict(of_groups, fitted_groups, [genes[0], pair], groups=["c", "a"], dose=[10, 3], n_cells=4)
    assert predicted.n_obs == 2 * 2 * 2 * 4
    expected = [f"{p} in {g} at {d}" for g in "ca" for p in (genes[0], pair) for d in (10, 3)]
    assert notes_of(predicted)["condition"].tolist() == expected
    assert notes_of(predicted)["group"].tolist() == ["c"] * 4 + ["a"] * 4
    assert notes_of(predicted)["dose"].tolist() == [10, 3] * 4
    assert notes_of(predicted)["trained"].tolist() == [True, False] * 4
    assert predicted.obs["line"].tolist() == ["c"] * 16 + ["a"] * 16
    assert list(predicted.obs["line"].cat.categories) == ["c", "a"]
    assert predicted.obs["dose"].tolist() == notes_of(predicted)["dose"].repeat(4).tolist()
    assert (of_groups.obs["line"][predicted.obs["scdiva_control_cell"]].to_numpy() == predicted.obs["line"]).all()
    assert np.isfinite(predicted.varm["scdiva_baseline_elsewhere"]).all()
    alone = predict(of_groups, fitted_groups, pair, groups="a", dose=3.0, n_cells=4)
    assert notes_of(alone)["condition"].tolist() == [f"{pair} in a"]
    np.testing.assert_array_equal(alone.X, predicted[predicted.obs["scdiva_condition"] == f"{pair} in a at 3"].X)
    every = predict(of_groups, fitted_groups, pair)
    assert notes_of(every)["group"].tolist() == ["a", "b", "c"]
    assert set(notes_of(every)["dose"]) == {5.5}  # the median of the screen


def test_a_group_that_the_screen_does_not_hold(fitted_groups, perturbed_cells, genes):
    new = perturbed_cells(("control",), ("new", "b"), n=8, rng=7)
    predicted = predict(new, fitted_groups, genes[0], n_cells=3)
    assert notes_of(predicted)["group"].tolist() == ["b", "new"]
    assert not notes_of(predicted)["trained"].any()  # at this dose
    assert notes_of(predict(new, fitted_groups, genes[0], dose=10.0))["trained"].tolist() == [True, False]
    assert predicted.obs["line"].tolist() == ["b"] * 3 + ["new"] * 3
    assert np.isfinite(predicted.X).all()
    # what is added is that of a new group, whatever else is asked
    alone = predict(new, fitted_groups, genes[0], groups=["new"], n_cells=3)
    np.testing.assert_array_equal(alone.X, predicted.X[3:])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"predict": ["ALB", "drugg", "ALB+no gene"]}, "2 of 3 perturbed .*'drugg'"),
        ({"groupby": "line"}, "fitted without groupby, but groupby='line'"),
        ({"perturbation_key": "line"}, "perturbation_key='perturbation', but perturbation_key='line'"),
        ({"dose_key": "dose"}, "fitted without dose_key, but dose_key='dose'"),
        ({"control": "DMSO"}, "fitted with control='control', but control='DMSO'"),
        ({"separator": "_"}, r"fitted with separator='\+', but separator='_'"),
        ({"finetune": True}, "finetune cannot be used with a fitted model"),
        ({"lora": 2}, "lora cannot be used with a fitted model"),
        ({"key_added": "mine"}, r"uns\['mine'\] would be overwritten"),
        ({"predict": ["drug", "control+control"]}, r"has 'control\+control', which is not a perturbation"),
        ({"predict": ["drug", "drug+control"]}, "holds 'drug' more than once"),
        ({"predict": ["drug+"]}, r"'drug\+' has an empty part"),
        ({"groups": ["a"]}, "groups requires"),
        ({"dose": 3.0}, "dose requires"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changed(fitted, data, arguments, match, hashed):
    cells = data.copy()
    cells.uns["mine"] = {"params": 1}
    before, state = hashed(cells), torch.random.get_rng_state()
    with pytest.raises(ValueError, match=match):
        sd.tl.predict_perturbation(cells, model=fitted, **{"rng": 0} | arguments)
    assert hashed(cells) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_no_screen_is_refused(one, fitted, data):
    with pytest.raises(ValueError, match="perturbation_key is missing"):
        predict(data, one)
    with pytest.raises(ValueError, match=r"no cell of adata .*'control'"):
        predict(data[data.obs["perturbation"] != "control"], fitted)
    twice = data.copy()
    twice.var_names = [twice.var_names[1], *twice.var_names[1:]]
    with pytest.raises(ValueError, match="1 of 60 genes of adata repeat a name"):
        predict(twice, fitted)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"groups": []}, "groups is empty"),
        ({"groups": ["a", "z"]}, r"1 of 2 groups .*control .*'z'; .*'a', 'b'"),
        ({"dose": [1.0, 2.0, 1]}, "dose holds 1.0 more than once"),
        *(({"dose": dose}, "dose must be a number above 0") for dose in ([1, np.nan], [1, np.inf], [])),
    ],
)
def test_groups_and_doses_that_are_not_there_are_refused(fitted_groups, of_groups, arguments, match):
    with pytest.raises(ValueError, match=match):
        predict(of_groups, fitted_groups, **arguments)
