"""The files of a corpus to train on, each a study: which they are, which of them validate, and what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scdiva._checks import or_nearest, warn
from scdiva.data.packed import is_packed, read_index
from scdiva.data.paths import as_path, is_path, listing, reaching
from scdiva.data.soma import SomaCells

WHOLE = 1 << 30
"""Bytes from which on a file is not hashed whole."""
PIECES, PIECE = 256, 1 << 20
"""Pieces that are hashed of such a file, and bytes of each."""


def data_files(data: Iterable[Any]) -> list[Any]:
    """Replace each folder of files by its files, in the order of their paths.

    Parameters
    ----------
    data
        Paths and AnnData objects. A folder that is no ``.zarr`` and no packed corpus stands for every ``.h5ad`` and
        ``.zarr`` below it.

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
        found = [one]
        if is_path(one) and not isinstance(one, SomaCells):
            with reaching(path := as_path(one)):
                if path.is_dir() and not (_is_zarr(path) or is_packed(path)):
                    found = sorted(_below(path))
        if not found:
            raise ValueError(f"the folder {str(one)!r} holds no .h5ad or .zarr; name the folder that does.")
        out += found
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
    """Give each file's study its name: the file's name without suffix.

    Parameters
    ----------
    files
        Paths of the files.

    Raises
    ------
    ValueError
        If there are no files, or two would have one name.
    """
    names = [path.stem for path in files]
    if not names:
        raise ValueError("no files were given.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{len(twice)} names stand for more than one file (first: {twice[0]!r}); rename one of them.")
    return names


def file_note(path: str | Path) -> dict[str, Any]:
    """Note how large a file is and what it holds.

    Parameters
    ----------
    path
        An existing file or folder, here or elsewhere, a packed corpus, or cells of a SOMA experiment.

    Returns
    -------
    `size` in bytes, and `sha256`: of a packed corpus that of its parts, as its index has it, else of all of the file if
    that is below 1 GiB. To read all of an atlas would take minutes, so of more it is `sampled_sha256`: of 256 pieces of
    1 MiB at even distances. Both are of the names and sizes of the files of a folder too. A file that was written anew
    differs; values overwritten in place between two pieces would not be noticed.
    Of another URL nothing is read: `files` and `size` in bytes together, and `listing_sha256`, of their names, sizes
    and ETags (:func:`scdiva.data.paths.listing`). Of cells of a SOMA experiment which they are, not what they hold.
    """
    path = as_path(path)
    if isinstance(path, SomaCells):
        return path.note()
    if not (isinstance(path, Path) and path.is_file()) and is_packed(path):
        about = read_index(path)
        return {"size": about["bytes"], "sha256": about["sha256"]}
    if not isinstance(path, Path):
        found = listing(path)
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        return {"files": len(found), "size": sum(size for _, size, _ in found), "listing_sha256": digest}
    parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
    sizes = [part.stat().st_size for part in parts]
    ends, size = np.cumsum(sizes), sum(sizes)
    digest = hashlib.sha256()
    if path.is_dir():
        for part, n in zip(parts, sizes, strict=True):
            digest.update(f"{part.relative_to(path).as_posix()}\0{n}\n".encode())
    if size < WHOLE:
        for part in parts:
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return {"size": size, "sha256": digest.hexdigest()}
    for at in np.linspace(0, size - PIECE, PIECES).astype(np.int64).tolist():
        number = int(np.searchsorted(ends, at, side="right"))
        with parts[number].open("rb") as file:
            file.seek(at - int(ends[number]) + sizes[number])
            digest.update(file.read(PIECE))
    return {"size": size, "sampled_sha256": digest.hexdigest()}


def warn_left_out(name: str, n_left_out: int, n_obs: int, min_genes: int) -> None:
    """Warn that cells of a study are not trained on.

    Parameters
    ----------
    name
        The study.
    n_left_out, n_obs
        Number of cells left out, of all.
    min_genes
        The limit that they miss.
    """
    if n_left_out:
        genes = "any gene" if min_genes == 1 else f"{min_genes} genes"
        warn(f"{name}: {n_left_out} of {n_obs} cells are left out: they lack {genes} of the vocabulary.")


def held_out_studies(names: Sequence[str], asked: float | Sequence[str] | None, seed: int) -> list[str]:
    """Choose the studies that validate instead of being trained on.

    Parameters
    ----------
    names
        All studies.
    asked
        Names, or a share of the studies (not of the cells) between 0 and 1: so many, rounded, but one at least, are
        drawn. None: no study.
    seed
        Of the draw; with the names, in whatever order, it settles it.

    Returns
    -------
    Their names, in the order of `names`.

    Raises
    ------
    ValueError
        If a name is unknown or given twice, the share is not between 0 and 1, or no study would be left to train on.
    """
    if asked is None:
        return []
    if isinstance(asked, str):
        asked = [asked]
    if isinstance(asked, int | float):
        if isinstance(asked, bool) or not 0 < asked < 1:
            raise ValueError(f"validation_studies must be names, or a share between 0 and 1; got {asked!r}.")
        n = max(1, round(asked * len(names)))
        # The second number keeps this draw apart from those of the order.
        drawn = np.random.default_rng([seed, len(names), 0, 3]).permutation(len(names))[:n]
        chosen = {sorted(names)[i] for i in drawn}
    else:
        chosen = set(asked)
        if len(chosen) < len(asked):
            raise ValueError("validation_studies names a study twice.")
        for name in sorted(chosen - set(names)):
            raise ValueError(f"validation_studies: there is no study {name!r}{or_nearest(name, names)}.")
    if len(chosen) == len(names):
        raise ValueError(f"all {len(names)} studies would validate and none be trained on; name fewer or add files.")
    return [name for name in names if name in chosen]
