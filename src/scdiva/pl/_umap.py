"""A map of cells, coloured by columns of obs or by genes, with its groups named on the picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scdiva._constants import OBSM_EMBEDDING
from scdiva._docs import with_shared_docs
from scdiva._nearest import or_nearest
from scdiva._settings import settings
from scdiva.data.writing import check_anndata
from scdiva.pl._coordinates import axis_name, coordinates, embedding_of
from scdiva.pl._dots import MAX_ON_DATA, dots, draw_groups, draw_numbers, legend_columns, n_present, palette
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._groups import MAX_GROUPS, as_groups, without_missing_texts

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS_A_ROW = 4


@with_shared_docs
def umap(
    adata: AnnData,
    color: str | Sequence[str] | None = None,
    *,
    basis: str = OBSM_EMBEDDING,
    layer: str | None = None,
    use_raw: bool = False,
    n_neighbors: int = 15,
    min_dist: float = 0.5,
    legend: str = "auto",
    size: float | None = None,
    title: str | Sequence[str] | None = None,
    rng: int | None = None,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw cells on the UMAP of an embedding, coloured by columns of obs or by genes.

    The map, (n_obs, 2), is computed from ``obsm[basis]`` by UMAP [1]_ and kept in ``obsm[basis + "_umap"]``, with its
    parameters in ``uns["scdiva"]["umap"]``, so that the next picture is at once the same. It is computed anew when the
    embedding or the parameters have changed. A map of that name that did not come from here is drawn as it is and never
    written over; ``obsm["X_umap"]`` is never touched.

    A `basis` that is a map already is drawn as it is, and nothing is computed: one of two columns, such as
    ``obsm["X_umap"]`` or ``obsm["spatial"]``, or the first two of one whose name ends in ``umap`` or ``tsne``.

    Parameters
    ----------
    adata
        Cells with an embedding, see `scdiva.tl.embed`.
    color
        A column of ``adata.obs`` (text, categories and booleans as groups, numbers on a scale) or a gene of
        ``adata.var_names``; or several of them, with a panel each. None draws all cells grey. Colours of groups are
        those in ``uns[color + "_colors"]`` where scanpy has put them. Cells without a value are grey, below the others,
        and named ``NA`` beside a colour bar or a legend.
    basis
        Key of the embedding in ``adata.obsm``, (n_obs, dim).
    layer
        Where the values of genes stand: a key of ``adata.layers``, or of a table in ``adata.obsm`` with a column for
        each gene, as `scdiva.tl.impute` writes it; None takes ``adata.X``.
    use_raw
        Whether to take genes and their values from ``adata.raw``.
    n_neighbors
        Neighbours of each cell in UMAP's graph; at most n_obs - 1 are used.
    min_dist
        How close UMAP may put two cells.
    legend
        Where the names of groups stand: ``"on data"``, ``"right"``, ``"none"``, or ``"auto"``: on the data, up to 30
        groups, at the right, up to 100, and else nowhere.
    size
        Area of a dot in points squared; None fits it to the number of cells.
    title
        Above the plot, or one above each; None writes `color`.
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
        If `basis` is not in obsm, `layer` is not in layers, or `color` is neither in obs nor in var_names.
    TypeError
        If `color` is neither a name nor names.
    ValueError
        If there are fewer than five cells with a finite embedding, or none on a map; `color` is empty, or several with
        `ax`; there are not as many titles as panels; a gene's name repeats or `layer` and `use_raw` are both given;
        `legend` is none of the above; or `save` ends in no picture format.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.embed(adata)
    >>> sd.pl.umap(adata, color=["cell_type", adata.var_names[0]], save="umap.png")
    """
    if legend not in ("auto", "on data", "right", "none"):
        raise ValueError(f'legend={legend!r} must be "auto", "on data", "right" or "none"')
    check_file(save)
    check_anndata(adata)
    colors = _listed(color)
    titles = [c or "" for c in colors] if title is None else [title] if isinstance(title, str) else list(title)
    if len(titles) != len(colors):
        raise ValueError(f"title has {len(titles)} entries for {len(colors)} panels: give one for each")
    if ax is not None and len(colors) > 1:
        raise ValueError(f"ax is one panel and color names {len(colors)}: call umap once for each, or leave ax out")
    genes = _genes(adata, layer, use_raw)
    panels = [None if c is None else _values(adata, c, genes) for c in colors]
    embedding_of(adata, basis)
    seed = settings.seed if rng is None else int(rng)
    xy = coordinates(adata, basis, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed)
    shown = np.isfinite(xy).all(axis=1)

    places = [_legend_place(legend, None if values is None else values[shown]) for values in panels]
    n_columns = [
        legend_columns(values[shown]) if values is not None and where == "right" else 0
        for values, where in zip(panels, places, strict=True)
    ]
    fig, all_axes = _axes(ax, len(colors), max(n_columns))
    axis = axis_name(adata, basis)
    for axes, name, text, values, where in zip(all_axes, colors, titles, panels, places, strict=True):
        axes.set(xticks=[], yticks=[], xlabel=f"{axis} 1", ylabel=f"{axis} 2")
        axes.set_title(text)
        if values is None:
            axes.scatter(xy[shown, 0], xy[shown, 1], color="0.5", **dots(size, shown.sum()))
        elif isinstance(values.dtype, pd.CategoricalDtype):
            draw_groups(axes, xy, values, palette(adata, str(name), values), where, size)
        else:
            draw_numbers(fig, axes, xy, values.to_numpy(dtype=np.float64, na_value=np.nan), size)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _listed(color: str | Sequence[str] | None) -> list[str | None]:
    """Give what each panel is coloured by."""
    if color is None or isinstance(color, str):
        return [color]
    names = list(color) if isinstance(color, Sequence | np.ndarray | pd.Index | pd.Series) else [color]
    if not names:
        raise ValueError("color names nothing: leave it out to draw all cells grey")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"color must be a column or a gene, or several, by name; got {wrong[0]!r}")
    return [str(name) for name in names]


def _axes(ax: Axes | None, n: int, n_columns: int) -> tuple[Figure, list[Axes]]:
    """Give axes for each panel, in rows of four; `n_columns` of names stand beside the widest."""
    width = 6.0 + 1.6 * n_columns
    if n == 1:
        fig, axes = axes_for(ax, (width, 5.0))
        return fig, [axes]
    import matplotlib.pyplot as plt

    in_row = min(n, _PANELS_A_ROW)
    rows = -(-n // in_row)
    fig, grid = plt.subplots(
        rows, in_row, figsize=(0.75 * width * in_row, 3.75 * rows), layout="constrained", squeeze=False
    )
    flat = list(grid.ravel())
    for empty in flat[n:]:
        empty.set_axis_off()
    return fig, flat[:n]


def _legend_place(legend: str, values: pd.Series | None) -> str:
    """Say where the names stand if the user leaves it open."""
    if legend != "auto":
        return legend
    n = n_present(values) if values is not None and isinstance(values.dtype, pd.CategoricalDtype) else 0
    return "on data" if n <= MAX_ON_DATA else "right" if n <= MAX_GROUPS else "none"


def _genes(adata: AnnData, layer: str | None, use_raw: bool) -> tuple[str, pd.Index, Callable[[str], Any]]:
    """Say where values of genes come from, which genes are there, and how to read one."""
    if use_raw and layer is not None:
        raise ValueError(f"layer={layer!r} and use_raw=True exclude each other: adata.raw has no layers")
    if use_raw:
        raw = adata.raw
        if raw is None:
            raise ValueError("use_raw=True, but adata.raw is None: leave it out to draw the values of adata.X")
        return "adata.raw", raw.var_names, lambda gene: raw[:, gene].X
    if layer is None:
        return "adata.var_names", adata.var_names, lambda gene: adata[:, gene].X
    if layer in adata.layers:
        return "adata.var_names", adata.var_names, lambda gene: adata[:, gene].layers[layer]
    frame = adata.obsm.get(layer)
    if not isinstance(frame, pd.DataFrame):
        raise KeyError(
            f"adata has no layer {layer!r}{or_nearest(layer, adata.layers)}, and no table of genes of that name in "
            f"adata.obsm; its layers: {', '.join(map(repr, adata.layers)) or 'none'}"
        )
    return f"adata.obsm[{layer!r}]", frame.columns, lambda gene: frame[gene].to_numpy()


def _values(adata: AnnData, color: str, genes: tuple[str, pd.Index, Callable[[str], Any]]) -> pd.Series:
    """Give what colours the cells: a categorical series for groups, a numeric one for numbers."""
    if color in adata.obs:
        values = adata.obs[color]
        if isinstance(values, pd.DataFrame):
            raise ValueError(f"{values.shape[1]} columns of adata.obs are called {color!r}: rename them, or drop one")
        if pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values):
            values = values if isinstance(values.dtype, pd.CategoricalDtype) else as_groups(values)
            values = without_missing_texts(values, color)
        return values
    where, names, read = genes
    n = int((names == color).sum())
    if n > 1:
        raise ValueError(f"{n} columns are called {color!r}: call adata.var_names_make_unique(), or choose one")
    if n:
        column = read(color)
        if column is None:
            raise ValueError(f"adata.X is None, so there are no values of {color!r}: put the layer to draw there")
        column = column.compute() if hasattr(column, "compute") else column
        column = column.toarray() if hasattr(column, "toarray") else column
        return pd.Series(np.asarray(column).ravel(), adata.obs_names)
    in_raw = where != "adata.raw" and adata.raw is not None and color in adata.raw.var_names
    raise KeyError(
        f"color={color!r} is neither a gene of {where} nor a column of adata.obs"
        f"{or_nearest(color, [*adata.obs.columns, *names])}, which has "
        f"{', '.join(map(str, adata.obs.columns)) or 'none'}"
        f"{'; adata.raw has that gene: pass use_raw=True' if in_raw else ''}"
    )
