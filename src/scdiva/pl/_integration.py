"""Batches and cell types on the map of an embedding, before integration and after."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scdiva._constants import OBSM_EMBEDDING, OBSM_INTEGRATED
from scdiva._docs import with_shared_docs
from scdiva._settings import settings
from scdiva.data.writing import check_anndata
from scdiva.pl._coordinates import coordinates, embedding_of, is_map
from scdiva.pl._dots import MAX_ON_DATA, draw_groups, legend_columns, palette
from scdiva.pl._figure import check_file, finish
from scdiva.pl._groups import groups_of

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.figure import Figure


@with_shared_docs
def integration(
    adata: AnnData,
    batch_key: str | Sequence[str],
    labels_key: str | None = None,
    *,
    before: str = OBSM_EMBEDDING,
    after: str = OBSM_INTEGRATED,
    n_neighbors: int = 15,
    min_dist: float = 0.5,
    size: float | None = None,
    rng: int | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw what integration did: UMAPs before and after, by batch and by cell type.

    The left column is the embedding before, the right one after; there is a row for each batch column and one for the
    labels. Batches should mix on the right, and cell types stay apart. How well they do, a map does not tell: for that
    see `scdiva.metrics.avg_batch` and `scdiva.metrics.shuffle_control`.

    Both maps are computed and kept as `scdiva.pl.umap` does, (n_obs, 2) in ``obsm[before + "_umap"]`` and
    ``obsm[after + "_umap"]``, with their parameters in ``uns["scdiva"]["umap"]``.

    Parameters
    ----------
    adata
        Cells with both embeddings, see `scdiva.tl.embed` and `scdiva.tl.integrate`.
    batch_key
        A column of ``adata.obs`` with the batch of each cell, or several; numbers are taken as names.
    labels_key
        A column of ``adata.obs`` with the cell types; None draws the batches only. Cells without one are grey.
    before
        Key of the embedding before integration in ``adata.obsm``, (n_obs, dim).
    after
        Key of the embedding after integration in ``adata.obsm``, (n_obs, dim).
    n_neighbors
        Neighbours of each cell in UMAP's graph; at most n_obs - 1 are used.
    min_dist
        How close UMAP may put two cells.
    size
        Area of a dot in points squared; None fits it to the number of cells.
    %(rng)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

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
    check_file(save)
    check_anndata(adata)
    batches = [batch_key] if isinstance(batch_key, str) else list(batch_key)
    if not batches:
        raise ValueError("batch_key must name a column of adata.obs, or several; got none.")
    rows = {key: groups_of(adata, key) for key in [*batches, *([labels_key] if labels_key is not None else [])]}
    # Both before either map is computed: a call that fails leaves adata as it was.
    embedding_of(adata, before)
    embedding_of(adata, after, made_by=f"scdiva.tl.integrate(adata, {batches[0]!r})")
    seed = settings.seed if rng is None else int(rng)
    maps, titles = [], []
    for when, basis in (("before", before), ("after", after)):
        maps.append(coordinates(adata, basis, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed))
        titles.append(f"{when}: {basis}" if is_map(adata, basis) else f"{when}: UMAP of {basis}")

    import matplotlib.pyplot as plt

    # Mixed batches have no place where their names could stand; a few cell types have.
    aside = {key: key in batches or len(rows[key].cat.categories) > MAX_ON_DATA for key in rows}
    columns = max((legend_columns(values) for key, values in rows.items() if aside[key]), default=0)
    fig, axes = plt.subplots(
        len(rows), 2, figsize=(8.4 + 1.5 * columns, 4.0 * len(rows)), layout="constrained", squeeze=False
    )
    for row, (key, values) in zip(axes, rows.items(), strict=True):
        colours = palette(adata, key, values)
        for ax, xy, legend in zip(row, maps, ("none", "right"), strict=True):
            ax.set(xticks=[], yticks=[])
            draw_groups(ax, xy, values, colours, legend if aside[key] else "on data", size)
        row[0].set_ylabel(key, fontsize="large")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    return finish(fig, own=True, return_fig=return_fig, save=save)
