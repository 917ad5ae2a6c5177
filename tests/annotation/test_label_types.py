"""Labels come back in the type that they came in: numbers, truth values, ordered categories."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva._labels import label_numbers


def annotate(data, reference, model, **arguments):
    """Annotate a copy; the annotator and the copy."""
    data = data.copy()
    return sd.tl.annotate(data, "cell_type", reference, model=model, method="knn", rng=3, **arguments), data


@pytest.mark.parametrize(
    ("values", "categories", "dtype"),
    [
        (np.array([3, 1, 2], dtype=np.int32), [1, 2, 3], np.int32),
        (np.array([0.5, 0.25, 2.0], dtype=np.float32), [0.25, 0.5, 2.0], np.float32),
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
    given = query[:60].copy()
    given.obs["label"] = pd.Series(values).take(np.arange(60) % 3).set_axis(given.obs_names)
    numbers, labels = label_numbers(given, "label")
    assert labels.categories.tolist() == categories
    assert labels.categories.dtype == dtype
    assert bool(labels.ordered) == getattr(given.obs["label"].dtype, "ordered", False)
    for value, number in zip(given.obs["label"], numbers, strict=True):
        assert number == -1 if pd.isna(value) else labels.categories[number] in (value, str(value))


KINDS = {
    "int64": lambda codes: codes.astype(np.int64),
    "int32": lambda codes: codes.astype(np.int32),
    "float64": lambda codes: codes / 2,
    "bool": lambda codes: codes > 1,
    "categories of numbers": lambda codes: pd.Categorical(codes.astype(np.int16) * 5),
    "ordered": lambda codes: pd.Categorical.from_codes(codes, ["b", "d", "a", "c"], ordered=True),
    "text": lambda codes: np.array(["b/1", "d", "a", "c"], dtype=object)[codes],
}


@pytest.mark.fault("labels that are no text")
@pytest.mark.parametrize(
    ("kind", "store"), [*((kind, "h5ad") for kind in KINDS), ("int32", "zarr"), ("ordered", "zarr")]
)
def test_labels_come_back_in_their_type(plain, query, reference, tmp_path, kind, store):
    known, data = reference.copy(), query.copy()
    known.obs["cell_type"] = KINDS[kind](known.obs["cell_type"].cat.codes.to_numpy())
    del data.obs["cell_type"]
    given = known.obs["cell_type"].astype("category").cat
    later = data.copy()
    annotator, data = annotate(data, known, plain)
    assert list(annotator.labels) == list(given.categories)
    kept = sd.models.load(annotator.save(tmp_path / "saved"))
    sd.tl.annotate(later, model=kept)
    getattr(later, f"write_{store}")(tmp_path / "cells")
    read = getattr(ad, f"read_{store}")(tmp_path / "cells")
    frame = sd.get.annotation_df(read)
    for cells in (data, later, read):
        found = cells.obs["scdiva_label"].cat
        # of text, pandas 3 has a type of its own beside object
        text = pd.api.types.is_string_dtype(given.categories) and pd.api.types.is_string_dtype(found.categories)
        assert text or found.categories.dtype == given.categories.dtype
        assert found.ordered == given.ordered
        assert set(found.categories) <= set(given.categories)
        assert (cells.obs["scdiva_label"] == data.obs["scdiva_label"].to_numpy()).all()
        assert list(cells.uns["scdiva"]["scdiva_label"]["labels"]) == list(given.categories)
    assert frame["label"].tolist() == data.obs["scdiva_label"].tolist()


def test_rejected_cells_among_labels_that_are_no_text_are_missing(plain, query, reference):
    known, data = reference.copy(), query.copy()
    known.obs["cell_type"] = known.obs["cell_type"].cat.codes.astype(np.int64)
    del data.obs["cell_type"]
    with pytest.warns(UserWarning, match="of 80 cells .*int64"):
        _, data = annotate(data, known, plain, reject=0.5)
    assert data.obs["scdiva_label"].cat.categories.dtype == np.int64
    rejected = data.obs["scdiva_label_novelty"] > data.uns["scdiva"]["scdiva_label"]["max_novelty"]
    assert data.obs["scdiva_label"].isna().equals(rejected)
    parents = {0: "low", "1": "low"}
    _, named = annotate(query, known, plain, parents=parents, backoff=1.0)
    assert set(named.obs["scdiva_label"]) <= {"low", "2", "3"}
    assert "low" in set(named.obs["scdiva_label"])
