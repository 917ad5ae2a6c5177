"""Ranked genes and predicted labels of cells as data frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData

from scdiva._checks import check_arguments, check_least, no_entry, refuse_absent
from scdiva._constants import LAYER_RANK, OBS_LABEL, PROBABILITY, REJECTED, UNS
from scdiva.data.results import check_anndata, our_uns


@check_arguments
def serialized_df(
    adata: AnnData, *, key: str = LAYER_RANK, cells: Sequence[str] | str | None = None, max_rank: int | None = None
) -> pd.DataFrame:
    """Ranked genes of cells, one row per cell and gene.

    Parameters
    ----------
    adata
        Cells with a layer from :func:`scdiva.pp.entropy_serialize`.
    key
        Key of the layer.
    cells
        Names of the cells, in order. None: all cells.
    max_rank
        Highest rank. None: all ranks.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1) and `gene` (var name), by cell and rank.

    Raises
    ------
    KeyError
        If the layer or a cell does not exist.
    ValueError
        If `max_rank` is below 1.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.pp.entropy_serialize(adata, "scdiva-mini")
    >>> sd.get.serialized_df(adata, cells="cell0", max_rank=3).shape[0]
    3
    """
    check_anndata(adata)
    check_least(max_rank=(1 if max_rank is None else max_rank, 1))
    if key not in adata.layers:
        raise no_entry("adata.layers", key, adata.layers, "scdiva.pp.entropy_serialize(adata)")
    names = adata.obs_names
    if cells is None:
        rows = np.arange(adata.n_obs)
    else:
        wanted = [cells] if isinstance(cells, str) else list(cells)
        refuse_absent(wanted, names, "cells are not in adata")
        if not names.is_unique:
            raise KeyError("adata.obs_names repeat names: call adata.obs_names_make_unique() first.")
        rows = names.get_indexer(wanted)
    ranks = sp.csr_matrix(adata.layers[key])[rows].tocoo()
    order = np.lexsort((ranks.data, ranks.row))
    if max_rank is not None:
        order = order[ranks.data[order] <= max_rank]
    return pd.DataFrame(
        {
            "cell": np.asarray(names)[rows[ranks.row[order]]],
            "rank": ranks.data[order],
            "gene": np.asarray(adata.var_names)[ranks.col[order]],
        }
    )


@check_arguments
def annotation_df(adata: AnnData, *, key: str = OBS_LABEL, top_k: int = 1) -> pd.DataFrame:
    """Most probable labels of cells, one row per cell and label.

    All cells are listed with the labels of the annotator, including cells that were rejected or labelled by a parent
    type; their final label is in ``adata.obs[key]``.

    Parameters
    ----------
    adata
        Cells annotated by :func:`scdiva.tl.annotate`, or a part of them.
    key
        `key_added` of the annotation.
    top_k
        Maximum number of labels per cell, the most probable first.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1), `label` (categorical with all labels of the annotator) and `probability`
    (float32), by cell and rank. Ties are in the annotator's order. Cells without a known gene are excluded.

    Raises
    ------
    KeyError
        If the annotation does not exist, or the names of its labels were lost, as in `anndata.concat`.
    ValueError
        If `top_k` is below 1, or labels and probabilities are from different annotations, as after ``anndata.concat``
        with ``uns_merge="first"``.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference, method="knn")
    >>> sd.get.annotation_df(query, top_k=2).columns.to_list()
    ['cell', 'rank', 'label', 'probability']
    """
    check_anndata(adata)
    check_least(top_k=(top_k, 1))
    at = f"{key}_{PROBABILITY}"
    ours = our_uns(adata)
    if at not in adata.obsm or "labels" not in ours.get(key, ()):
        where = f"adata.obsm has no {at!r}" if at not in adata.obsm else f"adata.uns[{UNS!r}][{key!r}] names no labels"
        raise KeyError(
            f"{where}: call scdiva.tl.annotate(adata, ..., key_added={key!r}) first. anndata.concat leaves out `uns`, "
            "and with it the names of labels; uns_merge='same' keeps what all parts agree on."
        )
    labels = np.asarray(ours[key]["labels"])
    if labels.dtype.kind not in "biuf":  # zarr returns numpy's string dtype
        labels = np.array([str(name) for name in labels], dtype=object)
    probability = np.asarray(adata.obsm[at], dtype=np.float32)
    if probability.shape != (adata.n_obs, len(labels)):
        raise ValueError(
            f"adata.obsm[{at!r}] has shape {probability.shape}, but there are {adata.n_obs} cells and {len(labels)} "
            "labels: the two are of different annotations. Annotate the cells anew."
        )
    rows = np.flatnonzero(~np.isnan(probability).any(axis=1))
    probability = probability[rows]
    best = np.argsort(-probability, axis=1, kind="stable")[:, :top_k]
    if adata.n_obs > ours[key].get("n_cells", adata.n_obs) and key in adata.obs:
        names = adata.obs[key].iloc[rows]
        named = (
            names.notna().to_numpy() & ~names.astype(str).isin([REJECTED, *map(str, ours[key]["groups"])]).to_numpy()
        )
        other = named & (names.astype(str).to_numpy() != labels[best[:, 0]].astype(str))
        if other.any():
            first = int(other.argmax())
            raise ValueError(
                f"adata.uns[{UNS!r}][{key!r}] describes {ours[key]['n_cells']} of {adata.n_obs} cells, and its labels "
                f"do not fit {other.sum()} others (first: {adata.obs_names[rows[first]]!r}, {names.iloc[first]!r}): "
                "different annotations were concatenated. Use anndata.concat(..., uns_merge='same') on cells annotated "
                "with one annotator, scdiva.tl.annotate(adata, model=annotator), or annotate the cells anew."
            )
    k = best.shape[1]
    return pd.DataFrame(
        {
            "cell": np.repeat(np.asarray(adata.obs_names)[rows], k),
            "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), len(rows)),
            "label": pd.Categorical.from_codes(best.ravel(), labels),
            "probability": np.take_along_axis(probability, best, axis=1).ravel(),
        }
    )
