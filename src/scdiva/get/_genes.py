"""What was found out about genes, and about pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva._constants import GROUPS, UNS, VARM_EMBEDDING, VARP_GRN
from scdiva._nearest import or_nearest
from scdiva.data.network import genes_of, network_of
from scdiva.data.writing import check_anndata, our_uns

if TYPE_CHECKING:
    from anndata import AnnData


def gene_embedding_df(adata: AnnData, *, key: str = VARM_EMBEDDING, group: str | None = None) -> pd.DataFrame:
    """Give the genes that have an embedding, one row each.

    Parameters
    ----------
    adata
        Data that :func:`scdiva.tl.gene_embedding` wrote to.
    key
        Its `key_added`.
    group
        A group of cells, for contextual embeddings; None gives the static ones.

    Returns
    -------
    float32, index var names, columns `0 ... dim - 1`. Genes without an embedding are left out.

    Raises
    ------
    KeyError
        If there is no such embedding or group.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.gene_embedding(adata)
    >>> sd.get.gene_embedding_df(adata).shape
    (89, 128)
    """
    check_anndata(adata)
    if group is None:
        if key not in adata.varm:
            raise KeyError(
                f"adata.varm has no {key!r}{or_nearest(key, adata.varm)}: call scdiva.tl.gene_embedding(adata) first."
            )
        values = np.asarray(adata.varm[key])
        if values.ndim != 2:
            raise KeyError(
                f"adata.varm[{key!r}] has one embedding for each group of cells: name the group, "
                f"scdiva.get.gene_embedding_df(adata, key={key.removesuffix(f'_{GROUPS}')!r}, group=...)."
            )
    else:
        at = f"{key}_{GROUPS}"
        if at not in adata.varm or at not in our_uns(adata):
            raise KeyError(f"adata.varm has no {at!r}: call scdiva.tl.gene_embedding(adata, groupby=...) first.")
        names = [str(name) for name in adata.uns[UNS][at]["groups"]]
        if group not in names:
            raise KeyError(f"there is no group {group!r}; the groups: {names}.")
        values = np.asarray(adata.varm[at])[:, names.index(group)]
    known = ~np.isnan(values).any(axis=1)
    return pd.DataFrame(values[known], index=adata.var_names[known])


def grn_df(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    top: int | None = None,
) -> pd.DataFrame:
    """List the edges of a network of genes, one row each.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.grn` wrote to.
    key
        Its `key_added`.
    group
        Which network, where there is one for each group of cells.
    sources, targets
        Genes whose edges are listed, by var name; None: all. Those that are not in the network are left out, with a
        warning.
    top
        Edges listed, the first ones; None lists all.

    Returns
    -------
    Columns `source`, `target` (var names) and `weight` (float64), the strongest first; what decoupler takes as `net`.
    Strong is an edge of large weight, or of large absolute weight where one below 0 is as strong
    (`"correlation"`, knock-outs of values, differences).

    Raises
    ------
    KeyError
        If there is no such network or group, or none of the genes is in it.
    ValueError
        If `top` is below 1.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.grn(adata, "correlation")
    >>> sd.get.grn_df(adata, top=3).columns.to_list()
    ['source', 'target', 'weight']
    """
    check_anndata(adata)
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}.")
    network = network_of(adata, key, group)
    edges = network.weights.tocoo()
    kept = np.ones(edges.nnz, dtype=bool)
    for wanted, genes in ((sources, edges.row), (targets, edges.col)):
        if wanted is not None:
            kept &= np.isin(genes, genes_of(network, [wanted] if isinstance(wanted, str) else wanted, key))
    source, target, weight = edges.row[kept], edges.col[kept], edges.data[kept].astype(np.float64)
    order = np.lexsort((target, source, -network.strength(weight)))[:top]
    return pd.DataFrame(
        {"source": network.names[source[order]], "target": network.names[target[order]], "weight": weight[order]}
    )
