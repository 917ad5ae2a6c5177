from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from scdiva.pl._labels import free_places, place_labels


def test_names_without_room_near_their_anchor_are_left_out_and_not_the_first():
    kept = {}
    for furthest in (40.0, 80.0, np.inf):
        fig, axes = plt.subplots(figsize=(6, 6))
        axes.set(xlim=(0, 1), ylim=(0, 1))
        anchors = np.array([*np.random.default_rng(0).normal(0.5, 0.01, (24, 2)), (0.1, 0.1)])
        names = [f"GENE{i:02}" for i in range(25)]
        place_labels(axes, anchors, anchors, names, ["k"] * 25, furthest=furthest)
        fig.canvas.draw()
        boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
        kept[furthest] = list(boxes)
        at = dict(zip(names, axes.transData.transform(anchors), strict=True))
        for name, box in boxes.items():
            centre = np.array([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2])
            assert np.linalg.norm(centre - at[name]) < furthest + 3  # a pixel of rounding, and the font's baseline
        if furthest < np.inf:
            assert not any(a.overlaps(b) for a in boxes.values() for b in boxes.values() if a is not b)
    assert kept[np.inf] == names
    for furthest in (40.0, 80.0):
        assert kept[furthest][-1] == "GENE24"  # alone in its corner
        assert kept[furthest][0] == "GENE00"
    assert 4 <= len(kept[40.0]) < len(kept[80.0]) <= 25


@pytest.mark.parametrize("seed", range(2))
def test_names_stand_alike_whatever_the_last_digits(seed):
    """Opposite sides of a dot cost the same, and BLAS rounds otherwise on another CPU."""
    rng = np.random.default_rng(seed)
    anchors, sizes = rng.uniform(100, 700, (12, 2)), np.tile((44.0, 12.0), (12, 1))
    frame = (0.0, 0.0, 800.0, 800.0)
    expected = free_places(anchors, sizes, anchors, frame)
    for _ in range(3):
        moved = anchors + rng.normal(0, 1e-10, anchors.shape)
        np.testing.assert_allclose(free_places(moved, sizes, moved, frame), expected, atol=1e-6)
