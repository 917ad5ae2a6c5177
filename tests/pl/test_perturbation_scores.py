from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva import _constants as C
from scdiva.pl import hit_rate, perturbation_scores


def curves(fig) -> dict[str, np.ndarray]:
    """Numbers of genes and rates of each curve, (2, n)."""
    return {line.get_label(): np.array(line.get_data()) for line in fig.axes[0].lines}


def test_hit_rates_look_as_they_did(predicted_screen, looks_as_it_did):
    predicted, observed = predicted_screen()
    looks_as_it_did(hit_rate(predicted, observed, return_fig=True), "hit_rate")


def test_curves_are_means_over_conditions(predicted_screen):
    predicted, observed = predicted_screen()
    fig = hit_rate(predicted, observed, return_fig=True)
    drawn = curves(fig)
    assert set(drawn) == {"scdiva", "train mean", "matching mean", "chance"}
    np.testing.assert_allclose(drawn["chance"], [[5, 10, 15, 20], [0.125, 0.25, 0.375, 0.5]])
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    control = x[(observed.obs["perturbation"] == "control").to_numpy()]
    rates = []
    for i, name in enumerate(predicted.uns["scdiva"]["perturbation"]["perturbation"]):
        cells = x[(observed.obs["perturbation"] == name).to_numpy()]
        error = np.sqrt(cells.var(axis=0, ddof=1) / len(cells) + control.var(axis=0, ddof=1) / len(control))
        true = np.argsort(-np.abs(cells.mean(axis=0) - control.mean(axis=0)) / error)
        found = np.argsort(-np.abs(predicted.varm[C.VARM_MEAN][:, i] - control.mean(axis=0)))
        rates.append([len(set(true[:k]) & set(found[:k])) / k for k in (5, 10, 15, 20)])
    np.testing.assert_allclose(drawn["scdiva"][1], np.mean(rates, axis=0))
    band = fig.axes[0].collections[-1].get_paths()[0].vertices[:, 1]  # ours is drawn last
    error = np.std(rates, axis=0, ddof=1) / np.sqrt(5)
    np.testing.assert_allclose(sorted({*band})[-1], (np.mean(rates, axis=0) + error).max())
    scores = sd.tl.score_perturbation(predicted, observed)
    scores = scores[(scores["reference"] == "control") & (scores["method"] == "train_mean")]
    np.testing.assert_allclose(drawn["train mean"][1][-1], scores["hit_rate_20"].mean())
    assert fig.axes[0].get_title() == "hit rate, 5 conditions, 40 genes"


def test_baselines_are_drawn_where_they_predict_all(predicted_screen):
    predicted, observed = predicted_screen()
    doubles = observed[observed.obs["perturbation"].isin(["A+B", "C+B", "control"])].copy()
    assert "additive" in curves(hit_rate(predicted, doubles, return_fig=True))
    assert "elsewhere" not in curves(hit_rate(predicted, doubles, return_fig=True))
    in_groups = curves(hit_rate(*predicted_screen(("B cell", "T cell")), return_fig=True))
    assert "elsewhere" in in_groups


def test_one_condition_has_no_band(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    one = observed[observed.obs["perturbation"].isin(["B", "control"])].copy()
    _, (left, right) = plt.subplots(1, 2)
    assert hit_rate(predicted, one, ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not right.collections
    assert right.get_title() == "hit rate, 1 condition, 40 genes"
    assert not left.lines


def test_hit_rates_that_cannot_be_drawn_are_refused(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    with pytest.raises(ValueError, match="picture format"):
        hit_rate(predicted, observed, save=tmp_path / "picture")
    with pytest.raises(ValueError, match="none of 5 predicted conditions"):
        hit_rate(predicted, observed[observed.obs["perturbation"] == "control"].copy())
    assert plt.get_fignums() == []


@pytest.fixture
def scores(predicted_screen) -> pd.DataFrame:
    predicted, observed = predicted_screen()
    return sd.tl.score_perturbation(predicted, observed)


@pytest.mark.parametrize("metric", ["pearson_delta", "mse"])
def test_scores_look_as_they_did(scores, looks_as_it_did, metric):
    looks_as_it_did(perturbation_scores(scores, metric, return_fig=True), f"perturbation_scores_{metric}")


@pytest.mark.parametrize("reference", ["control", "mean"])
@pytest.mark.parametrize("metric", ["pearson_delta", "wmse"])
def test_dots_are_conditions_and_the_best_method_is_on_top(scores, metric, reference):
    axes = perturbation_scores(scores, metric, reference=reference, return_fig=True).axes[0]
    labels = [text.get_text().split(", mean ") for text in axes.get_yticklabels()]
    shown = [name.replace(" ", "_") for name, _ in labels]
    rows = scores[scores["reference"] == reference]
    means = rows.groupby("method")[metric].mean()[shown]
    assert means.is_monotonic_increasing if metric == "wmse" else means.is_monotonic_decreasing
    assert axes.yaxis_inverted()
    assert "additive" not in shown
    assert {"scdiva", "no_change", "train_mean"} <= set(shown)
    dots = [c for c in axes.collections if len(c.get_offsets()) > 1]
    for place, (method, drawn) in enumerate(zip(shown, dots, strict=True)):
        xy = np.asarray(drawn.get_offsets())
        np.testing.assert_allclose(np.sort(xy[:, 0]), np.sort(rows.loc[rows["method"] == method, metric]))
        assert (np.abs(xy[:, 1] - place) <= 0.25).all()
    assert [mean for _, mean in labels] == [f"{mean:#.3g}" for mean in means]


def test_methods_that_predict_all_conditions_are_drawn(scores, tmp_path):
    _, (left, right) = plt.subplots(1, 2)
    chosen = scores[scores["method"].isin(["scdiva", "train_mean"])]
    assert perturbation_scores(chosen, ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert [text.get_text().split(",")[0] for text in right.get_yticklabels()] == ["scdiva", "train mean"]
    assert not left.collections
    doubles = scores[scores["n_parts"] == 2]
    labels = perturbation_scores(doubles, return_fig=True).axes[0].get_yticklabels()
    assert "additive" in [text.get_text().split(",")[0] for text in labels]


def test_scores_that_cannot_be_drawn_are_refused(scores, tmp_path):
    for frame, metric, options, error, words in [
        (scores, "pearson", {}, KeyError, "'pearson' is not a numeric column"),
        (scores, "group", {}, KeyError, "'group' is not a numeric column"),
        (scores.drop(columns="method"), "mse", {}, KeyError, "'method' is not a numeric column"),
        (scores, "mse", {"reference": "other"}, ValueError, "no row has a mse with reference='other'"),
        (scores[scores["condition"] == "A"].assign(mse=np.nan), "mse", {}, ValueError, "no row has a mse"),
        (scores, "mse", {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            perturbation_scores(frame, metric, **options)
    assert plt.get_fignums() == []
