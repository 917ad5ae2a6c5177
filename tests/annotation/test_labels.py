"""Columns of batches and labels as numbers; labels come back in the type that they came in."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva._labels import batch_numbers, label_numbers


@pytest.fixture(scope="module")
def data():
    return sd.datasets.toy(60, 60, n_batches=3, rng=1)


def test_batches_are_numbered_by_name(data):
    numbers = batch_numbers(data, "batch")
    assert numbers.dtype == np.int64
    assert (numbers == data.obs["batch"].cat.codes).all()
    assert not batch_numbers(data, None).any()
    data = data.copy()
    data.obs["number"] = np.where(np.arange(60) < 30, 10, 9)
    assert set(batch_numbers(data, "number")[:30]) == {0}  # names are text: "10" before "9"


@pytest.mark.parametrize("kind", ["category", "object", "string"])
def test_labels_are_numbered_by_name(data, kind):
    adata = data.copy()
    names = adata.obs["cell_type"].astype(str).where(np.arange(60) % 5 != 0)
    adata.obs["label"] = names.astype(kind)
    numbers, labels = label_numbers(adata, "label")
    types = labels.categories.tolist()
    assert numbers.dtype == np.int64
    assert labels.categories.dtype == object
    assert types == ["type A", "type B", "type C", "type D"]
    expected = [types.index(name) if isinstance(name, str) else -1 for name in names]
    assert numbers.tolist() == expected
    filled = adata.copy()
    filled.obs["label"] = names.fillna("?").astype(kind)
    again, same = label_numbers(filled, "label", "?")
    assert (again.tolist(), same) == (expected, labels)
    mixed = adata.copy()  # a missing value also means no label if a category for unlabelled cells is named
    mixed.obs["label"] = names.where(np.arange(60) != 1, "?").astype(kind)
    expected[1] = -1
    assert label_numbers(mixed, "label", "?")[0].tolist() == expected


def test_a_number_may_mean_no_label(data):
    adata = data.copy()
    adata.obs["cluster"] = np.resize([10, 9, -1], 60)
    numbers, types = label_numbers(adata, "cluster", -1)
    assert types.categories.tolist() == [9, 10]  # in their order, not that of their text
    assert numbers[:3].tolist() == [1, 0, -1]


def test_what_is_wrong_with_labels_is_said(data):
    adata = data.copy()
    adata.obs["one"], adata.obs["none"] = "a", None
    with pytest.raises(ValueError, match=r"reference\.obs\['one'\] .*60 cells .*1 type"):
        label_numbers(adata, "one", where="reference")
    with pytest.raises(ValueError, match=r"labels 0 cells with 0 type\(s\)"):
        label_numbers(adata, "none")
    with pytest.warns(UserWarning, match=r"unlabeled_category 'X': adata\.obs\['cell_type'\].*'ty"):
        label_numbers(adata, "cell_type", "X")


@pytest.mark.parametrize("form", ["object", "category"])
def test_bytes_are_the_text_that_they_encode(form):
    texts = ["T cell", "β cell", "unknown", "T cell"]
    adata = ad.AnnData(np.ones((4, 1)), obs=pd.DataFrame({"text": texts}, index=list("abcd")))
    adata.obs["bytes"] = pd.Series([text.encode() for text in texts], index=adata.obs_names, dtype=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "unknown" is a batch like any other
        actual, expected = (batch_numbers(adata, key) for key in ("bytes", "text"))
    np.testing.assert_array_equal(actual, expected)
    (numbers, types), (of_text, names) = (label_numbers(adata, key, "unknown") for key in ("bytes", "text"))
    assert (numbers.tolist(), types.categories.tolist()) == (of_text.tolist(), names.categories.tolist())
    adata.obs["latin"] = pd.Series([text.replace("β", "é").encode("latin-1") for text in texts], adata.obs_names)
    with pytest.raises(ValueError, match=r"adata\.obs\['latin'\] holds bytes that are not UTF-8") as error:
        batch_numbers(adata, "latin")
    exec(str(error.value).split("Decode them: ")[1].rstrip("."), {"adata": adata})
    assert adata.obs["latin"].tolist() == ["T cell", "é cell", "unknown", "T cell"]


def annotate(data, reference, model, **arguments):
    """Annotate a copy; the annotator and the copy."""
    data = data.copy()
    return sd.tl.annotate(data, "cell_type", reference, model=model, method="knn", rng=3, **arguments), data


@pytest.mark.parametrize(
    ("values", "categories", "dtype"),
    [
        (np.array([3, 1, 2], dtype=np.int32), [1, 2, 3], np.int32),
        (pd.array([3, None, 2], dtype="Int64"), [2, 3], np.int64),
        (pd.array([True, None, False], dtype="boolean"), [False, True], np.bool_),
        (np.array([3, 1, None], dtype=object), [1, 3], np.int64),
        (np.array([3, "1", None], dtype=object), ["1", "3"], object),
        (pd.Categorical([3, 10, 2]), [2, 3, 10], np.int64),
        (pd.Categorical(["b", "a", "b"], categories=["b", "a", "c"], ordered=True), ["b", "a"], object),
        (pd.Categorical([3, 1, 2], categories=[3, 2, 1, 0], ordered=True), [3, 2, 1], np.int64),
    ],
)
def test_labels_are_numbered_in_their_type(query, values, categories, dtype):
    adata = query[:60].copy()
    adata.obs["label"] = pd.Series(values).take(np.arange(60) % 3).set_axis(adata.obs_names)
    numbers, labels = label_numbers(adata, "label")
    assert labels.categories.tolist() == categories
    assert labels.categories.dtype == dtype
    assert bool(labels.ordered) == getattr(adata.obs["label"].dtype, "ordered", False)
    for value, number in zip(adata.obs["label"], numbers, strict=True):
        assert number == -1 if pd.isna(value) else labels.categories[number] in (value, str(value))


KINDS = {
    "int32": lambda codes: codes.astype(np.int32),
    "float64": lambda codes: codes / 2,
    "bool": lambda codes: codes > 1,
    "categories of numbers": lambda codes: pd.Categorical(codes.astype(np.int16) * 5),
    "ordered": lambda codes: pd.Categorical.from_codes(codes, ["b", "d", "a", "c"], ordered=True),
    "text": lambda codes: np.array(["b/1", "d", "a", "c"], dtype=object)[codes],
}


@pytest.mark.fault("labels that are not text")
@pytest.mark.parametrize(
    ("kind", "store"), [*((kind, "h5ad") for kind in KINDS), ("int32", "zarr"), ("ordered", "zarr")]
)
def test_labels_come_back_in_their_type(plain, query, reference, tmp_path, kind, store):
    labelled, data = reference.copy(), query.copy()
    labelled.obs["cell_type"] = KINDS[kind](labelled.obs["cell_type"].cat.codes.to_numpy())
    del data.obs["cell_type"]
    expected = labelled.obs["cell_type"].astype("category").cat
    later = data.copy()
    annotator, data = annotate(data, labelled, plain)
    assert list(annotator.labels) == list(expected.categories)
    loaded = sd.models.load(annotator.save(tmp_path / "saved"))
    sd.tl.annotate(later, model=loaded)
    getattr(later, f"write_{store}")(tmp_path / "cells")
    stored = getattr(ad, f"read_{store}")(tmp_path / "cells")
    frame = sd.get.annotation_df(stored)
    for cells in (data, later, stored):
        actual = cells.obs["scdiva_label"].cat
        # of text, pandas 3 has a type of its own beside object
        text = pd.api.types.is_string_dtype(expected.categories) and pd.api.types.is_string_dtype(actual.categories)
        assert text or actual.categories.dtype == expected.categories.dtype
        assert actual.ordered == expected.ordered
        assert set(actual.categories) <= set(expected.categories)
        assert (cells.obs["scdiva_label"] == data.obs["scdiva_label"].to_numpy()).all()
        assert list(cells.uns["scdiva"]["scdiva_label"]["labels"]) == list(expected.categories)
    assert frame["label"].tolist() == data.obs["scdiva_label"].tolist()


def test_rejected_cells_among_labels_that_are_no_text_are_missing(plain, query, reference):
    labelled, data = reference.copy(), query.copy()
    labelled.obs["cell_type"] = labelled.obs["cell_type"].cat.codes.astype(np.int64)
    del data.obs["cell_type"]
    with pytest.warns(UserWarning, match="of 80 cells .*int64"):
        _, data = annotate(data, labelled, plain, reject=0.5)
    assert data.obs["scdiva_label"].cat.categories.dtype == np.int64
    rejected = data.obs["scdiva_label_novelty"] > data.uns["scdiva"]["scdiva_label"]["max_novelty"]
    assert data.obs["scdiva_label"].isna().equals(rejected)
    parents = {0: "low", "1": "low"}
    _, annotated = annotate(query, labelled, plain, parents=parents, backoff=1.0)
    assert set(annotated.obs["scdiva_label"]) <= {"low", "2", "3"}
    assert "low" in set(annotated.obs["scdiva_label"])
