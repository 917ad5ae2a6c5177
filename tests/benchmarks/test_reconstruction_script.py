"""reconstruction.py: what is taken away comes back as the truth, and is scored against it."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva.models import load_model

NAMES = ["CD3D", "LYZ", "CD14", "MS4A1", "CD79A", "GNLY", "NKG7", "FTH1", "ACTB", "CD20", "no gene"]


@pytest.fixture
def cells(script):
    return script("_reconstruction_cells")


@pytest.fixture
def adata(cells) -> ad.AnnData:
    """Counts of ten genes, one of them twice (MS4A1 is CD20), and of one that nobody knows."""
    counts = np.random.default_rng(0).poisson(3, (60, len(NAMES))).astype(np.float32)
    counts[:, 9] = 1  # rarer than MS4A1
    counts[:, 8] += 1
    adata = ad.AnnData(sp.csr_matrix(counts))
    adata.var_names = NAMES
    adata.obs["cell_type"] = ["T"] * 30 + ["B"] * 29 + ["unlabelled"]
    return cells.prepared(adata, load_model("scdiva-mini"))


def test_training_and_test_cells_are_apart(cells, adata):
    train, test = cells.Work("toy", adata, load_model("scdiva-mini"), cells.Sizes(4, 2, 4, 2, 2)).split()
    assert not set(train) & set(test)
    assert (len(train), len(test)) == (47, 12)


def test_holes_are_a_tenth_and_the_truth_is_what_was_there(cells, adata):
    holes = cells.with_holes(adata, 1)
    assert len(holes.truth) == round(0.1 * adata.X.nnz)
    assert holes.left.X.nnz + len(holes.truth) == adata.X.nnz
    assert (holes.left.X[holes.rows, holes.columns] == 0).all()
    total = np.asarray(holes.left.X.sum(axis=1)).ravel()[holes.rows]
    was = np.asarray(adata.X[holes.rows, holes.columns]).ravel()
    np.testing.assert_allclose(holes.truth, np.log1p(1e4 * was / total))
    told = np.zeros(adata.shape)
    told[holes.rows, holes.columns] = holes.truth
    scores = cells.hole_scores(holes, told)
    assert scores["rmse"] == 0
    # an expectation of many counts holds no zeros; one of nearly none is a single count where there is one
    sure = cells.hole_scores(holes._replace(totals=np.full(adata.n_obs, 1e9)), told)
    assert sure["rmse_shown"] == pytest.approx(0, abs=1e-6)
    rare = cells.hole_scores(holes, 1e-9 * np.random.default_rng(0).random(adata.shape))
    one = np.log1p(1e4 / holes.totals[holes.rows])
    assert rare["rmse_shown"] == pytest.approx(np.sqrt(np.mean((one - holes.truth) ** 2)), rel=1e-4)
    assert scores["spearman_cell"] == pytest.approx(1)
    apart = cells.hole_scores(holes, told + 1, told)  # an arm that says both
    assert (apart["rmse_shown"], apart["rmse"]) == (0, pytest.approx(1))
