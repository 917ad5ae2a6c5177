"""Write results into AnnData: checks before anything is computed, and the only function that writes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scdiva._checks import is_second_argument, warn
from scdiva._constants import GENERATE, INTEGRATE, MATCH, PERTURBATION, UMAP, UNS, WRITTEN
from scdiva._settings import HINT, logger

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

_PARTS = ("obs_names", "var_names", "layers", "uns", "is_view")
_RESERVED = {".", "..", "_index", "zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata"}
_MOST_BYTES = 255
"""Maximum length of a key, which zarr uses as a file name."""
_OWN_ENTRIES = {
    INTEGRATE: "tl.integrate",
    GENERATE: "tl.generate",
    PERTURBATION: "tl.predict_perturbation",
    MATCH: "pp.match_genes",
    UMAP: "pl.umap",
    WRITTEN: "",
}
"""Calls that own the entries with a fixed name."""


def check_anndata(adata: object) -> None:
    """Raise TypeError if `adata` is not an AnnData object; the message says how to get one from it."""
    # a MuData object has all the parts of AnnData, some of them None
    if isinstance(getattr(adata, "mod", None), Mapping) or not all(hasattr(adata, part) for part in _PARTS):
        raise TypeError(f"expected an AnnData object, got {_what_it_is(adata)}")


def _what_it_is(value: object) -> str:
    """Describe another object, and the call that gives an AnnData object."""
    kind = type(value).__name__
    if value is None:
        return (
            "None. Calls that write into adata return None: scdiva.tl.embed(adata), not adata = scdiva.tl.embed(adata)."
        )
    # by attributes, to import neither package
    for attribute, name in (("mod", "mdata"), ("tables", "sdata.tables")):
        if isinstance(parts := getattr(value, attribute, None), Mapping):
            options = " or ".join(f"{name}[{part!r}]" for part in parts) or "it holds none"
            return f"a {kind} of {len(parts)} AnnData objects. Pass the one of RNA: {options}."
    if isinstance(value, list | tuple | Mapping):
        return (
            f"a {kind} of {len(value)}. Pass one at a time, or join them: "
            "adata = anndata.concat(adatas, label='batch', index_unique='-')."
        )
    if hasattr(value, "to_adata"):
        return f"{kind}, which is adata.raw? Pass adata with use_raw=True, or adata.raw.to_adata()."
    if hasattr(value, "shape"):
        return (
            f"{kind}. If it holds counts, cells × genes, make one: adata = anndata.AnnData(counts); adata.var_names = "
            "symbols, the symbols or Ensembl ids of its columns. If it is part of one, pass that."
        )
    if is_second_argument():
        return f"{kind}. Of a file: adata = anndata.read_h5ad(path)."
    return f"{kind}. Of a file: adata = anndata.read_h5ad(path, backed='r'), or scdiva.tl.embed_file(path, out)."


def check_writable(
    adata: AnnData, *, copy: bool = False, call: str = "", entry: str | None = None, **keys: Iterable[str]
) -> None:
    """Check that results can be written: the object, the keys, and that nothing of the user is overwritten.

    Parameters
    ----------
    adata
        The object.
    copy
        Whether the results go into a copy.
    call
        Name of the call, such as `"tl.embed"`.
    entry
        Its entry in `adata.uns["scdiva"]`. None: no entry, or not yet known.
    **keys
        All other keys that it writes, by `obs`, `obsm`, `layers` and so on.

    Raises
    ------
    TypeError
        If it is not an AnnData object, or a key is not text.
    ValueError
        If it is backed and would have to be copied, because of ``copy=True`` or because it is a view; if
        `adata.uns["scdiva"]` was not written by scdiva; if a key is not a valid h5ad and zarr key; if a key exists and
        was not written by scdiva, or belongs to another result. The same call with the same key may replace it.
    """
    check_anndata(adata)
    if adata.isbacked and (copy or adata.is_view):
        what = "copy=True needs a copy of it" if copy else "it is a view, and writing into a view makes it a copy"
        raise ValueError(
            f"adata is backed by a file, and {what}, which AnnData does not make without a file of its own. "
            "Load it first: adata = adata.to_memory()."
        )
    records = our_uns(adata)
    if entry is not None:
        check_key(entry)
        _check_entry(records, call, entry)
    conflicts: list[str] = []
    result = _result_name(entry, keys)
    for slot, names in keys.items():
        for name in names:
            check_key(name)
            if slot == "uns" and name == UNS:
                raise ValueError(f"adata.uns[{UNS!r}] holds what scdiva records of every call: choose another key.")
            if name not in getattr(adata, slot):
                continue
            owner = _owner(records, f"{slot}/{name}")
            if owner not in (None, (call, result)):
                raise ValueError(
                    f"adata.{slot}[{name!r}] belongs to the result {owner[1]!r} of scdiva.{owner[0]} and would be "
                    f"overwritten by the result {result!r} of scdiva.{call}: choose another key."
                )
            # an embedding from `tl.embed_file` has no record but its entry
            if owner is None and (entry not in records or _owner(records, f"uns/{UNS}/{entry}")):
                conflicts.append(f"adata.{slot}[{name!r}]")
    if conflicts:
        raise ValueError(
            f"{' and '.join(conflicts)} would be overwritten, and adata.uns[{UNS!r}] has no record that scdiva wrote "
            f"it. Pass another key, or delete it first: del {', '.join(conflicts)}."
        )


def check_key(key: object, argument: str = "a key that is written") -> None:
    """Raise an error if a key is not valid in both h5ad and zarr (formats 2 and 3).

    Parameters
    ----------
    key
        Key of `obs`, `obsm`, `uns` or another part of AnnData.
    argument
        Its name in messages.

    Raises
    ------
    TypeError
        If it is not text.
    ValueError
        If it is empty or blank, has a slash, a backslash or a null character, is longer than 255 bytes, or is reserved.
    """
    if not isinstance(key, str):
        raise TypeError(f"{argument} must be text, such as 'scdiva_mine', not {key!r} ({type(key).__name__}).")
    if not key.strip():
        wrong = "it is empty"
    elif any(mark in key for mark in "/\\\0"):
        wrong = "it holds a slash, a backslash or a null character"
    elif key in _RESERVED:
        wrong = "such files keep something of their own under that name"
    elif len(encoded := key.encode(errors="replace")) > _MOST_BYTES:
        wrong = f"it has {len(encoded)} bytes, more than {_MOST_BYTES}"
    elif encoded.decode() != key:
        wrong = "it is not valid Unicode"
    else:
        return
    raise ValueError(f"{argument} can't be {key[:60]!r}: h5ad and zarr could not hold it, since {wrong}.")


def check_columns(*keys: str | None) -> None:
    """Check names of the user's columns that are copied into a result (None: no column)."""
    for key in keys:
        if key is not None:
            try:
                check_key(key, "a column of the result")
            except ValueError as error:
                renamed = f"adata.obs = adata.obs.rename(columns={{{key!r}: 'another name'}})"
                raise ValueError(f"{error} Rename the column first: {renamed}.") from None


def _result_name(entry: str | None, keys: Mapping[str, Iterable[str]]) -> str:
    """Name of a result: its entry, or its first key."""
    return entry if entry is not None else next((name for names in keys.values() for name in names), "")


def _owner(records: Mapping[str, Any], path: str) -> tuple[str, str] | None:
    """Call and name of the result that wrote a path, by the record in `uns`."""
    for call, results in records.get(WRITTEN, {}).items():
        for result, paths in results.items() if isinstance(results, Mapping) else ():
            if path in set(map(str, paths)):
                return call, result
    return None


def _check_entry(records: Mapping[str, Any], call: str, entry: str) -> None:
    """Raise an error if an entry belongs to another call."""
    owner = _OWN_ENTRIES[entry] if entry in _OWN_ENTRIES else (_owner(records, f"uns/{UNS}/{entry}") or (call,))[0]
    if owner != call:
        raise ValueError(
            f"adata.uns[{UNS!r}][{entry!r}] is where {f'scdiva.{owner}' if owner else 'every call'} keeps what "
            "it did: choose another key."
        )


def noted(adata: AnnData, call: str, entry: str | None, notes: Any = None, **keys: Iterable[str]) -> dict[str, Any]:
    """New `adata.uns["scdiva"]` after a call, with its entry and a record of the keys that it wrote.

    Parameters
    ----------
    adata
        The object with the results.
    call, entry, **keys
        As for :func:`check_writable`.
    notes
        Content of the entry.
    """
    records = our_uns(adata)
    paths = [f"{slot}/{name}" for slot, names in keys.items() for name in names]
    if entry is not None:
        records[entry] = notes
        paths.append(f"uns/{UNS}/{entry}")
    result = _result_name(entry, keys)
    written: dict[str, dict[str, NDArray[np.object_]]] = {}
    for one, results in {call: {}, **records.get(WRITTEN, {})}.items():
        added = {result: ()} if one == call else {}
        for name, former in {**added, **(results if isinstance(results, Mapping) else {})}.items():
            # a path belongs to the last result that wrote it
            current = set(map(str, former)) - set(paths) | (set(paths) if (one, name) == (call, result) else set())
            if current:
                written.setdefault(one, {})[name] = np.array(sorted(current), dtype=object)
    return {**records, WRITTEN: written}


def write(
    adata: AnnData, call: str, entry: str | None, notes: Any, *, copy: bool = False, **parts: Mapping[str, Any]
) -> AnnData | None:
    """Write the results of a call: its last step, after which nothing can fail.

    Parameters
    ----------
    adata
        Object that :func:`check_writable` accepted.
    call, entry, notes
        As for :func:`noted`.
    copy
        Whether to write into a copy.
    **parts
        Values by key, for each part of AnnData such as `obsm`.

    Returns
    -------
    The copy, or None.
    """
    target = adata.copy() if copy else adata
    with _view_warnings():
        for part, values in parts.items():
            for key, value in values.items():
                getattr(target, part)[key] = value
        target.uns[UNS] = noted(target, call, entry, notes, **parts)
    keys = [f"{part}[{key!r}]" for part, values in parts.items() for key in values]
    keys += [] if entry is None else [f"uns[{UNS!r}][{entry!r}]"]
    logger.log(HINT, "%s added %s", call, ", ".join(keys))
    return target if copy else None


@contextlib.contextmanager
def _view_warnings() -> Iterator[None]:
    """Show anndata's warning that a view becomes a copy at the line that called scdiva."""
    from anndata import ImplicitModificationWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ImplicitModificationWarning)
        yield
    for one in caught:
        warn(str(one.message), one.category)


def our_uns(adata: AnnData) -> dict[str, Any]:
    """Shallow copy of `adata.uns["scdiva"]`, empty if absent; ValueError if it is not a dictionary."""
    records = adata.uns.get(UNS, {})
    if not isinstance(records, Mapping):
        raise ValueError(
            f"adata.uns[{UNS!r}] is a {type(records).__name__}, but scdiva keeps a dictionary there. Give yours "
            f"another name: adata.uns['mine'] = adata.uns.pop({UNS!r})."
        )
    return dict(records)
