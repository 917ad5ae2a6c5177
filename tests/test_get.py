from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scdiva import get


@pytest.fixture
def annotated() -> ad.AnnData:
    """Four cells with the keys of an annotation: a tie in the third, no known gene in the last."""
    adata = ad.AnnData(np.zeros((4, 1), np.float32), obs=pd.DataFrame(index=["c1", "c2", "c3", "c4"]))
    adata.obsm["scdiva_label_probability"] = np.array(
        [[0.7, 0.1, 0.2], [0.1, 0.5, 0.4], [0.4, 0.2, 0.4], [np.nan] * 3], np.float32
    )
    adata.uns["scdiva"] = {"scdiva_label": {"labels": np.array(["T cell", "B cell", "NK"])}}
    return adata


def test_the_most_probable_labels_come_first_cell_by_cell(annotated, tmp_path):
    frame = get.annotation_df(annotated, top_k=2)
    assert list(frame) == ["cell", "rank", "label", "probability"]
    assert frame.astype({"label": str}).to_numpy().tolist() == [
        ["c1", 1, "T cell", np.float32(0.7)],
        ["c1", 2, "NK", np.float32(0.2)],
        ["c2", 1, "B cell", np.float32(0.5)],
        ["c2", 2, "NK", np.float32(0.4)],
        ["c3", 1, "T cell", np.float32(0.4)],
        ["c3", 2, "NK", np.float32(0.4)],
    ]
    assert (frame["rank"].dtype, frame["probability"].dtype) == (np.int32, np.float32)
    assert list(frame["label"].cat.categories) == ["T cell", "B cell", "NK"]
    annotated.write_h5ad(tmp_path / "cells.h5ad")
    pd.testing.assert_frame_equal(get.annotation_df(ad.read_h5ad(tmp_path / "cells.h5ad"), top_k=2), frame)


def test_one_label_or_all_and_some_cells(annotated):
    one = get.annotation_df(annotated)
    assert one["cell"].tolist() == ["c1", "c2", "c3"]
    assert one["label"].tolist() == ["T cell", "B cell", "T cell"]
    every = get.annotation_df(annotated, top_k=99)
    assert len(every) == 9
    np.testing.assert_allclose(every.groupby("cell")["probability"].sum(), 1.0, rtol=1e-6)
    part = get.annotation_df(annotated[["c3", "c1"]], top_k=99)
    expected = pd.concat([every[every["cell"] == name] for name in ("c3", "c1")], ignore_index=True)
    pd.testing.assert_frame_equal(part, expected)
    assert len(get.annotation_df(annotated[["c4"]])) == 0


def test_annotations_of_other_keys_are_told_apart(annotated):
    annotated.obsm["coarse_probability"] = np.array([[0.9, 0.1]] * 4)
    annotated.uns["scdiva"]["coarse"] = {"labels": ["lymphoid", "myeloid"]}
    assert get.annotation_df(annotated, key="coarse")["label"].tolist() == ["lymphoid"] * 4


def test_what_is_not_there_is_named(annotated):
    with pytest.raises(KeyError, match=r"no 'mine_probability': call scdiva.tl.annotate\(adata, ..., key_added='mine'"):
        get.annotation_df(annotated, key="mine")
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        get.annotation_df(annotated, top_k=0)
    annotated.uns["scdiva"]["scdiva_label"]["labels"] = ["a", "b"]
    with pytest.raises(ValueError, match=r"shape \(4, 3\), but there are 4 cells and 2 labels"):
        get.annotation_df(annotated)
    del annotated.uns["scdiva"]
    with pytest.raises(KeyError, match=r"uns\['scdiva'\] has no 'scdiva_label'"):
        get.annotation_df(annotated)
