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


def test_looks_as_it_did(predicted_screen, looks_as_it_did):
    predicted, observed = predicted_screen()
    looks_as_it_did(delta_scatter(predicted, "A+B", observed, return_fig=True), "delta_scatter")


def test_points_are_changes_and_the_title_holds_their_score(predicted_screen):
    predicted, observed = predicted_screen()
    fig = delta_scatter(predicted, "A+B", observed, return_fig=True)
    rest, top = points(fig)
    assert len(rest) == len(top) == 20
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    mean = {name: x[(observed.obs["perturbation"] == name).to_numpy()].mean(axis=0) for name in ("control", "A+B")}
    changes = [mean["A+B"] - mean["control"], predicted.varm[C.VARM_MEAN][:, 3] - mean["control"]]
    expected = np.column_stack(changes)
    both = np.concatenate([rest, top])
    np.testing.assert_allclose(both[both[:, 0].argsort()], expected[expected[:, 0].argsort()], atol=1e-4)
    scores = sd.tl.score_perturbation(predicted, observed)
    chosen = (scores["method"] == "scdiva") & (scores["condition"] == "A+B") & (scores["reference"] == "control")
    (row,) = scores[chosen].to_dict("records")
    assert fig.axes[0].get_title() == (
        f"A+B\nPearson r {row['pearson_delta']:.2f} (40 genes), {row['pearson_delta_top20']:.2f} (top 20)"
    )
    assert fig.axes[0].get_aspect() == 1  # one scale


def test_few_genes_are_all_top_and_what_is_left_out_is_said(predicted_screen):
    predicted, observed = predicted_screen()
    most = np.argsort(-observed.X.sum(axis=0))[:18]  # most counts, so that the scale is nearly the same
    with pytest.warns(UserWarning, match="22 of 40 predicted genes were not observed"):
        fig = delta_scatter(predicted, "B", observed[:, most].copy(), n_names=3, return_fig=True)
    rest, top = points(fig)
    assert (len(rest), len(top)) == (0, 18)
    assert "(18 genes)" in fig.axes[0].get_title()


def test_what_cannot_be_drawn_is_refused(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    with pytest.raises(
        TypeError, match=r"condition must be the name .* got AnnData.*\(predicted, condition, observed\)"
    ):
        sd.pl.perturbation(predicted, observed)
    for condition, options, error, words in [
        ("D", {}, KeyError, "'D' must name one of the 5 predicted"),
        ("A", {"n_names": -1}, ValueError, "n_names must be"),
        ("A", {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            delta_scatter(predicted, condition, observed, **options)
    with pytest.raises(ValueError, match=r"'A'\) was observed"):
        delta_scatter(predicted, "A", observed[observed.obs["perturbation"] != "A"].copy())
    assert plt.get_fignums() == []
