"""Columns of batches and labels as numbers."""

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


def test_batches_of_other_cells_are_named_so(data):
    with pytest.raises(KeyError, match=r"reference\.obs.*'nowhere'.*'cell_type'.*'batch'"):
        batch_numbers(data, "nowhere", where="reference")
    holed = data.copy()
    holed.obs["batch"] = holed.obs["batch"].where(np.arange(60) != 7)
    match = r"reference\.obs\['batch'\] .*1 of 60.*'cell7'.*reference\["
    with pytest.raises(ValueError, match=match):
        batch_numbers(holed, "batch", where="reference")


@pytest.mark.parametrize("kind", ["category", "object", "string"])
def test_labels_are_numbered_by_name(data, kind):
    given = data.copy()
    names = given.obs["cell_type"].astype(str).where(np.arange(60) % 5 != 0)
    given.obs["label"] = names.astype(kind)
    numbers, labels = label_numbers(given, "label")
    types = labels.categories.tolist()
    assert numbers.dtype == np.int64
    assert labels.categories.dtype == object
    assert types == ["type A", "type B", "type C", "type D"]
    expected = [types.index(name) if isinstance(name, str) else -1 for name in names]
    assert numbers.tolist() == expected
    filled = given.copy()
    filled.obs["label"] = names.fillna("?").astype(kind)
    again, same = label_numbers(filled, "label", "?")
    assert (again.tolist(), same) == (expected, labels)
    both = given.copy()  # a missing value means no label beside a category that means so
    both.obs["label"] = names.where(np.arange(60) != 1, "?").astype(kind)
    expected[1] = -1
    assert label_numbers(both, "label", "?")[0].tolist() == expected


def test_labels_that_are_numbers_or_truth(data):
    given = data.copy()
    given.obs["cluster"] = np.resize([10, 9, -1], 60)
    numbers, types = label_numbers(given, "cluster", -1)
    assert types.categories.tolist() == [9, 10]  # in their order, not that of their text
    assert numbers[:3].tolist() == [1, 0, -1]
    given.obs["tumour"] = np.resize([True, False], 60)
    assert label_numbers(given, "tumour")[1].categories.tolist() == [False, True]


def test_what_is_wrong_with_labels_is_said(data):
    with pytest.raises(KeyError, match=r"adata\.obs.*'nowhere'.*'cell_type'.*'batch'"):
        label_numbers(data, "nowhere")
    given = data.copy()
    given.obs["one"], given.obs["none"] = "a", None
    with pytest.raises(ValueError, match=r"reference\.obs\['one'\] .*60 cells .*1 type"):
        label_numbers(given, "one", where="reference")
    with pytest.raises(ValueError, match=r"labels 0 cells with 0 type\(s\)"):
        label_numbers(given, "none")
    with pytest.warns(UserWarning, match=r"unlabeled_category 'X': adata\.obs\['cell_type'\].*'ty"):
        label_numbers(given, "cell_type", "X")


@pytest.mark.parametrize("form", ["object", "category"])
def test_bytes_are_the_text_that_they_encode(form):
    texts = ["T cell", "β cell", "unknown", "T cell"]
    adata = ad.AnnData(np.ones((4, 1)), obs=pd.DataFrame({"text": texts}, index=list("abcd")))
    adata.obs["bytes"] = pd.Series([text.encode() for text in texts], index=adata.obs_names, dtype=form)
    for read in (
        lambda key: batch_numbers(adata, key).tolist(),
        lambda key: label_numbers(adata, key, "unknown")[0].tolist(),
        lambda key: label_numbers(adata, key, "unknown")[1].categories.tolist(),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "unknown" is a batch like any other
            assert read("bytes") == read("text")
    adata.obs["latin"] = pd.Series([text.replace("β", "é").encode("latin-1") for text in texts], adata.obs_names)
    adata.obs["latin"] = adata.obs["latin"].astype(form)
    with pytest.raises(ValueError, match=r"adata\.obs\['latin'\] holds bytes that are not UTF-8") as said:
        batch_numbers(adata, "latin")
    exec(str(said.value).split("Decode them: ")[1].rstrip("."), {"adata": adata})
    assert adata.obs["latin"].tolist() == ["T cell", "é cell", "unknown", "T cell"]
