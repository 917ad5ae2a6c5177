from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.pl import confusion_matrix
from scdiva.pl._figure import similar_order


def parts(fig) -> tuple[list[str], list[str], dict[tuple[str, str], int], dict[tuple[str, str], float]]:
    """Names of rows and columns, the numbers written and the colours, by names."""
    axes = fig.axes[0]
    rows = [text.get_text() for text in axes.get_yticklabels()]
    columns = [text.get_text() for text in axes.get_xticklabels()]
    names = [row.rsplit(" (", 1)[0] for row in rows]
    written = {}
    for text in axes.texts:
        x, y = text.get_position()
        written[names[int(y)], columns[int(x)]] = int(text.get_text())
    colour = np.asarray(axes.collections[0].get_array()).reshape(len(rows), len(columns))
    return rows, columns, written, {(r, c): colour[i, j] for i, r in enumerate(names) for j, c in enumerate(columns)}


def framed(fig) -> set[tuple[int, int]]:
    """Row and column of the framed fields."""
    return {(int(patch.get_y()), int(patch.get_x())) for patch in fig.axes[0].patches}


def test_looks_as_it_did(annotated, looks_as_it_did):
    looks_as_it_did(confusion_matrix(annotated, "cell type", return_fig=True), "confusion_matrix")


def test_names_of_cells_may_repeat(annotated):
    expected = parts(confusion_matrix(annotated, "cell type", return_fig=True))
    annotated.obs_names = ["cell"] * annotated.n_obs
    assert parts(confusion_matrix(annotated, "cell type", return_fig=True)) == expected


def test_fields_are_the_counts_and_their_shares(annotated):
    annotated.obs.loc["cell0", "cell type"] = np.nan
    annotated.obs.loc["cell1", "scdiva_label"] = np.nan
    rows, columns, written, colour = parts(confusion_matrix(annotated, "cell type", return_fig=True))
    truth, predicted = annotated.obs["cell type"], annotated.obs["scdiva_label"]
    for name in truth.cat.categories:
        of_type = (truth == name).to_numpy()
        assert f"{name} ({of_type.sum()})" in rows
        for other in columns:
            named = predicted.isna() if other == "no label" else predicted == other
            n = int((of_type & named.to_numpy()).sum())
            assert written.get((name, other), 0) == n
            assert colour[name, other] == pytest.approx(n / of_type.sum())
    assert sum(written.values()) == 159
    assert columns[-2:] == ["unknown", "no label"]


def test_like_types_stand_together_and_what_is_right_on_the_diagonal(annotated):
    fig = confusion_matrix(annotated, "cell type", return_fig=True)
    rows, columns, _, _ = parts(fig)
    names = [row.rsplit(" (", 1)[0] for row in rows]
    assert names == columns[:4]
    assert abs(names.index("CD4+ memory T cell") - names.index("CD8+ T cell")) == 1
    assert framed(fig) == {(i, i) for i in range(4)}


def test_types_that_only_one_side_has(annotated):
    """The annotator knows no monocytes but macrophages, never gives B cell, and one cell is called a parent's name."""
    annotated.uns["scdiva"]["scdiva_label"]["labels"] = ["B cell", "CD4+ memory T cell", "CD8+ T cell", "macrophage"]
    label = annotated.obs["scdiva_label"].astype(object).replace({"Monocyte": "macrophage", "B cell": "unknown"})
    label.iloc[1] = "T cell"
    annotated.obs["scdiva_label"] = label
    fig = confusion_matrix(annotated, "cell type", return_fig=True)
    rows, columns, written, _ = parts(fig)
    names = [row.rsplit(" (", 1)[0] for row in rows]
    known = [name for name in names if name != "Monocyte"]
    assert columns[:3] == known  # B cell too, though its column is empty: it could have been found
    assert not [key for key in written if key[1] == "B cell"]
    assert set(columns[3:5]) == {"T cell", "macrophage"}
    assert columns[5] == "unknown"
    assert framed(fig) == {(names.index(name), columns.index(name)) for name in known}


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=9))
@settings(deadline=None)
def test_an_order_is_a_permutation_whatever_the_rows(rows):
    order = similar_order(np.array(rows))
    assert sorted(order) == list(range(len(rows)))
    assert order[0] <= order[-1]


def test_rows_on_a_line_are_ordered_along_it():
    place = np.array([4.0, 0.0, 3.0, 1.0, 2.2])
    order = similar_order(place[:, None])
    assert order.tolist() == [0, 2, 4, 3, 1]


def test_bad_input_is_refused_and_the_users_axes_left_open(annotated, tmp_path):
    annotated.obs["none"] = np.nan
    for keys, options, error, words in [
        (("type",), {}, KeyError, "no column 'type'"),
        (("cell type", "mine"), {}, KeyError, "call scdiva.tl.annotate"),
        (("none",), {}, ValueError, "has 0 different values in 160 cells"),
        (("cell type",), {"save": tmp_path / "map"}, ValueError, "must end in a picture format"),
    ]:
        with pytest.raises(error, match=words):
            confusion_matrix(annotated, *keys, **options)
    assert plt.get_fignums() == []
    fig, ax = plt.subplots()
    assert confusion_matrix(annotated, "cell type", ax=ax, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").exists()
    assert plt.get_fignums() == [fig.number]
