from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from scdiva.pl import regulon
from scdiva.pl._network import DOWN, UP


@pytest.fixture
def frame() -> pd.DataFrame:
    """Thirteen targets, the strongest first."""
    weight = np.linspace(0.9, 0.3, 13) * np.where(np.arange(13) % 4 == 1, -1, 1)
    rows = pd.DataFrame({"source": "SPI1", "target": [f"TARGET{i}" for i in range(13)], "weight": weight})
    rows["correlation"] = weight / 2
    rows["sign"] = np.sign(weight)
    rows["known"] = [1.0, np.nan, -1.0, 0.0, *[np.nan] * 9]
    return rows


def drawn(fig) -> dict[str, tuple]:
    """Of each target the end of its line, its colour, and the colour of its dot."""
    axes = fig.axes[0]
    names = [text.get_text() for text in axes.get_yticklabels()]
    lines, dots = axes.collections
    ends = [segment[1] for segment in lines.get_segments()]
    return dict(zip(names, zip(ends, lines.get_colors(), dots.get_facecolors(), strict=True), strict=True))


def legend(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].get_legend().get_texts()]


@pytest.mark.parametrize("known", [True, False])
def test_looks_as_it_did(frame, looks_as_it_did, known):
    frame = frame if known else frame.drop(columns="known")
    looks_as_it_did(regulon(frame, return_fig=True), "regulon_known" if known else "regulon")


def test_lines_are_the_weights_the_strongest_on_top(frame):
    fig = regulon(frame, n_targets=9, return_fig=True)
    assert list(drawn(fig)) == [f"TARGET{i}" for i in range(9)]
    ends = np.array([end for end, *_ in drawn(fig).values()])
    np.testing.assert_allclose(ends, np.column_stack([frame["weight"].abs()[:9], np.arange(9)]))
    assert fig.axes[0].yaxis_inverted()
    assert fig.axes[0].get_xlim()[0] == 0
    assert fig.axes[0].get_title() == "SPI1: 9 strongest targets, 3 known"


def test_colours_are_signs_and_known_ones_are_marked(frame):
    fig = regulon(frame, return_fig=True)
    signs = frame.set_index("target")["sign"]
    for name, (_, colour, _) in drawn(fig).items():
        np.testing.assert_allclose(colour, to_rgba(UP if signs[name] > 0 else DOWN))
    fills = {"TARGET0": UP, "TARGET1": "white", "TARGET2": DOWN, "TARGET3": "0.45", "TARGET9": "white"}
    for name, colour in fills.items():
        np.testing.assert_allclose(drawn(fig)[name][2], to_rgba(colour))
    bold = [text.get_text() for text in fig.axes[0].get_yticklabels() if text.get_fontweight() == "bold"]
    assert bold == ["TARGET0", "TARGET2", "TARGET3"]
    assert legend(fig) == [
        "increases with the factor", "decreases with the factor", "known, activates", "known, represses", "known",
    ]  # fmt: skip
    plain = regulon(frame.drop(columns=["known", "sign"]), return_fig=True)
    assert legend(plain) == ["increases with the factor", "decreases with the factor"]
    assert "known" not in plain.axes[0].get_title()


def test_one_of_several_factors(frame, tmp_path):
    both = pd.concat([frame, frame.assign(source="CEBPB", weight=1.0).head(3)])
    _, (left, right) = plt.subplots(1, 2)
    assert regulon(both, "CEBPB", ax=right, save=tmp_path / "a.svg") is None
    assert (tmp_path / "a.svg").is_file()
    assert right.get_title().startswith("CEBPB: 3 strongest targets")
    assert not left.collections


def test_what_cannot_be_drawn_is_refused(frame, tmp_path):
    both = pd.concat([frame, frame.assign(source="CEBPB")])
    for rows, options, error, words in [
        (frame.drop(columns="weight"), {}, KeyError, "regulon has no column 'weight'"),
        (both, {}, KeyError, "source=None must be one of the 2 of the frame: SPI1, CEBPB"),
        (frame, {"source": "GATA1"}, KeyError, "source='GATA1' must be one of the 1 of the frame: SPI1"),
        (frame.head(0), {}, ValueError, "no target with a weight: call scdiva.tl.regulon"),
        (frame.assign(weight=np.nan), {}, ValueError, "no target with a weight"),
        (pd.concat([frame, frame.tail(1)]), {}, ValueError, "1 targets of SPI1 come twice, first 'TARGET"),
        (frame, {"n_targets": 0}, ValueError, "n_targets must be"),
        (frame, {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            regulon(rows, **options)
    assert plt.get_fignums() == []
