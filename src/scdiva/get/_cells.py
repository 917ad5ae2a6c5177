"""What was found out about single cells."""

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
    """List the ranked genes of cells, one row per cell and gene.

    Parameters
    ----------
    adata
        Data that :func:`scdiva.pp.entropy_serialize` ranked.
    key
        The layer it wrote.
    cells
        Names of the cells, in the order wanted; None takes all.
    max_rank
        Last rank listed; None lists all.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1) and `gene` (var name), by cell and rank.

    Raises
    ------
    KeyError
        If there is no such layer or cell.
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
    """List the most probable labels of cells, one row per cell and label.

    These are the labels that the annotator knows. A cell that it rejected, or named by a parent type only, is listed
    with them too; what such a cell is called is in ``adata.obs[key]``.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.annotate` wrote to, or some of its cells.
    key
        Its `key_added`.
    top_k
        Labels listed of each cell, the most probable first; more than there are lists all.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1), `label` (categorical, all that the annotator knows) and `probability`
    (float32), by cell and rank. Of equally probable labels the first of the annotator's comes first. Cells without a
    probability, which have no known gene, are left out.

    Raises
    ------
    KeyError
        If there is no such annotation, or the names of its labels were lost, as in `anndata.concat`.
    ValueError
        If `top_k` is below 1, or labels and probabilities do not belong together, as after ``anndata.concat`` with
        ``uns_merge="first"`` of cells with different annotations.

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
    if labels.dtype.kind not in "biuf":  # zarr gives text in a type of numpy's own
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
