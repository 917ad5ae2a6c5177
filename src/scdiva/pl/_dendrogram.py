"""Order rows of a heatmap by similarity, and draw the tree of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def correlation_tree(profiles: NDArray[np.floating]) -> tuple[NDArray[np.floating], NDArray[np.intp]]:
    """Cluster rows by correlation (average linkage, optimal leaf order), what is NaN taken as the row's mean.

    Parameters
    ----------
    profiles
        (n, n_values).

    Returns
    -------
    tree, order
        scipy's linkage, empty for fewer than two rows, and the rows from leaf to leaf.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage

    n = len(profiles)
    if n < 2:
        return np.empty((0, 4)), np.arange(n)
    known = np.isfinite(profiles)
    mean = np.where(known, profiles, 0).sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1, keepdims=True), 1)
    around = np.where(known, profiles - mean, 0.0)
    around /= np.maximum(np.linalg.norm(around, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    distance = np.clip(1 - around @ around.T, 0, 2)[np.triu_indices(n, 1)]
    tree = linkage(distance, method="average", optimal_ordering=True)
    return tree, leaves_list(tree).astype(np.intp)


def draw_tree(axes: Axes, tree: NDArray[np.floating], *, share: float, lowest: float) -> None:
    """Draw the tree above the fields, its leaves over their columns, `share` of their height (at least 4 %)."""
    from scipy.cluster.hierarchy import dendrogram

    drawn = dendrogram(tree, no_plot=True)
    above = axes.inset_axes((0.0, 1.01, 1.0, max(share, 0.04)), sharex=axes)
    for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        above.plot(np.array(x) / 10, y, color="0.3", linewidth=0.8)  # scipy's leaves are at 5, 15, ...
    above.set_ylim(lowest, 1.02 * tree[:, 2].max())
    above.set_xlim(0, len(tree) + 1)
    above.axis("off")
