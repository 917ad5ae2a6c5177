"""Real cells that come with scanpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anndata import AnnData


def pbmc68k_reduced() -> AnnData:
    """Give 700 peripheral blood cells with 765 genes and published labels, bundled with scanpy.

    A subset of the 68,579 blood cells of Zheng et al. 2017 (Nature Communications 8, 14049). `adata.X` is scaled and
    can't be read by scdiva; `adata.raw` holds log-normalised values of the same genes: pass `use_raw=True`.

    Returns
    -------
    AnnData
        `obs["bulk_labels"]` holds ten cell types (correlation with sorted populations), `obs["louvain"]` clusters.

    Raises
    ------
    ImportError
        If scanpy is not installed.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc68k_reduced()
    >>> adata.shape
    (700, 765)
    """
    try:
        import scanpy as sc
    except ImportError as error:
        raise ImportError("pbmc68k_reduced comes with scanpy: pip install scanpy") from error
    return sc.datasets.pbmc68k_reduced()
