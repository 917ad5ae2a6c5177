"""The usable cells of several studies: counted, in blocks of neighbours, and read."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from scdiva.data.cells import CellSource
from scdiva.data.matrix import BLOCK_ROWS
from scdiva.data.packed import PackedCells

Source: TypeAlias = CellSource | PackedCells
Cells = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n cells, and the study of each (n,)."""
LEFT_OUT = -2
"""Study number of cells that a pool leaves out."""
CHUNK = 1 << 16
"""Cells that are looked at at once when blocks are made."""


class Held(NamedTuple):
    """Cells as they were read, with where each of them lies: to bring them in order would copy them.

    Attributes
    ----------
    parts
        Tokens and values of what was read at once.
    part, start, length, study
        int64 (n,) of each cell: its part, where it starts there, its number of genes, its study.
    """

    parts: list[tuple[np.ndarray, np.ndarray]]
    part: np.ndarray
    start: np.ndarray
    length: np.ndarray
    study: np.ndarray

    def take(self, rows: np.ndarray | slice) -> Cells:
        """Copy some of the cells.

        Parameters
        ----------
        rows
            int, numbers of the cells, or a slice; one at least.
        """
        start, length = self.start[rows], self.length[rows]
        where = list(zip(self.part[rows].tolist(), start.tolist(), (start + length).tolist(), strict=True))
        # of the types of a batch at once, which would copy them otherwise
        tokens = np.concatenate([self.parts[p][0][a:b] for p, a, b in where], dtype=np.int64)
        values = np.concatenate([self.parts[p][1][a:b] for p, a, b in where], dtype=np.float32)
        return np.concatenate([[0], length]).cumsum(), tokens, values, self.study[rows]


class CellPool:
    """The usable cells of several studies, counted through, in blocks of neighbours.

    Of a block only its source, first and last row are kept, 28 bytes with what is counted, 26 MB for 59 M cells. Its
    rows are found again from the lengths and studies of its source, which may be mapped into memory.

    Parameters
    ----------
    sources
        Opened studies, or one packed corpus.
    studies
        For each source, the study of each of its cells, int (n_obs,).
    min_genes
        Cells with fewer known genes are left out.
    context
        Genes kept per cell, the first of its ranking.
    block_rows
        Cells of a block. No block spans two studies.
    numbers
        For each source, int (n_studies,), the number that each of its studies gets; cells of a study that gets
        :data:`LEFT_OUT` are not of this pool. None: those of `studies` themselves.

    Attributes
    ----------
    n_cells
        Their number.
    sizes, tokens
        int32 (n_blocks,), cells and tokens (with `[LAT]` of each cell) of each block.
    starts
        int64 (n_blocks,), the number in the pool of each block's first cell.
    longest
        Tokens of the longest cell; 0 if there is none.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        studies: Sequence[np.ndarray],
        min_genes: int,
        context: int,
        block_rows: int,
        numbers: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.sources, self.studies = list(sources), list(studies)
        self.context, self.min_genes, self.numbers, self.longest = context, min_genes, numbers, 0
        self._lengths = [source.lengths for source in self.sources]
        columns = [array(kind) for kind in "iIiii"]  # 32 bits, and they grow in place
        for number in range(len(self.sources)):
            for blocks in self._blocks(number, block_rows):
                for column, some in zip(columns, blocks, strict=True):
                    column.frombytes(some.astype(column.typecode).tobytes())
        self._source, self._first, self._span, self.sizes, self.tokens = map(np.asarray, columns)
        self.starts = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        self.n_cells = int(self.sizes.sum())

    def _usable(self, number: int, start: int, stop: int) -> np.ndarray:
        """Rows of a source that are of this pool, between two."""
        kept = self._lengths[number][start:stop] >= self.min_genes
        return start + np.flatnonzero(kept & (self._study(number, slice(start, stop)) != LEFT_OUT))

    def _study(self, number: int, rows: np.ndarray | slice) -> np.ndarray:
        study = self.studies[number][rows]
        return study if self.numbers is None else self.numbers[number][study]

    def _length(self, number: int, rows: np.ndarray | slice) -> np.ndarray:
        return np.minimum(self._lengths[number][rows].astype(np.int64), self.context)

    def _blocks(self, number: int, block_rows: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Make the blocks of a source: of each its source, first row, rows from there, cells and tokens."""
        n_obs = len(self._lengths[number])
        rows = np.zeros(0, np.int64)
        for start in range(0, n_obs, CHUNK):
            rows = np.concatenate([rows, self._usable(number, start, min(start + CHUNK, n_obs))])
            if not len(rows):
                continue
            # No block spans two studies: then a packed corpus gives the very stream that its files give.
            runs = np.concatenate([[0], np.flatnonzero(np.diff(self.studies[number][rows])) + 1, [len(rows)]])
            n = -(-np.diff(runs) // block_rows)
            bounds = np.repeat(runs[:-1] - block_rows * (np.cumsum(n) - n), n) + block_rows * np.arange(n.sum())
            bounds = np.append(bounds, len(rows))
            if start + CHUNK < n_obs and bounds[-1] - bounds[-2] < block_rows:  # the next rows may belong to it
                bounds = bounds[:-1]
            firsts, lasts, waiting = rows[bounds[:-1]], rows[bounds[1:] - 1], rows[bounds[-1] :]
            n_tokens = self._length(number, rows) + 1
            self.longest = max(self.longest, int(n_tokens.max()))
            before = np.concatenate([[0], np.cumsum(n_tokens)])[bounds]
            yield np.full(len(firsts), number), firsts, lasts + 1 - firsts, np.diff(bounds), np.diff(before)
            rows = waiting

    def _find(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, source and row of cells."""
        block = np.searchsorted(self.starts, cells, side="right") - 1
        found, at = np.unique(block, return_inverse=True)
        where = zip(self._source[found].tolist(), self._first[found].tolist(), self._span[found].tolist(), strict=True)
        rows = np.concatenate([self._usable(number, first, first + span) for number, first, span in where])
        before = np.cumsum(self.sizes[found]) - self.sizes[found]
        return block, self._source[block], rows[(before - self.starts[found])[at] + cells]

    def rows_of(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Say where cells lie, without reading them.

        Parameters
        ----------
        cells
            Their numbers in the pool, int (n,); one at least.

        Returns
        -------
        int (n,) of each the number of its source, its row there, and the number of its study.
        """
        _, source, row = self._find(cells)
        return source, row, _each(self._study, source, row)

    def n_tokens(self, cells: np.ndarray) -> np.ndarray:
        """Count the tokens of cells, `[LAT]` with them; nothing is read.

        An upper bound: where a file has two columns of one gene, they become one token.

        Parameters
        ----------
        cells
            As for :meth:`rows_of`.

        Returns
        -------
        int64 (n,).
        """
        _, source, row = self._find(cells)
        return _each(self._length, source, row) + 1

    def read(self, cells: np.ndarray) -> Held:
        """Read cells, in the order of the files, many of one file at once.

        Parameters
        ----------
        cells
            As for :meth:`rows_of`. Of each block all that lies between the first and the last of them is read.

        Returns
        -------
        The cells, in the order asked for.
        """
        block, source, row = self._find(cells)
        order = np.lexsort((row, source))
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(block[order])) + 1, [len(cells)]])
        first, stop, of = row[order[bounds[:-1]]], row[order[bounds[1:] - 1]] + 1, source[order[bounds[:-1]]]
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        part, start, length = np.empty((3, len(cells)), np.int64)
        # of one source, and of a limited number of rows
        changes = np.diff(of) | np.diff(np.cumsum(stop - first) // BLOCK_ROWS)
        for a, b in itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(of)]):
            ranges = list(zip(first[a:b].tolist(), stop[a:b].tolist(), strict=True))
            indptr, tokens, values = self.sources[of[a]].read_ranges(ranges)
            mine = order[bounds[a] : bounds[b]]
            before = np.cumsum(stop[a:b] - first[a:b]) - stop[a:b]  # rows read before, less the row that comes first
            at = row[mine] + np.repeat(before, np.diff(bounds[a : b + 1]))
            part[mine], start[mine] = len(parts), indptr[at]
            length[mine] = np.minimum(indptr[at + 1] - indptr[at], self.context)
            parts.append((tokens, values))
        return Held(parts, part, start, length, _each(self._study, source, row))


def _each(what: Callable[[int, np.ndarray], np.ndarray], source: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Find one value for each cell, source by source."""
    out = np.empty(len(row), np.int64)
    for number in np.unique(source).tolist():
        mine = source == number
        out[mine] = what(number, row[mine])
    return out
