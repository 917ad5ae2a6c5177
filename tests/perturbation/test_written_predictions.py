"""What `tl.predict_perturbation` writes into the adata that it is given, who reads it, and means of predicted cells."""

from __future__ import annotations

import warnings
from pathlib import Path

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.perturbation.scores import read_prediction

NORMAN = (
    Path(__file__).parents[3] / "shared/data/benchmark/perturbench_devel_norman_mcfaline_5961_500g.h5ad"
)  # fmt: skip
KEY = "scdiva_perturbation"


@pytest.mark.skipif(not NORMAN.is_file(), reason="Norman's screen is not at hand (shared/data/benchmark)")
def test_predicted_cells_of_a_real_screen_have_the_predicted_change():
    """Computed from the predicted cells and all control cells."""
    screen = ad.read_h5ad(NORMAN)
    screen = screen[screen.obs["cell_type"] == "k562"].copy()
    predicted = sd.tl.predict_perturbation(screen, "perturbation", n_cells=50, rng=0)
    control = log_normalised(screen)[0].toarray()[(screen.obs["perturbation"] == "control").to_numpy()].mean(axis=0)
    conditions = read_prediction(predicted).conditions["condition"]
    assert len(conditions) > 20
    for i, condition in enumerate(conditions):
        cells = predicted.X[(predicted.obs["scdiva_condition"] == condition).to_numpy()]
        change = predicted.varm["scdiva_mean"][:, i] - predicted.varm["scdiva_control"][:, i]
        assert np.corrcoef(cells.mean(axis=0) - control, change)[0, 1] >= 0.99


def test_the_adata_that_is_given_reads_like_the_cells_that_are_returned(one, perturbed_cells, tmp_path):
    data = perturbed_cells(groups=("a", "b"), n=24)
    predicted = sd.tl.predict_perturbation(data, "perturbation", groupby="line", model=one, rng=0, n_cells=5)
    data.write_h5ad(tmp_path / "data.h5ad")
    forms = [data, ad.read_h5ad(tmp_path / "data.h5ad"), data[:7, 3:9].copy()]
    frame, scores = sd.get.perturbation_df(predicted), sd.tl.score_perturbation(predicted, data)
    for form in forms:
        pd.testing.assert_frame_equal(sd.get.perturbation_df(form), frame)
        pd.testing.assert_frame_equal(sd.tl.score_perturbation(form, data), scores)
    from_data, returned = (read_prediction(form).notes["validation"]["mse"] for form in (forms[1], predicted))
    np.testing.assert_array_equal(from_data, returned)
    condition = frame["condition"].iloc[0]
    for draw in (
        lambda one: sd.pl.perturbation(one, condition, data, return_fig=True),
        lambda one: sd.pl.delta_scatter(one, condition, data, gene_symbols="n", return_fig=True),
    ):
        figures = [draw(form) for form in (predicted, data)]
        for figure in figures:
            figure.canvas.draw()
        np.testing.assert_array_equal(*(np.asarray(figure.canvas.buffer_rgba()) for figure in figures))
        plt.close("all")


def test_a_later_call_replaces_what_stands_there_and_another_key_leaves_it(data, fitted, genes):
    data = data.copy()
    for names, how in ((genes[:2], {}), (genes[1:4], {"key_added": "mine"}), (genes[2], {})):
        sd.tl.predict_perturbation(data, model=fitted, predict=names, **how)
    assert sd.get.perturbation_df(data)["condition"].unique().tolist() == [genes[2]]
    assert sd.get.perturbation_df(data, key="mine")["condition"].unique().tolist() == genes[1:4]
    assert set(data.uns) == {KEY, "mine", "scdiva"}


def test_views_and_backed_files(data, fitted, genes, tmp_path):
    data.write_h5ad(tmp_path / "data.h5ad")
    before, view = (tmp_path / "data.h5ad").read_bytes(), data[:70]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sd.tl.predict_perturbation(view, model=fitted, predict=genes[0])
    assert KEY in view.uns
    assert KEY not in data.uns  # which the view is of
    backed = ad.read_h5ad(tmp_path / "data.h5ad", backed="r")
    sd.tl.predict_perturbation(backed, model=fitted, predict=genes[0])
    assert sd.get.perturbation_df(backed, top=1).shape[0] == 1
    with pytest.raises(ValueError, match=r"backed .*view"):
        sd.tl.predict_perturbation(backed[:50], model=fitted, predict=genes[0])
    backed.file.close()
    assert (tmp_path / "data.h5ad").read_bytes() == before
