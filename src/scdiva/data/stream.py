"""Batches for training: a stream that depends on the seed and the batch's number only, and fixed validation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset

from scdiva.data.batch import WINDOW, CellBatch, deal_batches, from_ragged, n_dealt
from scdiva.data.blocks import BLOCK_ROWS
from scdiva.data.corpus import PackedCells
from scdiva.data.order import BlockShuffle

if TYPE_CHECKING:  # a packed corpus is read without AnnData
    from scdiva.data.cells import CellSource

Source: TypeAlias = "CellSource | PackedCells"
Buffers = tuple[int, range]
"""Epoch, and neighbouring buffers of its order."""
Key = TypeVar("Key")
Item = TypeVar("Item")

Cells = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n cells, and the study of each (n,)."""
LEFT_OUT = -2
"""Study number of cells that a pool leaves out."""


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
        return np.asarray(self._n_tokens[number][rows])

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


class TrainingStream(IterableDataset[CellBatch]):
    """Endless training batches. Batch s is a function of (cells, batch size or tokens, seed, s) and of nothing else.

    With several processes (distributed training), step s takes the batches ``s * world_size + rank``. Together they see
    each epoch's permutation exactly once. An epoch need not fill its last step: then the processes that it has no batch
    for begin with the next epoch, and no cell is left out or repeated. Without `batch_tokens` a batch may hold the end
    of one epoch and the beginning of the next.

    A thread reads the next buffer while the present one is used, so that there are two in memory.

    Parameters
    ----------
    pool
        The cells.
    order
        The shuffle.
    batch_size
        Cells of a batch; without effect if `batch_tokens` is given.
    start_step, max_steps
        First step, and the step to end before; None never ends.
    batch_tokens
        Most tokens of a batch. The shuffled cells of each window of at least 4,096 are then sorted by length and dealt
        into batches (:func:`~scdiva.data.batch.deal_batches`), which follow one another in random order. The number
        of batches of an epoch depends on lengths only, so any batch is found without reading those before it.
    prefetch
        Whether the thread reads ahead; the batches are the same without.
    """

    def __init__(
        self,
        pool: CellPool,
        order: BlockShuffle,
        batch_size: int,
        start_step: int = 0,
        max_steps: int | None = None,
        *,
        batch_tokens: int | None = None,
        prefetch: bool = True,
    ) -> None:
        self.pool, self.order, self.batch_size, self.batch_tokens = pool, order, batch_size, batch_tokens
        self.start_step, self.max_steps, self.prefetch = start_step, max_steps, prefetch
        self._deal: tuple[Buffers | None, list[np.ndarray]] = None, []
        self._epochs: list[int] = [0]
        self._windows: dict[int, tuple[list[range], np.ndarray]] = {}
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def batch(self, number: int) -> CellBatch:
        """Make one batch of the stream.

        Parameters
        ----------
        number
            Its number, from 0.
        """
        keys = (key for key, _ in self.cells_of(number))
        return next(self._batches(iter([number]), map(self._read_buffers, keys)))

    def cells_of(self, number: int) -> list[tuple[Buffers, np.ndarray]]:
        """Say which cells a batch holds, without reading them.

        Parameters
        ----------
        number
            Of the batch, from 0.

        Returns
        -------
        Neighbouring buffers of an epoch, and the numbers of the cells within them; several in order.
        """
        if self.batch_tokens is None:
            start = number * self.batch_size
            found = self.order.spans(start, start + self.batch_size)
            return [((epoch, range(i, i + 1)), self.order.permutation(epoch, i)[a:b]) for epoch, i, a, b in found]
        key, window, at = self._find(number, self.batch_tokens)
        if self._deal[0] != key:  # all batches of a window are dealt at once
            epoch, buffers = key
            starts = self.order.buffers(epoch)[1]
            drawn = [self.order.permutation(epoch, i) + starts[i] - starts[buffers[0]] for i in buffers]
            cells = np.concatenate(drawn)
            batches = deal_batches(self._lengths(epoch, buffers)[cells], self.batch_tokens)
            # The fourth number keeps this draw apart from those of the order.
            turn = np.random.default_rng([self.order.seed, epoch, window, 1]).permutation(len(batches))
            self._deal = key, [cells[batches[i]] for i in turn]
        return [(key, self._deal[1][at])]

    def rows_of(self, number: int) -> list[tuple[Source, int, int]]:
        """Say where the cells of a batch lie, without reading them.

        Parameters
        ----------
        number
            Of the batch, from 0.

        Returns
        -------
        Of each cell its source, its row there, and the number of its study.
        """
        found = []
        for key, cells in self.cells_of(number):
            blocks = [self.pool.blocks[block] for block in self._blocks(key).tolist()]
            rows = [(source, int(row)) for source, of_block in blocks for row in of_block]
            found += [rows[cell] for cell in cells.tolist()]
        return [(self.pool.sources[source], row, int(self.pool.studies[source][row])) for source, row in found]

    def _batches(self, numbers: Iterator[int], read: Iterator[Held]) -> Iterator[CellBatch]:
        """Make batches of what is read for them, in order, each as often as it is needed."""
        key: Buffers | None = None
        held: Held | None = None
        for number in numbers:
            pieces = []
            for wanted, rows in self.cells_of(number):
                if held is None or wanted != key:
                    held = None  # of two buffers the first must go before the second comes
                    key, held = wanted, next(read)
                pieces.append(held.take(rows))
            yield _joined(pieces)

    def _blocks(self, key: Buffers) -> np.ndarray:
        epoch, buffers = key
        return np.concatenate([self.order.buffers(epoch)[0][buffer] for buffer in buffers])

    def _read_buffers(self, key: Buffers) -> Held:
        return self.pool.read_blocks(self._blocks(key))

    def _find(self, number: int, budget: int) -> tuple[Buffers, int, int]:
        """Find a batch of a token budget: its epoch and buffers, the number of that window, its place in the window."""
        while self._epochs[-1] <= number:  # batches before each epoch, counted as far as was asked
            self._epochs.append(self._epochs[-1] + int(self._dealt_before(len(self._epochs) - 1, budget)[1][-1]))
        epoch = int(np.searchsorted(self._epochs, number, side="right")) - 1
        windows, before = self._dealt_before(epoch, budget)
        window = int(np.searchsorted(before, number - self._epochs[epoch], side="right")) - 1
        return (epoch, windows[window]), window, number - self._epochs[epoch] - int(before[window])

    def _dealt_before(self, epoch: int, budget: int) -> tuple[list[range], np.ndarray]:
        """Windows of an epoch, and the number of batches before each; the two epochs asked for last are kept."""
        if epoch not in self._windows:
            windows = self.order.windows(epoch, WINDOW)
            n = [n_dealt(self._lengths(epoch, buffers), budget) for buffers in windows]
            while len(self._windows) > 1:  # reading ahead, one epoch ends while the next is asked for
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch] = windows, np.concatenate([[0], np.cumsum(n)])
        return self._windows[epoch]

    def _lengths(self, epoch: int, buffers: range) -> np.ndarray:
        return np.concatenate([self.pool.n_tokens(int(block)) for block in self._blocks((epoch, buffers))])

    def _numbers(self) -> Iterator[int]:
        """Numbers of the batches of this process."""
        steps = itertools.count(self.start_step) if self.max_steps is None else range(self.start_step, self.max_steps)
        return (step * self.world_size + self.rank for step in steps)

    def _needed(self) -> Iterator[Buffers]:
        """List what each of these batches needs, in order."""
        for number in self._numbers():
            if self.batch_tokens is not None:
                yield self._find(number, self.batch_tokens)[0]
            else:
                at = number * self.batch_size
                for epoch, i, *_ in self.order.spans(at, at + self.batch_size):
                    yield epoch, range(i, i + 1)

    def __iter__(self) -> Iterator[CellBatch]:
        how = _read_ahead if self.prefetch else map
        read = (key for key, _ in itertools.groupby(self._needed()))  # once for all neighbouring batches that need it
        yield from self._batches(self._numbers(), how(self._read_buffers, read))


class ValidationBatches(IterableDataset[CellBatch]):
    """The same cells in the same order every time.

    Parameters
    ----------
    pool
        The cells.
    batch_size
        Cells of a batch; the last one may be smaller.
    n_cells
        Number of cells, taken evenly from all; None takes all.
    batch_tokens
        Most tokens of a batch, in place of `batch_size`: cells are taken in order as long as they fit.
    """

    def __init__(
        self, pool: CellPool, batch_size: int, n_cells: int | None = None, *, batch_tokens: int | None = None
    ) -> None:
        self.pool = pool
        if n_cells is None or n_cells >= pool.n_cells:
            self.chosen = np.arange(pool.n_cells)
        else:
            self.chosen = np.arange(n_cells) * pool.n_cells // n_cells
        if batch_tokens is None:
            self._ends = [*range(batch_size, len(self.chosen), batch_size), len(self.chosen)]
        else:
            lengths = np.concatenate([pool.n_tokens(block) for block in range(len(pool.blocks))])[self.chosen]
            self._ends = _ends_in_order(lengths, batch_tokens)

    def __iter__(self) -> Iterator[CellBatch]:
        sizes = np.array(self.pool.block_sizes)
        starts = np.cumsum(sizes) - sizes
        for first, last in itertools.pairwise([0, *self._ends]):
            cells = self.chosen[first:last]
            read, at = np.unique(np.searchsorted(starts, cells, side="right") - 1, return_inverse=True)
            before = np.cumsum(sizes[read]) - sizes[read]  # cells of the blocks read before each
            held = self.pool.read_blocks(read)
            yield from_ragged(*held.take(before[at] + cells - starts[read[at]]), copy=False)

    def studies(self) -> tuple[list[str], np.ndarray]:
        """Name the study of each cell, without reading any: batches say only whether it is trained on.

        Returns
        -------
        Names of the studies, and for each cell, in the order in which the batches give them, the number of its study
        among these, int `(n_cells,)`.
        """
        names: list[str] = []
        of_source: list[np.ndarray] = []
        for source in self.pool.sources:  # a pool may hold some of the studies only, so that its numbers are not these
            if isinstance(source, PackedCells):
                of_source.append(len(names) + source.study)
                names += source.study_names
            else:
                of_source.append(np.full(source.n_obs, len(names)))
                names.append(source.name)
        study = np.concatenate([of_source[number][rows] for number, rows in self.pool.blocks])[self.chosen]
        present, numbers = np.unique(study, return_inverse=True)
        return [names[i] for i in present], numbers


def _ends_in_order(lengths: np.ndarray, budget: int) -> list[int]:
    """Find the ends of batches that take cells in order as long as they fit."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = [0]
    while ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(before, before[ends[-1]] + budget, side="right")) - 1)
    return ends[1:]


def _joined(parts: Sequence[Cells]) -> CellBatch:
    """Make one batch of pieces, which are taken over."""
    if len(parts) == 1:
        return from_ragged(*parts[0], copy=False)
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part[0]) for part in parts]))])
    tokens, values, study = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    return from_ragged(indptr, tokens, values, study, copy=False)


def _read_ahead(read: Callable[[Key], Item], keys: Iterator[Key]) -> Iterator[Item]:
    """Read the items of keys in a thread, the next one while one is used; there are never more than two.

    What goes wrong is raised where the item is asked for. The thread is gone when the iterator is.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="scdiva-read-ahead")
    try:
        coming = None
        for key in keys:
            following = thread.submit(read, key)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
