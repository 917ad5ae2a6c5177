"""New ``.h5ad`` and ``.zarr`` files, written by blocks and put in their place when they are whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import h5py
import numpy as np

from scdiva._checks import refuse_unwritable
from scdiva._settings import logger
from scdiva.data.stored import open_root

if TYPE_CHECKING:
    from anndata import AnnData

ROWS_PER_CHUNK = 4096


def refuse_target(out: Path, overwrite: bool, *sources: Path) -> None:
    """Refuse a file that must not be written.

    Parameters
    ----------
    out
        The file, or folder for ``.zarr``.
    overwrite
        Whether it may be replaced.
    sources
        What is read while it is written.

    Raises
    ------
    FileExistsError
        If it is one of the sources, if it exists and may not be replaced, or if it is a folder and no ``.zarr``, or a
        file where a folder is to be.
    OSError
        If its folder can't be written into.
    """
    refuse_unwritable(out)
    if not out.exists():
        return
    if any(isinstance(source, Path) and source.exists() and out.samefile(source) for source in sources):
        raise FileExistsError(f"{str(out)!r} is the file that is read. Pass another out, not the input.")
    is_store = any((out / name).exists() for name in ("zarr.json", ".zgroup"))
    if out.is_dir() and not (is_store and is_zarr(out)):
        raise FileExistsError(f"{str(out)!r} is a folder and no .zarr, and is not overwritten. Pass another out.")
    if not overwrite:
        raise FileExistsError(f"{str(out)!r} exists. Pass another out, or overwrite=True.")
    if is_zarr(out) and not out.is_dir():
        raise FileExistsError(f"{str(out)!r} is a file, where a .zarr is a folder. Pass another out.")


def refuse_full(out: Path, n_bytes: int) -> None:
    """Refuse to write where there is no room: HDF5 itself may crash the process when it can't close a file.

    Parameters
    ----------
    out
        The file to be, in a folder that is there.
    n_bytes
        What it will hold at least.

    Raises
    ------
    OSError
        If the disk has less room than that.
    """
    if (free := shutil.disk_usage(out.parent).free) < n_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: it takes {n_bytes / 2**20:,.1f} MiB and there are {free / 2**20:,.1f}. Make "
            "room, or pass an out on another disk",
            str(out),
        )


def is_zarr(path: Path) -> bool:
    """Whether a file is to be written as a folder of zarr, by its name."""
    return path.suffix == ".zarr"


@contextlib.contextmanager
def open_store(path: Path, mode: str = "r") -> Iterator[Any]:
    """Open an ``.h5ad`` or ``.zarr`` as a group.

    Parameters
    ----------
    path
        The file, to be read also a URL. What is to be written is a ``.zarr`` if its name says so.
    mode
        ``"r"``, or ``"w"`` to begin it anew as AnnData begins a file.

    Yields
    ------
    The root group, of h5py or zarr.

    Raises
    ------
    OSError
        If the system refuses a write, for instance because the disk is full.
    """
    begun = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
    if mode == "r":
        root, file = open_root(path)
        with file or contextlib.nullcontext():
            yield root
    elif is_zarr(path):
        import anndata
        import zarr

        with warnings.catch_warnings():  # deprecated since anndata 0.13; then format 3 is all that it writes
            warnings.simplefilter("ignore", DeprecationWarning)
            version = getattr(anndata.settings, "zarr_write_format", 3)
        root = zarr.open_group(str(path), mode=mode, zarr_format=version)
        root.attrs.update(begun)
        yield root
    else:
        with _said_briefly(path), h5py.File(path, mode) as file:
            file.attrs.update(begun)
            yield file


@contextlib.contextmanager
def _said_briefly(path: Path) -> Iterator[None]:
    """Turn what HDF5 says where the system refuses a write, a RuntimeError of hundreds of lines, into an OSError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = re.search(r"errno = (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


@contextlib.contextmanager
def whole_or_not(out: Path) -> Iterator[Path]:
    """Give a path beside `out` to be written, and put it in the place of `out` if the block ends well.

    Its name is always the same, so that what a killed run left there is found and deleted; one call at a time. Within
    the block anndata writes text of pandas's `string` and `str` dtypes as such: before 0.13 it refuses the names that a
    newer one has written, unless it is asked to.

    Parameters
    ----------
    out
        The file or ``.zarr`` folder to be; one that is there is replaced.

    Yields
    ------
    Path
        Where to write.

    Raises
    ------
    RuntimeError
        If another call is writing the same.
    """
    import anndata

    new, old = (out.with_name(f".{out.stem}.{state}{out.suffix}") for state in ("new", "old"))
    mark = out.with_name(f".{out.name}.writing")
    with open_alone(mark):
        try:
            _delete(new)
            with anndata.settings.override(allow_write_nullable_strings=True):
                yield new
            if not new.is_dir():
                with new.open("rb") as file:
                    os.fsync(file.fileno())
            elif os.path.lexists(out):  # folders can't be swapped in one step
                _delete(old)
                out.rename(old)
            new.replace(out)
        finally:
            _delete(new)
            if os.path.lexists(old) and not os.path.lexists(out):
                old.rename(out)
            _delete(old)
            mark.unlink(missing_ok=True)


def write_cells(adata: AnnData, out: Path) -> Path:
    """Write an AnnData object to a file, which is there whole or not at all.

    Parameters
    ----------
    adata
        What to write.
    out
        The file, a ``.zarr`` folder if its name ends so, else ``.h5ad``; one that is there is replaced. Folders above
        it are made.

    Returns
    -------
    `out`.

    Raises
    ------
    OSError
        If there is no room for its matrices, or the system refuses a write.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    layers = [adata.layers[name] for name in adata.layers if name is not None]  # None: X once more, in anndata 0.13
    matrices = [adata.X, *layers, *adata.obsm.values(), *adata.varm.values()]
    refuse_full(out, sum(_held(matrix) for matrix in matrices))
    with whole_or_not(out) as new:
        if is_zarr(out):
            with warnings.catch_warnings():
                # of the format, which is anndata's own setting
                warnings.filterwarnings("ignore", message="Writing zarr v2")
                adata.write_zarr(new)
        else:
            with _said_briefly(new):
                adata.write_h5ad(new)
    return out


def _held(matrix: Any) -> int:
    """Bytes of an array, or of the values of a sparse matrix."""
    return int(getattr(getattr(matrix, "data", None), "nbytes", 0) or getattr(matrix, "nbytes", 0))


def open_alone(path: Path, *, waits: bool = False) -> BinaryIO:
    """Open a file to be appended to, for one call at a time.

    The lock goes with the open file, so that a killed process leaves none behind.

    Parameters
    ----------
    path
        The file; made if it is not there. Who holds it may delete it.
    waits
        Whether to wait for whoever has it open.

    Raises
    ------
    RuntimeError
        If it is open elsewhere, and this does not wait.
    """
    import fcntl

    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            raise RuntimeError(
                f"{str(path)!r} is in use: another call is writing the same result. Wait for it, or pass another out."
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s can't be locked (%s): calls that begin at once don't know of each other", path, error)
        # its last owner may have deleted it between our opening and our lock
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_frame(old: Any, parent: Any, name: str) -> None:
    """Copy annotation (`obs` or `var`) into another file.

    From HDF5 to HDF5 it is copied as it is stored. A column at a time is held.

    Parameters
    ----------
    old
        The stored data frame, a group of h5py or zarr.
    parent, name
        Group to write into, and the name there.
    """
    import anndata.io

    if "__categories" in old:  # categories of anndata before 0.8 are references into their own file
        anndata.io.write_elem(parent, name, anndata.io.read_elem(old))
    elif isinstance(old, h5py.Group) and isinstance(parent, h5py.Group):
        old.file.copy(old, parent, name)
    else:
        new = parent.create_group(name)
        columns = [str(column) for column in old.attrs["column-order"]]
        # lists and strings: zarr keeps attributes as JSON
        new.attrs.update({key: str(old.attrs[key]) for key in ("_index", "encoding-type", "encoding-version")})
        new.attrs["column-order"] = columns
        for column in dict.fromkeys([str(old.attrs["_index"]), *columns]):
            anndata.io.write_elem(new, column, anndata.io.read_elem(old[column]))


def new_rows(parent: Any, name: str, shape: tuple[int, int]) -> Any:
    """Lay out a float32 array of NaN to be filled by blocks of rows.

    Parameters
    ----------
    parent, name
        Group of h5py or zarr, and the name there.
    shape
        Rows and columns.

    Returns
    -------
    The stored array.
    """
    chunks = (min(ROWS_PER_CHUNK, max(shape[0], 1)), shape[1])
    make = getattr(parent, "create_array", None)  # of zarr; h5py has create_dataset alone
    layout = {"shape": shape, "dtype": np.float32, "chunks": chunks}
    rows = make(name, **layout, fill_value=np.nan) if make else parent.create_dataset(name, **layout, fillvalue=np.nan)
    rows.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return rows
