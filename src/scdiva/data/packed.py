"""A corpus serialised once into one HDF5 file, which training reads without AnnData."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from scdiva._checks import check_least, warn
from scdiva._constants import MAX_LENGTH, N_SPECIAL
from scdiva.data.blocks import BLOCK_ROWS
from scdiva.data.files import data_files, study_names
from scdiva.data.output import refuse_target, whole_or_not
from scdiva.data.reading import Reading
from scdiva.data.stored import open_hdf5
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

_FORMAT = 1
_CHUNK = 1 << 16  # values of a chunk of the file: 256 kB
_PARTS = ("indptr", "tokens", "values", "study", "study_names", "measured", "denominator")
_ATTRIBUTES = ("max_length", "n_tokens", "fingerprint", "entropy_floor")


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
    if isinstance(paths, str | Path):
        raise TypeError(f"paths={str(paths)!r} must be a list of files and folders.")
    how = Reading(**reading, empty="nan")
    files, out = [Path(path) for path in data_files(paths)], Path(out)
    names = study_names(files)
    refuse_target(out, True, *(file for file in files if file.exists()))
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
                _append(columns["tokens"], tokens)
                _append(columns["values"], values)
                _append(columns["study"], np.full(len(kept), number, np.int32))
                lengths.append(np.diff(indptr))
                n_kept += len(kept)
            source.close()
            warn_left_out(names[number], source.n_obs - n_kept, source.n_obs, min_genes)
        file["indptr"] = np.cumsum(np.concatenate(lengths))
        file["study_names"] = np.array(names, dtype=h5py.string_dtype())
        file.create_dataset("measured", data=measured, compression="gzip")
        file["denominator"] = denominator
    return PackedCells(out)


def _append(column: h5py.Dataset, values: np.ndarray) -> None:
    n = len(column)
    column.resize((n + len(values),))
    column[n:] = values


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
        self._process = -1
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
            raise ValueError(
                f"{str(self.path)!r} was packed with other entropies than this vocabulary's; pack it anew."
            )

    def _open(self) -> h5py.File:
        # HDF5 handles do not survive a fork: a data loader's worker opens the file anew.
        if self._file is None or self._process != os.getpid():
            self._file, self._process = h5py.File(self.path, "r"), os.getpid()
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def close(self) -> None:
        """Close the file. It is opened anew when read."""
        if self._file is not None and self._process == os.getpid():
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
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    if path.is_dir() or not h5py.is_hdf5(path):
        return False
    with open_hdf5(path) as file:
        return "scdiva_packed" in file.attrs
