"""Faults of labels: missing keys and labels, types with one cell or none, invalid texts and numbers."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd

from .conftest import CALLS, QUICK


def missing(how, cells, column):
    """Take the labels of two cells away."""
    values = cells.obs[column].astype(object)
    values.iloc[[3, 40]] = {"NaN": np.nan, "None": None, "NA": pd.NA, "NaT": pd.NaT}[how]
    cells.obs[column] = values.astype("category") if how != "None" else values
    return cells


LABELLED = {
    "tl.integrate": {"batch_key": "batch"},
    "tl.annotate": {"batch_key": "batch"},
    "tl.adapt": {"batch_key": "batch"},
    "tl.predict_perturbation": {"perturbation_key": "perturbation"},
    "tl.predict_perturbation, groups": {"groupby": "batch"},
    "tl.grn": {"groupby": "batch"},
    "tl.generate": {"groupby": "batch"},
    "pp.split_perturbations": {"perturbation_key": "perturbation"},
}
"""The argument of each call that names a column of batches, groups or perturbations."""


def call_of(name, column=None):
    """Call with one of these arguments, which may name another column."""
    ((argument, usual),) = LABELLED[name].items()
    return lambda a, m: CALLS[name.partition(",")[0]](a, m, **{argument: column or usual})


@pytest.mark.fault("NaN batch labels")
@pytest.mark.parametrize("how", ["NaN", "None", "NA", "NaT"])
@pytest.mark.parametrize("name", LABELLED)
def test_missing_labels_are_counted_and_named(cells, model, refused, name, how):
    (column,) = LABELLED[name].values()
    patterns = "(missing for 2 of 80|2 of 80 cells have no)", "first.*'cell3'", "notna"
    refused(lambda a: call_of(name)(a, model), missing(how, cells, column), ValueError, *patterns)


# --- few labels -------------------------------------------------------------------------------------------------------
@pytest.mark.fault("one batch")
@pytest.mark.parametrize("labels", [None, "cell_type"])
def test_one_batch_is_not_integrated(cells, model, refused, labels):
    cells.obs["all"] = "the same"
    call = partial(CALLS["tl.integrate"], batch_key="all", labels_key=labels)
    refused(lambda a: call(a, model), cells, ValueError, "are of one batch of .*'all'", "nothing to integrate", "adapt")


def alone(cells):
    """One cell with a type of its own."""
    labels = cells.obs["cell_type"].astype(str)
    labels.iloc[7] = "alone"
    cells.obs["cell_type"] = labels.astype("category")
    return cells


@pytest.mark.fault("singleton classes")
@pytest.mark.parametrize("method", ["knn", "linear"])
def test_a_type_of_one_cell_is_a_type(cells, model, method):
    CALLS["tl.annotate"](alone(cells), model, method=method, unlabeled_category=None)
    assert "alone" in list(cells.uns["scdiva"]["scdiva_label"]["labels"])
    assert np.allclose(cells.obsm["scdiva_label_probability"].sum(1), 1, atol=1e-5)


@pytest.mark.fault("unused categories")
@pytest.mark.parametrize("call", ["tl.integrate", "tl.annotate", "tl.grn"])
def test_categories_without_cells_change_nothing(drawn, model, call):
    def run(unused):
        adata = drawn.copy()
        for column in ("batch", "cell_type"):
            names = adata.obs[column].cat.categories
            if unused:
                adata.obs[column] = adata.obs[column].cat.set_categories(["AAA", *names, "zzz"])
        if call == "tl.integrate":
            CALLS[call](adata, model, labels_key="cell_type")
            return adata.obsm["X_scdiva_integrated"], ()
        if call == "tl.annotate":
            CALLS[call](adata, model)
            notes = adata.uns["scdiva"]["scdiva_label"]
            return adata.obsm["scdiva_label_probability"], tuple(notes["labels"])
        CALLS[call](adata, model, method="correlation", groupby="batch")
        keys = [key for key in adata.varp if key.startswith("scdiva_grn")]
        return adata.varp[keys[0]].toarray(), tuple(keys)

    (with_unused, names), (without, same) = run(True), run(False)
    assert np.array_equal(with_unused, without)
    assert names == same


@pytest.mark.fault("unicode keys")
@pytest.mark.parametrize("text", ["Zelltyp β⁺ 細胞型 🧬", "a b\tc %s {0}"])
def test_keys_and_labels_in_any_script(cells, model, tmp_path, text):
    """Written under a key of any letters, and still there in a file."""
    cells.obs[text] = cells.obs["cell_type"].cat.rename_categories(lambda name: f"{text} {name}")
    cells.obs_names = [f"{text} {i}" for i in range(cells.n_obs)]
    sd.tl.embed(cells, model, key_added=text)
    CALLS["tl.annotate"](cells, model, labels_key=text, key_added=f"{text} found")
    CALLS["tl.integrate"](cells, model, labels_key=text)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    back = ad.read_h5ad(tmp_path / "cells.h5ad")
    assert np.array_equal(back.obsm[text], cells.obsm[text])
    assert sd.get.annotation_df(back, key=f"{text} found")["label"].str.startswith(text).all()


# --- cells of new batches ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def integrated(drawn, model):
    adata = drawn[:60].copy()
    with sd.settings.override(precision="fp32", progress=False):
        return CALLS["tl.integrate"](adata, model), adata.obsm["X_scdiva_integrated"]


@pytest.mark.fault("unseen batch at mapping")
@pytest.mark.parametrize("batch", ["a new one", np.nan, None])
def test_an_integrated_model_maps_cells_of_any_batch(integrated, drawn, batch):
    """The model does not use the batch: a cell's embedding does not depend on its batch label."""
    fitted, before = integrated
    unchanged, new = drawn.copy(), drawn.copy()
    new.obs["batch"] = batch
    for cells in (unchanged, new):
        sd.tl.embed(cells, fitted)
    assert np.array_equal(new.obsm["X_scdiva_integrated"], unchanged.obsm["X_scdiva_integrated"])
    # tl.integrate encodes with other batches than tl.embed: the last bits may differ where blocks are run
    np.testing.assert_allclose(new.obsm["X_scdiva_integrated"][:60], before, atol=1e-6)
    assert np.isfinite(new.obsm["X_scdiva_integrated"]).all()


# --- columns that hold no labels --------------------------------------------------------------------------------------
def with_reference(a, m, key="cell_type", **more):
    return sd.tl.annotate(a[:4].copy(), key, a, model=m, method="knn", **QUICK | more)


LEARNED = {
    "tl.annotate, reference": with_reference,
    "tl.integrate": lambda a, m, key="cell_type", **more: CALLS["tl.integrate"](a, m, labels_key=key, **more),
}
BATCHES = ("tl.annotate", "tl.integrate", "tl.adapt")
GROUPS = ("tl.grn", "tl.generate", "tl.predict_perturbation", "pp.split_perturbations")
TEXTS = ["nan", "NaN", "None", "", " ", "NA", "<NA>", "NaT", "null", "N/A"]
WORDS = ["unknown", "Unknown", "UNASSIGNED", "unlabelled", "unlabeled", "-", "not assigned"]


def spoilt(adata, key, text, kind="object"):
    """Give five cells another text, the fourth cell the first."""
    values = adata.obs[key].astype(str).to_numpy(dtype=object)
    values[3:8] = text
    adata.obs["given"] = pd.Categorical(values) if kind == "category" else values
    return adata


@pytest.mark.fault("text for a missing label")
@pytest.mark.fault("word for an unknown label")
@pytest.mark.parametrize("text", TEXTS + WORDS)
@pytest.mark.parametrize("call", LEARNED)
def test_a_text_for_a_missing_or_unknown_label_is_no_type(cells, model, refused, call, text):
    adata = spoilt(cells, "cell_type", text, "category" if text in WORDS else "object")
    patterns = rf"obs\['given'\] is {text!r} for 5 of 80 cells, the first is 'cell3'", f"unlabeled_category={text!r}"
    refused(lambda a: LEARNED[call](a, model, "given"), adata, ValueError, "not a type", *patterns)


@pytest.mark.fault("word for an unknown label")
@pytest.mark.parametrize("call", LEARNED)
def test_what_the_error_says_mends_it(cells, model, call):
    adata = spoilt(cells, "cell_type", "unknown")
    LEARNED[call](adata.copy(), model, "given", unlabeled_category="unknown")
    adata.obs["given"] = adata.obs["given"].where(np.arange(80) != 9, "nan")
    with pytest.raises(ValueError, match=r"'nan' for 1 of 7"):
        LEARNED[call](adata.copy(), model, "given", unlabeled_category="unknown")
    adata.obs["given"] = adata.obs["given"].astype(object).replace(["nan", "unknown"], "unknown")
    LEARNED[call](adata, model, "given", unlabeled_category="unknown")


@pytest.mark.fault("text for a missing batch")
@pytest.mark.fault("text for a missing group")
@pytest.mark.parametrize("text", ["nan", ""])
@pytest.mark.parametrize("call", BATCHES + GROUPS)
def test_a_text_for_a_missing_batch_or_group_is_none(cells, model, refused, call, text):
    patterns = rf"obs\['given'\] is {text!r} for 5 of 80 cells, the first is 'cell3'", "leave these cells out"
    adata = spoilt(cells, "batch" if call in BATCHES else "perturbation", text)
    refused(lambda a: call_of(call, "given")(a, model), adata, ValueError, *patterns)


NUMBERS = {
    "float": lambda n: np.random.default_rng(0).random(n),
    "float as categories": lambda n: pd.Categorical(np.random.default_rng(0).random(n)),
    "float as text": lambda n: np.random.default_rng(0).random(n).astype(str),
    "names of cells": lambda n: [f"cell {i}" for i in range(n)],
    "a score of one digit": lambda n: np.round(np.random.default_rng(0).random(n) * 4, 1),
}


@pytest.mark.fault("numbers as labels")
@pytest.mark.fault("numbers as groups")
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        *itertools.product(["labels", *BATCHES], NUMBERS),
        *itertools.product(GROUPS, ["float", "a score of one digit"]),
    ],
)
def test_numbers_that_vary_are_no_labels(cells, model, refused, call, kind):
    cells.obs["given"] = NUMBERS[kind](80)
    n = cells.obs["given"].nunique()
    pattern = (
        rf"obs\['given'\] holds (continuous numbers|nearly as many (labels|batches) as cells): {n} different values"
    )
    of = with_reference if call == "labels" else lambda a, m, key: call_of(call, key)(a, m)
    refused(lambda a: of(a, model, "given"), cells, ValueError, pattern, "such as")


@pytest.mark.fault("numbers as labels")
@pytest.mark.parametrize("kind", ["clusters", "two doses", "months", "truth"])
def test_numbers_that_are_groups_are_labels(cells, model, kind):
    values = {"clusters": np.arange(80) % 12, "two doses": np.arange(80) % 4 / 2, "months": np.arange(80) % 6 * 1.0}
    cells.obs["given"] = values.get(kind, np.arange(80) % 2 == 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*given.*")
        CALLS["tl.integrate"](cells, model, batch_key="given")
    assert np.isfinite(cells.obsm["X_scdiva_integrated"]).all()


# --- scores and plots -------------------------------------------------------------------------------------------------
SCORES = {
    "classification": lambda z, labels, batch: sd.metrics.classification(labels, labels),
    "avg_batch": lambda z, labels, batch: sd.metrics.avg_batch(z, batch, labels),
    "knn_cross_validation": lambda z, labels, batch: sd.metrics.knn_cross_validation(z, labels),
}


@pytest.mark.fault("scores of what is no label")
@pytest.mark.parametrize("text", ["nan", "None", "", "Unassigned", "N/A"])
@pytest.mark.parametrize("score", SCORES)
def test_scores_leave_out_what_names_no_type(drawn, score, text):
    z, labels = drawn.X.toarray(), drawn.obs["cell_type"].astype(str).to_numpy(dtype=object)
    batch = np.arange(80) % 2
    expected = SCORES[score](z[5:], labels[5:], batch[5:])
    labels[:5] = text
    assert SCORES[score](z, labels, batch) == expected


# --- labels in the query ----------------------------------------------------------------------------------------------
@pytest.mark.fault("a query with labels of its own")
@pytest.mark.parametrize("kind", ["text", "category", "number"])
def test_a_query_with_other_names_is_annotated(cells, model, kind):
    query, reference = cells[:30].copy(), cells[30:].copy()
    labels = {
        "text": np.array(["x", "y"] * 15),
        "category": pd.Categorical(["x", "y"] * 15),
        "number": np.arange(30) % 2,
    }
    query.obs["cell_type"] = labels[kind]
    before = query.obs["cell_type"].copy()
    with pytest.warns(UserWarning, match="have no label in common .*neither read nor changed"):
        sd.tl.annotate(query, "cell_type", reference, model=model, method="knn", **QUICK)
    assert query.obs["cell_type"].equals(before)
    assert set(query.obs["scdiva_label"]) <= set(reference.obs["cell_type"])
