"""Cells that were opened: read by row blocks, as expression or as ranked gene tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from scdiva._constants import N_SPECIAL, TARGET_SUM
from scdiva._validate import Scan
from scdiva.data.blocks import KeptRows, OpenMatrix, open_path, read_ranges, row_blocks, row_readable
from scdiva.data.reading import AS_IT_IS, Reading
from scdiva.tokenizer.serialize import serialize, to_token_space
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    import pandas as pd

    from scdiva.data.stored import StoredNames

Ragged = tuple[np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n serialised cells."""


@dataclass
class CellSource:
    """Cells of one AnnData object or file, ready to be read. Made by :func:`scdiva.data.open_cells`.

    Held in memory are what was found out about each gene and the number of known genes of each cell, and the matrix
    itself if it is small: the user's own is then read once. A source of a file may be sent to another process; it
    opens the file there anew.

    Attributes
    ----------
    vocabulary
        The genes.
    tokens
        int32 (n_vars,), token of each column; -1 = unknown.
    report
        What :func:`scdiva.data.genes.judge_genes` reported about the genes.
    scan
        What :func:`scdiva._validate.scan` found.
    denominator
        float32 (n_tokens,) of the ranking score, or None where the cells are not to be ranked.
    max_length
        Genes kept per cell.
    block_rows
        Rows read at once.
    reading
        What is read.
    columns
        Columns read, ascending; None: all. See :func:`restricted`.
    name
        What the study is called: the name of the file without suffix, unless somebody names it.
    """

    vocabulary: Vocabulary
    tokens: np.ndarray
    report: dict[str, Any]
    scan: Scan
    max_length: int
    block_rows: int
    denominator: np.ndarray | None
    reading: Reading = AS_IT_IS
    path: Path | None = None
    _opened: OpenMatrix | None = field(default=None, repr=False)
    _matrix: Any = field(default=None, repr=False)
    _process: int = field(default_factory=os.getpid, repr=False)
    columns: np.ndarray | None = None
    name: str = ""

    @property
    def n_obs(self) -> int:
        """Number of cells, also of those without a known gene."""
        return self.scan.n_obs

    @property
    def n_tokens(self) -> int:
        """Size of the token space: genes and specials."""
        return self.vocabulary.n_genes + N_SPECIAL

    @property
    def kind(self) -> Literal["counts", "lognorm"]:
        """What the matrix holds."""
        return self.scan.kind

    @property
    def obs_names(self) -> pd.Index | StoredNames:
        """Names of the cells, by row number."""
        return self._open().obs_names

    @property
    def var(self) -> pd.DataFrame:
        """Annotation of the columns that were opened, which may be those of `adata.raw`."""
        return self._open().var

    @property
    def lengths(self) -> np.ndarray:
        """Number of columns above zero with a known gene, for each cell, int32 (n_obs,); 0 = nothing to embed."""
        return self.scan.known_per_cell

    @property
    def measured_tokens(self) -> np.ndarray:
        """Tokens that this study has a column for, ascending."""
        return np.unique(self.tokens[self.tokens >= 0])

    def _open(self) -> OpenMatrix:
        # HDF5 handles do not survive a fork: a data loader's worker opens the file anew.
        if self.path is not None and (self._opened is None or self._process != os.getpid()):
            self._opened = open_path(self.path, self.reading.layer, self.reading.use_raw)
            self._matrix = self._matrix if isinstance(self._matrix, KeptRows) else None  # in memory it lives on
            self._process = os.getpid()
        assert self._opened is not None  # only a source of a file lets go of it
        if self._matrix is None:
            self._matrix = row_readable(self._opened.matrix)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.path is not None:
            state["_opened"] = state["_matrix"] = None
        return state

    def close(self) -> None:
        """Close the file, if there is one. It is opened anew when read."""
        if self.path is not None and self._opened is not None and self._process == os.getpid():
            self._opened.close()
            self._opened = self._matrix = None

    def expression(self, start: int, stop: int) -> sp.csr_matrix:
        """Read cells `start` to `stop` as log-normalised expression in token space.

        Returns
        -------
        float32 CSR (stop - start, n_tokens), see :func:`scdiva.tokenizer.serialize.to_token_space`.
        """
        return self._expression([(start, stop)])

    def _expression(self, ranges: Sequence[tuple[int, int]]) -> sp.csr_matrix:
        self._open()
        block = read_ranges(self._matrix, ranges)
        block = block if self.columns is None else block[:, self.columns]
        return to_token_space(block, self.tokens, self.n_tokens, self.kind)

    def log_normalised(self) -> sp.csr_matrix:
        """Read all cells whole, as log1p of counts per ten thousand; genes that no vocabulary holds are kept.

        Returns
        -------
        float64 CSR (n_obs, n_vars), columns as in :attr:`var`. A cell without counts is a row of zeros.
        """
        self._open()
        return to_log([block for _, block in row_blocks(self._matrix, self.block_rows)], self.kind)

    def expression_blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, sp.csr_matrix]]:
        """Read cells in order, `block_rows` at a time.

        Yields
        ------
        The block's first row, and what :meth:`expression` returns.
        """
        stop = self.n_obs if stop is None else stop
        for lo in range(start, stop, self.block_rows):
            yield lo, self.expression(lo, min(lo + self.block_rows, stop))

    def read(self, start: int, stop: int) -> Ragged:
        """Read cells `start` to `stop`, ranked.

        Returns
        -------
        indptr, tokens and values, see :func:`scdiva.tokenizer.serialize.serialize`.
        """
        return self.read_ranges([(start, stop)])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Ragged:
        """Read ranges of cells, one after another, ranked: what :meth:`read` returns of each, joined."""
        if self.denominator is None:
            raise ValueError("this source was opened to be counted, not ranked; use open_cells.")
        return serialize(self._expression(ranges), self.denominator, self.max_length)

    def windows(
        self, n_cells: int, start: int = 0, stop: int | None = None, *, on_read: Callable[[int], Any] | None = None
    ) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Read cells in order, many at a time; memory does not grow with their number.

        Parameters
        ----------
        n_cells
            Cells of a window, at least; it is filled up to whole blocks of `block_rows`. The last one may be smaller.
        start, stop
            Range of rows; `None` is the last row.
        on_read
            Called after each block with the number of its rows.

        Yields
        ------
        Row numbers, int64 (n,), and indptr, tokens and values of these cells. Cells without a known gene (there are
        none unless ``empty="nan"`` was given) are left out, and with them a window of nothing else.
        """
        stop = self.n_obs if stop is None else stop
        if n_cells < 1:
            raise ValueError(f"n_cells must be at least 1, got {n_cells}.")
        if not 0 <= start <= stop <= self.n_obs:
            raise ValueError(f"rows {start} to {stop} are not within the {self.n_obs} cells.")
        step = -(-n_cells // self.block_rows) * self.block_rows
        for first in range(start, stop, step):
            last = min(first + step, stop)
            parts = []
            for lo in range(first, last, self.block_rows):
                hi = min(lo + self.block_rows, last)
                parts.append(self.read(lo, hi))
                if on_read is not None:
                    on_read(hi - lo)
            lengths = np.concatenate([np.diff(indptr) for indptr, _, _ in parts])
            filled = np.flatnonzero(lengths)
            if len(filled):
                # A cell without genes holds no position: leaving out its entry of indptr leaves out the cell.
                indptr = np.concatenate([[0], np.cumsum(lengths[filled], dtype=np.int64)])
                tokens, values = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
                yield first + filled, (indptr, tokens, values)


def restricted(source: CellSource, tokens: np.ndarray) -> CellSource:
    """Leave all but some genes out, as if the data had no other columns: cells are normalised to these alone.

    Parameters
    ----------
    source
        Checked cells, of all columns.
    tokens
        Genes to keep, as tokens.

    Returns
    -------
    The same cells; some may have no gene left. The given source itself, if all of its columns are kept.
    """
    kept = np.isin(source.tokens, tokens)
    if kept.all():
        return source
    columns = np.flatnonzero(kept)
    source._open()
    lengths = _known_per_cell(source._matrix, kept, source.block_rows)
    found = replace(source.scan, known_per_cell=lengths)
    return replace(source, tokens=source.tokens[columns], scan=found, columns=columns)


def _known_per_cell(matrix: Any, known: np.ndarray, block_rows: int) -> np.ndarray:
    # Every stored value of a canonical block is above zero.
    parts = [
        np.add.reduceat(np.append(known[b.indices], 0), b.indptr[:-1]) * (np.diff(b.indptr) > 0)
        for _, b in row_blocks(matrix, block_rows)
    ]
    return np.concatenate(parts).astype(np.int32)


def to_log(blocks: Sequence[sp.csr_matrix], kind: str) -> sp.csr_matrix:
    """Join row blocks of counts or log-normalised values, as log1p of counts per ten thousand."""
    values = sp.vstack(blocks, format="csr").astype(np.float64)
    if kind == "counts":
        total = np.asarray(values.sum(axis=1)).ravel()
        values = sp.csr_matrix(sp.diags_array(TARGET_SUM / np.where(total > 0, total, 1.0)) @ values)
        values.data = np.log1p(values.data)
    return values
