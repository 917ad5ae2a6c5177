"""The order in which training sees cells: a pure function of the seed and the number of the batch."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

KEPT = 8
"""Draws that an order keeps."""


@dataclass(frozen=True)
class BlockShuffle:
    """Block shuffle: blocks of neighbouring cells in random order, permuted within a buffer of several blocks.

    Reading neighbours together is an order of magnitude faster than reading cells one by one, and a buffer of many
    blocks mixes studies well. Every epoch is a permutation of all cells, drawn from (seed, epoch); epochs follow one
    another without a gap, so a batch may span two.

    With `times` an epoch holds each block as often as it says, on average over epochs: its whole part always, and one
    more in as many epochs as its fraction tells, which is drawn from (seed, epoch) for all blocks together, at even
    distances (systematic sampling). So any run of neighbouring blocks, such as a study, is drawn as often as it should
    be to within one block in every single epoch, and the epochs differ a little in length.

    Attributes
    ----------
    block_sizes
        Cells of each block.
    seed
        Seed of all draws.
    n_blocks
        Blocks of a buffer.
    times
        How often an epoch holds each block, on average; above zero. None: once.

    Raises
    ------
    ValueError
        If there are no cells, `times` does not fit them, or an epoch might hold none.
    """

    block_sizes: tuple[int, ...]
    seed: int
    n_blocks: int = 64
    times: tuple[float, ...] | None = None
    _drawn: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(default=(0,), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n_blocks < 1:
            raise ValueError(f"n_blocks must be at least 1, got {self.n_blocks}.")
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ValueError("there are no cells to shuffle.")
        if self.times is not None:
            if len(self.times) != len(self.block_sizes) or not all(0 < n < math.inf for n in self.times):
                raise ValueError("times must hold a finite number above zero for each block.")
            if sum(self.times) < 1:
                raise ValueError(
                    f"an epoch would hold {sum(self.times):.3g} blocks, less than one: give studies larger weights."
                )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "n_cells"} | {"_drawn": {}}

    @cached_property
    def n_cells(self) -> int:
        """Cells, each counted once."""
        return sum(self.block_sizes)

    def _start(self, epoch: int) -> int:
        """Place in the endless stream at which an epoch begins."""
        if self.times is None:
            return epoch * self.n_cells
        starts = self._starts
        while len(starts) <= epoch:
            starts = (*starts, starts[-1] + int(self._times_drawn(len(starts) - 1) @ np.array(self.block_sizes)))
        # replaced as a whole: the thread that reads ahead asks too
        object.__setattr__(self, "_starts", starts)
        return starts[epoch]

    def _epoch_at(self, place: int) -> int:
        """Epoch in which a place of the endless stream lies."""
        if self.times is None:
            return place // self.n_cells
        epoch = 0
        while self._start(epoch + 1) <= place:
            epoch = max(epoch + 1, bisect.bisect_right(self._starts, place) - 1)
        return epoch

    def _times_drawn(self, epoch: int) -> np.ndarray:
        """How often an epoch holds each block, int64."""
        assert self.times is not None
        # The fourth number keeps this draw apart from the others. Rounded, so that 0.1 ten times over is one.
        shift = np.random.default_rng([self.seed, epoch, 0, 2]).random()
        whole = np.floor(np.round(np.cumsum(self.times), 9) + shift).astype(np.int64)
        return np.diff(whole, prepend=0)

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
        found: tuple[list[np.ndarray], np.ndarray] = self._keep(("buffers", epoch), lambda: self._draw_buffers(epoch))
        return found

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
        found: np.ndarray = self._keep(("cells", epoch, buffer), lambda: self._draw_cells(epoch, buffer))
        return found

    def _draw_buffers(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        each = np.arange(len(self.block_sizes))
        chosen = each if self.times is None else np.repeat(each, self._times_drawn(epoch))
        blocks = np.random.default_rng([self.seed, epoch, 0]).permutation(chosen)
        sizes = np.add.reduceat(np.array(self.block_sizes)[blocks], np.arange(0, len(blocks), self.n_blocks))
        buffers = [blocks[i : i + self.n_blocks] for i in range(0, len(blocks), self.n_blocks)]
        return buffers, np.concatenate([[0], np.cumsum(sizes)])

    def _draw_cells(self, epoch: int, buffer: int) -> np.ndarray:
        starts = self.buffers(epoch)[1]
        # The third number keeps these draws apart from that of the blocks' order.
        drawn = np.random.default_rng([self.seed, epoch, buffer + 1])
        return drawn.permutation(int(starts[buffer + 1] - starts[buffer]))

    def _keep(self, key: tuple[str | int, ...], draw: Callable[[], Any]) -> Any:
        """Draw, or give what was drawn lately: every batch asks, and a hash of all block sizes costs more than it."""
        if key not in self._drawn:
            while len(self._drawn) >= KEPT:
                self._drawn.pop(next(iter(self._drawn)), None)
            self._drawn[key] = draw()
        return self._drawn[key]

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

    def locate(self, start: int, stop: int) -> list[tuple[int, int, np.ndarray]]:
        """Find the cells `start` to `stop` of the endless stream.

        Parameters
        ----------
        start, stop
            Positions in the stream, from 0; without `times`, an epoch has :attr:`n_cells`.

        Returns
        -------
        Pieces in order: epoch, buffer, and the numbers of the cells within the buffer.
        """
        return [
            (epoch, buffer, self.permutation(epoch, buffer)[first:last])
            for epoch, buffer, first, last in self.spans(start, stop)
        ]

    def spans(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Find where the cells `start` to `stop` of the endless stream are, without drawing their order.

        Parameters
        ----------
        start, stop
            As in :meth:`locate`.

        Returns
        -------
        Pieces in order: epoch, buffer, and which places of the buffer's order, from and to.
        """
        pieces = []
        while start < stop:
            epoch = self._epoch_at(start)
            within = start - self._start(epoch)
            starts = self.buffers(epoch)[1]
            buffer = int(np.searchsorted(starts, within, side="right")) - 1
            first = within - int(starts[buffer])
            n = min(stop - start, int(starts[buffer + 1]) - within)
            pieces.append((epoch, buffer, first, first + n))
            start += n
        return pieces
