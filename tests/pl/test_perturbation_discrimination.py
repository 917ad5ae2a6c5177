from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

import scdiva as sd
from scdiva import _constants as C
from scdiva.pl import discrimination


def parts(fig) -> tuple[list[str], np.ndarray, str]:
    """Names, the same of rows and columns, the colours and the title."""
    axes = fig.axes[0]
    rows, columns = ([t.get_text() for t in ticks] for ticks in (axes.get_yticklabels(), axes.get_xticklabels()))
    assert rows == columns
    return rows, np.asarray(axes.collections[0].get_array()).reshape(len(rows), -1), axes.get_title()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("discrimination", {"method": "train_mean"}),
        ("discrimination_cosine", {"values": "similarity", "metric": "cosine"}),
    ],
)
def test_looks_as_it_did(predicted_screen, looks_as_it_did, name, options):
    predicted, observed = predicted_screen()
    looks_as_it_did(discrimination(predicted, observed, return_fig=True, **options), name)


@pytest.mark.parametrize("metric", ["l1", "l2", "cosine"])
@pytest.mark.parametrize("reference", ["control", "mean"])
@pytest.mark.parametrize("method", ["scdiva", "train_mean"])
def test_the_framed_diagonal_is_the_score(predicted_screen, metric, reference, method):
    predicted, observed = predicted_screen()
    predicted.varm[C.VARM_MEAN] += np.random.default_rng(1).normal(0, 2, (40, 5)).astype(np.float32)
    fig = discrimination(predicted, observed, metric=metric, reference=reference, method=method, return_fig=True)
    names, colours, title = parts(fig)
    scores = sd.tl.score_perturbation(predicted, observed, metric=metric)
    rows = scores[(scores["method"] == method) & (scores["reference"] == reference)].set_index("condition")
    np.testing.assert_allclose(np.diagonal(colours), rows.loc[names, "discrimination"], atol=1e-9)
    assert title == f"discrimination {rows['discrimination'].mean():.2f}"
    assert [(patch.get_x(), patch.get_y()) for patch in fig.axes[0].patches] == [(i, i) for i in range(5)]
    assert fig.axes[0].collections[0].get_clim() == (0.0, 1.0)


def test_like_conditions_stand_together(predicted_screen):
    """A and A+B, C and C+B differ by B alone; there is no noise between B's effect on the two."""
    predicted, observed = predicted_screen()
    before = predicted.copy()
    names, similarity, _ = parts(
        discrimination(predicted, observed, values="similarity", metric="cosine", return_fig=True)
    )
    places = {name: i for i, name in enumerate(names)}
    assert abs(places["A"] - places["A+B"]) == abs(places["C"] - places["C+B"]) == 1
    at = before.uns["scdiva"]["perturbation"]["perturbation"].tolist().index
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    mean = {name: x[(observed.obs["perturbation"] == name).to_numpy()].mean(axis=0) for name in (*names, "control")}
    a = predicted.varm[C.VARM_MEAN][:, at("A")] - mean["control"]
    b = mean["C"] - mean["control"]
    expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    np.testing.assert_allclose(similarity[places["A"], places["C"]], expected, rtol=1e-4)


def test_one_group_is_drawn(predicted_screen):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    with pytest.raises(ValueError, match="conditions of 2 groups were observed: name one, such as group='B cell'"):
        discrimination(predicted, observed)
    with pytest.raises(KeyError, match="group='NK cell' has no predicted condition that was observed; B cell, T cell"):
        discrimination(predicted, observed, group="NK cell")
    names, _, title = parts(discrimination(predicted, observed, group="T cell", return_fig=True))
    assert sorted(names) == ["A", "A+B", "B", "C", "C+B"]
    assert title.endswith("in T cell")
    alone = observed[observed.obs["line"] == "T cell"].copy()
    assert parts(discrimination(predicted, alone, return_fig=True))[2] == title


def test_a_prediction_that_is_the_same_for_all_is_chance(predicted_screen):
    predicted, observed = predicted_screen()
    for metric in ("l1", "l2"):
        fig = discrimination(predicted, observed, method="train_mean", metric=metric, return_fig=True)
        assert parts(fig)[2] == "discrimination 0.50"


def test_the_users_axes_are_drawn_on(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    _, (left, right) = plt.subplots(1, 2)
    assert discrimination(predicted, observed, ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert right.get_xlabel() == "observed"
    assert left.get_xlabel() == ""


def test_what_cannot_be_drawn_is_refused(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    with pytest.raises(KeyError, match=r"methods=\['additive'\] must be a list of some of scdiva, no_change"):
        discrimination(predicted, observed, method="additive")
    with pytest.raises(ValueError, match="metric must be"):
        discrimination(predicted, observed, metric="l3")
    with pytest.raises(ValueError, match="values must be"):
        discrimination(predicted, observed, values="ranks")
    with pytest.raises(ValueError, match="reference must be"):
        discrimination(predicted, observed, reference="controls")
    with pytest.raises(ValueError, match="picture format"):
        discrimination(predicted, observed, save=tmp_path / "picture")
    with pytest.raises(ValueError, match="only 'A' was both predicted and observed"):
        discrimination(predicted, observed[observed.obs["perturbation"].isin(["A", "control"])].copy())
    assert plt.get_fignums() == []
