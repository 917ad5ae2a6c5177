"""What `tl.predict_perturbation` writes into the adata that it is given, who reads it, and means of predicted cells."""

from __future__ import annotations

import warnings
from pathlib import Path

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.perturbation.scores import read_prediction

NORMAN = (
    Path(__file__).parents[3] / "shared/data/benchmark/perturbench_devel_norman_mcfaline_5961_500g.h5ad"
)  # fmt: skip
KEY = "scdiva_perturbation"


@pytest.fixture(scope="module")
def weak(adata, perturbed_cells):
    """A screen of 300 control cells in each of two lines, and of effects that lie far below their spread."""
    genes = list(adata.var_names)
    draw = np.random.default_rng(2)
    rate = np.exp(draw.normal(size=60))
    labels = [("control", line, 300) for line in "ab"] + [(g, line, 60) for g in genes[:6] for line in "ab"]
    rows = [(label, line) for label, line, n in labels for _ in range(n)]
    effect = {g: 1 + 0.02 * draw.normal(size=60) for g in genes[:6]} | {"control": np.ones(60)}
    depth = draw.gamma(6.0, 1 / 6, len(rows))[:, None]
    counts = draw.poisson(depth * np.stack([rate * effect[label] for label, _ in rows])).astype(np.float32)
    obs = pd.DataFrame(rows, columns=["perturbation", "line"], index=[f"c{i}" for i in range(len(rows))])
    return ad.AnnData(sp.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=genes))


def agreement(predicted, observed, key="perturbation", groupby=None, control="control"):
    """Correlate the predicted change of each condition with what a user works out of the predicted cells."""
    values = log_normalised(observed)[0].toarray()
    is_control = (observed.obs[key] == control).to_numpy()
    found = []
    for i, condition in read_prediction(predicted).conditions.iterrows():
        of_group = np.ones(len(values), dtype=bool) if groupby is None else observed.obs[groupby] == condition["group"]
        start = values[is_control & np.asarray(of_group)].mean(axis=0)
        cells = predicted.X[(predicted.obs["scdiva_condition"] == condition["condition"]).to_numpy()]
        change = predicted.varm["scdiva_mean"][:, i] - predicted.varm["scdiva_control"][:, i]
        found.append(np.corrcoef(cells.mean(axis=0) - start, change)[0, 1])
    return np.array(found)


@pytest.fixture(scope="module")
def fitted_weak(one, weak):
    return sd.tl.fit_perturbation(weak, "perturbation", groupby="line", model=one, rng=0)


@pytest.mark.parametrize("n_cells", [50, 77])
def test_predicted_cells_less_all_control_cells_are_the_predicted_change(fitted_weak, weak, genes, n_cells):
    asked = [*genes[:6], f"{genes[0]}+{genes[1]}", genes[9]]
    found = sd.tl.predict_perturbation(weak, model=fitted_weak, predict=asked, n_cells=n_cells, rng=1)
    assert agreement(found, weak, groupby="line").min() > 0.999
    assert found.X.min() >= 0
    # the drawn cells alone are farther from all of them than the effects are large
    cells = log_normalised(weak[found.obs["scdiva_control_cell"]])[0].toarray()
    of_one = (found.obs["scdiva_condition"] == f"{genes[0]} in a").to_numpy()
    missed = cells[of_one].mean(axis=0) - found.varm["scdiva_control"][:, 0]
    assert missed.std() > (found.varm["scdiva_mean"] - found.varm["scdiva_control"])[:, 0].std()
    every = log_normalised(weak[(weak.obs["perturbation"] == "control") & (weak.obs["line"] == "a")])[0].toarray()
    spread = found.X[of_one].std(axis=0) / every.std(axis=0)
    assert 0.9 < np.median(spread) < 1.1
    assert abs((found.X[of_one] > 0).mean() - (every > 0).mean()) < 0.02


@pytest.mark.skipif(not NORMAN.is_file(), reason="Norman's screen is not at hand (shared/data/benchmark)")
@pytest.mark.parametrize("n_cells", [50, 100])
def test_predicted_cells_of_a_real_screen_have_the_predicted_change(n_cells):
    screen = ad.read_h5ad(NORMAN)
    screen = screen[screen.obs["cell_type"] == "k562"].copy()
    found = sd.tl.predict_perturbation(screen, "perturbation", n_cells=n_cells, rng=0)
    assert len(read_prediction(found).conditions) > 20
    assert agreement(found, screen).min() >= 0.99


def test_the_adata_that_is_given_reads_like_the_cells_that_are_returned(one, perturbed_cells, tmp_path):
    data = perturbed_cells(groups=("a", "b"), n=24)
    found = sd.tl.predict_perturbation(data, "perturbation", groupby="line", model=one, rng=0, n_cells=5)
    data.write_h5ad(tmp_path / "data.h5ad")
    forms = [data, ad.read_h5ad(tmp_path / "data.h5ad"), data[:7, 3:9].copy()]
    frame, scores = sd.get.perturbation_df(found), sd.tl.score_perturbation(found, data)
    for form in forms:
        pd.testing.assert_frame_equal(sd.get.perturbation_df(form), frame)
        pd.testing.assert_frame_equal(sd.tl.score_perturbation(form, data), scores)
    given, returned = read_prediction(forms[1]), read_prediction(found)
    pd.testing.assert_frame_equal(given.conditions, returned.conditions)
    validation = returned.notes["validation"]
    assert set(given.notes["validation"]) == set(validation)
    np.testing.assert_array_equal(given.notes["validation"]["mse"], validation["mse"])
    condition = frame["condition"].iloc[0]
    for draw in (
        lambda one: sd.pl.perturbation(one, condition, return_fig=True),
        lambda one: sd.pl.perturbation(one, condition, data, return_fig=True),
        lambda one: sd.pl.hit_rate(one, data, return_fig=True),
        lambda one: sd.pl.discrimination(one, data, group="a", return_fig=True),
        lambda one: sd.pl.delta_scatter(one, condition, data, gene_symbols="n", return_fig=True),
    ):
        pictures = []
        for form in (found, data):
            figure = draw(form)
            figure.canvas.draw()
            pictures.append(np.asarray(figure.canvas.buffer_rgba()))
            plt.close(figure)
        np.testing.assert_array_equal(*pictures)


def test_a_later_call_replaces_what_stands_there_and_another_key_leaves_it(one, perturbed_cells, genes):
    data = perturbed_cells(n=20)
    fitted = sd.tl.fit_perturbation(data, "perturbation", model=one, rng=0)
    assert not data.uns
    sd.tl.predict_perturbation(data, model=fitted, predict=genes[:2])
    sd.tl.predict_perturbation(data, model=fitted, predict=genes[1:4], key_added="mine")
    assert sd.get.perturbation_df(data)["condition"].unique().tolist() == genes[:2]
    sd.tl.predict_perturbation(data, model=fitted, predict=genes[2])
    assert sd.get.perturbation_df(data)["condition"].unique().tolist() == [genes[2]]
    assert sd.get.perturbation_df(data, key="mine")["condition"].unique().tolist() == genes[1:4]
    assert set(data.uns) == {KEY, "mine", "scdiva"}


@pytest.mark.parametrize("there", [{"params": 1}, np.arange(3), pd.DataFrame({"a": [1]}), "text"])
def test_what_the_user_keeps_under_a_key_is_not_overwritten(one, perturbed_cells, there, contents):
    data = perturbed_cells(n=20)
    data.uns["neighbors"] = there
    before = contents(data)
    with pytest.raises(ValueError, match=r"uns\['neighbors'\] would be overwritten"):
        sd.tl.predict_perturbation(data, "perturbation", model=one, key_added="neighbors")
    assert contents(data) == before


def test_views_and_backed_files(one, perturbed_cells, genes, tmp_path):
    data = perturbed_cells(n=20)
    data.write_h5ad(tmp_path / "data.h5ad")
    before = (tmp_path / "data.h5ad").read_bytes()
    fitted = sd.tl.fit_perturbation(data, "perturbation", model=one, rng=0)
    view = data[40:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view = data[:100]
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


def test_control_cells_are_run_through_the_model_once(one, perturbed_cells, monkeypatch):
    data = perturbed_cells(n=20)
    calls = []
    from scdiva.perturbation import screen

    plain = screen.embed_all
    monkeypatch.setattr(screen, "embed_all", lambda *given: calls.append(given) or plain(*given))
    sd.tl.predict_perturbation(data, "perturbation", model=one, rng=0)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"predict": ["nothing known"]}, "neither in the screen nor"),
        ({"predict": "control"}, "predict holds 'control'"),
        ({"groups": ["a", "elsewhere"]}, "1 of 2 groups .*control .*'elsewhere'"),
        ({"dose": 2.0}, "dose requires"),
    ],
)
def test_what_is_asked_for_is_checked_before_the_fit(one, perturbed_cells, monkeypatch, arguments, match, contents):
    data = perturbed_cells(groups=("a", "b"), n=20)
    before = contents(data)

    def fit(*_, **__):
        raise AssertionError("fitted")

    monkeypatch.setattr("scdiva.perturbation.model.fit", fit)
    with pytest.raises(ValueError, match=match):
        sd.tl.predict_perturbation(data, "perturbation", groupby="line", model=one, **arguments)
    assert contents(data) == before
