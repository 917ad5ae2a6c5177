from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

import scdiva as sd
from scdiva import _constants as C
from scdiva.pl import delta_scatter


def points(fig) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of the other genes and of the top ones."""
    rest, top = fig.axes[0].collections[-2:]
    return np.asarray(rest.get_offsets()), np.asarray(top.get_offsets())


def texts(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].texts]


@pytest.mark.parametrize("uncertainty", [False, True])
def test_looks_as_it_did(predicted_screen, looks_as_it_did, uncertainty):
    predicted, observed = predicted_screen()
    name = "delta_scatter_uncertainty" if uncertainty else "delta_scatter"
    looks_as_it_did(delta_scatter(predicted, "A+B", observed, uncertainty=uncertainty, return_fig=True), name)


@pytest.mark.parametrize("reference", ["control", "mean"])
@pytest.mark.parametrize("method", ["scdiva", "additive", "train_mean"])
def test_points_are_changes_and_the_corner_holds_their_score(predicted_screen, reference, method):
    predicted, observed = predicted_screen()
    fig = delta_scatter(predicted, "A+B", observed, method=method, reference=reference, return_fig=True)
    rest, top = points(fig)
    assert len(rest) == len(top) == 20
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    mean = {name: x[(observed.obs["perturbation"] == name).to_numpy()].mean(axis=0) for name in ("control", "A+B")}
    base = mean["control"] if reference == "control" else predicted.varm[C.VARM_BASELINE + "train_mean"][:, 3]
    key = C.VARM_MEAN if method == "scdiva" else C.VARM_BASELINE + method
    expected = np.column_stack([mean["A+B"] - base, predicted.varm[key][:, 3] - base])
    both = np.concatenate([rest, top])
    np.testing.assert_allclose(both[both[:, 0].argsort()], expected[expected[:, 0].argsort()], atol=1e-4)
    scores = sd.tl.score_perturbation(predicted, observed)
    (row,) = scores[
        (scores["method"] == method) & (scores["condition"] == "A+B") & (scores["reference"] == reference)
    ].to_dict("records")
    assert texts(fig)[0] == (
        f"Pearson r {row['pearson_delta']:.2f} (40 genes)\n{row['pearson_delta_top20']:.2f} (top 20)"
    )
    assert fig.axes[0].get_xlim() == fig.axes[0].get_ylim()


def test_names_stand_beside_their_points_and_apart(predicted_screen):
    predicted, observed = predicted_screen()
    fig = delta_scatter(predicted, "A+B", observed, n_names=8, gene_symbols="symbol", return_fig=True)
    fig.canvas.draw()
    axes = fig.axes[0]
    _, top = points(fig)
    assert len(texts(fig)) == 9
    assert all(name.endswith("-s") for name in texts(fig)[1:])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    named = axes.transData.transform(top)[: len(boxes) - 1]  # the first of them are named
    assert not any(box.contains(*point) for box in boxes[1:] for point in named)
    assert texts(delta_scatter(predicted, "A+B", observed, n_names=0, return_fig=True)) == texts(fig)[:1]


def test_bars_are_a_standard_deviation_each_way(predicted_screen):
    predicted, observed = predicted_screen()
    predicted.varm[C.VARM_SD][:, 3] = 0.25
    axes = delta_scatter(predicted, "A+B", observed, uncertainty=True, n_names=0, return_fig=True).axes[0]
    _, top = axes.containers
    _, _, (across, upright) = top
    heights = [segment[1, 1] - segment[0, 1] for segment in upright.get_segments()]
    np.testing.assert_allclose(heights, 0.5, rtol=1e-5)
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    sides = [x[(observed.obs["perturbation"] == name).to_numpy()] for name in ("A+B", "control")]
    error = np.sqrt(sum(side.var(axis=0, ddof=1) / len(side) for side in sides))
    widths = np.array([segment[1, 0] - segment[0, 0] for segment in across.get_segments()])
    assert all(np.isclose(2 * error, width, rtol=1e-4).any() for width in widths)
    axes = delta_scatter(predicted, "A+B", observed, method="additive", uncertainty=True, return_fig=True).axes[0]
    _, _, (across, upright) = axes.containers[1]
    assert all(np.isfinite(segment).all() for segment in across.get_segments())
    assert not any(np.size(segment) for segment in upright.get_segments())  # no baseline knows its own uncertainty


def test_a_prediction_of_no_change_has_the_score_of_none(predicted_screen):
    predicted, observed = predicted_screen()
    fig = delta_scatter(predicted, "B", observed, method="no_change", n_names=0, return_fig=True)
    assert texts(fig)[0] == "Pearson r 0.00 (40 genes)\n0.00 (top 20)"


def test_few_genes_are_all_top_and_what_is_left_out_is_said(predicted_screen):
    predicted, observed = predicted_screen()
    with pytest.warns(UserWarning, match="28 of 40 predicted genes were not observed"):
        fig = delta_scatter(predicted, "B", observed[:, :12].copy(), n_names=3, return_fig=True)
    rest, top = points(fig)
    assert (len(rest), len(top)) == (0, 12)
    assert "(12 genes)" in texts(fig)[0]
    assert "top" not in texts(fig)[0]


def test_the_users_axes_are_drawn_on(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    _, (left, right) = plt.subplots(1, 2)
    assert delta_scatter(predicted, "A", observed, ax=right, save=tmp_path / "a.pdf") is None
    assert (tmp_path / "a.pdf").read_bytes()[:4] == b"%PDF"
    assert right.get_title() == "A"
    assert left.get_title() == ""


def test_what_cannot_be_drawn_is_refused(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    for condition, options, error, words in [
        ("D", {}, KeyError, "'D' is none of the 5 predicted conditions"),
        ("A", {"method": "additive"}, KeyError, "'additive' does not predict 'A'; scdiva, no_change, train_mean"),
        ("A", {"reference": "controls"}, ValueError, "reference must be 'control' or 'mean'"),
        ("A", {"n_names": -1}, ValueError, "n_names must be 0 or more"),
        ("A", {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            delta_scatter(predicted, condition, observed, **options)
    for key in [key for key in predicted.varm if key.startswith(C.VARM_BASELINE)]:
        del predicted.varm[key]
    with pytest.raises(ValueError, match="take reference='control'"):
        delta_scatter(predicted, "A", observed, reference="mean")
    with pytest.raises(ValueError, match=r"'A'\) was observed"):
        delta_scatter(predicted, "A", observed[observed.obs["perturbation"] != "A"].copy())
    assert plt.get_fignums() == []
