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


def ours(predicted) -> dict:
    return predicted.uns["scdiva"]["perturbation"]


def test_what_is_documented_is_there_and_nothing_else(one, data, genes, hashed, weights, same, tmp_path):
    cells, theirs, state = data.copy(), weights(one), torch.random.get_rng_state()
    asked = [genes[0], f"{genes[0]}+{genes[4]}", f"drug+{genes[3]}+{genes[1]}"]
    found = sd.tl.predict_perturbation(cells, "perturbation", predict=asked, model=one, n_cells=7, rng=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    kept = cells.uns.pop("scdiva_perturbation")
    assert set(cells.uns.pop("scdiva")) == {"written"}
    assert hashed(cells) == hashed(data)  # and nothing else was written
    assert same(weights(one), theirs)
    assert (found.shape, found.X.dtype) == ((21, 60), np.float32)
    assert np.isfinite(found.X).all()
    assert found.X.min() == 0
    pd.testing.assert_frame_equal(found.var, data.var)
    assert set(found.obs) == {"scdiva_condition", "perturbation", "scdiva_control_cell"}
    assert found.obs_names.is_unique
    for key in ("scdiva_condition", "perturbation"):
        assert list(found.obs[key].cat.categories) == asked
        assert found.obs[key].tolist() == [name for name in asked for _ in range(7)]
    assert (data.obs["perturbation"][found.obs["scdiva_control_cell"]] == "control").all()
    assert set(found.varm) == VARM
    assert {(value.shape, value.dtype.name) for value in found.varm.values()} == {((60, 3), "float32")}
    for key, value in found.varm.items():
        assert (np.isnan if key == "scdiva_baseline_elsewhere" else np.isfinite)(value).all()
    of_cells = np.stack([found.X[7 * i : 7 * i + 7].mean(axis=0) for i in range(3)], axis=1)
    np.testing.assert_allclose(of_cells, found.varm["scdiva_mean"], atol=1e-4)
    assert {key: set(value) for key, value in found.uns.items()} == {"scdiva": {"perturbation"}}
    notes = ours(found)
    assert {key: notes[key].dtype.kind for key in OF_CONDITIONS} == OF_CONDITIONS
    assert notes["condition"].tolist() == notes["perturbation"].tolist() == asked
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
    found.write_h5ad(tmp_path / "predicted.h5ad")
    read = ad.read_h5ad(tmp_path / "predicted.h5ad")
    alike(read, found)
    pd.testing.assert_frame_equal(read.obs, found.obs)
    assert set(ours(read)) == set(notes)
    for key in OF_CONDITIONS:
        assert ours(read)[key].tolist() == notes[key].tolist()
    assert set(kept) == set(notes) | {"genes", "mean", "change", "sd", "control_mean", "baselines"}
    assert kept["genes"].tolist() == genes
    for name, key in (("mean", "mean"), ("sd", "sd"), ("control_mean", "control")):
        np.testing.assert_array_equal(kept[name], found.varm[f"scdiva_{key}"].T)
    np.testing.assert_array_equal(kept["change"], kept["mean"] - kept["control_mean"])
    assert set(kept["baselines"]) == set(BASELINES) - {"elsewhere"}  # which is defined of nothing here


def test_controls_and_baselines_beside_plain_means(fitted, data, genes):
    found = predict(data, fitted)
    values, label = log_normalised(data)[0].toarray(), data.obs["perturbation"].to_numpy()
    mean = {name: values[label == name].mean(axis=0) for name in set(label)}
    at = {name: i for i, name in enumerate(ours(found)["perturbation"])}
    pair = "+".join(sorted(genes[:2]))
    others = [m for name, m in mean.items() if name != "control"]
    for name in ("scdiva_control", "scdiva_baseline_no_change"):
        np.testing.assert_allclose(found.varm[name][:, 0], mean["control"], atol=1e-5)
    np.testing.assert_allclose(found.varm["scdiva_baseline_train_mean"][:, 3], np.mean(others, axis=0), atol=1e-5)
    expected = np.maximum(mean[genes[0]] + mean[genes[1]] - mean["control"], 0)
    np.testing.assert_allclose(found.varm["scdiva_baseline_additive"][:, at[pair]], expected, atol=1e-5)


def test_a_condition_does_not_depend_on_which_others_are_asked_for(fitted, data, genes):
    asked = [genes[4], f"{genes[1]}+{genes[5]}", "drug", f"{genes[0]}+{genes[1]}+{genes[2]}"]
    together = predict(data, fitted, asked[::-1])
    for i, name in enumerate(asked):
        alone = predict(data, fitted, [name])
        np.testing.assert_array_equal(alone.X, together[together.obs["perturbation"] == name].X)
        for key in VARM:
            np.testing.assert_allclose(alone.varm[key][:, 0], together.varm[key][:, 3 - i], rtol=1e-5, atol=1e-6)
    a, b = genes[:2]
    one = predict(data, fitted, f"{a}+{b}")
    for other in (f"{b}+{a}", f"{a}+control+{b}", f"{b} + {a}"):
        found = predict(data, fitted, other)
        alike(found, one)
        assert ours(found)["condition"].tolist() == [other]  # as it was asked for


def test_the_same_seed_takes_the_same_control_cells(fitted, data, genes):
    one, two, other = (predict(data, fitted, genes[:3], n_cells=4, rng=rng) for rng in (5, 5, 6))
    alike(one, two)
    pd.testing.assert_frame_equal(one.obs, two.obs)
    assert one.obs["scdiva_control_cell"].tolist() != other.obs["scdiva_control_cell"].tolist()
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
    other = ad.AnnData(
        sp.hstack([new.X[:, order], more], format="csr"),
        obs=new.obs[["line"]],
        var=pd.DataFrame({"n": range(64)}, index=[*new.var_names[order], *"wxyz"]),
    )
    found = predict(other, fitted, [genes[0], "drug"], n_cells=5)
    assert list(found.var_names) == genes
    assert found.var["n"].tolist() == [int(np.flatnonzero(order == j)[0]) for j in range(60)]
    assert set(found.obs["scdiva_control_cell"]) <= set(new.obs_names)
    np.testing.assert_allclose(found.X, expected.X, atol=1e-4)
    np.testing.assert_allclose(found.varm["scdiva_mean"], expected.varm["scdiva_mean"], atol=1e-4)
    with pytest.raises(ValueError, match=f"2 of 60 genes .*adata.var_names, .*'{genes[3]}'"):
        predict(new[:, [i for i in range(60) if i not in (3, 8)]].copy(), fitted)


def test_groups_and_doses(fitted_groups, of_groups, genes):
    pair = f"{genes[1]}+{genes[0]}"
    found = predict(of_groups, fitted_groups, [genes[0], pair], groups=["c", "a"], dose=[10, 3], n_cells=4)
    assert found.n_obs == 2 * 2 * 2 * 4
    expected = [f"{p} in {g} at {d}" for g in "ca" for p in (genes[0], pair) for d in (10, 3)]
    assert ours(found)["condition"].tolist() == expected
    assert ours(found)["group"].tolist() == ["c"] * 4 + ["a"] * 4
    assert ours(found)["dose"].tolist() == [10, 3] * 4
    assert ours(found)["trained"].tolist() == [True, False] * 4
    assert found.obs["line"].tolist() == ["c"] * 16 + ["a"] * 16
    assert list(found.obs["line"].cat.categories) == ["c", "a"]
    assert found.obs["dose"].tolist() == ours(found)["dose"].repeat(4).tolist()
    assert (of_groups.obs["line"][found.obs["scdiva_control_cell"]].to_numpy() == found.obs["line"]).all()
    assert np.isfinite(found.varm["scdiva_baseline_elsewhere"]).all()
    alone = predict(of_groups, fitted_groups, pair, groups="a", dose=3.0, n_cells=4)
    assert ours(alone)["condition"].tolist() == [f"{pair} in a"]
    np.testing.assert_array_equal(alone.X, found[found.obs["scdiva_condition"] == f"{pair} in a at 3"].X)
    every = predict(of_groups, fitted_groups, pair)
    assert ours(every)["group"].tolist() == ["a", "b", "c"]
    assert set(ours(every)["dose"]) == {5.5}  # the median of the screen


def test_a_group_that_the_screen_does_not_hold(fitted_groups, perturbed_cells, genes):
    new = perturbed_cells(("control",), ("new", "b"), n=8, rng=7)
    found = predict(new, fitted_groups, genes[0], n_cells=3)
    assert ours(found)["group"].tolist() == ["b", "new"]
    assert not ours(found)["trained"].any()  # at this dose
    assert ours(predict(new, fitted_groups, genes[0], dose=10.0))["trained"].tolist() == [True, False]
    assert found.obs["line"].tolist() == ["b"] * 3 + ["new"] * 3
    assert np.isfinite(found.X).all()
    # what is added is that of a new group, whatever else is asked
    alone = predict(new, fitted_groups, genes[0], groups=["new"], n_cells=3)
    np.testing.assert_array_equal(alone.X, found.X[3:])


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
