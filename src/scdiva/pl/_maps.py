"""Maps of cells: where cells stand, and panels of them coloured by groups or numbers."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scdiva._checks import no_entry, warn
from scdiva._constants import UMAP
from scdiva._settings import settings, torch_threads_kept, tqdm_keywords
from scdiva.data.results import check_writable, our_uns, write
from scdiva.pl._figure import axes_for, grid_of_axes, text_inches, write_names
from scdiva.pl._groups import MAX_GROUPS, MISSING

MIN_CELLS = 5
UMAP_KEY = "X_umap"
"""Where scanpy looks for a UMAP."""
_N_NEIGHBORS, _MIN_DIST = 15, 0.5
"""Of every UMAP, as scanpy has them; whoever wants another makes it with scanpy and draws it as `basis`."""
ON_DATA = 14
"""Groups up to which names stand among the cells; more would hide them."""


def basis_of(adata: AnnData, basis: str) -> str:
    """Give the key of obsm that a basis names, with or without ``X_``, as in scanpy."""
    return f"X_{basis}" if basis not in adata.obsm and f"X_{basis}" in adata.obsm else basis


def embedding_of(adata: AnnData, basis: str, *, made_by: str | None = None) -> NDArray[np.floating]:
    """Give the embedding, (n_obs, dim), once it is clear that it has enough cells for a map."""
    if basis not in adata.obsm:
        by_umap = "scdiva.tl.umap(adata)" if basis in ("umap", UMAP_KEY) else "scdiva.tl.embed(adata)"
        raise no_entry("adata.obsm", basis, adata.obsm, made_by or by_umap)
    z = adata.obsm[basis]
    z = np.asarray(z.toarray() if hasattr(z, "toarray") else z)
    z = z if z.ndim > 1 else z[:, None]
    n = int(np.isfinite(z).all(axis=1).sum())
    least = 1 if is_map(adata, basis) else MIN_CELLS
    if n < least:
        raise ValueError(f"obsm[{basis!r}] has {n} finite rows of {len(z)}: a map of them needs at least {least}")
    return z


def is_map(adata: AnnData, basis: str) -> bool:
    """Whether an embedding is a map already, and drawn as it is: of two columns, or a UMAP or t-SNE of more."""
    n = 1 if len(shape := adata.obsm[basis].shape) < 2 else shape[1]
    return n == 2 or (n > 2 and basis.lower().endswith(("umap", "tsne")))


def coordinates(adata: AnnData, basis: str, rng: int | None, *, for_scanpy: bool = False) -> NDArray[np.floating]:
    """Give the map of `basis`, (n_obs, 2): itself if it is one, the one in obsm if it still fits, else a new one.

    A new one is kept in obsm. With `for_scanpy` the map is also written to ``X_umap``, unless the user has another
    there; a copy of an earlier map of ours is replaced in any case.
    """
    z = embedding_of(adata, basis)
    if is_map(adata, basis):
        _warn_of_left_out(z[:, :2])
        return z[:, :2].astype(np.float64)
    z = np.ascontiguousarray(z, dtype=np.float32)
    key, seed = f"{basis}_umap", settings.seed if rng is None else int(rng)
    digest = hashlib.sha256(z.tobytes()).hexdigest()
    record = {"n_neighbors": _N_NEIGHBORS, "min_dist": _MIN_DIST, "seed": seed, "embedding_sha256": digest}
    maps = our_uns(adata).get(UMAP, {})
    here = key in adata.obsm and adata.obsm[key].shape[1:] in ((2,), (3,))
    fits = here and (key not in maps or dict(maps[key]) == record)
    ours = UMAP_KEY in adata.obsm and any(
        np.array_equal(adata.obsm[UMAP_KEY], adata.obsm[one], equal_nan=True) for one in {*maps, key} & set(adata.obsm)
    )
    free = for_scanpy and UMAP_KEY not in adata.obsm
    if not fits or free:
        check_writable(adata, call="pl.umap", entry=UMAP, obsm=[] if fits else [key])
    xy = np.asarray(adata.obsm[key])[:, :2] if fits else umap_of(z, seed)
    new = {} if fits else {key: xy}
    if free or (ours and (for_scanpy or not fits)):
        new[UMAP_KEY] = xy.copy()
    if new:
        write(adata, "pl.umap", UMAP, maps if fits else {**maps, key: record}, obsm=new)
    if for_scanpy and not free and not ours:
        warn(
            f"adata.obsm[{UMAP_KEY!r}] was not written by scdiva and is kept: sc.pl.umap(adata) draws it. Draw the map "
            f"of {basis!r} with sc.pl.embedding(adata, {key!r}) or scdiva.pl.umap(adata, basis={basis!r})."
        )
    return xy


def umap_of(z: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Run umap-learn on the rows that are finite; the others (cells left without a gene) stay NaN."""
    finite = np.isfinite(z).all(axis=1)
    n = int(finite.sum())
    _warn_of_left_out(z)
    from sklearn.neighbors import NearestNeighbors
    from umap import UMAP, umap_

    for function in (umap_.smooth_knn_dist, umap_.compute_membership_strengths):
        with contextlib.suppress(AttributeError, RuntimeError):  # where numba finds no place for it
            function.enable_caching()  # else each process compiles them, for seconds
    # The spectral start needs more points than it has dimensions to solve for; few cells start at random.
    init = "spectral" if n > 50 else "random"
    bar = {"desc": "laying out cells", "unit": "epoch", "bar_format": None, **tqdm_keywords()}
    z, k, near = z[finite], min(_N_NEIGHBORS, n - 1), {}
    if n < 4096:  # umap-learn would compare all pairs, each by a call from Python: seconds for 2,700 cells
        near = {"precomputed_knn": NearestNeighbors(n_neighbors=k).fit(z).kneighbors(z)[::-1]}
    # One job is what a fixed seed asks for.
    reducer = UMAP(k, min_dist=_MIN_DIST, init=init, random_state=seed, n_jobs=1, tqdm_kwds=bar, **near)
    xy = np.full((*finite.shape, 2), np.nan, dtype=np.float32)
    with torch_threads_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "precomputed_knn")  # no later cell is put on the map
        xy[finite] = reducer.fit_transform(z)
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
    colours: Mapping[Hashable, Any] = {}
    """Colour of each category."""
    legend: str = "auto"
    """Where the names of groups stand: "on data", "right", "none", or "auto", by their number."""
    axis_names: tuple[str, str] = ("", "")
    limits: tuple[float | None, float | None] = (None, None)
    """Where colours of numbers end; None fits them to the cells."""

    @property
    def groups(self) -> list[Hashable]:
        """The categories that have cells; none where there are numbers."""
        if self.column is None or not isinstance(self.column.dtype, pd.CategoricalDtype):
            return []
        used = self.column[np.isfinite(self.xy).all(axis=1)].unique()
        return [name for name in self.column.cat.categories if name in used]


def draw_maps(
    panels: Sequence[Panel], *, n_columns: int = 4, size: float | None = None, ax: Axes | None = None
) -> Figure:
    """Draw maps in rows of `n_columns`, with room beside them for legends; one alone is larger, or drawn on `ax`."""
    panels = [panel._replace(legend=_place_of_names(panel)) for panel in panels]
    n_columns = min(n_columns, len(panels))
    room = sum(max(map(_inches_beside, panels[i::n_columns])) for i in range(n_columns))
    if len(panels) == 1:
        fig, axes = axes_for(ax, (6.0 + room, 5.0), framed=True)
        grid = [axes]
    else:
        n_rows = -(-len(panels) // n_columns)
        fig, all_axes = grid_of_axes(n_rows, n_columns, (4.0 * n_columns + room, 4.0 * n_rows))
        grid = list(all_axes.flat)
    for axes, panel in zip(grid, panels, strict=False):
        _draw_cells(axes, panel, size)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):  # once all legends have their room
        if panel.legend == "on data":
            _name_groups(axes, panel)
    return fig


def _place_of_names(panel: Panel) -> str:
    """Say where the names of groups stand if it is left open."""
    n = len(panel.groups)
    where = "on data" if n <= ON_DATA else "right" if n <= MAX_GROUPS else "none"
    return where if panel.legend == "auto" else panel.legend


def _inches_beside(panel: Panel) -> float:
    """Give the width of what stands at the right: a colour bar, or a legend, in as many columns as scanpy makes."""
    names = [str(name) for name in panel.groups]
    if not names:
        return 0.7
    n_columns = 1 + (len(names) > 14) + (len(names) > 30)
    return n_columns * (text_inches(names) + 0.4) if panel.legend == "right" else 0.0


def _draw_cells(axes: Axes, panel: Panel, size: float | None) -> None:
    """Draw the cells of a panel with scanpy, those without a value below the others."""
    import scanpy as sc

    # In no order, so that no group hides another only because its cells come later.
    shown = np.random.default_rng(0).permutation(np.flatnonzero(np.isfinite(panel.xy).all(axis=1)))
    cells = AnnData(shape=(len(shown), 0), obsm={"map": panel.xy[shown]})
    bar = missing = False
    if panel.groups and panel.column is not None:
        column = panel.column.iloc[shown].cat.set_categories(panel.groups).cat.rename_categories(str)
        cells.uns["value_colors"] = [to_hex(panel.colours[name]) for name in panel.groups]
        cells.obs["value"] = column.array  # keeps the order of the categories, and so their colours
    elif panel.column is not None:
        numbers = pd.to_numeric(panel.column.iloc[shown].astype(object), errors="coerce").to_numpy(dtype=np.float64)
        known = np.isfinite(numbers)
        bar, missing = known.any(), not known.all()
        cells.obs["value"] = np.where(known, numbers, np.nan)
    sc.pl.embedding(
        cells,
        "map",
        color=None if panel.column is None else "value",
        title=panel.title,
        size=float(np.clip(48_000 / len(shown), 4, 72)) if size is None else size,
        na_color="0.5" if panel.column is None else MISSING,
        vmin=panel.limits[0],
        vmax=panel.limits[1],
        legend_loc="right margin" if panel.legend == "right" else None,
        legend_fontsize=8,
        colorbar_loc=None,
        ax=axes,
        show=False,
        save=False,  # whatever scanpy's settings say
    )
    if bar:  # scanpy's would be put into pyplot's current figure
        axes.figure.colorbar(axes.collections[-1], ax=axes, pad=0.02, shrink=0.7)
    axes.set(xlabel=panel.axis_names[0] + "\ngrey: NA" * missing, ylabel=panel.axis_names[1])


def _name_groups(axes: Axes, panel: Panel) -> None:
    """Write the names of groups amid their cells, darker than these, so that they can be read on white."""
    shown = np.isfinite(panel.xy).all(axis=1)
    anchors = []
    for name in panel.groups:
        own = panel.xy[shown & np.asarray(panel.column == name)]
        anchors.append(own[np.abs(own - np.median(own, axis=0)).sum(axis=1).argmin()])
    inks = [tuple(0.7 * part for part in to_rgb(panel.colours[name])) for name in panel.groups]
    write_names(axes, panel.xy[shown], anchors, [str(name) for name in panel.groups], inks)
