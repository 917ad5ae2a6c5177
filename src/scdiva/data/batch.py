"""Batches of cells without padding, filled or dealt by a budget of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from scdiva._checks import check_least

WINDOW = 4096
"""Minimum number of cells that batches are filled from; fewer fill them badly."""
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
    """Pack cells into as few batches as a token budget allows, those of equal length side by side. For inference.

    Each batch takes, again and again, the longest cells left that still fit: a run of long cells, then the few shorter
    ones that fill the rest. No number is random; cells of equal length are taken in the order in which they came.

    Parameters
    ----------
    lengths
        Tokens of each cell, int (n,), not negative; with `[LAT]` where the transformer runs.
    budget
        Most tokens of a batch. A cell longer than that gets a batch of its own.
    max_cells
        Most cells of a batch.

    Returns
    -------
    The cells of each batch, int64 index arrays that together hold each of ``range(n)`` once; batches with the longest
    cells come first, and within a batch lengths do not rise.

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
        places = len(lengths) if max_cells is None else max_cells
        while at >= 0:
            length = alive[at]
            n = min(places, count[at] if length == 0 else min(count[at], room // length))
            n = max(n, 1)  # one that is longer than the whole budget
            parts.append(order[start[at] : start[at] + n])
            room -= n * length
            places -= n
            start[at] += n
            count[at] -= n
            if count[at] == 0:
                del alive[at], start[at], count[at]
            at = bisect_right(alive, room) - 1 if places else -1
        batches.append(np.concatenate(parts))
    return batches


def portions(batches: list[np.ndarray], lengths: np.ndarray, held: int | None) -> list[list[np.ndarray]]:
    """Cut a list of batches into runs of about so many tokens; a batch itself is never cut.

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

    Cells are sorted by length and dealt to the batches forwards, backwards and so on. Batches differ by at most one
    cell in number and by at most the longest cell in tokens.

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
    batch_of[np.argsort(lengths, kind="stable")[::-1]] = _turns(len(lengths), n_batches)
    by_batch = np.argsort(batch_of, kind="stable")
    return np.split(by_batch, np.searchsorted(batch_of[by_batch], np.arange(1, n_batches)))


def _turns(n_cells: int, n_batches: int) -> np.ndarray:
    """Batch of each cell in turn: 0 1 2 2 1 0 0 1 2 ..."""
    round_, place = np.divmod(np.arange(n_cells), n_batches)
    return np.where(round_ % 2 == 0, place, n_batches - 1 - place)
