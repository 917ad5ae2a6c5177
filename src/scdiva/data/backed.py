"""Files that AnnData wrote, local or in object storage: opened without loading, and read by rows of a CSR matrix."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from scdiva._files import MOST_DEPTH, MOST_INDEX, check_regular, reaching

REQUESTS = 32
"""Parallel requests to an object storage, each of which takes tens of milliseconds, however small."""
_BLOSC_HEAD = 16
"""Bytes of the header of a blosc chunk; the last four are the size of the chunk."""
METADATA = frozenset(("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata"))
"""Metadata files of a zarr store."""
_CLAIMED, _COMPRESSED = 1 << 30, 10_000
"""Arrays above this size (bytes) must be stored, compressed by at most this factor."""


class StoredNames:
    """Names of the cells of a file, read one by one: all of them take more memory than a block.

    Parameters
    ----------
    stored
        Array of strings of an HDF5 or zarr file.
    """

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __len__(self) -> int:
        return int(self._stored.shape[0])

    def __getitem__(self, row: int) -> str:
        name = self._stored[int(row)]
        return name.decode() if isinstance(name, bytes) else str(name)


class StoredRows:
    """A CSR matrix in an HDF5 or zarr file, read by ranges of rows.

    Row bounds are read together with the rows for HDF5 (2% of the time), and held in memory for zarr (4 or 8 bytes per
    cell), where a read is slow.

    Parameters
    ----------
    group
        Group with `indptr`, `indices` and `data`.

    Attributes
    ----------
    shape
        Cells and genes.
    where
        Matrix and path of the file, for error messages.

    Raises
    ------
    ValueError
        If arrays are missing or inconsistent, or a zarr lacks chunks.
    """

    format = "csr"

    def __init__(self, group: Any) -> None:
        self.where = f"{group.name.strip('/')} of {file_of(group)!r}"
        missing = [name for name in ("indptr", "indices", "data") if name not in group]
        shape = group.attrs.get("shape", group.attrs.get("h5sparse_shape"))
        if missing or shape is None:
            raise _damaged(self.where, "it lacks " + ", ".join([*missing, *(["shape"] if shape is None else [])]))
        self.shape = int(shape[0]), int(shape[1])
        self._indptr, self._indices, self._data = (group[name] for name in ("indptr", "indices", "data"))
        self._direct = hasattr(self._data, "read_direct")
        n = self._indptr.shape[0]
        if n != self.shape[0] + 1:
            raise _damaged(self.where, f"indptr has {n} entries for {self.shape[0]} cells")
        if hasattr(getattr(group, "store", None), "fs"):
            self._data = _refusing(self._data)
            self._indices = self._indices if self.shape[1] == 1 else _refusing(self._indices)
        elif not self._direct:
            for array in (self._indices, self._data):
                n_missing = array.nchunks - array.nchunks_initialized  # zarr would fill them with zeros
                # and does not write chunks of zeros only, such as the indices of one gene
                if n_missing and not (array is self._indices and self.shape[1] == 1):
                    raise _damaged(self.where, f"{n_missing} chunks of {array.path} are gone")
            for array in (self._indptr, self._indices, self._data):
                checked_array(array, self.where)
        if not self._direct:
            self._indptr = self._indptr[:]
        last = int(self._indptr[n - 1])
        if not self._indices.shape[0] == self._data.shape[0] == last:
            n_indices, n_values = self._indices.shape[0], self._data.shape[0]
            raise _damaged(self.where, f"indptr ends at {last}, with {n_indices} indices and {n_values} values")

    @property
    def dtype(self) -> np.dtype:
        """Type of the stored values."""
        dtype: np.dtype = self._data.dtype
        return dtype

    def read(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read ranges of rows (first, exclusive last), joined in order, as they are stored.

        Returns
        -------
        data and indices, owned by the caller, and indptr int64, from 0.

        Raises
        ------
        ValueError
            If the file can't be read.
        """
        with naming(self.where):
            bounds = [self._indptr[start : stop + 1].astype(np.int64) for start, stop in ranges]
        lengths = [np.diff(bound) for bound in bounds]
        if any((length < 0).any() for length in lengths):
            raise _damaged(self.where, "indptr descends")
        if (longest := max((int(length.max()) for length in lengths if len(length)), default=0)) > self.shape[1]:
            raise _damaged(self.where, f"a cell has {longest:,} values for {self.shape[1]:,} genes")
        indptr = np.concatenate([[0], *lengths], dtype=np.int64).cumsum()
        spans = [(int(bound[0]), int(bound[-1])) for bound in bounds]
        with naming(self.where):
            values, indices = self._values(self._data, spans), self._values(self._indices, spans)
        if not len(values) == len(indices) == indptr[-1]:  # zarr returns fewer values without an error
            raise _damaged(self.where, "indptr points behind the end of data or indices")
        return values, indices, indptr

    def _values(self, array: Any, spans: list[tuple[int, int]]) -> np.ndarray:
        if not self._direct:
            with ThreadPoolExecutor(REQUESTS) as pool:
                return np.concatenate([*pool.map(lambda span: array[slice(*span)], spans)])
        # as array[a:b], without a copy and without h5py's slow checks of the selection
        out = np.empty(sum(b - a for a, b in spans), dtype=array.dtype)
        space, at = array.id.get_space(), 0
        for a, b in spans:
            if b > a:
                space.select_hyperslab((a,), (b - a,))
                array.id.read(h5py.h5s.create_simple((b - a,)), space, out[at : at + b - a])
            at += b - a
        return out


def _damaged(where: str, how: str) -> ValueError:
    return ValueError(f"{where} is damaged: {how}. Copy or write the file again.")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Convert errors of HDF5, zarr and their codecs into a ValueError that names the matrix and its file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # the error depends on codec and store
        raise _damaged(where, f"it can't be read ({type(error).__name__}: {error})") from error


def _refusing(array: Any) -> Any:
    """Make an array in object storage raise FileNotFoundError for a missing chunk, which zarr reads as zeros."""
    from zarr import Array, AsyncArray
    from zarr.storage import FsspecStore, StorePath

    store, of = array.store, array.async_array
    store = FsspecStore(store.fs, read_only=True, path=store.path, allowed_exceptions=())
    return Array(AsyncArray(of.metadata, StorePath(store, array.path), of.config))


def checked_array(array: Any, where: str) -> Any:
    """Return a zarr array after checking that its blosc chunks in a local folder are not truncated.

    Blosc does not check the size: it would read memory beyond the end of a truncated chunk.

    Parameters
    ----------
    array
        The array.
    where
        Matrix and file, for the error message.

    Raises
    ------
    ValueError
        If a chunk is truncated.
    """
    root = getattr(getattr(array, "store", None), "root", None)
    if root is None or array.shards or not any("blosc" in type(codec).__name__.lower() for codec in array.compressors):
        return array
    for folder, _, names in os.walk(os.path.join(root, array.path)):
        for name in names:
            if name.startswith(".") or name == "zarr.json":
                continue
            with open(os.path.join(folder, name), "rb", buffering=0) as chunk:
                head, size = chunk.read(_BLOSC_HEAD), os.fstat(chunk.fileno()).st_size
            if size < _BLOSC_HEAD or size < int.from_bytes(head[12:16], "little"):
                raise _damaged(where, f"it can't be read (chunk {name} of {array.path} is cut off)")
    return array


def file_of(element: Any) -> str:
    """Path of the file of an HDF5 or zarr group or array."""
    if hasattr(element, "file"):
        return str(element.file.filename)
    store = element.store
    return str(store.fs.unstrip_protocol(store.path) if hasattr(store, "fs") else getattr(store, "root", store))


class _Uncollected:
    """A remote file for h5py, which reads with garbage collection disabled.

    h5py holds its lock while it reads, and needs it to close a garbage-collected file. If fsspec's thread collected
    such a file, the read and the thread would be in a deadlock.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def readinto(self, buffer: Any) -> int:
        collects = gc.isenabled()
        gc.disable()
        try:
            return int(self._file.readinto(buffer))
        finally:
            if collects:
                gc.enable()


def open_root(path: Path) -> tuple[Any, Any]:
    """Open an ``.h5ad`` or ``.zarr`` (format 2 or 3) for reading.

    Parameters
    ----------
    path
        The file or folder, from :func:`scdiva._files.as_path`.

    Returns
    -------
    Its root group, and the file to close (None for a folder).

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    OSError
        If it can't be reached.
    ValueError
        If it is neither, or truncated; the message names it.
    """
    import zarr

    if not isinstance(path, Path):
        with reaching(path):
            if path.suffix != ".h5ad":
                return zarr.open_group(path.fs.get_mapper(path.path), mode="r"), None
            # HDF5 reads a few bytes at many places: 32 cached blocks of 4 MiB
            remote = path.fs.open(path.path, "rb", cache_type="blockcache", block_size=1 << 22)
            file = h5py.File(_Uncollected(remote), "r")
            check_contained(file, path)
            return file, file
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    if path.is_dir():
        _check_files(path)
        try:
            return zarr.open_group(str(path), mode="r"), None
        except (FileNotFoundError, ValueError) as error:
            held = sorted(one.name for one in path.iterdir() if one.suffix in (".h5ad", ".zarr", ".h5"))[:5]
            inside = f"It holds {', '.join(held)}: name one of them." if held else "Cell Ranger's: scanpy.read_10x_mtx."
            raise ValueError(f"{str(path)!r} is a folder, but no .zarr that AnnData wrote. {inside}") from error
    check_regular(path)
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{str(path)!r} may not be read by this user.")
    if not h5py.is_hdf5(path):
        raise ValueError(f"{str(path)!r} is not an HDF5 file: expected an .h5ad or .zarr that AnnData wrote.")
    file = open_hdf5(path)
    return file, file


def _check_files(folder: Path) -> None:
    """Raise an error if a ``.zarr`` has special files such as a FIFO, or too large metadata."""
    folders = [os.fspath(folder)]
    for one in folders:  # grows
        with os.scandir(one) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name in METADATA or not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
                    check_regular(entry.path, MOST_INDEX)


def open_hdf5(path: Path) -> Any:
    """Open an HDF5 file for reading.

    Parameters
    ----------
    path
        An existing HDF5 file.

    Raises
    ------
    ValueError
        If it can't be opened; the message names it.
    """
    try:
        file = h5py.File(path, "r")
        check_contained(file, path)
        return file
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} can't be opened: it is truncated, damaged, or being written ({error}). Copy it again, or "
            "write it again from its source."
        ) from error


def check_contained(file: h5py.File, path: Path) -> None:
    """Raise an error if an HDF5 file reads other files, or claims arrays that it does not contain.

    Parameters
    ----------
    file
        The open file; closed on an error.
    path
        Its path, for the message.

    Raises
    ------
    ValueError
        If it has an external link, an array in other files (external or virtual), or an array of more than 1 GiB of
        which less than a ten-thousandth is stored.
    """

    def link(name: bytes, info: Any) -> str | None:
        if name.count(b"/") > MOST_DEPTH:
            return f"{name.decode()[:80]!r}... is nested more than {MOST_DEPTH} deep"
        return f"{name.decode()!r} is a link to another file" if info.type == h5py.h5l.TYPE_EXTERNAL else None

    def array(name: bytes, info: Any) -> str | None:
        if info.type != h5py.h5o.TYPE_DATASET:
            return None
        opened = h5py.h5d.open(file.id, name)
        how, stored = opened.get_create_plist(), opened.get_storage_size()
        claimed = math.prod(opened.shape or ()) * opened.get_type().get_size()
        if how.get_external_count() or how.get_layout() == h5py.h5d.VIRTUAL:
            return f"{name.decode()!r} is stored in another file"
        if claimed > _CLAIMED and claimed > _COMPRESSED * stored:
            return f"{name.decode()!r} claims {claimed:,} bytes and contains {stored:,}"
        return None

    if problem := file.id.links.visit(link, info=True) or h5py.h5o.visit(file.id, array, info=True):
        file.close()
        raise ValueError(
            f"{str(path)!r}: {problem}, which is not read. If you trust it, write it again: "
            "anndata.read_h5ad(path).write_h5ad(new_path)."
        )


def names_of(root: Any, axis: str, path: Path) -> Any:
    """Stored names of cells or genes.

    For text that anndata 0.13 stores as values and a mask, the values; for categories, the group.

    Parameters
    ----------
    root
        Group with `obs` or `var`.
    axis
        `"obs"` or `"var"`.
    path
        The file, for the error message.

    Raises
    ------
    ValueError
        If the file has no names, or was written by anndata before 0.7.
    """
    frame = root[axis]
    if not hasattr(frame, "keys"):
        raise ValueError(
            f"{str(path)!r} was written by anndata before 0.7. Write it again: "
            "anndata.read_h5ad(path).write_h5ad(new_path)."
        )
    index = frame.attrs.get("_index")
    if index is None or index not in frame:
        what = {"obs": "cells", "var": "genes"}[axis]
        raise ValueError(
            f"{str(path)!r} has no names of its {what} ({axis} lacks its index). Write the file again with them."
        )
    names = frame[index]
    return names["values"] if hasattr(names, "keys") and "values" in names else names
