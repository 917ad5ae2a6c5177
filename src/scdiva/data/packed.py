"""Read a packed corpus: serialised cells in parts, local or in object storage."""

from __future__ import annotations

import hashlib
import operator
import os
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from fsspec.core import url_to_fs

from scdiva._constants import N_SPECIAL
from scdiva._files import MOST_INDEX, check_regular, digest, parse_json
from scdiva.data.backed import open_hdf5
from scdiva.data.soma import SomaCells
from scdiva.tokenizer.serialize import score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary

INDEX = "index.json"
FORMAT = 2
"""Format of an index; parts, and a corpus in a single file, have format 1."""
PART_CELLS = 1 << 16
"""Maximum number of cells per part: 240 MB for cells of 600 genes, the memory of a packing process."""
ARRAYS = ("lengths", "study", "measured", "denominator")
"""Arrays of an index over all cells, studies and genes, in one file each."""


_HASHED = 1 << 24
"""Bytes hashed at once."""


class _Part(NamedTuple):
    """A range of cells in one file.

    Attributes
    ----------
    file
        Name of the file.
    start
        Position of its first value in the columns.
    at
        Offset of each column in bytes; None if it is stored in chunks.
    sha256
        Checksum of the whole part; empty if the file has none.
    """

    file: str
    start: int
    at: dict[str, int | None]
    sha256: str = ""


class PackedCells:
    """A corpus from :func:`scdiva.data.pack_files`.

    Opening it reads no part: the lengths and studies of the cells are memory-mapped, or fetched from object storage. A
    part has each column in one piece, so that neighbouring cells are a range of bytes; ranges in object storage are
    fetched in parallel. No file is kept open.

    A local part is compared with its checksum before its first use, 0.2 s for 65,536 cells of 600 genes; parts in
    object storage are not. Tokens and values are checked in every read.

    Parameters
    ----------
    path
        The folder, or its URL (``s3://``, ``gs://``, ``https://`` or any other of fsspec); a single part; or a corpus
        of several studies in a single file.
    vocabulary
        Vocabulary that the corpus must have been packed with. None: any.

    Attributes
    ----------
    bounds
        int64 (n_parts + 1,), first cell of each part. A part has cells of one study.
    lengths
        uint16 or wider (n_obs,), number of genes of each cell.
    study
        int16 or wider (n_obs,), study number of each cell.
    study_names
        Names of the studies.
    measured
        bool (n_studies, n_tokens), genes measured in each study.
    denominator
        float32 (n_tokens,), denominator of the ranking score.
    max_length
        Maximum number of genes per cell.

    Raises
    ------
    FileNotFoundError, ValueError
        If the corpus does not exist, is damaged, refers to files outside its folder, or was packed with another
        vocabulary.
    """

    def __init__(self, path: str | Path, vocabulary: Vocabulary | None = None) -> None:
        self.path = str(path) if is_url(path) else Path(path)
        if not is_packed(path):
            raise ValueError(f"{str(path)!r} is not a packed corpus; make one with scdiva.data.pack_files.")
        try:
            about, arrays = self._from_file() if os.path.isfile(self.path) else self._from_index()
            self.lengths, self.study, self.measured, self.denominator = (arrays[name] for name in ARRAYS)
            self.max_length, self.n_tokens = int(about["max_length"]), int(about["n_tokens"])
            self.fingerprint, self.entropy_floor = str(about["fingerprint"]), float(about["entropy_floor"])
            self._verified = set[str]()
            self._check_arrays()
        except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError, EOFError) as error:
            raise self._damaged(f"{error}; or it is of another version") from error
        if vocabulary is not None:
            self._check_vocabulary(vocabulary)

    def _from_index(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        about = read_index(self.path)
        if about["scdiva_packed"] != FORMAT:
            raise ValueError(f"it has format {about['scdiva_packed']}, not {FORMAT}")
        arrays, parts = {name: self._array(about["arrays"][name]) for name in ARRAYS}, about["parts"]
        self.study_names = list(dict.fromkeys(str(part["study"]) for part in parts))
        self.bounds = np.cumsum([0, *(operator.index(part["cells"]) for part in parts)])
        self._parts = []
        for part in parts:
            at: dict[str, int | None] = {name: operator.index(part["at"][name]) for name in ("tokens", "values")}
            self._parts.append(_Part(_in_folder(part["file"]), 0, at, part["sha256"]))
            if min(part["cells"], *part["at"].values()) < 0:
                raise ValueError(f"{part['file']!r} has a negative number of cells or offset")
            if isinstance(self.path, Path) and (n := check_regular(self.path / part["file"])) != part["bytes"]:
                raise ValueError(f"{part['file']!r} has {n:,} bytes, not {part['bytes']:,}")
        if about["sha256"] != digest([part.sha256 for part in self._parts]):
            raise ValueError(f"the checksums in {INDEX} do not fit each other")
        self._types = {"tokens": token_type(about["n_tokens"]), "values": np.dtype(np.float32)}
        numbers = [self.study_names.index(part["study"]) for part in parts]
        if not np.array_equal(arrays["study"], np.repeat(numbers, np.diff(self.bounds))):
            raise ValueError("the studies of its cells are not those of its parts")
        return about, arrays

    def _array(self, name: str) -> np.ndarray:
        if isinstance(self.path, Path):
            check_regular(file := self.path / _in_folder(name))
            array: np.ndarray = np.load(file, mmap_mode="c")
        else:
            array = np.load(BytesIO(_get(self.path, _in_folder(name))))
        return array

    def _check_arrays(self) -> None:
        """Raise ValueError if arrays are inconsistent with each other or with the index."""
        n_cells, shape = self.bounds[-1], (len(self.study_names), self.n_tokens)
        lengths, denominator = self.lengths, self.denominator
        fits = len(lengths) == len(self.study) == n_cells and self.measured.shape == shape
        if not (fits and denominator.shape == shape[1:] and np.isfinite(denominator).all()):
            raise ValueError("its parts do not fit each other")
        numbers = lengths.dtype.kind in "iu" and (not len(lengths) or lengths.min() >= 0)
        if not numbers or lengths.max(initial=0) > self.max_length:
            raise ValueError(f"its cells do not have 0 to {self.max_length} genes")

    def _from_file(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        with open_hdf5(Path(self.path)) as file:
            if file.attrs["scdiva_packed"] != 1:
                raise ValueError(f"it has format {file.attrs['scdiva_packed']}, not 1")
            columns = {name: file[name] for name in ("tokens", "values")}
            indptr, study, arrays = file["indptr"][:], file["study"][:], {name: file[name][:] for name in ARRAYS[1:]}
            self.study_names = [str(name) for name in file["study_names"].asstr()[:]]
            fits = len(study) == len(indptr) - 1 and all(len(column) == indptr[-1] for column in columns.values())
            if not fits or (np.diff(indptr) < 0).any() or not np.isin(study, np.arange(len(self.study_names))).all():
                raise ValueError("its columns do not fit each other")
            # the position of a cell is the sum of lengths since the last bound
            edges = np.flatnonzero(np.diff(study)) + 1
            self.bounds = np.unique(np.concatenate([[0], edges, np.arange(0, len(study), PART_CELLS), [len(study)]]))
            at = {name: column.id.get_offset() for name, column in columns.items()}
            # a single part has a checksum, a corpus in a single file has none
            stated = parse_json(self.path, str(file.attrs.get("about", "{}")).encode()).get("sha256", "")
            checksum = stated if len(self.bounds) == 2 else ""
            self._parts = [_Part("", int(indptr[first]), at, checksum) for first in self.bounds[:-1]]
            self._types = {name: column.dtype for name, column in columns.items()}
            return dict(file.attrs), {"lengths": np.diff(indptr), **arrays}

    def _check_vocabulary(self, vocabulary: Vocabulary) -> None:
        if vocabulary.fingerprint != self.fingerprint or self.n_tokens != vocabulary.n_genes + N_SPECIAL:
            raise ValueError(
                f"{str(self.path)!r} was packed with another vocabulary (fingerprint {self.fingerprint[:12]}, not "
                f"{vocabulary.fingerprint[:12]}). Pass that vocabulary (vocabulary=, --vocabulary), or pack it again."
            )
        if not np.array_equal(self.denominator, score_denominator(vocabulary.entropy, self.entropy_floor)):
            raise ValueError(f"{str(self.path)!r} was packed with entropies of another vocabulary; pack it again.")

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"{str(self.path)!r} is damaged: {how}. Pack it again.")

    def close(self) -> None:
        """Do nothing, as no file is kept open."""

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
        """Read ranges of cells, joined in order; see :meth:`read`.

        Raises
        ------
        ValueError
            If a part can't be read.
        """
        spans = []
        for start, stop in ranges:
            first, last = np.searchsorted(self.bounds, start, side="right") - 1, np.searchsorted(self.bounds, stop)
            for number in range(first, last):  # a range may span several parts
                self._verify(number)
                begin = int(self.bounds[number])
                at, end = max(start, begin), min(stop, int(self.bounds[number + 1]))
                before, n = (int(self.lengths[a:b].sum(dtype=np.int64)) for a, b in ((begin, at), (at, end)))
                if n:
                    spans.append((self._parts[number], before, n))
        try:
            tokens, values = self._column("tokens", spans), self._column("values", spans)
        except (OSError, EOFError, ValueError) as error:
            raise self._damaged(f"it can't be read ({error})") from error
        if len(tokens) and not N_SPECIAL <= tokens.min() <= tokens.max() < self.n_tokens:
            raise self._damaged(f"it has tokens outside of {N_SPECIAL} to {self.n_tokens - 1}")
        if len(values) and not 0 < values.min() <= values.max() < np.inf:  # False for NaN, too
            raise self._damaged("it has values that are not finite and above 0")
        lengths = [self.lengths[start:stop] for start, stop in ranges]
        indptr = np.concatenate([[0], *lengths], dtype=np.int64).cumsum()
        return indptr, tokens.astype(np.int32, copy=False), values.astype(np.float32, copy=False)

    def _verify(self, number: int) -> None:
        """Compare a local part with its checksum, once.

        Raises
        ------
        ValueError
            If it differs.
        """
        part = self._parts[number]
        if part.file in self._verified or not part.sha256 or not isinstance(self.path, Path):
            return
        lengths = self.lengths[self.bounds[number] : self.bounds[number + 1]]
        indptr = np.concatenate([[0], lengths], dtype=np.int64).cumsum()
        content = hashlib.sha256(indptr.tobytes())
        try:
            with (self.path / part.file if part.file else self.path).open("rb") as file:
                for name, dtype in self._types.items():
                    file.seek(part.at[name] or 0)
                    left = int(indptr[-1]) * dtype.itemsize
                    while left and (chunk := file.read(min(left, _HASHED))):
                        content.update(chunk)
                        left -= len(chunk)
        except OSError as error:
            raise self._damaged(f"{part.file!r} can't be read ({error})") from error
        if content.hexdigest() != part.sha256:
            raise self._damaged(f"{part.file or self.path.name!r} does not match its checksum")
        self._verified.add(part.file)

    def _column(self, name: str, spans: list[tuple[_Part, int, int]]) -> np.ndarray:
        """Read spans of a column, each a part, a number of values to skip, and a number of values."""
        dtype, size = self._types[name], self._types[name].itemsize
        if not spans:
            return np.empty(0, dtype)
        extents = [(part.file, part.start + before, n, part.at[name] or 0) for part, before, n in spans]
        if spans[0][0].at[name] is None:  # stored in chunks
            with open_hdf5(Path(self.path)) as opened:
                columns = [opened[name][first : first + n] for _, first, n, _ in extents]
        elif isinstance(self.path, Path):
            columns = [
                np.fromfile(self.path / file, dtype, n, offset=at + first * size) for file, first, n, at in extents
            ]
        else:
            store, root = url_to_fs(self.path)
            ranges = [(f"{root}/{file}", at + first * size, at + (first + n) * size) for file, first, n, at in extents]
            got = store.cat_ranges(*map(list, zip(*ranges, strict=True)), on_error="raise")
            if [len(one) for one in got] != [stop - first for _, first, stop in ranges]:
                raise EOFError("a part is cut off, or its server sends no ranges of bytes")
            columns = [np.frombuffer(one, dtype) for one in got]
        if [len(values) for values in columns] != [n for _, _, n in spans]:
            raise EOFError("a part is cut off")
        return np.concatenate(columns)


def token_type(n_tokens: int) -> np.dtype:
    """Dtype of the tokens in a part."""
    return np.dtype(np.uint16 if n_tokens <= 1 << 16 else np.int32)


def is_url(path: Any) -> bool:
    """Whether `path` is a URL such as ``s3://bucket/corpus``."""
    return not isinstance(path, Path | SomaCells) and "://" in str(path)


def read_index(path: str | Path) -> dict[str, Any]:
    """Read the index of a packed corpus at a folder or URL."""
    return dict(parse_json(f"{path}/{INDEX}", _get(path, INDEX, limit=MOST_INDEX)))


def is_packed(path: str | Path) -> bool:
    """Whether an existing folder, URL or file is a packed corpus.

    Raises
    ------
    FileNotFoundError
        If the file or folder does not exist.
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
    if not os.path.isfile(path) or not h5py.is_hdf5(path):
        return False
    with open_hdf5(Path(path)) as file:
        return "scdiva_packed" in file.attrs


def _in_folder(name: Any) -> str:
    """Check that a file name of the index is in the folder of the corpus."""
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00]+", name) or name in (".", ".."):
        raise ValueError(f"{INDEX} names {name!r:.200}, which is not a file in its folder")
    return name


def _get(path: str | Path, name: str, stop: int | None = None, limit: int | None = None) -> bytes:
    """Read a file of a corpus, or its first `stop` bytes; raise an error if it is larger than `limit`."""
    if is_url(path):
        store, at = url_to_fs(f"{path}/{name}")
        data = bytes(store.cat_file(at, end=stop or (limit and limit + 1)))
        if limit is not None and len(data) > limit:
            raise ValueError(f"{path}/{name} has more than {limit:,} bytes, which are not read")
        return data
    check_regular(file := Path(path) / name, limit)
    with file.open("rb") as opened:
        return opened.read(stop)
