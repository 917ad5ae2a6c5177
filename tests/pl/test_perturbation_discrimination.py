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


def test_looks_as_it_did(predicted_screen, looks_as_it_did):
    predicted, observed = predicted_screen()
    looks_as_it_did(discrimination(predicted, observed, return_fig=True), "discrimination")


def test_the_framed_diagonal_is_the_score(predicted_screen):
    predicted, observed = predicted_screen()
    predicted.varm[C.VARM_MEAN] += np.random.default_rng(1).normal(0, 2, (40, 5)).astype(np.float32)
    fig = discrimination(predicted, observed, return_fig=True)
    names, colours, title = parts(fig)
    scores = sd.tl.score_perturbation(predicted, observed)
    rows = scores[(scores["method"] == "scdiva") & (scores["reference"] == "control")].set_index("condition")
    np.testing.assert_allclose(np.diagonal(colours), rows.loc[names, "discrimination"], atol=1e-9)
    assert title == f"discrimination {rows['discrimination'].mean():.2f}"
    assert [(patch.get_x(), patch.get_y()) for patch in fig.axes[0].patches] == [(i, i) for i in range(5)]
    assert fig.axes[0].collections[0].get_clim() == (0.0, 1.0)


def test_one_group_is_drawn(predicted_screen):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    with pytest.raises(KeyError, match=r"group=None .*'B cell', 'T cell'"):
        discrimination(predicted, observed)
    with pytest.raises(KeyError, match="group='NK cell' must"):
        discrimination(predicted, observed, group="NK cell")
    names, _, title = parts(discrimination(predicted, observed, group="T cell", return_fig=True))
    assert sorted(names) == ["A", "A+B", "B", "C", "C+B"]
    assert title.endswith("in T cell")
    alone = observed[observed.obs["line"] == "T cell"].copy()
    assert parts(discrimination(predicted, alone, return_fig=True))[2] == title


def test_a_prediction_that_is_the_same_for_all_is_chance(predicted_screen):
    predicted, observed = predicted_screen()
    predicted.varm[C.VARM_MEAN][:] = predicted.varm[C.VARM_MEAN].mean(axis=1, keepdims=True)
    assert parts(discrimination(predicted, observed, return_fig=True))[2] == "discrimination 0.50"


def test_what_cannot_be_drawn_is_refused(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    with pytest.raises(ValueError, match="picture format"):
        discrimination(predicted, observed, save=tmp_path / "picture")
    with pytest.raises(ValueError, match="only one predicted condition was observed, 'A'"):
        discrimination(predicted, observed[observed.obs["perturbation"].isin(["A", "control"])].copy())
    assert plt.get_fignums() == []
