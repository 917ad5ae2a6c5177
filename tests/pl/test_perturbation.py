"""Plots of predicted perturbations, with and without observed cells."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_ind

import scdiva as sd
from scdiva import _constants as C
from scdiva.pl import delta_scatter, discrimination, hit_rate, perturbation, perturbation_scores

from .conftest import heatmap, legend, texts


def log_cells(observed, name: str, group: str = "") -> np.ndarray:
    """Log-normalised expression of the observed cells of a condition."""
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    return x[((observed.obs["perturbation"] == name) & (observed.obs["line"] == group)).to_numpy()]


def scores_of(predicted, observed, method="scdiva"):
    scores = sd.tl.score_perturbation(predicted, observed)
    return scores[(scores["method"] == method) & (scores["reference"] == "control")].set_index("condition")


# --- changes of genes -------------------------------------------------------------------------------------------------
def parts(fig) -> tuple[list[str], list[str], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Names of genes, those that are bold, and the changes drawn of each kind, with half the length of their bars."""
    axes = fig.axes[0]
    ticks = axes.get_yticklabels()
    changes, bars = {}, {}
    for drawn in axes.containers:
        kind = drawn.get_label().split()[0].rstrip(",")
        changes[kind] = drawn.lines[0].get_xdata()
        if drawn.has_xerr:
            bars[kind] = np.array([np.ptp(line[:, 0]) / 2 for line in drawn.lines[2][0].get_segments()])
    return texts(ticks), [t.get_text() for t in ticks if t.get_fontweight() == "bold"], changes, bars


def test_genes_are_those_of_the_largest_observed_t_and_dots_are_changes(predicted_screen):
    predicted, observed = predicted_screen()
    observed = observed[:, ::-1].copy()  # genes are matched by name
    fig = perturbation(predicted, "A+B", observed, n_genes=7, return_fig=True)
    genes, bold, changes, bars = parts(fig)
    cells, control = log_cells(observed, "A+B"), log_cells(observed, "control")
    t = ttest_ind(cells, control, equal_var=False).statistic
    order = np.argsort(-np.abs(t))[:7]
    assert genes == list(observed.var_names[order])
    assert set(bold) == {"A", "B"} & set(genes) != set()
    change = cells.mean(axis=0) - control.mean(axis=0)
    np.testing.assert_allclose(changes["observed"], change[order], rtol=1e-4)
    np.testing.assert_allclose(bars["observed"], 1.96 * np.abs(change / t)[order], rtol=1e-4)
    at = predicted.var_names.get_indexer(genes)
    number = list(predicted.uns[C.UNS][C.PERTURBATION]["condition"]).index("A+B")
    expected = predicted.varm[C.VARM_MEAN][at, number] - control.mean(axis=0)[order]
    np.testing.assert_allclose(changes["predicted"], expected, rtol=1e-4)
    np.testing.assert_allclose(bars["predicted"], predicted.varm[C.VARM_SD][at, number], rtol=1e-4)
    assert legend(fig) == ["predicted ± sd", "observed, 95% CI\n(24 cells, 24 control)"]


def test_alone_genes_are_those_of_the_largest_change_for_its_uncertainty(predicted_screen):
    predicted, _ = predicted_screen()
    delta = predicted.varm[C.VARM_MEAN][:, 1] - predicted.varm[C.VARM_CONTROL][:, 1]
    genes, bold, changes, _ = parts(perturbation(predicted, "B", n_genes=5, return_fig=True))
    assert genes == list(predicted.var_names[np.argsort(-np.abs(delta))[:5]])
    assert "B" in bold
    assert set(changes) == {"predicted"}
    np.testing.assert_allclose(changes["predicted"], delta[predicted.var_names.get_indexer(genes)], rtol=1e-5)
    predicted.varm[C.VARM_SD][:, 1] = np.linspace(0.01, 3, 40)
    sure, *_ = parts(perturbation(predicted, "B", n_genes=5, return_fig=True))
    assert sure == list(predicted.var_names[np.argsort(-np.abs(delta / np.linspace(0.01, 3, 40)))[:5]]) != genes
    predicted.varm[C.VARM_SD] = np.full((40, 5), np.nan, dtype=np.float32)  # nothing is known: by the change itself
    assert parts(perturbation(predicted, "B", n_genes=5, return_fig=True))[0] == genes
    del predicted.varm[C.VARM_SD]
    assert parts(perturbation(predicted, "B", n_genes=5, return_fig=True))[0] == genes


def test_a_condition_is_of_one_group(predicted_screen):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    genes, _, changes, _ = parts(perturbation(predicted, "A in T cell", observed, n_genes=4, return_fig=True))
    at = observed.var_names.get_indexer(genes)
    perturbed, control = (log_cells(observed, name, "T cell")[:, at].mean(axis=0) for name in ("A", "control"))
    np.testing.assert_allclose(changes["observed"], perturbed - control, rtol=1e-4)
    with pytest.raises(KeyError, match=r"'A' .*10 predicted.*A in B cell"):
        perturbation(predicted, "A", observed)
    of = observed.obs
    without = observed[((of["line"] != "T cell") | (of["perturbation"] != "control")).to_numpy()]
    with pytest.raises(ValueError, match=r"no control cells.*'T cell'"):
        perturbation(predicted, "A in T cell", without)
    del observed.obs["line"]
    with pytest.raises(KeyError, match="'line'"):
        perturbation(predicted, "A in T cell", observed)


def test_the_order_of_parts_does_not_matter(predicted_screen):
    predicted, observed = predicted_screen()
    observed.obs["perturbation"] = observed.obs["perturbation"].replace("A+B", "B+A")
    fig = perturbation(predicted, "B+A", observed, gene_symbols="symbol", return_fig=True)
    genes, bold, *_ = parts(fig)
    assert all(name.endswith("-s") for name in genes)
    assert "A-s" in bold
    assert fig.axes[0].get_title().startswith("A+B: ")


def test_a_single_cell_is_drawn_and_ranked_by_its_difference(predicted_screen):
    predicted, observed = predicted_screen()
    of_ga = np.flatnonzero(observed.obs["perturbation"] == "A")
    observed = observed[np.setdiff1d(np.arange(observed.n_obs), of_ga[1:])].copy()
    genes, _, _, bars = parts(perturbation(predicted, "A", observed, n_genes=4, return_fig=True))
    assert set(bars) <= {"predicted"}
    change = log_cells(observed, "A")[0] - log_cells(observed, "control").mean(axis=0)
    assert genes == list(observed.var_names[np.argsort(-np.abs(change))[:4]])


# --- changes of all genes ---------------------------------------------------------------------------------------------
def test_points_are_changes_and_the_title_holds_their_score(predicted_screen):
    predicted, observed = predicted_screen()
    fig = delta_scatter(predicted, "A+B", observed, return_fig=True)
    background, top = (np.asarray(points.get_offsets()) for points in fig.axes[0].collections[-2:])
    assert len(background) == len(top) == 20
    control, cells = (log_cells(observed, name).mean(axis=0) for name in ("control", "A+B"))
    expected = np.column_stack([cells - control, predicted.varm[C.VARM_MEAN][:, 3] - control])
    all_points = np.concatenate([background, top])
    np.testing.assert_allclose(all_points[all_points[:, 0].argsort()], expected[expected[:, 0].argsort()], atol=1e-4)
    row = scores_of(predicted, observed).loc["A+B"]
    assert fig.axes[0].get_title() == (
        f"A+B\nPearson r {row['pearson_delta']:.2f} (40 genes), {row['pearson_delta_top20']:.2f} (top 20)"
    )
    assert fig.axes[0].get_aspect() == 1  # one scale


def test_few_genes_are_all_top_and_what_is_left_out_is_said(predicted_screen):
    predicted, observed = predicted_screen()
    top_genes = np.argsort(-observed.X.sum(axis=0))[:18]  # most counts, so that the scale is nearly the same
    with pytest.warns(UserWarning, match="22 of 40 predicted genes were not observed"):
        fig = delta_scatter(predicted, "B", observed[:, top_genes].copy(), n_names=3, return_fig=True)
    assert [len(points.get_offsets()) for points in fig.axes[0].collections[-2:]] == [0, 18]
    assert "(18 genes)" in fig.axes[0].get_title()


# --- discrimination ---------------------------------------------------------------------------------------------------
def test_the_framed_diagonal_is_the_score(predicted_screen):
    predicted, observed = predicted_screen()
    predicted.varm[C.VARM_MEAN] += np.random.default_rng(1).normal(0, 2, (40, 5)).astype(np.float32)
    fig = discrimination(predicted, observed, return_fig=True)
    rows, columns, colours = heatmap(fig)
    assert rows == columns
    expected = scores_of(predicted, observed).loc[rows, "discrimination"]
    np.testing.assert_allclose(np.diagonal(colours), expected, atol=1e-9)
    assert fig.axes[0].get_title() == f"discrimination {expected.mean():.2f}"
    assert [(patch.get_x(), patch.get_y()) for patch in fig.axes[0].patches] == [(i, i) for i in range(5)]
    assert fig.axes[0].collections[0].get_clim() == (0.0, 1.0)
    predicted.varm[C.VARM_MEAN][:] = predicted.varm[C.VARM_MEAN].mean(axis=1, keepdims=True)  # all the same: chance
    assert discrimination(predicted, observed, return_fig=True).axes[0].get_title() == "discrimination 0.50"


def test_one_group_is_drawn(predicted_screen):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    with pytest.raises(KeyError, match=r"group=None .*'B cell', 'T cell'"):
        discrimination(predicted, observed)
    fig = discrimination(predicted, observed, group="T cell", return_fig=True)
    title = fig.axes[0].get_title()
    assert sorted(heatmap(fig)[0]) == ["A", "A+B", "B", "C", "C+B"]
    assert title.endswith("in T cell")
    alone = observed[observed.obs["line"] == "T cell"].copy()
    assert discrimination(predicted, alone, return_fig=True).axes[0].get_title() == title


# --- hit rates --------------------------------------------------------------------------------------------------------
def curves(fig) -> dict[str, np.ndarray]:
    """Numbers of genes and rates of each curve, (2, n)."""
    return {line.get_label(): np.array(line.get_data()) for line in fig.axes[0].lines}


def test_curves_are_means_over_conditions(predicted_screen):
    predicted, observed = predicted_screen()
    fig = hit_rate(predicted, observed, return_fig=True)
    drawn = curves(fig)
    assert set(drawn) == {"scdiva", "train mean", "matching mean", "chance"}
    np.testing.assert_allclose(drawn["chance"], [[5, 10, 15, 20], [0.125, 0.25, 0.375, 0.5]])
    control = log_cells(observed, "control")
    rates = []
    for i, name in enumerate(predicted.uns["scdiva"]["perturbation"]["perturbation"]):
        cells = log_cells(observed, name)
        true = np.argsort(-np.abs(ttest_ind(cells, control, equal_var=False).statistic))
        predicted_order = np.argsort(-np.abs(predicted.varm[C.VARM_MEAN][:, i] - control.mean(axis=0)))
        rates.append([len(set(true[:k]) & set(predicted_order[:k])) / k for k in (5, 10, 15, 20)])
    np.testing.assert_allclose(drawn["scdiva"][1], np.mean(rates, axis=0))
    band = fig.axes[0].collections[-1].get_paths()[0].vertices[:, 1]  # ours is drawn last
    error = np.std(rates, axis=0, ddof=1) / np.sqrt(5)
    np.testing.assert_allclose(band.max(), (np.mean(rates, axis=0) + error).max())
    expected = scores_of(predicted, observed, "train_mean")["hit_rate_20"].mean()
    np.testing.assert_allclose(drawn["train mean"][1][-1], expected)


def test_baselines_are_drawn_where_they_predict_all(predicted_screen):
    predicted, observed = predicted_screen()
    doubles = observed[observed.obs["perturbation"].isin(["A+B", "C+B", "control"])].copy()
    drawn = curves(hit_rate(predicted, doubles, return_fig=True))
    assert ("additive" in drawn, "elsewhere" in drawn) == (True, False)
    assert "elsewhere" in curves(hit_rate(*predicted_screen(("B cell", "T cell")), return_fig=True))
    one = observed[observed.obs["perturbation"].isin(["B", "control"])].copy()
    assert not hit_rate(predicted, one, show=False).collections  # one condition has no band


# --- scores -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("metric", "reference"), [("pearson_delta", "control"), ("wmse", "mean")])
def test_dots_are_conditions_and_the_best_method_is_on_top(scores, metric, reference):
    axes = perturbation_scores(scores, metric, reference=reference, return_fig=True).axes[0]
    labels = [text.split(", mean ") for text in texts(axes.get_yticklabels())]
    methods = [name.replace(" ", "_") for name, _ in labels]
    rows = scores[(scores["reference"] == reference) & ~scores["trained"]]
    assert 1 < rows["condition"].nunique() < scores["condition"].nunique()  # those of the fit are not drawn
    means = rows.groupby("method")[metric].mean()[methods]
    assert means.is_monotonic_increasing if metric == "wmse" else means.is_monotonic_decreasing
    assert axes.yaxis_inverted()
    assert {"scdiva", "additive", "no_change", "train_mean"} <= set(methods)
    dots = [c for c in axes.collections if len(c.get_offsets()) > 1]
    for position, (method, drawn) in enumerate(zip(methods, dots, strict=True)):
        xy = np.asarray(drawn.get_offsets())
        np.testing.assert_allclose(np.sort(xy[:, 0]), np.sort(rows.loc[rows["method"] == method, metric]))
        assert (np.abs(xy[:, 1] - position) <= 0.25).all()
    assert [mean for _, mean in labels] == [f"{mean:#.3g}" for mean in means]
    less = scores.drop(rows.index[rows["method"] == "additive"][:1])  # it does not predict all conditions
    labels = perturbation_scores(less, metric, reference=reference, return_fig=True).axes[0].get_yticklabels()
    assert "additive" not in [text.split(",")[0] for text in texts(labels)]
