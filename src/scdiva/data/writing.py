"""What is asked of an AnnData object before results are computed for it, so that writing them can't fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scdiva._constants import UNS

if TYPE_CHECKING:
    from anndata import AnnData


def check_anndata(adata: object) -> None:
    """Raise a TypeError that says what to do if `adata` is no AnnData object, but the path of one, say."""
    if not all(hasattr(adata, part) for part in ("obs_names", "layers", "uns", "is_view")):
        raise TypeError(
            f"expected an AnnData object, got {type(adata).__name__}. Of a file: adata = anndata.read_h5ad(path, "
            "backed='r'), or scdiva.tl.embed_file(path, out)."
        )


def check_writable(adata: AnnData, *, copy: bool = False) -> None:
    """Refuse what results can't be written into.

    Parameters
    ----------
    adata
        What the user gave.
    copy
        Whether the results go into a copy.

    Raises
    ------
    TypeError
        If it is no AnnData object.
    ValueError
        If it is backed by a file and would have to be copied: for ``copy=True``, or because it is a view.
    """
    check_anndata(adata)
    if adata.isbacked and (copy or adata.is_view):
        what = "copy=True needs a copy of it" if copy else "it is a view, and writing into a view makes it a copy"
        raise ValueError(
            f"adata is backed by a file, and {what}, which AnnData does not make without a file of its own. "
            "Load it first: adata = adata.to_memory()."
        )


def our_uns(adata: AnnData) -> dict[str, Any]:
    """Give a shallow copy of `adata.uns["scdiva"]`, empty if there is none.

    Raises
    ------
    ValueError
        If the user keeps something else under that name.
    """
    ours = adata.uns.get(UNS, {})
    if not isinstance(ours, Mapping):
        raise ValueError(
            f"adata.uns[{UNS!r}] is a {type(ours).__name__}, but scdiva keeps a dictionary there. Give yours another "
            f"name: adata.uns['mine'] = adata.uns.pop({UNS!r})."
        )
    return dict(ours)
