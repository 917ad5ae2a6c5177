"""A corpus to train on: files, each a study; or all of them serialised once, into one that is read without AnnData."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from scdiva._checks import check_least, or_nearest, warn
from scdiva._constants import MAX_LENGTH, N_SPECIAL
from scdiva.data.blocks import BLOCK_ROWS
from scdiva.data.output import refuse_target, whole_or_not
from scdiva.data.paths import as_path, is_path, listing, reaching
from scdiva.data.reading import Reading
from scdiva.data.soma import SomaCells
from scdiva.data.stored import open_hdf5
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

WHOLE = 1 << 30
"""Bytes from which on a file is not hashed whole."""
PIECES, PIECE = 256, 1 << 20
"""Pieces that are hashed of such a file, and bytes of each."""
_FORMAT = 1
_CHUNK = 1 << 16  # values of a chunk of the file: 256 kB
_PARTS = ("indptr", "tokens", "values", "study", "study_names", "measured", "denominator")
_ATTRIBUTES = ("max_length", "n_tokens", "fingerprint", "entropy_floor")


def data_files(data: Iterable[Any]) -> list[Any]:
    """Replace each folder of files by its files, in the order of their paths.

    Parameters
    ----------
    data
        Paths and AnnData objects. A folder that is no ``.zarr`` itself stands for every ``.h5ad`` and ``.zarr`` below
        it.

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
                found = sorted(_below(path)) if not _is_zarr(path) and path.is_dir() else found
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


def file_note(path: str | Path) -> dict[str, Any]:
    """Note how large a file is and what it holds.

    Parameters
    ----------
    path
        An existing file or folder, here or elsewhere, or cells of a SOMA experiment.

    Returns
    -------
    `size` in bytes, and `sha256` of all of it if that is below 1 GiB. To read all of an atlas would take minutes, so of
    more it is `sampled_sha256`: of 256 pieces of 1 MiB at even distances. Both are of the names and sizes of the files
    of a folder too. A file that was written anew differs; values overwritten in place between two pieces would not be
    noticed.
    Of a URL nothing is read: `files` and `size` in bytes together, and `listing_sha256`, of their names, sizes and
    ETags (:func:`scdiva.data.paths.listing`). Of cells of a SOMA experiment which they are, not what they hold.
    """
    path = as_path(path)
    if isinstance(path, SomaCells):
        return path.note()
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
                while piece := file.read(PIECE):
                    digest.update(piece)
        return {"size": size, "sha256": digest.hexdigest()}
    for at in np.linspace(0, size - PIECE, PIECES).astype(np.int64).tolist():
        number = int(np.searchsorted(ends, at, side="right"))
        with parts[number].open("rb") as file:
            file.seek(at - int(ends[number]) + sizes[number])
            digest.update(file.read(PIECE))
    return {"size": size, "sampled_sha256": digest.hexdigest()}


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
    return {as_path(one).name: file_note(one) for one in data if is_path(one)}


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


def pack_files(
    paths: Sequence[str | Path],
    vocabulary: Vocabulary | str | Path,
    out: str | Path,
    *,
    max_length: int = MAX_LENGTH,
    entropy_floor: float = ENTROPY_FLOOR,
    min_genes: int = 1,
    **reading: Any,
) -> PackedCells:
    """Serialise many files into one, cell after cell, by row blocks.

    Parameters
    ----------
    paths
        ``.h5ad`` or ``.zarr`` files, one study each, or folders of them; the file's name without suffix is the study's
        name. They may have different genes: each is matched by itself, as human or mouse, unless
        `species` says which.
    vocabulary
        Genes and entropies.
    out
        File to write, whole or not at all; replaced if it exists.
    max_length
        Genes kept per cell.
    entropy_floor
        See :func:`scdiva.tokenizer.serialize.score_denominator`.
    min_genes
        Cells with fewer known genes are left out, with a warning that says how many.
    **reading
        `layer`, `use_raw`, `input`, `gene_ids`, `species` and `duplicates`, as in :func:`scdiva.tl.embed`.

    Returns
    -------
    The written file, opened.

    Raises
    ------
    TypeError
        If `paths` is a single path.
    FileExistsError
        If `out` is one of the files.
    RuntimeError
        If another call is writing the same `out`.
    ValueError
        If there are no files, two have one name, or one does not pass :func:`scdiva.data.cells.open_cells`; the message
        names the file.

    Examples
    --------
    >>> import scdiva as sd
    >>> from scdiva.data import pack_files
    >>> sd.datasets.toy(60, 100).write_h5ad("study.h5ad")
    >>> packed = pack_files(["study.h5ad"], "scdiva-mini", "corpus.h5")
    >>> packed.n_obs
    60
    >>> packed.close()
    """
    from scdiva.data.cells import open_cells

    check_least(min_genes=(min_genes, 1))
    if is_path(paths):
        raise TypeError(f"paths={str(paths)!r} must be a list of files and folders.")
    how = Reading(**reading, empty="nan")
    files, out = [as_path(path) for path in data_files(paths)], Path(out)
    names = study_names(files)
    refuse_target(out, True, *files)
    vocabulary = load_vocabulary(vocabulary)
    denominator = score_denominator(vocabulary.entropy, entropy_floor)
    n_tokens = vocabulary.n_genes + N_SPECIAL
    with whole_or_not(out) as new, h5py.File(new, "w") as file:
        file.attrs.update(
            scdiva_packed=_FORMAT,
            fingerprint=vocabulary.fingerprint,
            n_tokens=n_tokens,
            max_length=max_length,
            entropy_floor=entropy_floor,
        )
        token_dtype = np.uint16 if n_tokens <= 1 << 16 else np.int32
        columns = {
            name: file.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(_CHUNK,))
            for name, dtype in (("tokens", token_dtype), ("values", np.float32), ("study", np.int32))
        }
        measured = np.zeros((len(files), n_tokens), dtype=bool)
        lengths = [np.zeros(1, np.int64)]
        for number, path in enumerate(files):
            try:
                source = open_cells(path, vocabulary, how, max_length=max_length, entropy_floor=entropy_floor)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path.name}: {error.args[0]}") from error
            measured[number, source.measured_tokens] = True
            n_kept = 0
            for start in range(0, source.n_obs, BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, source.n_obs)
                kept = np.flatnonzero(source.lengths[start:stop] >= min_genes)
                indptr, tokens, values = take_cells(source.read(start, stop), kept)
                read = {"tokens": tokens, "values": values, "study": np.full(len(kept), number, np.int32)}
                for name, column in columns.items():
                    column.resize((len(column) + len(read[name]),))
                    column[len(column) - len(read[name]) :] = read[name]
                lengths.append(np.diff(indptr))
                n_kept += len(kept)
            source.close()
            warn_left_out(names[number], source.n_obs - n_kept, source.n_obs, min_genes)
        file["indptr"] = np.cumsum(np.concatenate(lengths))
        file["study_names"] = np.array(names, dtype=h5py.string_dtype())
        file.create_dataset("measured", data=measured, compression="gzip")
        file["denominator"] = denominator
    return PackedCells(out)


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


def take_cells(
    ragged: tuple[np.ndarray, np.ndarray, np.ndarray], rows: np.ndarray, max_length: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose cells of serialised ones, in the order of `rows`, and cut each to its first `max_length` genes.

    Parameters
    ----------
    ragged
        indptr, tokens, values.
    rows
        int, numbers of the cells.
    max_length
        Genes kept per cell; None keeps all.

    Returns
    -------
    indptr, starting at 0, tokens, values.
    """
    indptr, tokens, values = ragged
    lengths = np.diff(indptr)[rows]
    if max_length is not None:
        lengths = np.minimum(lengths, max_length)
    out = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    if not len(rows):
        return out, tokens[:0].copy(), values[:0].copy()
    starts = indptr[:-1][rows]
    spans = [slice(a, b) for a, b in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
    # cell by cell: to gather position by position takes several times as long
    return out, np.concatenate([tokens[s] for s in spans]), np.concatenate([values[s] for s in spans])


class PackedCells:
    """A corpus that :func:`pack_files` wrote.

    Parameters
    ----------
    path
        The file.
    vocabulary
        If given, the file must have been packed with it.

    Attributes
    ----------
    study
        int32 (n_obs,), number of each cell's study.
    study_names
        Names of the studies.
    measured
        bool (n_studies, n_tokens), the genes that each study has a column for.
    max_length
        Genes kept per cell.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such file, it is no packed corpus, is damaged, or was packed with another vocabulary.
    """

    def __init__(self, path: str | Path, vocabulary: Vocabulary | None = None) -> None:
        self.path = Path(path)
        if not is_packed(self.path):
            raise ValueError(f"{str(path)!r} is no packed corpus; make one with scdiva.data.pack_files.")
        self._file: h5py.File | None = None
        file = self._open()
        missing = [name for name in _PARTS if name not in file] + [n for n in _ATTRIBUTES if n not in file.attrs]
        if file.attrs["scdiva_packed"] != _FORMAT or missing:
            raise ValueError(
                f"{str(path)!r} is a packed corpus of another version or is damaged (lacks {missing}); pack it anew."
            )
        self.max_length = int(file.attrs["max_length"])
        self.n_tokens = int(file.attrs["n_tokens"])
        self.fingerprint = str(file.attrs["fingerprint"])
        self.entropy_floor = float(file.attrs["entropy_floor"])
        self.indptr = file["indptr"][:]
        self.study = file["study"][:]
        self.study_names = [str(name) for name in file["study_names"].asstr()[:]]
        self.measured = file["measured"][:]
        n = int(self.indptr[-1])
        whole = len(self.study) == len(self.indptr) - 1 and len(file["tokens"]) == len(file["values"]) == n
        if not whole or (self.lengths < 0).any() or not np.isin(self.study, np.arange(len(self.study_names))).all():
            raise ValueError(f"{str(path)!r} is damaged: its parts do not fit each other; pack it anew.")
        if vocabulary is not None:
            self._check_vocabulary(vocabulary, file["denominator"][:])

    def _check_vocabulary(self, vocabulary: Vocabulary, denominator: np.ndarray) -> None:
        if vocabulary.fingerprint != self.fingerprint:
            raise ValueError(
                f"{str(self.path)!r} was packed with another vocabulary (fingerprint {self.fingerprint[:12]}, not "
                f"{vocabulary.fingerprint[:12]}); pack it anew."
            )
        if not np.array_equal(denominator, score_denominator(vocabulary.entropy, self.entropy_floor)):
            raise ValueError(f"{str(self.path)!r} was packed with other entropies than the vocabulary's; pack it anew.")

    def _open(self) -> h5py.File:
        if self._file is None:
            self._file = h5py.File(self.path, "r")
        return self._file

    def close(self) -> None:
        """Close the file. It is opened anew when read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        return len(self.study)

    @property
    def lengths(self) -> np.ndarray:
        """Genes of each cell, int64 (n_obs,)."""
        return np.diff(self.indptr)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read cells `start` to `stop`.

        Returns
        -------
        indptr int64 (n + 1,), tokens int32, values float32, as :func:`scdiva.tokenizer.serialize.serialize` returns.
        """
        return self.read_ranges([(start, stop)])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read ranges of cells, one after another: what :meth:`read` returns of each, joined.

        Raises
        ------
        ValueError
            If the file can't be read.
        """
        file = self._open()
        spans = [slice(int(self.indptr[start]), int(self.indptr[stop])) for start, stop in ranges]
        lengths = [np.diff(self.indptr[start : stop + 1]) for start, stop in ranges]
        try:
            tokens, values = (np.concatenate([file[name][s] for s in spans]) for name in ("tokens", "values"))
        except OSError as error:
            raise ValueError(f"{str(self.path)!r} is damaged: it can't be read ({error}). Pack it anew.") from error
        indptr = np.concatenate([[0], *lengths]).cumsum()
        return indptr, tokens.astype(np.int32, copy=False), values.astype(np.float32, copy=False)


def is_packed(path: str | Path) -> bool:
    """Tell whether a file is a packed corpus.

    Parameters
    ----------
    path
        An existing file or folder.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    ValueError
        If it is an HDF5 file that can't be opened.
    """
    path = as_path(path)
    if not isinstance(path, Path):
        return False
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    if path.is_dir() or not h5py.is_hdf5(path):
        return False
    with open_hdf5(path) as file:
        return "scdiva_packed" in file.attrs
