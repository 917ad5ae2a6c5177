"""Cells as they were, as the model reconstructed them, and what it expects of genes that dropped out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva._constants import IMPUTED, RECONSTRUCTED
from scdiva._nearest import or_nearest
from scdiva.data.reconstructed import places_of, recovered_of
from scdiva.data.writing import check_anndata

if TYPE_CHECKING:
    from anndata import AnnData


def reconstruction_df(adata: AnnData, *, key: str = RECONSTRUCTED) -> pd.DataFrame:
    """List cells as they were beside reconstructed ones, one row per cell and place.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.reconstruct` wrote to, or some of its cells.
    key
        Its `key_added`.

    Returns
    -------
    `obs_name` (categorical), `place` (int32, from 1), `gene` and `reconstructed_gene` (categorical, var names), which
    stand there in the cell as it was and in the reconstructed one; `value` and `reconstructed_value` (float32), the
    log-normalised values of these two genes; and `hidden` (bool), whether the gene there was hidden from the model. By
    cell and place. Where the reconstructed cell has no gene of adata, its name and value are missing.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If names of cells or genes repeat, the layers do not belong together, or columns were dropped since.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata)
    >>> sd.get.reconstruction_df(adata).columns.to_list()
    ['obs_name', 'place', 'gene', 'reconstructed_gene', 'value', 'reconstructed_value', 'hidden']
    """
    check_anndata(adata)
    for names, what in ((adata.obs_names, "obs_names"), (adata.var_names, "var_names")):
        if not names.is_unique:
            raise ValueError(f"adata.{what} repeat names: call adata.{what}_make_unique() first.")
    places = places_of(adata, key)
    return pd.DataFrame(
        {
            "obs_name": pd.Categorical.from_codes(places.cell, adata.obs_names),
            "place": places.place,
            "gene": pd.Categorical.from_codes(places.gene, adata.var_names),
            "reconstructed_gene": pd.Categorical.from_codes(places.reconstructed_gene, adata.var_names),
            "value": places.value,
            "reconstructed_value": places.reconstructed_value,
            "hidden": places.hidden,
        }
    )


def reconstructed_genes(
    adata: AnnData, *, key: str = RECONSTRUCTED, min_cells: int = 10, min_recall: float = 0.5
) -> list[str]:
    """List the genes that are found again where they were hidden.

    Of the cells in which a gene was hidden, its recall is the share whose reconstruction has it, at whatever place. It
    says nothing of the gene's value. A gene that most cells express is easily found, so compare only lists made with
    the same `min_recall` and the same share of hidden genes.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.reconstruct` wrote to, or some of its cells.
    key
        Its `key_added`.
    min_cells
        Cells in which a gene must have been hidden.
    min_recall
        Least recall, 0 to 1.

    Returns
    -------
    Var names, in their order; none where no gene is found again so often.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If `min_cells` is below 1, `min_recall` is not between 0 and 1, no gene was hidden in so many cells, the layers
        do not belong together, or columns were dropped since.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(20, 60)
    >>> sd.tl.reconstruct(adata)
    >>> genes = sd.get.reconstructed_genes(adata, min_cells=3)
    >>> set(genes) <= set(adata.var_names)
    True
    """
    check_anndata(adata)
    if min_cells < 1:
        raise ValueError(f"min_cells must be at least 1, got {min_cells}.")
    if not 0 <= min_recall <= 1:
        raise ValueError(f"min_recall must be between 0 and 1, got {min_recall}.")
    genes = recovered_of(adata, key)
    n_hidden = np.bincount(genes.gene[genes.hidden], minlength=adata.n_vars)
    if n_hidden.max(initial=0) < min_cells:
        raise ValueError(
            f"no gene was hidden in {min_cells} cells, the most in {n_hidden.max(initial=0)}: take a lower min_cells, "
            "or reconstruct more cells with a higher mask_ratio."
        )
    n_found = np.bincount(genes.gene[genes.hidden & (genes.reconstructed_rank > 0)], minlength=adata.n_vars)
    kept = (n_hidden >= min_cells) & (n_found / np.maximum(n_hidden, 1) >= min_recall)
    found: list[str] = adata.var_names[kept].tolist()
    return found


def imputed_df(adata: AnnData, genes: Sequence[str] | str | None = None, *, key: str = IMPUTED) -> pd.DataFrame:
    """Give the values that were expected of genes, one row per cell and one column per gene.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.impute` wrote to, or some of its cells.
    genes
        Names of genes, in the order wanted; None gives all that were imputed.
    key
        Its `key_added`; with ``"_sd"`` behind it the spread around the values.

    Returns
    -------
    float32, index obs names, columns names of genes: log1p of counts per ten thousand, or its standard deviation.

    Raises
    ------
    KeyError
        If there is no such result, or a gene was not imputed.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.impute(adata, list(adata.var_names[:2]))
    >>> sd.get.imputed_df(adata).shape
    (60, 2)
    >>> adata.obs["imputed"] = sd.get.imputed_df(adata)[adata.var_names[0]]  # for plots of scanpy
    """
    check_anndata(adata)
    found = adata.obsm.get(key)
    if not isinstance(found, pd.DataFrame):
        if key not in adata.layers:
            near = or_nearest(key, [*adata.obsm, *adata.layers])
            raise KeyError(
                f"neither adata.obsm nor adata.layers has {key!r}{near}: call scdiva.tl.impute(adata) first."
            )
        layer = np.asarray(adata.layers[key])
        known = ~np.isnan(layer).all(axis=0)
        found = pd.DataFrame(layer[:, known], adata.obs_names, adata.var_names[known])
    if genes is None:
        return found.copy()
    names = [genes] if isinstance(genes, str) else list(genes)
    if absent := [name for name in names if name not in found.columns]:
        raise KeyError(
            f"{len(absent)} of {len(names)} genes were not imputed, the first is {absent[0]!r}"
            f"{or_nearest(absent[0], found.columns)}: call scdiva.tl.impute(adata, [...]) with them."
        )
    return found[names].copy()
