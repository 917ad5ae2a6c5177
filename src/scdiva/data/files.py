"""Files as data: which ones a folder holds, and whether one is still what it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def data_files(data: Iterable[Any]) -> list[Any]:
    """Replace each folder of files by its files, in the order of their names.

    Parameters
    ----------
    data
        Paths and AnnData objects. A folder that is no ``.zarr`` itself stands for the ``.h5ad`` and ``.zarr`` that lie
        in it, not for those in folders below.

    Returns
    -------
    The paths and objects; whether a path that is no folder exists is not asked.

    Raises
    ------
    ValueError
        If a folder holds no such file.
    """
    out: list[Any] = []
    for one in data:
        if not isinstance(one, str | Path) or not Path(one).is_dir() or _is_zarr(Path(one)):
            out.append(one)
            continue
        found = sorted(path for path in Path(one).iterdir() if path.suffix in (".h5ad", ".zarr"))
        if not found:
            raise ValueError(f"the folder {str(one)!r} holds no .h5ad or .zarr; name the folder that does.")
        out += found
    return out


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


def manifest_of(data: Iterable[Any]) -> dict[str, str]:
    """Note the content of each file under its name; AnnData objects are left out.

    Parameters
    ----------
    data
        Paths and objects.
    """
    return {Path(one).name: content_digest(one) for one in data if isinstance(one, str | Path)}


def check_manifest(noted: dict[str, str], found: dict[str, str]) -> None:
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
