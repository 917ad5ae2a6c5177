"""UMAPs of cells: coloured by obs or genes, before and after integration, annotated, and with generated cells."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scdiva._checks import no_entry, or_nearest, speaking_of
from scdiva._constants import CONFIDENCE, OBS_LABEL, OBSM_EMBEDDING, OBSM_INTEGRATED
from scdiva._settings import settings
from scdiva.data.cells import counts_as_log, log_normalised
from scdiva.data.genes import check_unique
from scdiva.embedding.umap import MIN_CELLS, basis_of, coordinates, embedding_of, is_map, umap_of
from scdiva.pl._figure import plot
from scdiva.pl._groups import (
    as_groups,
    column_of,
    gene_names,
    groups_of,
    is_number,
    keep_colours,
    palette,
    predicted_groups,
)
from scdiva.pl._maps import ON_DATA, Panel, check_kwargs, draw_maps


@plot
def umap(
    adata: AnnData,
    color: str | Sequence[str] | None = None,
    *,
    basis: str = OBSM_EMBEDDING,
    layer: str | None = None,
    use_raw: bool = False,
    gene_symbols: str | None = None,
    rng: int | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Figure | Axes | list[Axes] | None:
    """Draw cells on the UMAP of an embedding, coloured by columns of obs or by genes.

    UMAP coordinates, (n_obs, 2), are computed from ``obsm[basis]`` [1]_ (15 neighbours, minimum distance 0.5, as in
    `scdiva.tl.umap`) and stored in ``obsm[basis + "_umap"]``, with their parameters in ``uns["scdiva"]["umap"]``. They
    are computed again if the embedding or the seed has changed. Coordinates of that name from another source are drawn
    and not overwritten. ``obsm["X_umap"]`` is written by `scdiva.tl.umap` only; scanpy draws the coordinates with
    ``scanpy.pl.embedding(adata, "X_scdiva_umap")``.

    A two-dimensional `basis`, such as ``obsm["X_umap"]`` or ``obsm["spatial"]``, or one whose name ends in ``umap`` or
    ``tsne``, is drawn without UMAP (the first two columns).

    Parameters
    ----------
    adata
        Cells with an embedding, see `scdiva.tl.embed`.
    color
        A column of ``adata.obs`` (text, categories and booleans as groups, numbers on a scale) or a gene of
        ``adata.var_names``; or several of them, with a panel each. None draws all cells grey. Groups have the colours
        in ``uns[color + "_colors"]``, where new ones are written, as in scanpy. Cells without a value are grey, below
        the others, and named ``NA`` in the legend.
    basis
        Key of the embedding in ``adata.obsm``, (n_obs, dim), with or without ``X_``: ``"umap"`` is ``"X_umap"``.
    layer
        Values of genes: a key of ``adata.layers``, or of a table in ``adata.obsm`` with a column for each gene, as
        `scdiva.tl.impute` writes it. None: ``adata.X``. Counts are drawn as log1p of counts per ten thousand, other
        values as they are stored.
    use_raw
        Whether to read genes and their values from ``adata.raw``.
    gene_symbols
        Column of ``adata.var`` (of ``adata.raw.var`` with `use_raw`) with the gene names in `color`. None: var names.
    %(rng)s
    %(ax)s
    %(show)s
    %(return_fig)s
    %(save)s
    %(of_scanpy)s

    Returns
    -------
    Figure, Axes, list of Axes or None
        The figure if `return_fig`, else the axes if ``show=False`` (a list if there are several panels), else None.

    Raises
    ------
    KeyError
        If `basis` is not in obsm, `layer` is not in layers, or `color` is neither in obs nor in var_names.
    TypeError
        If `color` is neither a name nor names.
    ValueError
        If there are fewer than five cells with a finite embedding, or none on a map; `color` is empty, or several with
        `ax`; there are not as many titles or limits as panels; a gene's name repeats; `layer` and `use_raw` are both
        given; `groups` or `palette` are not known; or `save` ends in no picture format.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.embed(adata)
    >>> sd.pl.umap(adata, color=["cell_type", "CD3D"], save="umap.png")
    """
    colors = _listed(color)
    if ax is not None and len(colors) > 1:
        raise ValueError(f"ax is one panel and color names {len(colors)}: call umap once for each, or leave ax out")
    check_kwargs(len(colors), adata.n_obs, **kwargs)
    _check_layer(adata, layer, use_raw)
    basis = basis_of(adata, basis)
    embedding_of(adata, basis)
    values = _values(adata, colors, layer, use_raw, gene_symbols)
    user_palette = kwargs.pop("palette", None)
    names = {name: list(column.cat.categories) for name, (column, _) in values.items() if hasattr(column, "cat")}
    colours = {name: palette(adata, {name: each}, user_palette) for name, each in names.items()}
    xy = coordinates(adata, basis, rng)
    drawn_as_is = is_map(adata, basis) and not basis.lower().endswith("umap")
    axis = basis.removeprefix("X_") if drawn_as_is else "UMAP"
    panels = []
    for name in colors:
        column, unit = values.get(name or "", (None, ""))
        axis_names = f"{axis} 1", f"{axis} 2"
        panels.append(Panel(name or "", xy, column, colours.get(name or "", {}), axis_names=axis_names, unit=unit))
    fig = draw_maps(panels, ax=ax, **kwargs)
    for name in names:
        keep_colours(adata, {name: names[name]}, colours[name], user_palette)
    return fig


@plot
def integration(
    adata: AnnData,
    batch_key: str | Sequence[str],
    labels_key: str | None = None,
    *,
    before: str | None = None,
    after: str = OBSM_INTEGRATED,
    rng: int | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Figure | Axes | list[Axes] | None:
    """Draw UMAPs before and after integration, coloured by batch and by cell type.

    The left column shows the embedding before integration, the right column after; there is a row for each batch column
    and one for the labels. Batches should mix on the right, and cell types remain separated. Quantify both with
    `scdiva.metrics.avg_batch` and `scdiva.metrics.shuffle_control`.

    UMAP coordinates are computed and stored as by `scdiva.pl.umap`, (n_obs, 2) in ``obsm[before + "_umap"]`` and
    ``obsm[after + "_umap"]``, with their parameters in ``uns["scdiva"]["umap"]``. Those of principal components that
    are computed for the figure are not stored.

    Parameters
    ----------
    adata
        Cells with the integrated embedding of `scdiva.tl.integrate` and an embedding from before, such as
        `scdiva.tl.embed`.
    batch_key
        A column of ``adata.obs`` with the batch of each cell, or several; numbers are treated as names.
    labels_key
        A column of ``adata.obs`` with the cell types. None: batches only. Cells without a type are grey.
    before
        Key of the embedding before integration in ``adata.obsm``, (n_obs, dim). None: ``"X_scdiva"``, or without it
        ``"X_pca"``, or without either 30 principal components of the log-normalised expression in ``adata.X``.
    after
        Key of the embedding after integration in ``adata.obsm``, (n_obs, dim).
    %(rng)s
    %(show)s
    %(return_fig)s
    %(save)s
    %(of_scanpy)s

    Returns
    -------
    Figure, Axes, list of Axes or None
        The figure if `return_fig`, else the axes if ``show=False`` (a list if there are several panels), else None.

    Raises
    ------
    KeyError
        If `before` or `after` is not in obsm, or a column is not in obs.
    ValueError
        If no batch column is named, a column has no or more than 100 groups, there are fewer than five cells with a
        finite embedding, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.embed(adata)
    >>> model = sd.tl.integrate(adata, "batch", steps=20)
    >>> sd.pl.integration(adata, "batch", "cell_type", save="integration.png")
    """
    batches = [batch_key] if isinstance(batch_key, str) else list(batch_key)
    if not batches:
        raise ValueError("batch_key must name a column of adata.obs, or several; got none.")
    check_kwargs(2 * (len(batches) + (labels_key is not None)), adata.n_obs, **kwargs)
    rows = {key: groups_of(adata, key) for key in [*batches, *([labels_key] if labels_key is not None else [])]}
    # both are checked before UMAP is computed
    after = basis_of(adata, after)
    embedding_of(adata, after, made_by=f"scdiva.tl.integrate(adata, {batches[0]!r})")
    if before is None:
        before = next((key for key in (OBSM_EMBEDDING, "X_pca") if key in adata.obsm), None)
    if before is not None:
        before = basis_of(adata, before)
        embedding_of(adata, before)
    user_palette = kwargs.pop("palette", None)
    names = {key: list(values.cat.categories) for key, values in rows.items()}
    colours = {key: palette(adata, {key: names[key]}, user_palette) for key in rows}
    panels = []
    for when, basis in (("before", before), ("after", after)):
        if basis is None:
            title, xy = f"{when}: UMAP of principal components", _map_of_expression(adata, rng)
        else:
            title = f"{when}: {basis if is_map(adata, basis) else f'UMAP of {basis}'}"
            xy = coordinates(adata, basis, rng)
        for key, values in rows.items():
            # mixed batches have no centre for their names
            on_data = key not in batches and values.nunique() <= ON_DATA
            legend = "on data" if on_data else "none" if when == "before" else "right margin"
            axis_names = ("", key if when == "before" else "")
            panels.append(Panel(title, xy, values, colours[key], legend, axis_names))
            title = ""
    n = len(rows)
    pairs = [panel for pair in zip(panels[:n], panels[n:], strict=True) for panel in pair]
    fig = draw_maps(pairs, **{"ncols": 2, **kwargs})
    for key in rows:
        keep_colours(adata, {key: names[key]}, colours[key], user_palette)
    return fig


def _map_of_expression(adata: AnnData, rng: int | None) -> NDArray[np.floating]:
    """UMAP of principal components of the expression in X."""
    try:
        values = log_normalised(adata)[0]
    except ValueError as error:
        raise no_entry("adata.obsm", OBSM_EMBEDDING, adata.obsm, "scdiva.tl.embed(adata)") from error
    seed = settings.seed if rng is None else int(rng)
    return umap_of(_principal_components(values, seed).transform(values).astype(np.float32), seed)


def _principal_components(values: sp.csr_matrix, seed: int) -> Any:
    """Fit 30 principal components, or fewer than rows and columns, with arpack for sparse matrices."""
    from sklearn.decomposition import PCA

    return PCA(min(30, *(n - 1 for n in values.shape)), svd_solver="arpack", random_state=seed).fit(values)


@plot
def annotation(
    adata: AnnData,
    labels_key: str | None = None,
    *,
    key: str = OBS_LABEL,
    basis: str = OBSM_EMBEDDING,
    rng: int | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Figure | Axes | list[Axes] | None:
    """Draw annotated and predicted cell types, and the confidence of the prediction, on a UMAP.

    A cell type has the same colour in both panels. "unknown" is grey; cells without a label are light grey. UMAP
    coordinates are computed and stored as by `scdiva.pl.umap`, (n_obs, 2) in ``obsm[basis + "_umap"]``.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.annotate` annotated, with an embedding.
    labels_key
        A column of ``adata.obs`` with the true types. None: no such panel.
    key
        A column of ``adata.obs`` with the predicted types; the last panel shows ``adata.obs[key + "_confidence"]``, 0
        to 1, if it exists.
    basis
        Key of the embedding in ``adata.obsm``, (n_obs, dim).
    %(rng)s
    %(show)s
    %(return_fig)s
    %(save)s
    %(of_scanpy)s

    Returns
    -------
    Figure, Axes, list of Axes or None
        The figure if `return_fig`, else the axes if ``show=False`` (a list if there are several panels), else None.

    Raises
    ------
    KeyError
        If a column is not in obs, or `basis` not in obsm.
    ValueError
        If a column has no or more than 100 groups, there are fewer than five cells with a finite embedding, or `save`
        ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> sd.tl.embed(query)
    >>> sd.pl.annotation(query, "cell_type", save="annotation.png")
    """
    columns = {} if labels_key is None else {f"annotated: {labels_key}": groups_of(adata, labels_key)}
    columns[f"predicted: {key}"] = predicted_groups(adata, key)
    confidence = adata.obs.get(f"{key}_{CONFIDENCE}")
    check_kwargs(len(columns) + (confidence is not None), adata.n_obs, **kwargs)
    xy = coordinates(adata, basis_of(adata, basis), rng)
    columns = {title: values.cat.rename_categories(str) for title, values in columns.items()}
    # the same colour in both panels
    keys = [key] if labels_key is None else [labels_key, key]
    names = {key: list(values.cat.categories) for key, values in zip(keys, columns.values(), strict=True)}
    user_palette = kwargs.pop("palette", None)
    colours = palette(adata, names, user_palette)
    maps = [Panel(title, xy, values, colours) for title, values in columns.items()]
    if confidence is not None:
        maps.append(Panel(CONFIDENCE, xy, confidence, limits=(0.0, 1.0)))
    fig = draw_maps(maps, **kwargs)
    keep_colours(adata, names, colours, user_palette)
    return fig


@plot
def generated(
    real: AnnData,
    generated: AnnData,
    *,
    color: str | None = None,
    rng: int | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Figure | Axes | list[Axes] | None:
    """Draw generated and real cells on a joint UMAP, coloured by origin and by group.

    UMAP [1]_ of all cells is computed from the first 30 principal components of the real cells' log-normalised
    expression, onto which the generated cells are projected; both are normalised to 10,000 counts per cell over the
    shared genes. Differences outside these components are not visible: cells that mix on the UMAP may still differ.
    Neither object is changed; UMAP is computed in each call.

    Parameters
    ----------
    real
        Real cells; `X` holds counts or log-normalised values.
    generated
        Generated cells; `X` holds log-normalised values, as `scdiva.tl.generate` writes them. All of its genes must
        be in `real`, in any order; other genes of `real` are ignored.
    color
        A column of obs of both, such as a cell type, for the second panel, in the colours of scanpy in
        ``real.uns[color + "_colors"]`` if they exist. Cells without a value are grey. None: the first panel only.
    %(rng)s
    %(show)s
    %(return_fig)s
    %(save)s
    %(of_scanpy)s

    Returns
    -------
    Figure, Axes, list of Axes or None
        The figure if `return_fig`, else the axes if ``show=False`` (a list if there are several panels), else None.

    Raises
    ------
    KeyError
        If `color` is not in obs of both.
    ValueError
        If `real` lacks genes of `generated`, genes repeat or are fewer than three, there are fewer than five real cells
        or no generated one, a matrix is neither counts nor log-normalised, `color` has no or more than 100 groups, or
        `save` ends in no picture format.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> made = sd.tl.generate(adata, 5, groupby="cell_type")
    >>> sd.pl.generated(adata, made, color="cell_type", save="generated.png")
    """
    shared = real.var_names.intersection(generated.var_names)
    if real.n_obs < MIN_CELLS or not generated.n_obs or len(shared) < 3:
        raise ValueError(
            f"{real.n_obs} real and {generated.n_obs} generated cells have {len(shared)} genes in common: the map "
            f"needs at least {MIN_CELLS} real cells, 1 generated and 3 genes."
        )
    for cells, what in ((real, "real"), (generated, "generated")):
        check_unique(cells.var_names, what)
    if alone := sorted(set(generated.var_names) - set(shared)):
        raise ValueError(
            f"{len(alone):,} genes of the generated cells are not among those of the real ones (first: {alone[0]!r}): "
            "pass generated[:, generated.var_names.isin(real.var_names)], or the real cells with all of their genes."
        )
    real = real[:, shared]  # generated cells have only genes of the model
    groups = None if color is None else _groups_of_both(real, generated, color)
    check_kwargs(1 + (color is not None), real.n_obs + generated.n_obs, **kwargs)
    seed = settings.seed if rng is None else int(rng)
    with speaking_of("real"):
        real_values = log_normalised(real)[0]
    with speaking_of("generated"):
        generated_values = log_normalised(generated, input="lognorm")[0]
    generated_values = generated_values[:, generated.var_names.get_indexer(real.var_names)]
    pca = _principal_components(real_values, seed)
    xy = umap_of(np.concatenate([pca.transform(x) for x in (real_values, generated_values)]).astype(np.float32), seed)

    names = [f"real ({real.n_obs:,})", f"generated ({generated.n_obs:,})"]
    origin = pd.Series(pd.Categorical.from_codes(np.repeat([0, 1], [real.n_obs, generated.n_obs]), names))
    colours: dict[Hashable, str] = dict(zip(names, ("0.6", "#d1495b"), strict=True))
    user_palette = kwargs.pop("palette", None)
    maps = [Panel("real and generated cells", xy, origin, colours, "right margin")]
    if groups is not None:
        maps.append(
            Panel(str(color), xy, groups, palette(real, {str(color): list(groups.cat.categories)}, user_palette))
        )
    return draw_maps(maps, **kwargs)


def _groups_of_both(real: AnnData, generated: AnnData, color: str) -> pd.Series:
    """Groups of real, then generated cells, with the categories of the real cells first."""
    both = []
    for cells, which in ((real, "real"), (generated, "generated")):
        if color not in cells.obs:
            raise KeyError(f"obs of the {which} cells has no {color!r}{or_nearest(color, cells.obs.columns)}.")
        both.append(groups_of(cells, color).cat.rename_categories(str))
    names = list(dict.fromkeys(name for groups in both for name in groups.cat.categories))
    return pd.concat([groups.cat.set_categories(names) for groups in both], ignore_index=True)


def _listed(color: str | Sequence[str] | None) -> list[str | None]:
    """Colour of each panel."""
    if color is None or isinstance(color, str):
        return [color]
    names = list(color) if isinstance(color, Sequence | np.ndarray | pd.Index | pd.Series) else [color]
    if not names:
        raise ValueError("color names nothing: leave it out to draw all cells grey")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"color must be a column or a gene, or several, by name; got {wrong[0]!r}")
    return names


def _check_layer(adata: AnnData, layer: str | None, use_raw: bool) -> None:
    """Check `layer` and `use_raw`."""
    if use_raw and layer is not None:
        raise ValueError(f"layer={layer!r} and use_raw=True exclude each other: adata.raw has no layers")
    if use_raw and adata.raw is None:
        raise ValueError("use_raw=True, but adata.raw is None: leave it out to draw the values of adata.X")
    if layer is not None and layer not in adata.layers and not isinstance(adata.obsm.get(layer), pd.DataFrame):
        raise KeyError(f"adata has no layer {layer!r}{or_nearest(layer, adata.layers)}, nor such a table in adata.obsm")


def _values(
    adata: AnnData, colors: Sequence[str | None], layer: str | None, use_raw: bool, gene_symbols: str | None
) -> dict[str, tuple[pd.Series, str]]:
    """Values that colour the cells, categorical for groups or numeric, and their unit, by name."""
    cells = adata.raw if use_raw else adata
    table = adata.obsm[layer] if layer is not None and layer not in adata.layers else None
    names = np.asarray(gene_names(cells.var, gene_symbols) if table is None else table.columns, dtype=object)
    values: dict[str, tuple[pd.Series, str]] = {}
    genes: dict[str, int] = {}
    for color in filter(None, colors):
        if color in adata.obs:
            column = column_of(adata, color)
            values[color] = (column if is_number(column) else as_groups(column, color)), ""
            continue
        matches = np.flatnonzero(names == color)
        if not len(matches):
            in_raw = not use_raw and adata.raw is not None and color in adata.raw.var_names
            raise KeyError(
                f"color={color!r} is neither a gene of {'adata.raw' if use_raw else layer or 'adata'} nor a "
                f"column of adata.obs{or_nearest(color, [*adata.obs.columns, *names])}, which has "
                f"{', '.join(map(str, adata.obs.columns)) or 'none'}"
                f"{'; adata.raw has that gene: pass use_raw=True' if in_raw else ''}"
            )
        if len(matches) > 1:
            raise ValueError(
                f"{len(matches)} columns are called {color!r}: call adata.var_names_make_unique(), or choose one"
            )
        genes[color] = int(matches[0])
    at = np.array(list(genes.values()), dtype=int)
    logs = counts_as_log(adata, at, layer=layer, use_raw=use_raw) if genes and table is None else None
    for i, (gene, column) in enumerate(genes.items()):
        each = logs[:, i] if logs is not None else _column(cells, column, layer) if table is None else table[gene]
        values[gene] = pd.Series(np.asarray(each), adata.obs_names), "log-normalised" if logs is not None else ""
    return values


def _column(cells: Any, number: int, layer: str | None) -> NDArray[Any]:
    """A column of a matrix as it is stored."""
    gene = cells[:, number]
    column = gene.X if layer is None else gene.layers[layer]
    column = column.compute() if hasattr(column, "compute") else column
    return np.asarray(column.toarray() if hasattr(column, "toarray") else column).ravel()
