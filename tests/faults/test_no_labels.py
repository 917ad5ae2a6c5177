"""Faults of columns that hold no labels: texts for missing values, words for unknown ones, numbers that vary."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

import scdiva as sd

FIT = {"rng": 0, "device": "cpu"}


def with_reference(a, m, key="cell_type", **more):
    return sd.tl.annotate(a[:4].copy(), key, a, model=m, **{"method": "knn"} | FIT | more)


def integrate(a, m, batch="batch", labels=None, **more):
    return sd.tl.integrate(a, batch, labels, model=m, steps=2, **FIT | more)


LEARNED = {
    "tl.annotate, reference": with_reference,
    "tl.integrate": lambda a, m, key="cell_type", **more: integrate(a, m, labels=key, **more),
}
BATCHES = {
    "tl.annotate": lambda a, m, key: sd.tl.annotate(a, "cell_type", batch_key=key, model=m, method="knn", **FIT),
    "tl.integrate": integrate,
    "tl.adapt": lambda a, m, key: sd.tl.adapt(a, m, batch_key=key, rng=0),
}
GROUPS = {
    "tl.grn": lambda a, m, key: sd.tl.grn(a, model=m, groupby=key, device="cpu"),
    "tl.generate": lambda a, m, key: sd.tl.generate(a, 3, groupby=key, model=m, rng=0),
    "tl.predict_perturbation": lambda a, m, key: sd.tl.predict_perturbation(a, key, model=m, **FIT),
    "pp.split_perturbations": lambda a, m, key: sd.pp.split_perturbations(a, key, by="single", n_splits=2),
}
TEXTS = ["nan", "NaN", "None", "", " ", "NA", "<NA>", "NaT", "null", "N/A"]
WORDS = ["unknown", "Unknown", "UNASSIGNED", "unlabelled", "unlabeled", "-", "not assigned"]


def spoilt(adata, key, text, kind="object"):
    """Give five cells another text, the fourth cell the first."""
    values = adata.obs[key].astype(str).to_numpy(dtype=object)
    values[3:8] = text
    adata.obs["given"] = pd.Categorical(values) if kind == "category" else values
    return adata


@pytest.mark.fault("text for a missing label")
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("call", LEARNED)
def test_a_text_for_a_missing_label_is_no_type(cells, model, refused, call, text):
    said = rf"obs\['given'\] is {text!r} for 5 of 80 cells, the first is 'cell3'", "not a type", "unlabeled_category"
    refused(lambda a: LEARNED[call](a, model, "given"), spoilt(cells, "cell_type", text), ValueError, *said)


@pytest.mark.fault("word for an unknown label")
@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("call", LEARNED)
def test_a_word_for_an_unknown_label_is_no_type(cells, model, refused, call, text):
    adata = spoilt(cells, "cell_type", text, "category")
    said = rf"{text!r} for 5 of 80 cells, the first is 'cell3'", f"unlabeled_category={text!r}"
    refused(lambda a: LEARNED[call](a, model, "given"), adata, ValueError, *said)


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
@pytest.mark.parametrize("text", ["nan", ""])
@pytest.mark.parametrize("call", BATCHES)
def test_a_text_for_a_missing_batch_is_no_batch(cells, model, refused, call, text):
    said = rf"obs\['given'\] is {text!r} for 5 of 80 cells, the first is 'cell3'", "leave these cells out"
    refused(lambda a: BATCHES[call](a, model, "given"), spoilt(cells, "batch", text), ValueError, *said)


@pytest.mark.fault("text for a missing group")
@pytest.mark.parametrize("text", ["nan", ""])
@pytest.mark.parametrize("call", GROUPS)
def test_a_text_for_a_missing_group_is_no_group(cells, model, refused, call, text):
    said = rf"obs\['given'\] is {text!r} for 5 of 80 cells, the first is 'cell3'"
    refused(lambda a: GROUPS[call](a, model, "given"), spoilt(cells, "perturbation", text), ValueError, said)


NUMBERS = {
    "float": lambda n: np.random.default_rng(0).random(n),
    "float as categories": lambda n: pd.Categorical(np.random.default_rng(0).random(n)),
    "float as text": lambda n: np.random.default_rng(0).random(n).astype(str),
    "names of cells": lambda n: [f"cell {i}" for i in range(n)],
    "a score of one digit": lambda n: np.round(np.random.default_rng(0).random(n) * 4, 1),
}


@pytest.mark.fault("numbers as labels")
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("of", [LEARNED["tl.annotate, reference"], *BATCHES.values()])
def test_numbers_that_vary_are_no_labels(cells, model, refused, of, kind):
    cells.obs["given"] = NUMBERS[kind](80)
    n = cells.obs["given"].nunique()
    said = rf"obs\['given'\] holds (continuous numbers|nearly as many (labels|batches) as cells): {n} different values"
    refused(lambda a: of(a, model, "given"), cells, ValueError, said, "such as")


@pytest.mark.fault("numbers as groups")
@pytest.mark.parametrize("kind", ["float", "a score of one digit"])
@pytest.mark.parametrize("call", GROUPS)
def test_numbers_that_vary_are_no_groups(cells, model, refused, call, kind):
    cells.obs["given"] = NUMBERS[kind](80)
    refused(lambda a: GROUPS[call](a, model, "given"), cells, ValueError, "holds continuous numbers")


@pytest.mark.fault("numbers as labels")
@pytest.mark.parametrize("kind", ["clusters", "two doses", "months", "truth"])
def test_numbers_that_are_groups_are_labels(cells, model, kind):
    values = {"clusters": np.arange(80) % 12, "two doses": np.arange(80) % 4 / 2, "months": np.arange(80) % 6 * 1.0}
    cells.obs["given"] = values.get(kind, np.arange(80) % 2 == 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*given.*")
        integrate(cells, model, "given")
    assert np.isfinite(cells.obsm["X_scdiva_integrated"]).all()


# --- scores and pictures ----------------------------------------------------------------------------------------------
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


# --- a query with a column of its own ---------------------------------------------------------------------------------
@pytest.mark.fault("a query with labels of its own")
@pytest.mark.parametrize("kind", ["text", "category", "number"])
def test_a_query_with_other_names_is_annotated(cells, model, kind):
    query, reference = cells[:30].copy(), cells[30:].copy()
    own = {"text": np.array(["x", "y"] * 15), "category": pd.Categorical(["x", "y"] * 15), "number": np.arange(30) % 2}
    query.obs["cell_type"] = own[kind]
    before = query.obs["cell_type"].copy()
    with pytest.warns(UserWarning, match="have no label in common .*neither read nor changed"):
        sd.tl.annotate(query, "cell_type", reference, model=model, method="knn", **FIT)
    assert query.obs["cell_type"].equals(before)
    assert set(query.obs["scdiva_label"]) <= set(reference.obs["cell_type"])
