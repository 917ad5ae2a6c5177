"""`tl.umap`: the map of an embedding, which `pl.umap` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scdiva._constants import OBSM_EMBEDDING
from scdiva._docs import with_shared_docs
from scdiva.data.writing import check_anndata

if TYPE_CHECKING:
    from anndata import AnnData


@with_shared_docs
def umap(adata: AnnData, basis: str = OBSM_EMBEDDING, *, rng: int | None = None) -> None:
    """Compute the UMAP of an embedding, as `scdiva.pl.umap` does where there is none yet.

    15 neighbours, least distance 0.5 [1]_. Nothing is computed where the map fits embedding and seed already, where
    `basis` is a map itself, or where a map of that name did not come from here.

    Parameters
    ----------
    adata
        Cells with an embedding, see :func:`embed`.
    basis
        Key of the embedding in `adata.obsm`, (n_obs, dim).
    %(rng)s

    Returns
    -------
    None. Written are ``adata.obsm[basis + "_umap"]``, float32 `(n_obs, 2)`, NaN for a cell without an embedding, and
    its parameters in ``adata.uns["scdiva"]["umap"]``; never ``X_umap``.

    Raises
    ------
    KeyError
        If `basis` is not in obsm.
    ValueError
        If fewer than five cells have a finite embedding.
    TypeError
        If `adata` is no AnnData object.

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
    >>> adata.obsm["X_scdiva_umap"].shape
    (60, 2)
    """
    check_anndata(adata)
    from scdiva.pl._maps import coordinates  # which brings matplotlib

    coordinates(adata, basis, rng)
