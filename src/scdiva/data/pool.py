"""The usable cells of several studies, counted through and read by blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from scdiva.data.blocks import BLOCK_ROWS

Cells = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n cells, and the study of each (n,)."""
LEFT_OUT = -2
"""Study number of cells that a pool leaves out."""


class Source(Protocol):
    """What a :class:`~scdiva.data.cells.CellSource` and a :class:`~scdiva.data.packed.PackedCells` have in common."""

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Known genes of each cell, int (n_obs,)."""
        ...

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read ranges of cells, first and end of each, one after another: indptr, tokens, values."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


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

    def take(self, rows: np.ndarray) -> Cells:
        """Copy some of the cells.

        Parameters
        ----------
        rows
            int, numbers of the cells; one at least.
        """
        start, length = self.start[rows], self.length[rows]
        where = list(zip(self.part[rows].tolist(), start.tolist(), (start + length).tolist(), strict=True))
        # of the types of a batch at once, which would copy them otherwise
        tokens = np.concatenate([self.parts[p][0][a:b] for p, a, b in where], dtype=np.int64)
        values = np.concatenate([self.parts[p][1][a:b] for p, a, b in where], dtype=np.float32)
        return np.concatenate([[0], length]).cumsum(), tokens, values, self.study[rows]


class CellPool:
    """The usable cells of several studies, counted through.

    Parameters
    ----------
    sources
        Opened studies, or one packed corpus.
    studies
        For each source, the study number of each of its cells, int (n_obs,); cells with :data:`LEFT_OUT` are not of
        this pool.
    min_genes
        Cells with fewer known genes are left out.
    context
        Genes kept per cell, the first of its ranking.
    block_rows
        Neighbouring cells read together.

    Attributes
    ----------
    blocks
        Of each block, the number of its source and its rows there.
    block_studies
        Study number of each block.
    """

    def __init__(
        self, sources: Sequence[Source], studies: Sequence[np.ndarray], min_genes: int, context: int, block_rows: int
    ) -> None:
        self.sources = list(sources)
        self.studies = list(studies)
        self.context = context
        self.blocks: list[tuple[int, np.ndarray]] = []
        for number, source in enumerate(self.sources):
            usable = np.flatnonzero((source.lengths >= min_genes) & (self.studies[number] != LEFT_OUT))
            # No block spans two studies: then a packed corpus gives the very stream that its files give.
            of_studies = np.split(usable, np.flatnonzero(np.diff(self.studies[number][usable])) + 1)
            for rows in of_studies:
                self.blocks += [(number, rows[i : i + block_rows]) for i in range(0, len(rows), block_rows)]
        self.block_sizes = tuple(len(rows) for _, rows in self.blocks)
        self.block_studies = [int(self.studies[number][rows[0]]) for number, rows in self.blocks]
        self.n_cells = sum(self.block_sizes)
        self._n_tokens = [np.minimum(source.lengths, context).astype(np.int32) + 1 for source in self.sources]

    def n_tokens(self, block: int) -> np.ndarray:
        """Count the tokens of a block's cells, `[LAT]` with them; nothing is read.

        An upper bound: where a file has two columns of one gene, they become one token.

        Parameters
        ----------
        block
            Its number.

        Returns
        -------
        int32 (n,).
        """
        number, rows = self.blocks[block]
        found: np.ndarray = self._n_tokens[number][rows]
        return found

    def read_block(self, block: int) -> Cells:
        """Read one block.

        Parameters
        ----------
        block
            Its number.

        Returns
        -------
        indptr, tokens, values, and the study of each cell.
        """
        held = self.read_blocks([block])
        return held.take(np.arange(len(held.part)))

    def read_blocks(self, blocks: Sequence[int] | np.ndarray) -> Held:
        """Read blocks, in the order of the files, many of one file at once.

        Parameters
        ----------
        blocks
            Their numbers.

        Returns
        -------
        Their cells, in the order asked for. A block that is asked for twice is read once and given twice.
        """
        blocks = np.asarray(blocks)
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        found: dict[int, tuple[int, np.ndarray, np.ndarray, np.ndarray]] = {}
        for together in self._together(np.unique(blocks)):
            number = self.blocks[together[0]][0]
            rows = [self.blocks[block][1] for block in together]
            ranges = [(int(some[0]), int(some[-1]) + 1) for some in rows]
            indptr, tokens, values = self.sources[number].read_ranges(ranges)
            before = 0
            for block, some, (first, last) in zip(together, rows, ranges, strict=True):
                at = some - first + before
                length = np.minimum(indptr[at + 1] - indptr[at], self.context)
                found[block] = len(parts), indptr[at], length, self.studies[number][some]
                before += last - first
            parts.append((tokens, values))
        chosen = [found[block] for block in blocks.tolist()]
        part = np.repeat([one[0] for one in chosen], [len(one[1]) for one in chosen])
        start, length, study = (np.concatenate([one[i] for one in chosen]) for i in (1, 2, 3))
        return Held(parts, part, start, length, study)

    def _together(self, blocks: np.ndarray) -> Iterator[list[int]]:
        """Part ascending blocks so that each part is of one file and reads a limited number of rows."""
        part: list[int] = []
        n_rows = 0
        for block in blocks.tolist():
            number, rows = self.blocks[block]
            n = int(rows[-1]) + 1 - int(rows[0])
            if part and (self.blocks[part[0]][0] != number or n_rows + n > BLOCK_ROWS):
                yield part
                part, n_rows = [], 0
            part.append(block)
            n_rows += n
        if part:
            yield part
