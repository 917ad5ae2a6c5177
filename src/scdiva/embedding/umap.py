"""`tl.umap`: the map of an embedding, which `pl.umap` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scdiva._checks import check_arguments
from scdiva._constants import OBSM_EMBEDDING
from scdiva._docs import with_shared_docs
from scdiva.data.results import check_anndata

if TYPE_CHECKING:
    from anndata import AnnData


@check_arguments
@with_shared_docs
def umap(adata: AnnData, basis: str = OBSM_EMBEDDING, *, rng: int | None = None) -> None:
    """Compute the UMAP of an embedding, for `scdiva.pl.umap` and `scanpy.pl.umap`.

    15 neighbours, minimum distance 0.5 [1]_. Nothing is computed if the map in `obsm` fits the embedding and the seed,
    if `basis` is a map itself, or if a map of that name was not written by scdiva.

    Parameters
    ----------
    adata
        Cells with an embedding, see :func:`embed`.
    basis
        Key of the embedding in `adata.obsm`, (n_obs, dim), with or without ``X_``.
    %(rng)s

    Returns
    -------
    None. Written are ``adata.obsm[basis + "_umap"]``, float32 `(n_obs, 2)`, NaN for a cell without an embedding, its
    parameters in ``adata.uns["scdiva"]["umap"]``, and a copy of the map in ``adata.obsm["X_umap"]``, where scanpy looks
    for it. An ``X_umap`` that scdiva did not write is kept.

    Raises
    ------
    KeyError
        If `basis` is not in obsm.
    ValueError
        If fewer than five cells have a finite embedding.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        If ``adata.obsm["X_umap"]`` was not written by scdiva: ``scanpy.pl.embedding(adata, "X_scdiva_umap")`` draws the
        new map.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.embed(adata)
    >>> sd.tl.umap(adata)
    >>> adata.obsm["X_umap"].shape
    (60, 2)
    """
    check_anndata(adata)
    from scdiva.pl._maps import basis_of, coordinates  # which bring matplotlib

    coordinates(adata, basis_of(adata, basis), rng, for_scanpy=True)
