"""Faults of perturbation screens: unknown perturbations, few control cells, other genes, other notes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import scdiva as sd

FIT = {"rng": 0, "device": "cpu"}
KEY = "scdiva_perturbation"
PREDICTED = {"predicted": lambda p, _: p, "adata": lambda _, a: a}


def predict(a, m, **more):
    return sd.tl.predict_perturbation(a, "perturbation", model=m, n_cells=5, **FIT | more)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.fault("lower-case perturbations")
@pytest.mark.parametrize("form", [str.lower, "{}_1".format, "sg{}".format])
def test_what_is_asked_for_in_small_letters_brings_the_gene(cells, model, refused, form):
    gene = cells.obs["perturbation"].iloc[1]
    message = refused(
        lambda a: predict(a, model, predict=[form(gene)]), cells, ValueError,
        "1 of 1 perturbed genes or labels .* Pass gene symbols",
    )  # fmt: skip
    assert f"similar names: {gene!r}" in message


@pytest.mark.fault("few control cells")
@pytest.mark.parametrize("left", [1, 3, 19])
def test_few_control_cells_are_told(cells, model, left):
    control = np.flatnonzero(cells.obs["perturbation"] == "control")
    subset = cells[np.setdiff1d(np.arange(80), control[left:])].copy()
    with pytest.warns(UserWarning, match=f"adata has {left} control cells: at most so many cells are predicted"):
        predicted = sd.tl.predict_perturbation(subset, "perturbation", model=model, **FIT)
    assert (predicted.obs["scdiva_condition"].value_counts() == left).all()
    mean = predicted[predicted.obs["scdiva_condition"] == predicted.obs["scdiva_condition"].iloc[0]].X.mean(axis=0)
    np.testing.assert_allclose(mean, predicted.varm["scdiva_mean"][:, 0], atol=1e-4)


READERS = {
    "tl.score_perturbation": lambda p, a: sd.tl.score_perturbation(p, a),
    "pl.hit_rate": lambda p, a: sd.pl.hit_rate(p, a),
    "pl.discrimination": lambda p, a: sd.pl.discrimination(p, a),
    "pl.delta_scatter": lambda p, a: sd.pl.delta_scatter(p, a.obs["perturbation"].iloc[1], a),
}


@pytest.mark.fault("a prediction of other genes")
@pytest.mark.parametrize("form", PREDICTED)
@pytest.mark.parametrize("name", READERS)
def test_observed_cells_of_other_genes_are_refused(cells, model, refused, quiet, form, name):
    predicted = PREDICTED[form](predict(cells, model), cells)
    renamed = cells.copy()
    renamed.var_names = [f"ENSG{i:011d}" for i in range(60)]
    refused(lambda a: READERS[name](predicted, a), renamed, ValueError, "0 genes in common, by name", "60 such as")


DAMAGE = {
    "fewer conditions": lambda arrays: arrays.update(mean=arrays["mean"][:2]),
    "fewer genes": lambda arrays: arrays.update(genes=arrays["genes"][:9]),
    "a baseline of others": lambda arrays: arrays["baselines"].update(additive=arrays["mean"][:, :3]),
    "turned about": lambda arrays: arrays.update(control_mean=arrays["control_mean"].T),
}


@pytest.mark.fault("a stored prediction that was changed")
@pytest.mark.parametrize("how", DAMAGE)
def test_a_stored_prediction_that_does_not_fit_together_is_refused(cells, model, refused, quiet, how):
    predict(cells, model)
    DAMAGE[how](cells.uns[KEY])
    refused(sd.get.perturbation_df, cells, ValueError, "Run scdiva.tl.predict_perturbation again")
    refused(lambda a: sd.tl.score_perturbation(a, a), cells, ValueError, "Run scdiva.tl.predict_perturbation again")
