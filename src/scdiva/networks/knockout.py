"""A network of in-silico knock-outs: what the model expects less of when a gene is taken out of a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from scdiva._running import Running
    from scdiva.networks.pairs import Pairs

N_CELLS = 50
"""Cells in which a source is knocked out, unless asked otherwise."""
PRIOR_CELLS = 10
"""Cells without a change that stand beside those read."""
_HELD_TOKENS = 16_384
"""Genes of the cells whose falls wait to be added up."""


def sums(
    pairs: Pairs,
    running: Running,
    n_cells: int,
    effect: Literal["value", "presence"],
    removal: Literal["remove", "mask"],
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Add up falls of what is expected over cells of each group.

    Parameters
    ----------
    pairs
        Genes, cells and groups.
    running
        How.
    n_cells
        Cells of a group in which each source is knocked out, drawn among those that express it.
    effect, removal
        As for :func:`scdiva.networks.read_outs.knockout_falls`.
    rng
        Draws the cells.

    Returns
    -------
    Sums of falls and numbers of cells in which they were read, float32 (n_groups, n_sources, n_targets).
    """
    import torch

    from scdiva._running import run_cells
    from scdiva.networks.read_outs import PARTS, knockout_falls

    knocked = _drawn(pairs, n_cells, rng)
    total, n = np.zeros(pairs.shape, dtype=np.float32), np.zeros(pairs.shape, dtype=np.float32)
    of_source, targets = pairs.places(pairs.sources), torch.from_numpy(pairs.tokens[pairs.targets].astype(np.int64))
    most = pairs.model.config.max_length
    held: dict[int, NDArray[np.int64]] = {}

    def places_and_turn(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        row = int(rows[0])
        return torch.from_numpy(held[row]), torch.tensor(row % PARTS)

    only = np.zeros(pairs.source.n_obs, dtype=bool)
    only[list(knocked)] = True
    reading = running._replace(what=knockout_falls(targets, effect, removal), batch_size=1)
    for rows, (indptr, tokens, _), results in run_cells(
        pairs.model, pairs.source, reading, held_tokens=_HELD_TOKENS, only=only, beside=places_and_turn
    ):
        for cell, row in enumerate(rows):
            genes = tokens[indptr[cell] : indptr[cell + 1]][:most]
            held[int(row)] = np.flatnonzero(np.isin(of_source[genes], knocked[int(row)]))
        for (cell,), falls in results:
            genes = tokens[indptr[cell] : indptr[cell + 1]][:most]
            group, at = pairs.group[rows[cell]], held.pop(int(rows[cell]))
            total[group][of_source[genes[at]]] += np.nan_to_num(falls)
            n[group][of_source[genes[at]]] += ~np.isnan(falls)
    return total, n


def _drawn(pairs: Pairs, n_cells: int, rng: np.random.Generator) -> dict[int, NDArray[np.int64]]:
    """Draw the cells in which each source is knocked out: rows, each with its sources' numbers."""
    expressing: list[list[NDArray[np.int64]]] = [[] for _ in pairs.sources]
    for first, block in pairs.source.expression_blocks():
        columns = block[:, pairs.tokens[pairs.sources]].tocsc()
        for number, (start, stop) in enumerate(zip(columns.indptr[:-1], columns.indptr[1:], strict=True)):
            expressing[number].append(first + columns.indices[start:stop].astype(np.int64))
    knocked: dict[int, list[int]] = {}
    for number, parts in enumerate(expressing):
        rows = np.sort(np.concatenate(parts))
        for group in range(pairs.n_groups):
            for row in rng.permutation(rows[pairs.group[rows] == group])[:n_cells]:
                knocked.setdefault(int(row), []).append(number)
    return {row: np.array(numbers) for row, numbers in knocked.items()}


def weights(total: NDArray[np.float32], n: NDArray[np.float32]) -> NDArray[np.float64]:
    """Give mean falls from the sums of one group, drawn towards 0; NaN for pairs that were never read."""
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, total / (n + PRIOR_CELLS), np.nan)
