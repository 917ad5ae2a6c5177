"""Write ``.h5ad`` and ``.zarr`` files by blocks and atomically, also from several jobs that share a disk."""

from __future__ import annotations

import contextlib
import io
import json
import operator
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from scdiva._checks import refuse_unwritable
from scdiva._files import open_alone, put_whole, refuse_full, whole_or_not
from scdiva._validate import Scan
from scdiva.data.backed import METADATA, open_root

if TYPE_CHECKING:
    from anndata import AnnData

ROWS_PER_CHUNK = 4096


def refuse_target(out: Path, overwrite: bool, *sources: Path) -> None:
    """Raise an error if an output file must not be written.

    Parameters
    ----------
    out
        The file, or folder for ``.zarr``.
    overwrite
        Whether it may be replaced.
    sources
        Input files.

    Raises
    ------
    FileExistsError
        If it is an input, exists and may not be replaced, is a folder but no ``.zarr``, or is a file but should be a
        ``.zarr`` folder.
    ValueError
        If its name does not end in .h5ad or .zarr.
    OSError
        If its folder is not writable.
    """
    if out.suffix not in (".h5ad", ".zarr"):
        raise ValueError(f"{str(out)!r} must end in .h5ad or .zarr.")
    refuse_unwritable(out)
    if any(isinstance(source, Path) and source.resolve() in out.resolve().parents for source in sources):
        raise FileExistsError(f"{str(out)!r} is inside the file that is read. Pass an out elsewhere.")
    if not out.exists():
        return
    if any(isinstance(source, Path) and source.exists() and out.samefile(source) for source in sources):
        raise FileExistsError(f"{str(out)!r} is the file that is read. Pass another out, not the input.")
    is_store = any((out / name).exists() for name in ("zarr.json", ".zgroup"))
    if out.is_dir() and not (is_store and is_zarr(out)):
        raise FileExistsError(f"{str(out)!r} is a folder and no .zarr, and is not overwritten. Pass another out.")
    if not overwrite:
        raise FileExistsError(f"{str(out)!r} exists. Pass another out, or overwrite=True.")
    if out.is_dir() and not out.is_symlink() and (stray := _stray_file(out)):
        raise FileExistsError(
            f"{str(out)!r} contains {stray!r}, which is not part of a .zarr: overwrite would delete it. Move it, or "
            "pass another out."
        )
    if is_zarr(out) and not out.is_dir():
        raise FileExistsError(f"{str(out)!r} is a file, where a .zarr is a folder. Pass another out.")


def _stray_file(folder: Path) -> str:
    """First file in a ``.zarr`` folder that does not belong to it; empty if there is none."""
    for path in sorted(folder.iterdir()):
        belongs = any((path / node).exists() for node in METADATA) if path.is_dir() else path.name in METADATA
        if not belongs and path.name != ".DS_Store":
            return path.name
    return ""


def is_zarr(path: Path) -> bool:
    """Whether an output is a zarr folder, by its name."""
    return path.suffix == ".zarr"


@contextlib.contextmanager
def open_store(path: Path, mode: str = "r") -> Iterator[Any]:
    """Open an ``.h5ad`` or ``.zarr`` as a group.

    Parameters
    ----------
    path
        The file; for reading also a URL.
    mode
        ``"r"``, or ``"w"`` for a new file with the attributes of AnnData.

    Yields
    ------
    The root group, of h5py or zarr.

    Raises
    ------
    OSError
        If a write fails, for instance because the disk is full.
    """
    attributes = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
    if mode == "r":
        root, file = open_root(path)
        with file or contextlib.nullcontext():
            yield root
    elif is_zarr(path):
        import anndata
        import zarr

        with warnings.catch_warnings():  # deprecated since anndata 0.13, which writes format 3 only
            warnings.simplefilter("ignore", DeprecationWarning)
            version = getattr(anndata.settings, "zarr_write_format", 3)
        root = zarr.open_group(str(path), mode=mode, zarr_format=version)
        root.attrs.update(attributes)
        with _text_as_it_is():
            yield root
    else:
        with _text_as_it_is(), new_hdf5(path) as file:
            file.attrs.update(attributes)
            yield file


class _Sink(io.RawIOBase):
    """File for HDF5 that never fails, since HDF5 crashes the process later if it can't close a file.

    The first error is kept for :func:`new_hdf5` to raise after HDF5 has closed the file; later writes are dropped.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self.error: BaseException | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        n = len(left)
        try:
            while self.error is None and len(left):  # a write may be partial
                left = left[self._file.write(left) :]
        except BaseException as error:  # noqa: BLE001 - an interrupt too
            self.error = error
        return n

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        n = 0
        try:
            n = self._file.readinto(view)
        except BaseException as error:  # noqa: BLE001
            self.error = self.error or error
        view[n:] = bytes(len(view) - n)  # zeros for dropped data
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            if self.error is None:
                self._file.truncate(size)
        except BaseException as error:  # noqa: BLE001
            self.error = error
        return size or 0

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[h5py.File]:
    """Write a new HDF5 file (an existing one is overwritten); errors such as a full disk are raised after closing it.

    Yields
    ------
    The open file.

    Raises
    ------
    OSError
        If a write fails.
    """
    with contextlib.closing(_Sink(path)) as sink:
        try:
            with h5py.File(sink, "w") as file:
                yield file
        finally:
            if isinstance(sink.error, OSError):
                sink.error.filename = str(path)
            if sink.error is not None:
                raise sink.error from None


def write_cells(adata: AnnData, out: Path) -> Path:
    """Write an AnnData object to a file, atomically.

    Parameters
    ----------
    adata
        The object.
    out
        The file, or ``.zarr`` folder by its name; replaced if it exists. Parent folders are created.

    Returns
    -------
    `out`.

    Raises
    ------
    OSError
        If the disk is too small or a write fails.
    """
    import anndata.io

    out.parent.mkdir(parents=True, exist_ok=True)
    if not is_zarr(out):  # zarr compresses
        refuse_full(out, _n_bytes(adata))
    with whole_or_not(out) as new, _text_as_it_is():
        if is_zarr(out):
            with warnings.catch_warnings():
                # the format is a setting of anndata
                warnings.filterwarnings("ignore", message="Writing zarr v2")
                adata.write_zarr(new)
        else:
            adata.strings_to_categoricals()
            if adata.raw is not None:
                adata.strings_to_categoricals(adata.raw.var)
            with new_hdf5(new) as file:
                anndata.io.write_elem(file, "/", adata)
    return out


def _text_as_it_is() -> contextlib.AbstractContextManager[Any]:
    """Allow anndata before 0.13 to write pandas' `string` and `str` dtypes."""
    import anndata

    override: contextlib.AbstractContextManager[Any] = anndata.settings.override(allow_write_nullable_strings=True)
    return override


def _n_bytes(adata: AnnData) -> int:
    """Lower bound of the size of an ``.h5ad`` file: its matrices."""
    parts = (adata.layers, adata.obsm, adata.varm, adata.obsp, adata.varp)
    # anndata 0.13 has X among the layers, as None
    matrices = [adata.X, *(part[key] for part in parts for key in part if key is not None)]
    if adata.raw is not None:
        matrices.append(adata.raw.X)
    arrays = [
        array
        for matrix in matrices
        for array in ([matrix.data, matrix.indices, matrix.indptr] if hasattr(matrix, "indptr") else [matrix])
    ]
    return sum(getattr(array, "nbytes", 0) for array in arrays)


def copy_frame(old: Any, parent: Any, name: str) -> None:
    """Copy annotation (`obs` or `var`) into another file, unchanged between HDF5 files, otherwise column by column.

    Parameters
    ----------
    old
        The stored data frame, a group of h5py or zarr.
    parent, name
        Group to write into, and name in it.
    """
    import anndata.io

    if "__categories" in old:  # categories of anndata before 0.8 are references within the file
        anndata.io.write_elem(parent, name, anndata.io.read_elem(old))
    elif isinstance(old, h5py.Group) and isinstance(parent, h5py.Group):
        old.file.copy(old, parent, name)
    else:
        new = parent.create_group(name)
        columns = [str(column) for column in old.attrs["column-order"]]
        # zarr stores attributes as JSON
        new.attrs.update({key: str(old.attrs[key]) for key in ("_index", "encoding-type", "encoding-version")})
        new.attrs["column-order"] = columns
        for column in dict.fromkeys([str(old.attrs["_index"]), *columns]):
            anndata.io.write_elem(new, column, anndata.io.read_elem(old[column]))


def new_rows(parent: Any, name: str, shape: tuple[int, int]) -> Any:
    """Create a stored float32 array of NaN with `shape`, to be filled by blocks of rows."""
    chunks = (min(ROWS_PER_CHUNK, max(shape[0], 1)), shape[1])
    make = getattr(parent, "create_array", None)  # zarr; h5py has create_dataset
    layout = {"shape": shape, "dtype": np.float32, "chunks": chunks}
    rows = make(name, **layout, fill_value=np.nan) if make else parent.create_dataset(name, **layout, fillvalue=np.nan)
    rows.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return rows


DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
"""Errors of numpy for a missing or damaged file."""


def folder_of(out: Path) -> Path:
    """Hidden folder next to an output for its finished parts."""
    return out.with_name(f".{out.name}.parts")


def scan_once(out: Path, key: dict[str, Any], make: Callable[[], Scan]) -> Scan:
    """Scan a matrix once for all jobs: one job scans it, the others wait and load the result.

    Parameters
    ----------
    out
        Output of the jobs; the scan is kept next to it.
    key
        Everything that determines the scan, as JSON values.
    make
        Scans the matrix.
    """
    text, path = json.dumps(key, sort_keys=True), folder_of(out) / "scan.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_alone(path.with_suffix(".lock"), waits=True):  # on a disk without locks, each job scans
        with contextlib.suppress(*DAMAGED), np.load(path) as file:
            if str(file["key"]) == text:
                stored = {field.name: file[field.name] for field in fields(Scan)}
                return Scan(**{name: value if value.ndim else value.item() for name, value in stored.items()})
        scan = make()
        put_whole(path, lambda file: np.savez(file, key=text, **asdict(scan)))
        return scan


def as_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """Check a shard `(i, n)`, i from 0; raise ValueError if it is not such a pair."""
    try:
        number, n = (operator.index(one) for one in shard)
        if 0 <= number < n:
            return number, n
    except (TypeError, ValueError):
        pass
    raise ValueError(f"shard must be (number from 0, how many), such as (0, 64) to (63, 64); got {shard!r}.")
