"""A packed corpus, read: cells serialised once into parts, of which any are read without AnnData, also from afar."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
from fsspec.core import url_to_fs

from scdiva.data.soma import SomaCells
from scdiva.data.stored import open_hdf5
from scdiva.tokenizer.serialize import score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary

INDEX = "index.json"
FORMAT = 2
"""Of an index; that of a part is 1, as of the one file that earlier versions packed a corpus into."""
PART_CELLS = 1 << 16
"""Cells of a part at most: 240 MB of cells of 600 genes, which is what a process that packs holds."""
ARRAYS = ("lengths", "study", "measured", "denominator")
"""What an index holds of all cells, studies and genes, in a file each."""


_Part: TypeAlias = tuple[str, int, dict[str, Any]]
"""File of a part, where its cells begin there in values, and where each column begins in bytes (None: in chunks)."""


class PackedCells:
    """A corpus that :func:`scdiva.data.pack_files` wrote.

    Opening it opens no part: the lengths of the cells and the numbers of their studies are mapped into memory, those of
    a corpus in object storage are fetched. A part holds each column in one piece, so that neighbouring cells are a
    range of bytes; ranges in object storage are fetched side by side. No file is held open.

    Parameters
    ----------
    path
        The folder, or its address (``s3://``, ``gs://``, ``https://`` or whatever fsspec reads); or a single part, or
        the file that earlier versions packed a corpus into.
    vocabulary
        If given, the corpus must have been packed with it.

    Attributes
    ----------
    bounds
        int64 (n_parts + 1,), first cell of each part. A part is of one study.
    lengths
        uint16 or wider (n_obs,), genes of each cell.
    study
        int16 or wider (n_obs,), number of each cell's study.
    study_names
        Names of the studies.
    measured
        bool (n_studies, n_tokens), the genes that each study has a column for.
    denominator
        float32 (n_tokens,), what genes were ranked by.
    max_length
        Genes kept per cell.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such corpus, it is none, is damaged, or was packed with another vocabulary.
    """

    def __init__(self, path: str | Path, vocabulary: Vocabulary | None = None) -> None:
        self.path = str(path) if is_url(path) else Path(path)
        if not is_packed(path):
            raise ValueError(f"{str(path)!r} is no packed corpus; make one with scdiva.data.pack_files.")
        try:
            about, arrays = self._from_file() if os.path.isfile(self.path) else self._from_index()
            self.lengths, self.study, self.measured, self.denominator = (arrays[name] for name in ARRAYS)
            self.max_length, self.n_tokens = int(about["max_length"]), int(about["n_tokens"])
            self.fingerprint, self.entropy_floor = str(about["fingerprint"]), float(about["entropy_floor"])
            if not len(self.lengths) == len(self.study) == self.bounds[-1]:
                raise ValueError("its parts do not fit each other")
        except (KeyError, OSError, TypeError, ValueError, EOFError) as error:
            raise self._damaged(f"{error}; or it is of another version") from error
        if vocabulary is not None:
            self._check_vocabulary(vocabulary)

    def _from_index(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        about = read_index(self.path)
        if about["scdiva_packed"] != FORMAT:
            raise ValueError(f"it has format {about['scdiva_packed']}, not {FORMAT}")
        if isinstance(self.path, Path):
            arrays = {name: np.load(self.path / about["arrays"][name], mmap_mode="c") for name in ARRAYS}
        else:
            arrays = {name: np.load(BytesIO(_get(self.path, about["arrays"][name]))) for name in ARRAYS}
        self.study_names = list(dict.fromkeys(part["study"] for part in about["parts"]))
        self.bounds = np.cumsum([0, *(part["cells"] for part in about["parts"])])
        self._parts = [(part["file"], 0, part["at"]) for part in about["parts"]]
        self._types = {"tokens": token_type(about["n_tokens"]), "values": np.dtype(np.float32)}
        return about, arrays

    def _from_file(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        with open_hdf5(Path(self.path)) as file:
            if file.attrs["scdiva_packed"] != 1:
                raise ValueError(f"it has format {file.attrs['scdiva_packed']}, not 1")
            columns = {name: file[name] for name in ("tokens", "values")}
            indptr, study, arrays = file["indptr"][:], file["study"][:], {name: file[name][:] for name in ARRAYS[1:]}
            self.study_names = [str(name) for name in file["study_names"].asstr()[:]]
            fits = len(study) == len(indptr) - 1 and all(len(column) == indptr[-1] for column in columns.values())
            if not fits or (np.diff(indptr) < 0).any() or not np.isin(study, np.arange(len(self.study_names))).all():
                raise ValueError("its parts do not fit each other")
            # where cells lie is a sum of lengths since the last bound
            edges = np.flatnonzero(np.diff(study)) + 1
            self.bounds = np.unique(np.concatenate([[0], edges, np.arange(0, len(study), PART_CELLS), [len(study)]]))
            at = {name: column.id.get_offset() for name, column in columns.items()}
            self._parts = [("", int(indptr[first]), at) for first in self.bounds[:-1]]
            self._types = {name: column.dtype for name, column in columns.items()}
            return dict(file.attrs), {"lengths": np.diff(indptr), **arrays}

    def _check_vocabulary(self, vocabulary: Vocabulary) -> None:
        if vocabulary.fingerprint != self.fingerprint:
            raise ValueError(
                f"{str(self.path)!r} was packed with another vocabulary (fingerprint {self.fingerprint[:12]}, not "
                f"{vocabulary.fingerprint[:12]}); pack it anew."
            )
        if not np.array_equal(self.denominator, score_denominator(vocabulary.entropy, self.entropy_floor)):
            raise ValueError(f"{str(self.path)!r} was packed with other entropies than the vocabulary's; pack it anew.")

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"{str(self.path)!r} is damaged: {how}. Pack it anew.")

    def close(self) -> None:
        """Do nothing: it holds no file open."""

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        return len(self.study)

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
            If a part can't be read.
        """
        spans = []
        for start, stop in ranges:
            first, last = np.searchsorted(self.bounds, start, side="right") - 1, np.searchsorted(self.bounds, stop)
            for number in range(first, last):  # a range may go on in the next part
                begin = int(self.bounds[number])
                at, end = max(start, begin), min(stop, int(self.bounds[number + 1]))
                before, n = (int(self.lengths[a:b].sum(dtype=np.int64)) for a, b in ((begin, at), (at, end)))
                if n:
                    spans.append((self._parts[number], before, n))
        try:
            tokens, values = self._column("tokens", spans), self._column("values", spans)
        except (OSError, EOFError, ValueError) as error:
            raise self._damaged(f"it can't be read ({error})") from error
        lengths = [self.lengths[start:stop] for start, stop in ranges]
        indptr = np.concatenate([[0], *lengths], dtype=np.int64).cumsum()
        return indptr, tokens.astype(np.int32, copy=False), values.astype(np.float32, copy=False)

    def _column(self, name: str, spans: list[tuple[_Part, int, int]]) -> np.ndarray:
        """Read spans of a column: of a part, so many values, after so many."""
        dtype, size = self._types[name], self._types[name].itemsize
        if not spans:
            return np.empty(0, dtype)
        places = [(file, start + before, n, at[name]) for (file, start, at), before, n in spans]
        if places[0][-1] is None:  # of earlier versions
            with open_hdf5(Path(self.path)) as opened:
                found = [opened[name][first : first + n] for _, first, n, _ in places]
        elif isinstance(self.path, Path):
            found = [np.fromfile(self.path / file, dtype, n, offset=at + first * size) for file, first, n, at in places]
        else:
            store, root = url_to_fs(self.path)
            ranges = [(f"{root}/{file}", at + first * size, at + (first + n) * size) for file, first, n, at in places]
            got = store.cat_ranges(*map(list, zip(*ranges, strict=True)), on_error="raise")
            found = [np.frombuffer(one, dtype) for one in got]
        if [len(values) for values in found] != [n for _, _, n in spans]:
            raise EOFError("a part is cut off, or its server sends no ranges of bytes")
        return np.concatenate(found)


def token_type(n_tokens: int) -> np.dtype:
    """Give the narrowest type that a part holds tokens in.

    Parameters
    ----------
    n_tokens
        Number of tokens that there are.
    """
    return np.dtype(np.uint16 if n_tokens <= 1 << 16 else np.int32)


def is_url(path: Any) -> bool:
    """Tell whether something is an address that fsspec reads, such as ``s3://bucket/corpus``.

    Parameters
    ----------
    path
        Anything.
    """
    return not isinstance(path, Path | SomaCells) and "://" in str(path)


def read_index(path: str | Path) -> dict[str, Any]:
    """Read the index of a packed corpus.

    Parameters
    ----------
    path
        Its folder or address.
    """
    return dict(json.loads(_get(path, INDEX)))


def is_packed(path: str | Path) -> bool:
    """Tell whether a folder, an address or a file is a packed corpus.

    Parameters
    ----------
    path
        An existing file or folder, or an address.

    Raises
    ------
    FileNotFoundError
        If there is no such file or folder.
    ValueError
        If it is an HDF5 file that can't be opened.
    """
    if isinstance(path, SomaCells):
        return False
    if is_url(path) or os.path.isdir(path):
        try:
            return b'"scdiva_packed"' in _get(path, INDEX, 64)
        except (FileNotFoundError, IsADirectoryError):
            return False
    if not os.path.exists(path):
        raise FileNotFoundError(f"no file {str(path)!r}.")
    if not h5py.is_hdf5(path):
        return False
    with open_hdf5(Path(path)) as file:
        return "scdiva_packed" in file.attrs


def _get(path: str | Path, name: str, stop: int | None = None) -> bytes:
    """Read a file of a corpus, or its first bytes."""
    if is_url(path):
        store, at = url_to_fs(f"{path}/{name}")
        return bytes(store.cat_file(at, end=stop))
    with (Path(path) / name).open("rb") as file:
        return file.read(stop)
