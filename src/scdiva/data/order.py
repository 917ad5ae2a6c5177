"""The order in which training sees cells: a pure function of the seed and the number of the batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

KEPT = 8
"""Draws that are kept: every batch asks for them."""


@dataclass(frozen=True, eq=False)
class BlockShuffle:
    """Block shuffle: blocks of neighbouring cells in random order, permuted within a buffer of several blocks.

    Reading neighbours together is an order of magnitude faster than reading cells one by one, and a buffer of many
    blocks mixes studies well. Every epoch is a permutation of all cells, drawn from (seed, epoch); epochs follow one
    another without a gap, so a batch may span two.

    Attributes
    ----------
    block_sizes
        Cells of each block.
    seed
        Seed of all draws.
    n_blocks
        Blocks of a buffer.

    Raises
    ------
    ValueError
        If there are no cells.
    """

    block_sizes: tuple[int, ...]
    seed: int
    n_blocks: int = 64

    def __post_init__(self) -> None:
        if self.n_blocks < 1:
            raise ValueError(f"n_blocks must be at least 1, got {self.n_blocks}.")
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ValueError("there are no cells to shuffle.")

    @cached_property
    def n_cells(self) -> int:
        """Cells, each counted once."""
        return sum(self.block_sizes)

    @lru_cache(maxsize=KEPT)  # noqa: B019, a few draws of orders in use
    def buffers(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Draw the buffers of an epoch.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.

        Returns
        -------
        The numbers of the blocks of each buffer, and where each buffer's cells start within the epoch (one entry more
        than there are buffers).
        """
        blocks = np.random.default_rng([self.seed, epoch, 0]).permutation(len(self.block_sizes))
        sizes = np.add.reduceat(np.array(self.block_sizes)[blocks], np.arange(0, len(blocks), self.n_blocks))
        buffers = [blocks[i : i + self.n_blocks] for i in range(0, len(blocks), self.n_blocks)]
        return buffers, np.concatenate([[0], np.cumsum(sizes)])

    @lru_cache(maxsize=KEPT)  # noqa: B019, a few draws of orders in use
    def permutation(self, epoch: int, buffer: int) -> np.ndarray:
        """Draw the order of the cells within a buffer.

        Parameters
        ----------
        epoch, buffer
            Their numbers, from 0.

        Returns
        -------
        Permutation of the buffer's cells, which are counted block after block as :meth:`buffers` lists them.
        """
        starts = self.buffers(epoch)[1]
        # The third number keeps these draws apart from that of the blocks' order.
        drawn = np.random.default_rng([self.seed, epoch, buffer + 1])
        return drawn.permutation(int(starts[buffer + 1] - starts[buffer]))

    def windows(self, epoch: int, least: int) -> list[range]:
        """Group an epoch's buffers, in order, into windows of at least `least` cells; one window if there are fewer.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.
        least
            Cells of a window.

        Returns
        -------
        The buffers of each window; what is left at the end goes to the last one.
        """
        starts = self.buffers(epoch)[1]
        bounds = [0]
        for buffer in range(1, len(starts)):
            if starts[buffer] - starts[bounds[-1]] >= least and starts[-1] - starts[buffer] >= least:
                bounds.append(buffer)
        return [range(a, b) for a, b in itertools.pairwise([*bounds, len(starts) - 1])]

    def spans(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Find where the cells `start` to `stop` of the endless stream are, without drawing their order.

        Parameters
        ----------
        start, stop
            Positions in the stream, from 0; an epoch has :attr:`n_cells`.

        Returns
        -------
        Pieces in order: epoch, buffer, and which places of the buffer's order, from and to.
        """
        pieces = []
        while start < stop:
            epoch, within = divmod(start, self.n_cells)
            starts = self.buffers(epoch)[1]
            buffer = int(np.searchsorted(starts, within, side="right")) - 1
            first = within - int(starts[buffer])
            n = min(stop - start, int(starts[buffer + 1]) - within)
            pieces.append((epoch, buffer, first, first + n))
            start += n
        return pieces
