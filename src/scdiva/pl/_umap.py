"""A UMAP of an embedding, with its groups named on the picture."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._constants import OBSM_EMBEDDING, UNS
from scdiva._docs import with_shared_docs
from scdiva._nearest import or_nearest
from scdiva._progress import tqdm_keywords
from scdiva._settings import logger, settings
from scdiva._threads import torch_threads_kept
from scdiva.data.writing import check_anndata, check_writable, our_uns
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._groups import as_groups
from scdiva.pl._labels import main_point, place_labels

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIN_CELLS = 5
_PER_COLUMN = 22
"""Names under each other in a legend at the side."""
MAX_ON_DATA = 30
"""With more groups than this their names would hide the cells, and go beside the plot."""


@with_shared_docs
def umap(
    adata: AnnData,
    color: str | None = None,
    *,
    basis: str = OBSM_EMBEDDING,
    n_neighbors: int = 15,
    min_dist: float = 0.5,
    legend: str = "auto",
    size: float | None = None,
    title: str | None = None,
    rng: int | None = None,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the UMAP of an embedding, coloured by a column of obs or by a gene.

    The map, (n_obs, 2), is computed from ``obsm[basis]`` by UMAP [1]_ and kept in ``obsm[basis + "_umap"]``, with its
    parameters in ``uns["scdiva"]["umap"]``, so that the next picture is at once the same. It is computed anew when the
    embedding or the parameters have changed. A map of that name that did not come from here is drawn as it is and never
    written over; ``obsm["X_umap"]`` is never touched.

    Parameters
    ----------
    adata
        Cells with an embedding, see `scdiva.tl.embed`.
    color
        A column of ``adata.obs`` (text, categories and booleans as groups, numbers on a scale) or a gene of
        ``adata.var_names`` (its values in ``adata.X``). None draws all cells grey. Colours of groups are those in
        ``uns[color + "_colors"]`` where scanpy has put them.
    basis
        Key of the embedding in ``adata.obsm``, (n_obs, dim).
    n_neighbors
        Neighbours of each cell in UMAP's graph; at most n_obs - 1 are used.
    min_dist
        How close UMAP may put two cells.
    legend
        Where the names of groups stand: ``"on data"``, ``"right"``, ``"none"``, or ``"auto"``: on the data, up to 30
        groups, else at the right.
    size
        Area of a dot in points squared; None fits it to the number of cells.
    title
        Above the plot; None writes `color`.
    %(rng)s
    %(ax)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    KeyError
        If `basis` is not in obsm, or `color` is neither in obs nor in var_names.
    ValueError
        If there are fewer than five cells with a finite embedding, `legend` is none of the above, or `save` ends in
        no picture format.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.embed(adata)
    >>> sd.pl.umap(adata, color="cell_type", save="umap.png")
    """
    if legend not in ("auto", "on data", "right", "none"):
        raise ValueError(f'legend={legend!r} must be "auto", "on data", "right" or "none"')
    check_file(save)
    check_anndata(adata)
    if color is not None and not isinstance(color, str):
        raise TypeError(f"color={color!r} must be one column or gene: call umap once for each")
    values = None if color is None else _values(adata, color)
    seed = settings.seed if rng is None else int(rng)
    xy = coordinates(adata, basis, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed)
    shown = np.isfinite(xy).all(axis=1)

    where = _legend_place(legend, None if values is None else values[shown])
    columns = legend_columns(values[shown]) if values is not None and where == "right" else 0
    fig, axes = axes_for(ax, (6.0 + 1.6 * columns, 5.0))
    axes.set(xticks=[], yticks=[], xlabel="UMAP 1", ylabel="UMAP 2")
    axes.set_title(title if title is not None else color or "")
    if values is None:
        axes.scatter(xy[shown, 0], xy[shown, 1], color="0.5", **_dots(size, shown.sum()))
    elif isinstance(values.dtype, pd.CategoricalDtype):
        draw_groups(axes, xy, values, palette(adata, str(color), values), where, size)
    else:
        draw_numbers(fig, axes, xy, values.to_numpy(dtype=np.float64), size)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _legend_place(legend: str, values: pd.Series | None) -> str:
    """Say where the names stand if the user leaves it open."""
    if legend != "auto":
        return legend
    many = values is not None and isinstance(values.dtype, pd.CategoricalDtype) and len(_present(values)) > MAX_ON_DATA
    return "right" if many else "on data"


def legend_columns(values: pd.Series) -> int:
    """Columns of a legend at the side for the groups that have cells; numbers have none."""
    return -(-len(_present(values)) // _PER_COLUMN) if isinstance(values.dtype, pd.CategoricalDtype) else 0


def _dots(size: float | None, n_cells: int) -> dict[str, Any]:
    dot = size if size is not None else float(np.clip(12_000 / n_cells, 1.0, 18.0))
    return {"s": dot, "linewidths": 0, "rasterized": True}


def _values(adata: AnnData, color: str) -> pd.Series:
    """Give what colours the cells: a categorical series for groups, a numeric one for numbers."""
    if color in adata.obs:
        values = adata.obs[color]
        if pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values):
            values = values.astype("category") if isinstance(values.dtype, pd.CategoricalDtype) else as_groups(values)
        return values
    if color in adata.var_names:
        n = int((adata.var_names == color).sum())
        if n > 1:
            raise ValueError(f"{n} columns are called {color!r}: call adata.var_names_make_unique(), or choose one")
        if adata.X is None:
            raise ValueError(f"adata.X is None, so there are no values of {color!r}: put the layer to draw there")
        column = adata[:, color].X
        column = column.compute() if hasattr(column, "compute") else column
        column = column.toarray() if hasattr(column, "toarray") else column
        return pd.Series(np.asarray(column).ravel(), adata.obs_names)
    raise KeyError(
        f"color={color!r} is neither a gene of adata.var_names nor a column of adata.obs"
        f"{or_nearest(color, [*adata.obs.columns, *adata.var_names])}, which has "
        f"{', '.join(map(str, adata.obs.columns)) or 'none'}"
    )


def embedding_of(adata: AnnData, basis: str, *, made_by: str = "scdiva.tl.embed(adata)") -> NDArray[np.float32]:
    """Give the embedding, (n_obs, dim), once it is clear that it has enough cells for a map."""
    if basis not in adata.obsm:
        raise KeyError(
            f"adata.obsm has no {basis!r}{or_nearest(basis, adata.obsm)}, it has "
            f"{', '.join(adata.obsm) or 'nothing'}: call {made_by} first"
        )
    z = adata.obsm[basis]
    z = np.ascontiguousarray(z.toarray() if hasattr(z, "toarray") else z, dtype=np.float32)
    n = int(np.isfinite(z).all(axis=1).sum())
    if n < _MIN_CELLS:
        raise ValueError(f"obsm[{basis!r}] has {n} finite rows of {len(z)}: a UMAP needs at least {_MIN_CELLS} cells")
    return z


def coordinates(adata: AnnData, basis: str, *, n_neighbors: int, min_dist: float, seed: int) -> NDArray[np.floating]:
    """Give the map of `basis`, (n_obs, 2): the one in obsm if it still fits, else a new one, which is kept there."""
    z = embedding_of(adata, basis)
    key = f"{basis}_umap"
    record = {
        "n_neighbors": int(n_neighbors),
        "min_dist": float(min_dist),
        "seed": int(seed),
        "embedding_sha256": hashlib.sha256(z.tobytes()).hexdigest(),
    }
    made_here = our_uns(adata).get("umap", {}).get(key)
    if key in adata.obsm and (made_here is None or dict(made_here) == record):
        return np.asarray(adata.obsm[key])[:, :2]
    if key in adata.obsm:
        logger.info("the embedding or the parameters have changed since %r was made: it is made anew", key)

    check_writable(adata)
    xy = umap_of(z, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed)
    adata.obsm[key] = xy
    ours = our_uns(adata)
    ours["umap"] = {**ours.get("umap", {}), key: record}
    adata.uns[UNS] = ours
    return xy


def umap_of(z: NDArray[np.float32], *, n_neighbors: int, min_dist: float, seed: int) -> NDArray[np.float32]:
    """Run umap-learn on the rows that are finite; the others (cells left without a gene) stay NaN."""
    finite = np.isfinite(z).all(axis=1)
    n = int(finite.sum())
    if n < len(z):
        warnings.warn(f"{len(z) - n:,} of {len(z):,} cells have no finite embedding and are not drawn", stacklevel=4)
    from umap import UMAP

    # The spectral start needs more points than it has dimensions to solve for; few cells start at random.
    reducer = UMAP(
        n_neighbors=min(n_neighbors, n - 1),
        min_dist=min_dist,
        init="spectral" if n > 50 else "random",
        random_state=seed,
        n_jobs=1,  # what a fixed seed asks for
        tqdm_kwds={"desc": "laying out cells", "unit": "epoch", "bar_format": None, **tqdm_keywords()},
    )
    xy = np.full((len(z), 2), np.nan, dtype=np.float32)
    with torch_threads_kept():
        xy[finite] = reducer.fit_transform(z[finite])
    return xy


def palette(adata: AnnData, color: str, values: pd.Series) -> dict[Any, Any]:
    """Give a colour to each category: scanpy's where it has set them, else well-separated ones."""
    names = list(values.cat.categories)
    given = adata.uns.get(f"{color}_colors")
    if given is not None and len(given) >= len(names):
        return dict(zip(names, given, strict=False))
    return dict(zip(names, distinct_colours(len(names)), strict=False))


def distinct_colours(n: int) -> list[Any]:
    """Give well-separated colours, n or more."""
    import matplotlib as mpl

    if n <= 20:
        # Strong colours first: groups take pale ones only from the eleventh on.
        strong_then_pale = [*range(0, 20, 2), *range(1, 20, 2)]
        return [mpl.colormaps["tab20"](i) for i in strong_then_pale]
    i = np.arange(n)
    turn = i * 0.618 % 1.0  # golden angle: neighbours in the list are far apart in hue
    light = 0.5 + 0.45 * ((i + i // 21) % 3) / 2  # hues come again after 21, in another lightness
    return list(mpl.colors.hsv_to_rgb(np.stack([turn, np.full(n, 0.75), light], axis=1)))


def draw_groups(
    ax: Axes,
    xy: NDArray[np.floating],
    values: pd.Series,
    colours_of: dict[Any, Any],
    where: str,
    size: float | None = None,
) -> None:
    """Draw cells coloured by group, unlabelled ones grey below, and name the groups that have cells."""
    shown = np.isfinite(xy).all(axis=1)
    xy, values = xy[shown], values[shown]
    codes = values.cat.codes.to_numpy()
    names = list(values.cat.categories)
    colours = np.array([(0.83, 0.83, 0.83, 1.0), *(_rgba(colours_of[name]) for name in names)])
    # One shuffled layer, so that no group hides another only because it comes later in the alphabet.
    order = np.random.default_rng(0).permutation(len(xy))
    order = order[np.argsort(codes[order] >= 0, kind="stable")]
    ax.scatter(xy[order, 0], xy[order, 1], c=colours[codes[order] + 1], **_dots(size, len(xy)))
    if where == "on data":
        name_groups(ax, xy, values, colours_of)
    elif where == "right":
        draw_legend(ax, values, colours_of)


def name_groups(ax: Axes, xy: NDArray[np.floating], values: pd.Series, colours_of: dict[Any, Any]) -> None:
    """Write the names of the groups that have cells where most of these are."""
    shown = np.isfinite(xy).all(axis=1)
    xy, values = xy[shown], values[shown]
    groups, codes = _present(values), values.cat.codes.to_numpy()
    if not groups:
        return
    names = [values.cat.categories[i] for i in groups]
    low, high = xy.min(axis=0), xy.max(axis=0)
    anchors = np.array([main_point(xy[codes == i], low, high) for i in groups])
    darker = [tuple(0.7 * part for part in _rgba(colours_of[name])[:3]) for name in names]
    place_labels(ax, xy, anchors, [str(name) for name in names], darker)


def draw_legend(ax: Axes, values: pd.Series, colours_of: dict[Any, Any]) -> None:
    """Name the groups that have cells at the right of the axes."""
    if not (groups := _present(values)):
        return
    for i in groups:
        name = values.cat.categories[i]
        ax.scatter([], [], color=_rgba(colours_of[name]), s=30, label=str(name))
    ax.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8,
        ncols=legend_columns(values),
        handletextpad=0.2,
    )


def draw_numbers(
    fig: Figure,
    ax: Axes,
    xy: NDArray[np.floating],
    number: NDArray[np.floating],
    size: float | None = None,
    limits: tuple[float | None, float | None] = (None, None),
) -> None:
    """Draw cells coloured by a number, high ones on top, with a colour bar; None in `limits` fits them to the cells."""
    shown = np.isfinite(xy).all(axis=1)
    order = np.flatnonzero(shown)[np.argsort(number[shown], kind="stable")]
    x, y = xy[order].T
    low, high = limits
    dots = ax.scatter(x, y, c=number[order], cmap="viridis", vmin=low, vmax=high, **_dots(size, len(order)))
    fig.colorbar(dots, ax=ax, shrink=0.7)


def _present(values: pd.Series) -> list[int]:
    """Codes of the categories that have cells."""
    return [int(code) for code in np.unique(values.cat.codes) if code >= 0]


def _rgba(colour: Any) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba

    return to_rgba(colour)
