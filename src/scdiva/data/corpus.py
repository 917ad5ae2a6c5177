"""Files of a training corpus: their studies, studies held out for validation, and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scdiva._checks import or_nearest
from scdiva._files import as_path, digest, is_path, listing, reaching
from scdiva.data.packed import is_packed, read_index
from scdiva.data.soma import SomaCells

WHOLE = 1 << 30
"""Files of at least this size (bytes) are hashed in pieces."""
PIECES, PIECE = 256, 1 << 20
"""Number of pieces, and bytes per piece."""


def data_files(data: Iterable[Any]) -> list[Any]:
    """Replace each folder by its files, ordered by path.

    Parameters
    ----------
    data
        Paths and AnnData objects. A folder that is neither a ``.zarr`` nor a packed corpus stands for every ``.h5ad``
        and ``.zarr`` below it.

    Returns
    -------
    The paths and objects; other paths need not exist.

    Raises
    ------
    ValueError
        If a folder has no such file.
    """
    out: list[Any] = []
    for one in data:
        files = [one]
        if is_path(one) and not isinstance(one, SomaCells):
            with reaching(path := as_path(one)):
                if path.is_dir() and not (_is_zarr(path) or is_packed(path)):
                    files = sorted(_below(path))
        if not files:
            raise ValueError(f"the folder {str(one)!r} holds no .h5ad or .zarr; name the folder that does.")
        out += files
    return out


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not _is_zarr(path):
            yield from _below(path)
        elif path.is_dir() or path.suffix in (".h5ad", ".zarr"):
            yield path


def _is_zarr(folder: Path) -> bool:
    # format 2 and format 3
    return folder.suffix == ".zarr" or (folder / ".zgroup").exists() or (folder / "zarr.json").exists()


def study_names(files: Sequence[Path]) -> list[str]:
    """Names of the studies: the file names without suffix.

    Raises
    ------
    ValueError
        If there are no files, or two have the same name.
    """
    names = [path.stem for path in files]
    if not names:
        raise ValueError("no files were given.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{len(twice)} names stand for more than one file (first: {twice[0]!r}); rename one of them.")
    return names


def file_note(path: str | Path) -> dict[str, Any]:
    """Size and checksum of a file.

    Parameters
    ----------
    path
        File or folder, local or a URL; packed corpus; or cells of a SOMA experiment.

    Returns
    -------
    `size` in bytes and `sha256`, of the parts for a packed corpus (from its index), otherwise of the whole file. Files
    of at least 1 GiB have `sampled_sha256`, of 256 evenly spaced pieces of 1 MiB: overwriting values between two pieces
    is not detected. For folders, names and sizes of the files are hashed, too. For other URLs nothing is read: `files`,
    total `size`, and `listing_sha256` of names, sizes and ETags (:func:`scdiva._files.listing`). For cells of a
    SOMA experiment: their numbers.
    """
    path = as_path(path)
    if isinstance(path, SomaCells):
        return path.note()
    if not (isinstance(path, Path) and path.is_file()) and is_packed(path):
        about = read_index(path)
        return {"size": about["bytes"], "sha256": about["sha256"]}
    if not isinstance(path, Path):
        files = listing(path)
        return {"files": len(files), "size": sum(size for _, size, _ in files), "listing_sha256": digest(files)}
    parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
    sizes = [part.stat().st_size for part in parts]
    ends, size = np.cumsum(sizes), sum(sizes)
    content = hashlib.sha256()
    if path.is_dir():
        for part, n in zip(parts, sizes, strict=True):
            content.update(f"{part.relative_to(path).as_posix()}\0{n}\n".encode())
    if size < WHOLE:
        for part in parts:
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: content)
        return {"size": size, "sha256": content.hexdigest()}
    for at in np.linspace(0, size - PIECE, PIECES).astype(np.int64).tolist():
        number = int(np.searchsorted(ends, at, side="right"))
        with parts[number].open("rb") as file:
            file.seek(at - int(ends[number]) + sizes[number])
            content.update(file.read(PIECE))
    return {"size": size, "sampled_sha256": content.hexdigest()}


def held_out_studies(names: Sequence[str], validation_studies: float | Sequence[str] | None, seed: int) -> list[str]:
    """Studies that are held out for validation.

    Parameters
    ----------
    names
        Names of all studies.
    validation_studies
        Names, or a share of the studies (not of the cells) between 0 and 1, of which at least one is drawn. None: no
        study.
    seed
        Seed of the draw, which does not depend on the order of `names`.

    Returns
    -------
    Their names, in the order of `names`.

    Raises
    ------
    ValueError
        If a name is unknown or repeated, the share is not between 0 and 1, or no study is left for training.
    """
    if validation_studies is None:
        return []
    if isinstance(validation_studies, str):
        validation_studies = [validation_studies]
    if isinstance(validation_studies, int | float):
        if isinstance(validation_studies, bool) or not 0 < validation_studies < 1:
            raise ValueError(
                f"validation_studies must be names, or a share between 0 and 1; got {validation_studies!r}."
            )
        n = max(1, round(validation_studies * len(names)))
        # a seed that differs from the seeds of the order
        drawn = np.random.default_rng([seed, len(names), 0, 3]).permutation(len(names))[:n]
        chosen = {sorted(names)[i] for i in drawn}
    else:
        chosen = set(validation_studies)
        if len(chosen) < len(validation_studies):
            raise ValueError("validation_studies names a study twice.")
        for name in sorted(chosen - set(names)):
            raise ValueError(f"validation_studies: there is no study {name!r}{or_nearest(name, names)}.")
    if len(chosen) == len(names):
        raise ValueError(f"all {len(names)} studies would validate and none be trained on; name fewer or add files.")
    return [name for name in names if name in chosen]
