"""What is asked of an AnnData object before results are computed for it, so that writing them can't fail."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from scdiva._constants import UNS

if TYPE_CHECKING:
    from anndata import AnnData

_PARTS = ("obs_names", "var_names", "layers", "uns", "is_view")
_RNA = ("rna", "gex", "gene expression", "gene_expression", "expression", "transcriptome")
"""Names of a modality that holds RNA, in small letters."""


def check_anndata(adata: object) -> None:
    """Refuse what is no AnnData object; of what holds one, the message says how to take it out.

    Parameters
    ----------
    adata
        What the user gave.

    Raises
    ------
    TypeError
        If it is no AnnData object, but the MuData or SpatialData of one, a list, a matrix or a path, say.
    """
    # a MuData object has all the parts of AnnData, some of them None
    if isinstance(getattr(adata, "mod", None), Mapping) or not all(hasattr(adata, part) for part in _PARTS):
        raise TypeError(f"expected an AnnData object, got {_what_it_is(adata)}")


def _what_it_is(other: object) -> str:
    """Name what is no AnnData object, and the call that makes one of it."""
    kind = type(other).__name__
    if other is None:
        return (
            "None. Calls that write into adata return None: scdiva.tl.embed(adata), not adata = scdiva.tl.embed(adata)."
        )
    # known by their attributes: neither package is needed for it
    for attribute, call in (("mod", "mdata[{!r}]"), ("tables", "sdata.tables[{!r}]")):
        if isinstance(parts := getattr(other, attribute, None), Mapping):
            named = " or ".join(call.format(name) for name in _of_rna(parts)) or "it holds none"
            return f"a {kind} of {len(parts)} AnnData objects. Pass the one of RNA: {named}."
    if isinstance(other, str | PathLike):
        return f"{kind}. Of a file: adata = anndata.read_h5ad(path, backed='r'), or scdiva.tl.embed_file(path, out)."
    if hasattr(other, "to_adata"):
        return f"{kind}, which is adata.raw? Pass adata with use_raw=True, or adata.raw.to_adata()."
    if isinstance(other, list | tuple | Mapping):
        return (
            f"a {kind} of {len(other)}. Pass one at a time, or join them: "
            "adata = anndata.concat(adatas, label='batch', index_unique='-')."
        )
    if hasattr(other, "columns") and hasattr(other, "index"):
        return (
            f"{kind}. Of a table of counts, cells × genes: adata = anndata.AnnData(table). The annotation of cells or "
            "genes alone, adata.obs or adata.var, holds no counts: pass adata."
        )
    if hasattr(other, "shape") and hasattr(other, "dtype"):
        return (
            f"{kind}, which has no names of genes. Of a matrix of cells × genes: adata = anndata.AnnData(matrix); "
            "adata.var_names = symbols, the symbols or Ensembl ids of its columns."
        )
    return f"{kind}. Read one with anndata.read_h5ad(path), or make one: anndata.AnnData(matrix, obs=cells, var=genes)."


def _of_rna(parts: Mapping[str, Any]) -> list[str]:
    """Name the one part of a container that holds RNA by its annotation of genes or its name; all where that fails."""
    kinds = {name: getattr(part, "var", {}).get("feature_types", ()) for name, part in parts.items()}
    by_annotation = [name for name, kind in kinds.items() if set(map(str, kind)) == {"Gene Expression"}]
    by_name = [name for name in parts if str(name).lower() in _RNA]
    return next((names for names in (by_annotation, by_name) if len(names) == 1), list(parts))


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
