"""Cells for models: batches without padding, filled or dealt by a token budget, and cells in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
import torch

from scdiva._checks import check_least
from scdiva._settings import progress_bar
from scdiva.data.cells import CellSource, Ragged, take_cells, warn_left_out

WINDOW = 4096
"""Minimum number of cells from which batches are filled; from fewer cells, batches would be less full."""
BATCH_TOKENS = 32_768
"""Default number of tokens per batch: fills a GPU, with half a gigabyte of activations."""


@dataclass(frozen=True)
class CellBatch:
    """Serialised cells: the genes of cell i are positions ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.

    There are no special tokens; the model adds ``[LAT]``.

    Attributes
    ----------
    tokens
        int64 (T,), gene tokens in rank order.
    values
        float32 (T,), log-normalised expression.
    cu_seqlens
        int32 (B + 1,), starts at 0 and ends at T. A cell may be empty.
    study
        int64 (B,), study number of each cell, or None.
    host
        The CPU batch that this batch was copied from, if any, to compute on cells without waiting for the device.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    cu_seqlens: torch.Tensor
    study: torch.Tensor | None = None
    host: CellBatch | None = None

    @property
    def n_cells(self) -> int:
        """Number of cells, B."""
        return len(self.cu_seqlens) - 1

    @property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`tokens`, `values` and `cu_seqlens`, as a model takes them."""
        return self.tokens, self.values, self.cu_seqlens

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CellBatch:
        """Copy the batch to a device; arguments as for :meth:`torch.Tensor.to`."""
        moved = self._each(lambda part: part.to(device, non_blocking=non_blocking))
        return moved if moved.tokens.device.type == "cpu" else replace(moved, host=self.on_host())

    def on_host(self) -> CellBatch:
        """The batch on the CPU: itself or `host`, otherwise a copy."""
        return self if self.tokens.device.type == "cpu" else self.host or self.to("cpu")

    def pin_memory(self) -> CellBatch:
        """Copy the batch to page-locked memory, for fast copies to a GPU."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> CellBatch:
        study = None if self.study is None else moved(self.study)
        return CellBatch(moved(self.tokens), moved(self.values), moved(self.cu_seqlens), study)


def from_ragged(
    indptr: np.ndarray, tokens: np.ndarray, values: np.ndarray, study: np.ndarray | None = None, *, copy: bool = True
) -> CellBatch:
    """Batch of serialised cells (:func:`scdiva.tokenizer.serialize.serialize`).

    Parameters
    ----------
    indptr
        int (B + 1,), not descending; may start above 0 as part of a longer array.
    tokens, values
        (T,) with T = ``indptr[-1] - indptr[0]``.
    study
        int (B,), or None.
    copy
        False: reuse arrays that have the dtype of a batch; the caller must not use them any more.

    Raises
    ------
    ValueError
        If the arrays are inconsistent.
    """
    indptr = np.asarray(indptr, dtype=np.int64)
    cu_seqlens = indptr - indptr[0]
    n = int(cu_seqlens[-1])
    if len(tokens) != n or len(values) != n or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(f"indptr spans {n} positions; there are {len(tokens)} tokens and {len(values)} values.")
    if n > np.iinfo(np.int32).max:
        raise ValueError(f"a batch of {n} tokens is too large: cu_seqlens is int32. Lower batch_size.")
    return CellBatch(
        torch.from_numpy(np.array(tokens, dtype=np.int64, copy=copy or None)),
        torch.from_numpy(np.array(values, dtype=np.float32, copy=copy or None)),
        torch.from_numpy(cu_seqlens.astype(np.int32)),
        None if study is None else torch.from_numpy(np.array(study, dtype=np.int64)),
    )


def fill_batches(lengths: np.ndarray, budget: int = BATCH_TOKENS, max_cells: int | None = None) -> list[np.ndarray]:
    """Pack cells greedily into few batches under a token budget, ordered by length. For inference.

    Each batch is filled with the longest remaining cells that fit: first long cells, then shorter ones in the remaining
    space. The result is deterministic; cells of equal length are taken in input order.

    Parameters
    ----------
    lengths
        Tokens of each cell, int (n,), not negative; with `[LAT]` where the transformer runs.
    budget
        Maximum number of tokens per batch. A longer cell gets a separate batch.
    max_cells
        Maximum number of cells per batch.

    Returns
    -------
    The cells of each batch, int64 index arrays that together hold each of ``range(n)`` once; batches with the longest
    cells come first, and within a batch lengths do not increase.

    Raises
    ------
    ValueError
        If the budget or the number of cells is below 1.
    """
    check_least(budget=(budget, 1), max_cells=(1 if max_cells is None else max_cells, 1))
    if not len(lengths):
        return []
    # cells by length; of each length the first `used` are dealt already
    order = np.argsort(lengths, kind="stable")
    values, first, left = np.unique(lengths[order], return_index=True, return_counts=True)
    alive, start, count = values.tolist(), first.tolist(), left.tolist()
    batches = []
    while alive:
        room, at, parts = budget, len(alive) - 1, []
        n_free = len(lengths) if max_cells is None else max_cells
        while at >= 0:
            length = alive[at]
            n = min(n_free, count[at] if length == 0 else min(count[at], room // length))
            n = max(n, 1)  # one that is longer than the whole budget
            parts.append(order[start[at] : start[at] + n])
            room -= n * length
            n_free -= n
            start[at] += n
            count[at] -= n
            if count[at] == 0:
                del alive[at], start[at], count[at]
            at = bisect_right(alive, room) - 1 if n_free else -1
        batches.append(np.concatenate(parts))
    return batches


def portions(batches: list[np.ndarray], lengths: np.ndarray, held: int | None) -> list[list[np.ndarray]]:
    """Group a list of batches into consecutive runs of about `held` tokens; batches are not split.

    Parameters
    ----------
    batches
        The cells of each.
    lengths
        Tokens of each cell, int (n,).
    held
        Tokens of a run; None: one run.
    """
    if held is None:
        return [batches]
    runs: list[list[np.ndarray]] = []
    room = 0
    for cells in batches:
        if room <= 0:
            runs.append([])
            room = held
        runs[-1].append(cells)
        room -= int(lengths[cells].sum())
    return runs


def deal_batches(lengths: np.ndarray, n_batches: int) -> list[np.ndarray]:
    """Deal cells into batches of mixed lengths, each a fair sample. For training.

    Cells are sorted by length and dealt to the batches forwards, backwards and so on. Numbers of cells per batch differ
    by at most one, and numbers of tokens by at most those of the longest cell.

    Parameters
    ----------
    lengths
        Tokens of each cell, int (n,), with `[LAT]`.
    n_batches
        Number of batches, at most n.

    Returns
    -------
    Cells of each batch, int64, in input order, which together are each of ``range(n)`` once.
    """
    batch_of = np.empty(len(lengths), dtype=np.int64)
    # in turn: 0 1 2 2 1 0 0 1 2 ...
    round_, position = np.divmod(np.arange(len(lengths)), n_batches)
    batch_of[np.argsort(lengths, kind="stable")[::-1]] = np.where(round_ % 2 == 0, position, n_batches - 1 - position)
    by_batch = np.argsort(batch_of, kind="stable")
    return np.split(by_batch, np.searchsorted(batch_of[by_batch], np.arange(1, n_batches)))


# --- cells in memory --------------------------------------------------------------------------------------------------
LEAST_CELLS = 20
"""Minimum number of cells to fit a model to."""


@dataclass(frozen=True)
class InMemoryCells:
    """Serialised cells in memory.

    Attributes
    ----------
    indptr, tokens, values
        As :func:`scdiva.tokenizer.serialize.serialize` returns them; no cell is empty.
    batch
        int64 `(n_cells,)`, batch number of each cell, from 0, ascending.
    measured
        int64, tokens of the columns of the data, ascending.
    n_batches
        Number of batches.
    """

    indptr: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    batch: np.ndarray
    measured: np.ndarray
    n_batches: int

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.batch)

    n_obs = n_cells
    """Number of cells, under the name that :class:`scdiva.data.cells.CellSource` uses."""

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Yield all cells in one window, see :meth:`scdiva.data.cells.CellSource.windows`."""
        yield np.arange(self.n_cells), (self.indptr, self.tokens, self.values)

    def take(self, rows: np.ndarray, max_length: int | None = None) -> CellBatch:
        """Batch of the cells `rows`, each cut to its first `max_length` genes (None: all)."""
        ragged = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return from_ragged(*ragged, self.batch[rows])

    def subset(self, rows: np.ndarray, max_length: int | None = None) -> InMemoryCells:
        """Cells `rows` (ascending), each cut to its first `max_length` genes (None: all)."""
        indptr, tokens, values = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return replace(self, indptr=indptr, tokens=tokens, values=values, batch=self.batch[rows])

    def keeping(self, mask: np.ndarray) -> InMemoryCells:
        """Keep the entries of a mask, bool (T,); cells may become empty."""
        indptr = np.concatenate([[0], np.cumsum(mask)])[self.indptr]
        return replace(self, indptr=indptr, tokens=self.tokens[mask], values=self.values[mask])

    def matrix(self, n_tokens: int) -> sp.csr_matrix:
        """Expression as CSR matrix (cells, tokens), which shares memory with the cells."""
        return sp.csr_matrix((self.values, self.tokens, self.indptr), shape=(self.n_cells, n_tokens))


def read_cells(
    source: CellSource,
    batch: np.ndarray,
    *,
    all_genes: bool = False,
    trains: bool = True,
    only: np.ndarray | None = None,
    max_cells: int | None = None,
    balanced: np.ndarray | None = None,
    seed: int = 0,
) -> tuple[InMemoryCells, np.ndarray]:
    """Read cells into memory by blocks, ordered by batch; cells without a known gene are skipped.

    Parameters
    ----------
    source
        Opened cells.
    batch
        Batch number of each cell, `(n_obs,)`.
    all_genes
        Whether to read all genes of a cell rather than the `max_length` genes that the model reads.
    trains
        Whether the cells are used for training; skipped cells then cause a warning.
    only
        bool `(n_obs,)`, the cells to read; None: all.
    max_cells
        Maximum number of cells; more are subsampled, and only the sample is held in memory. None: no maximum.
    balanced
        Group number of each cell, `(n_obs,)`: the sample takes equally many cells of each group, or all cells of a
        group that has fewer. None: the sample is uniform.
    seed
        Seed of the subsample.

    Returns
    -------
    The cells, and their rows in the source.

    Raises
    ------
    ValueError
        If fewer than 20 cells have a known gene.
    """
    chosen = np.flatnonzero(source.lengths > 0)
    if len(chosen) < LEAST_CELLS:
        raise ValueError(f"{len(chosen)} cells have a known gene; at least {LEAST_CELLS} are needed.")
    if all_genes:
        source = replace(source, max_length=source.vocabulary.n_genes)
    if trains:
        warn_left_out("adata", source.n_obs - len(chosen), source.n_obs, 1)
    if only is not None:
        chosen = chosen[only[chosen]]
    if balanced is not None and max_cells is not None:
        chosen = chosen[balanced_sample(balanced[chosen], max_cells, np.random.default_rng([seed, 1]))]
    chosen = chosen[np.argsort(batch[chosen], kind="stable")]
    if max_cells is not None and len(chosen) > max_cells:
        chosen = chosen[np.sort(np.random.default_rng([seed, 1]).choice(len(chosen), max_cells, replace=False))]
    # each cell is written to its final position, so that only one block is in memory twice
    position = np.full(source.n_obs, -1)
    position[chosen] = np.arange(len(chosen))
    room = np.minimum(source.lengths[chosen], source.max_length).astype(np.int64)
    starts, lengths = (np.cumsum(room) - room).tolist(), np.zeros(len(chosen), dtype=np.int64)
    tokens, values = np.empty(room.sum(), dtype=np.int32), np.empty(room.sum(), dtype=np.float32)
    with progress_bar(desc="reading", unit="cell", total=source.n_obs) as bar:
        for rows, (bounds, *block) in source.windows(source.block_rows, on_read=bar.update):
            for i, first, last in zip(position[rows].tolist(), bounds.tolist(), bounds[1:].tolist(), strict=False):
                if i >= 0:
                    lengths[i] = last - first
                    at = slice(starts[i], starts[i] + last - first)
                    tokens[at], values[at] = block[0][first:last], block[1][first:last]
    if (lengths > room).any():
        raise ValueError("the cells were changed while they were read: call again once the data are complete.")
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    if indptr[-1] < len(tokens):  # several columns of one gene were added
        for array in (tokens, values):
            for at, start, length in zip(indptr.tolist(), starts, lengths.tolist(), strict=False):
                array[at : at + length] = array[start : start + length]
        tokens, values = tokens[: indptr[-1]], values[: indptr[-1]]
    names, numbers = np.unique(batch[chosen], return_inverse=True)
    return InMemoryCells(indptr, tokens, values, numbers, source.measured_tokens, len(names)), chosen


def balanced_sample(group: np.ndarray, max_cells: int, rng: np.random.Generator) -> np.ndarray:
    """Draw equally many cells of each group, or all cells of a group that has fewer.

    Parameters
    ----------
    group
        Group number of each cell, `(n_cells,)`.
    max_cells
        Maximum number of cells.
    rng
        Source of the draw.

    Returns
    -------
    Cell numbers, ascending; all cells if there are at most `max_cells`.
    """
    if len(group) <= max_cells:
        return np.arange(len(group))
    # groups take turns: one cell of each, a second of each, and so on
    order = rng.permutation(len(group))
    order = order[np.argsort(group[order], kind="stable")]
    ordered = group[order]
    turn = np.arange(len(group)) - np.searchsorted(ordered, ordered)
    return np.sort(order[np.argsort(turn, kind="stable")[:max_cells]])


def means_by(x: np.ndarray, number: np.ndarray, n: int) -> np.ndarray:
    """Mean of the rows of `x` in each of n groups, float64 `(n, width)`; 0 for a group without rows."""
    sums = np.zeros((n, x.shape[1]))
    np.add.at(sums, number, x)
    return sums / np.maximum(np.bincount(number, minlength=n), 1)[:, None]
