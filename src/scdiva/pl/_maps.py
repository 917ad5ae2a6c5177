"""Maps of cells: where cells stand, and panels of them coloured by groups or numbers."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._checks import or_nearest, warn
from scdiva._constants import UNS
from scdiva._settings import logger, settings, torch_threads_kept, tqdm_keywords
from scdiva.data.writing import check_writable, our_uns
from scdiva.pl._figure import axes_for, draw_legend, grid_of_axes
from scdiva.pl._groups import MAX_GROUPS, MISSING
from scdiva.pl._heatmap import text_inches
from scdiva.pl._labels import main_point, place_labels

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_CELLS = 5
_PER_COLUMN = 22
"""Names under each other in a legend at the side."""
_ON_DATA, ON_SMALL = 30, 14
"""Groups up to which names stand among the cells, of one panel and of each of several; more would hide the cells."""


def embedding_of(adata: AnnData, basis: str, *, made_by: str = "scdiva.tl.embed(adata)") -> NDArray[np.floating]:
    """Give the embedding, (n_obs, dim), once it is clear that it has enough cells for a map."""
    if basis not in adata.obsm:
        raise KeyError(
            f"adata.obsm has no {basis!r}{or_nearest(basis, adata.obsm)}, it has "
            f"{', '.join(adata.obsm) or 'nothing'}: call {made_by} first"
        )
    z = adata.obsm[basis]
    z = np.asarray(z.toarray() if hasattr(z, "toarray") else z)
    z = z if z.ndim > 1 else z[:, None]
    n = int(np.isfinite(z).all(axis=1).sum())
    if is_map(adata, basis):
        if not n:
            raise ValueError(f"obsm[{basis!r}] has no finite row of {len(z)}: there is nothing to draw")
    elif n < MIN_CELLS:
        raise ValueError(f"obsm[{basis!r}] has {n} finite rows of {len(z)}: a UMAP needs at least {MIN_CELLS} cells")
    return z


def is_map(adata: AnnData, basis: str) -> bool:
    """Whether an embedding is a map already, and drawn as it is: of two columns, or a UMAP or t-SNE of more."""
    n = 1 if len(shape := adata.obsm[basis].shape) < 2 else shape[1]
    return n == 2 or (n > 2 and basis.lower().endswith(("umap", "tsne")))


def coordinates(
    adata: AnnData, basis: str, *, n_neighbors: int, min_dist: float, rng: int | None
) -> NDArray[np.floating]:
    """Give the map of `basis`, (n_obs, 2): itself if it is one, the one in obsm if it still fits, else a new one.

    A new one is kept in obsm.
    """
    z = embedding_of(adata, basis)
    if is_map(adata, basis):
        _warn_of_left_out(z[:, :2])
        return z[:, :2].astype(np.float64)
    z = np.ascontiguousarray(z, dtype=np.float32)
    key, seed = f"{basis}_umap", settings.seed if rng is None else int(rng)
    record = {
        "n_neighbors": int(n_neighbors),
        "min_dist": float(min_dist),
        "seed": seed,
        "embedding_sha256": hashlib.sha256(z.tobytes()).hexdigest(),
    }
    made_here = our_uns(adata).get("umap", {}).get(key)
    if key in adata.obsm and (made_here is None or dict(made_here) == record):
        return np.asarray(adata.obsm[key])[:, :2]
    if key in adata.obsm:
        logger.info("the embedding or the parameters have changed since %r was made: it is made anew", key)

    check_writable(adata)
    known = neighbors_at_hand(adata, basis, z, n_neighbors)
    xy = umap_of(z, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed, neighbors=known)
    adata.obsm[key] = xy
    ours = our_uns(adata)
    ours["umap"] = {**ours.get("umap", {}), key: record}
    adata.uns[UNS] = ours
    return xy


Neighbors = tuple[NDArray[np.integer], NDArray[np.floating]]
"""Nearest neighbours of each cell, itself first, and their distances, both (n_cells, n_neighbors)."""


def neighbors_at_hand(adata: AnnData, basis: str, z: NDArray[np.floating], n_neighbors: int) -> Neighbors | None:
    """Give the neighbours that ``scanpy.pp.neighbors(adata, use_rep=basis)`` found in `z`; None where there are none.

    They have to be as many as are asked for, and their distances those in `z`, which may have changed since: a thousand
    cells are looked at.
    """
    note = adata.uns.get("neighbors", {})
    parameters = note.get("params", {})
    distances = adata.obsp.get(note.get("distances_key", "distances"))
    asked = {"use_rep": basis, "n_neighbors": n_neighbors, "metric": "euclidean"}
    if distances is None or any(parameters.get(name) != value for name, value in asked.items()):
        return None
    n, stored = len(z), sp.csr_matrix(distances)
    if not (np.diff(stored.indptr) == n_neighbors - 1).all():
        return None
    far = stored.data.reshape(n, -1)
    order = np.argsort(far, axis=1, kind="stable")
    near, far = (np.take_along_axis(part, order, axis=1) for part in (stored.indices.reshape(n, -1), far))
    some = np.arange(0, n, -(-n // 1_000))
    if not np.allclose(far[some], np.linalg.norm(z[near[some]] - z[some, None], axis=2), rtol=1e-3, atol=1e-3):
        return None
    return np.column_stack([np.arange(n), near]), np.column_stack([np.zeros(n, far.dtype), far])


def umap_of(
    z: NDArray[np.float32], *, n_neighbors: int, min_dist: float, seed: int, neighbors: Neighbors | None = None
) -> NDArray[np.float32]:
    """Run umap-learn on the rows that are finite; the others (cells left without a gene) stay NaN."""
    finite = np.isfinite(z).all(axis=1)
    n = int(finite.sum())
    _warn_of_left_out(z)
    from umap import UMAP, umap_

    for function in (umap_.smooth_knn_dist, umap_.compute_membership_strengths):
        with contextlib.suppress(AttributeError, RuntimeError):  # where numba finds no place for it
            function.enable_caching()  # else each process compiles them, for seconds
    # The spectral start needs more points than it has dimensions to solve for; few cells start at random.
    reducer = UMAP(
        n_neighbors=min(n_neighbors, n - 1),
        min_dist=min_dist,
        init="spectral" if n > 50 else "random",
        random_state=seed,
        n_jobs=1,  # what a fixed seed asks for
        precomputed_knn=(None, None, None) if neighbors is None else neighbors,
        tqdm_kwds={"desc": "laying out cells", "unit": "epoch", "bar_format": None, **tqdm_keywords()},
    )
    xy = np.full((len(z), 2), np.nan, dtype=np.float32)
    with torch_threads_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "precomputed_knn")  # nothing is mapped later, which it would not serve
        xy[finite] = reducer.fit_transform(z[finite])
    return xy


def _warn_of_left_out(z: NDArray[np.floating]) -> None:
    """Warn of cells that are not on the map."""
    n = int((~np.isfinite(z).all(axis=1)).sum())
    if n:
        warn(f"{n:,} of {len(z):,} cells have no finite embedding and are not drawn")


class Panel(NamedTuple):
    """One map: where cells stand and what colours them."""

    title: str
    xy: NDArray[np.floating]
    """(n_cells, 2); cells with NaN are not drawn."""
    column: pd.Series | None = None
    """Categories, numbers, or None: all cells grey."""
    colours: Mapping[Any, Any] = {}
    """Colour of each category."""
    legend: str = "auto"
    """Where the names of groups stand: "on data", "right", "none", or "auto", by their number."""
    below: Collection[str] = ()
    """Groups that are named under the panel instead, as their cells have no place of their own."""
    named: pd.Series | None = None
    """Whose groups the legend at the right names, if not those of `column`."""
    limits: tuple[float | None, float | None] = (None, None)
    """Where colours of numbers end; None fits them to the cells."""
    axis_names: tuple[str, str] = ("", "")

    @property
    def groups(self) -> pd.Series | None:
        """The categories of the cells on the map; None where there are none."""
        if self.column is None or not isinstance(self.column.dtype, pd.CategoricalDtype):
            return None
        return self.column[np.isfinite(self.xy).all(axis=1)]


def draw_maps(
    panels: Sequence[Panel], *, n_columns: int = 4, size: float | None = None, ax: Axes | None = None
) -> Figure:
    """Draw maps in rows of `n_columns`, with room beside them for legends; one alone is larger, or drawn on `ax`."""
    one = len(panels) == 1
    panels = [panel._replace(legend=_place_of_names(panel, _ON_DATA if one else ON_SMALL)) for panel in panels]
    n_columns = min(n_columns, len(panels))
    room = [max(map(_inches_beside, panels[i::n_columns])) for i in range(n_columns)]
    if one:
        fig, axes = axes_for(ax, (6.0 + room[0], 5.0))
        grid = np.array([axes])
    else:
        n_rows = -(-len(panels) // n_columns)
        fig, all_axes = grid_of_axes(n_rows, n_columns, (4.0 * n_columns + sum(room), 4.0 * n_rows))
        grid = all_axes.ravel()
    for axes, panel in zip(grid, panels, strict=False):
        axes.set(xticks=[], yticks=[], xlabel=panel.axis_names[0], ylabel=panel.axis_names[1])
        axes.set_title(panel.title)
        _draw_cells(fig, axes, panel, size)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):  # once all legends have their room
        if panel.legend == "on data":
            _name_groups(axes, panel)
    return fig


def _place_of_names(panel: Panel, most: int) -> str:
    """Say where the names of groups stand if it is left open."""
    n = 0 if panel.groups is None else panel.groups.nunique()
    return (
        panel.legend if panel.legend != "auto" else "on data" if n <= most else "right" if n <= MAX_GROUPS else "none"
    )


def _listed(panel: Panel) -> list[str]:
    """Give the names in the legend of a panel, at the right or below, in the order of the categories."""
    groups = panel.groups if panel.named is None or panel.legend != "right" else panel.named
    if groups is None or panel.legend == "none":
        return []
    names = [str(name) for name in groups.cat.remove_unused_categories().cat.categories]
    return names if panel.legend == "right" else [name for name in names if name in panel.below]


def _inches_beside(panel: Panel) -> float:
    """Give the width of what stands at the right of a panel."""
    if panel.column is not None and panel.groups is None:
        return 0.7
    names = _listed(panel) if panel.legend == "right" else []
    return -(-len(names) // _PER_COLUMN) * (text_inches(names) + 0.4)


def _draw_cells(fig: Figure, ax: Axes, panel: Panel, size: float | None) -> None:
    """Draw the cells of a panel and name what their colours are."""
    shown = np.isfinite(panel.xy).all(axis=1)
    xy, groups = panel.xy[shown], panel.groups
    dot = size if size is not None else float(np.clip(12_000 / max(len(xy), 1), 1.0, 18.0))
    look: dict[str, Any] = {"s": dot, "linewidths": 0, "rasterized": True}
    if groups is not None:
        _draw_groups(ax, xy, groups, panel, look)
    elif panel.column is not None:
        _draw_numbers(fig, ax, xy, panel.column.to_numpy(dtype=np.float64, na_value=np.nan)[shown], panel.limits, look)
    else:
        ax.scatter(xy[:, 0], xy[:, 1], color="0.5", **look)


def _draw_groups(ax: Axes, xy: NDArray[np.floating], groups: pd.Series, panel: Panel, look: dict[str, Any]) -> None:
    """Draw cells coloured by group, those without one grey below, and name the groups that have cells."""
    from matplotlib.colors import to_rgba

    colours = {str(name): to_rgba(colour) for name, colour in panel.colours.items()}
    names, codes = [str(name) for name in groups.cat.categories], groups.cat.codes.to_numpy()
    table = np.array([MISSING, *(colours[name] for name in names)])
    # One shuffled layer, so that no group hides another only because it comes later in the alphabet.
    order = np.random.default_rng(0).permutation(len(xy))
    order = order[np.argsort(codes[order] >= 0, kind="stable")]
    ax.scatter(xy[order, 0], xy[order, 1], c=table[codes[order] + 1], **look)
    aside = panel.legend == "right"
    listed = _listed(panel)
    for name in listed:
        ax.scatter([], [], color=colours[name], s=30, linewidths=0, label=name)
    if aside and listed and groups.isna().any():
        ax.scatter([], [], color=MISSING, s=30, linewidths=0, label="NA")
    if listed:
        draw_legend(ax, "right" if aside else "below", ncols=-(-len(listed) // _PER_COLUMN) if aside else 2)


def _name_groups(ax: Axes, panel: Panel) -> None:
    """Write the names of groups among their cells, darker than these, so that they can be read on white."""
    from matplotlib.colors import to_rgb

    if panel.groups is None:
        return
    xy = panel.xy[np.isfinite(panel.xy).all(axis=1)]
    names = [name for name in panel.groups.cat.remove_unused_categories().cat.categories if name not in panel.below]
    anchors = [main_point(xy[(panel.groups == name).to_numpy()]) for name in names]
    inks = [tuple(0.7 * part for part in to_rgb(panel.colours[name])) for name in names]
    place_labels(ax, xy, anchors, [str(name) for name in names], inks)


def _draw_numbers(
    fig: Figure,
    ax: Axes,
    xy: NDArray[np.floating],
    number: NDArray[np.floating],
    limits: tuple[float | None, float | None],
    look: dict[str, Any],
) -> None:
    """Draw cells coloured by a number, high ones on top, those without one grey below, with a colour bar."""
    known = np.isfinite(number)
    missing = None if known.all() else ax.scatter(xy[~known, 0], xy[~known, 1], color=MISSING, **look)
    beside, where = ax, "right"
    if known.any():
        order = np.flatnonzero(known)[np.argsort(number[known], kind="stable")]
        low, high = limits
        cells = ax.scatter(xy[order, 0], xy[order, 1], c=number[order], cmap="viridis", vmin=low, vmax=high, **look)
        beside, where = fig.colorbar(cells, ax=ax, shrink=0.7).ax, "below"
    if missing is not None:
        draw_legend(beside, where, handles=[missing], labels=["NA"], handletextpad=0.1, borderpad=0.2)
