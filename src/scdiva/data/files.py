"""Files as data: which ones a folder holds, and whether one is still what it was."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from scdiva._checks import or_nearest

WHOLE = 1 << 30
"""Bytes from which on a file is not hashed whole."""
PIECES, PIECE = 256, 1 << 20
"""Pieces that are hashed of such a file, and bytes of each."""


def data_files(data: Iterable[Any], exclude: Collection[str] = ()) -> list[Any]:
    """Replace each folder of files by its files, in the order of their paths.

    Parameters
    ----------
    data
        Paths and AnnData objects. A folder that is no ``.zarr`` itself stands for every ``.h5ad`` and ``.zarr`` below
        it.
    exclude
        Names of files, without their suffix, that are left out: of a folder, those that can't be used.

    Returns
    -------
    The paths and objects; whether a path that is no folder exists is not asked.

    Raises
    ------
    ValueError
        If a folder holds no such file, or none is left or no file has a name that is to be left out.
    """
    out: list[Any] = []
    for one in data:
        if not isinstance(one, str | Path) or not Path(one).is_dir() or _is_zarr(Path(one)):
            out.append(one)
            continue
        found = sorted(_below(Path(one)))
        if not found:
            raise ValueError(f"the folder {str(one)!r} holds no .h5ad or .zarr; name the folder that does.")
        out += found
    if not exclude:
        return out
    names = [Path(one).stem if isinstance(one, str | Path) else None for one in out]
    for name in sorted(set(exclude) - set(names)):
        known = [other for other in names if other is not None]
        raise ValueError(f"there is no file {name!r} to leave out{or_nearest(name, known)}.")
    left = [one for one, name in zip(out, names, strict=True) if name not in exclude]
    if not left:
        raise ValueError(f"all {len(out)} files are left out; exclude fewer.")
    return left


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not _is_zarr(path):
            yield from _below(path)
        elif path.suffix in (".h5ad", ".zarr") or (path.is_dir() and _is_zarr(path)):
            yield path


def _is_zarr(folder: Path) -> bool:
    # format 2 and format 3
    return folder.suffix == ".zarr" or (folder / ".zgroup").exists() or (folder / "zarr.json").exists()


def content_digest(path: str | Path) -> str:
    """SHA-256 of a file, or of all files of a folder and their names, in hexadecimal.

    Parameters
    ----------
    path
        An existing file or folder.
    """
    path = Path(path)
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for part in sorted(part for part in path.rglob("*") if part.is_file()):
        whole.update(f"{part.relative_to(path).as_posix()}\0{content_digest(part)}\n".encode())
    return whole.hexdigest()


def file_note(path: str | Path) -> dict[str, Any]:
    """Note how large a file is and what it holds.

    Parameters
    ----------
    path
        An existing file or folder.

    Returns
    -------
    `size` in bytes, and `sha256` of all of it if that is below 1 GiB. To read all of an atlas would take minutes, so of
    more it is `sampled_sha256`: of the size, of 256 pieces of 1 MiB at even distances, and of the names, shapes, types
    and stored sizes of all that lies in an HDF5 file, or the names and sizes of the files of a zarr folder and all its
    metadata. A file that was written anew differs; values overwritten in place between two pieces would not be noticed.
    """
    path = Path(path)
    size = sum(_size(part) for part in _parts_of(path))
    if size < WHOLE:
        return {"size": size, "sha256": content_digest(path)}
    return {"size": size, "sampled_sha256": _sampled_digest(path, size)}


def _parts_of(path: Path) -> list[Path]:
    return sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]


def _size(path: Path) -> int:
    return path.stat().st_size


def _sampled_digest(path: Path, size: int) -> str:
    import h5py

    whole = hashlib.sha256(f"{size}\n".encode())
    parts = _parts_of(path)
    starts = []
    before = 0
    for part in parts:
        starts.append(before)
        before += _size(part)
        if path.is_dir():
            whole.update(f"{part.relative_to(path).as_posix()}\0{_size(part)}\n".encode())
            if part.name.startswith(".z") or part.name == "zarr.json":
                whole.update(part.read_bytes())
    for i in range(PIECES):
        at = i * max(0, size - PIECE) // (PIECES - 1)
        number = bisect.bisect_right(starts, at) - 1
        with parts[number].open("rb") as file:
            file.seek(at - starts[number])
            whole.update(file.read(PIECE))
    if path.is_file() and h5py.is_hdf5(path):

        def note(name: str, thing: Any) -> None:
            if isinstance(thing, h5py.Dataset):
                stored = thing.id.get_storage_size()
                whole.update(f"{name}\0{thing.shape}\0{thing.dtype}\0{stored}\n".encode())
            else:
                whole.update(f"{name}\n".encode())

        with h5py.File(path, "r") as file:
            file.visititems(note)
    return whole.hexdigest()


def manifest_of(data: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Note the content of each file under its name; AnnData objects are left out.

    Parameters
    ----------
    data
        Paths and objects.

    Returns
    -------
    What :func:`file_note` says, by the name of the file.
    """
    return {Path(one).name: file_note(one) for one in data if isinstance(one, str | Path)}


def check_manifest(noted: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise an error that names the first file that is not what it was when the manifest was written.

    Parameters
    ----------
    noted, found
        What :func:`manifest_of` gave then and now.

    Raises
    ------
    ValueError
        If a file changed, is gone or is new, or their order is another one.
    """
    changed = [name for name in noted if name in found and noted[name] != found[name]]
    gone, new = [name for name in noted if name not in found], [name for name in found if name not in noted]
    for names, what in (
        (changed, "have changed"),
        (gone, "are no longer given"),
        (new, "are new"),
        ([] if list(noted) == list(found) else list(found), "stand in another order"),
    ):
        if names:
            raise ValueError(
                f"{len(names)} of {len(noted)} files {what} since the run began (first: {names[0]!r}): resumed, it "
                "would not see the cells that it would have seen. Give the same files as then, or begin a new run."
            )
