"""A network of in-silico knock-outs: what the model expects less of when a gene is taken out of a cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva._running import Running, run_cells
from scdiva.models import ScDiVa
from scdiva.networks.pairs import Pairs

Effect = Literal["value", "presence"]
BYTES = 8
"""Held for each group, source and target while cells are read."""
PARTS = 4
"""One gene in so many is masked at a time."""
N_CELLS = 50
"""Cells in which a source is knocked out, unless asked otherwise."""
PRIOR_CELLS = 10
"""Cells without a change that stand beside those read."""
_HELD_TOKENS = 16_384
"""Genes of the cells whose falls wait to be added up."""


def sums(
    pairs: Pairs, running: Running, n_cells: int, effect: Effect, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Add up falls of what is expected over cells of each group.

    Parameters
    ----------
    pairs
        Genes, cells and groups.
    running
        How cells are run.
    n_cells
        Cells of a group in which each source is knocked out, drawn among those that express it.
    effect
        As for :func:`knockout_falls`.
    rng
        Draws the cells.

    Returns
    -------
    Sums of falls and numbers of cells in which they were read, float32 (n_groups, n_sources, n_targets).
    """
    knocked = _drawn(pairs, n_cells, rng)
    total, n = np.zeros((2, *pairs.shape), dtype=np.float32)
    of_source, targets = pairs.rows_of(pairs.sources), torch.from_numpy(pairs.tokens[pairs.targets].astype(np.int64))
    most = pairs.model.config.max_length
    held: dict[int, NDArray[np.int64]] = {}

    def sources_and_turn(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        row = int(rows[0])
        return torch.from_numpy(held[row]), torch.tensor(row % PARTS)

    only = np.zeros(pairs.source.n_obs, dtype=bool)
    only[list(knocked)] = True
    for rows, (indptr, tokens, _), results in run_cells(
        pairs.model,
        pairs.source,
        running._replace(what=knockout_falls(targets, effect), batch_size=1),
        held_tokens=_HELD_TOKENS,
        only=only,
        beside=sources_and_turn,
    ):
        genes = [tokens[start:stop][:most] for start, stop in itertools.pairwise(indptr)]
        for row, of_cell in zip(rows.tolist(), genes, strict=True):
            held[row] = np.flatnonzero(np.isin(of_source[of_cell], knocked[row]))
        for (cell,), falls in results:
            row = int(rows[cell])
            at = of_source[genes[cell][held.pop(row)]]
            total[pairs.group[row]][at] += np.nan_to_num(falls)
            n[pairs.group[row]][at] += ~np.isnan(falls)
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


def weights(_: Pairs, total: NDArray[np.float32], n: NDArray[np.float32]) -> NDArray[np.float64]:
    """Give mean falls from the sums of one group, drawn towards 0; NaN for pairs that were never read."""
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, total / (n + PRIOR_CELLS), np.nan)


def knockout_falls(
    targets: Tensor, effect: Effect = "value"
) -> Callable[[ScDiVa, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make a read-out of how far what the model expects of genes falls in a cell without each of some others.

    Every fourth gene of the ranking is masked and predicted from all others: once with the cell as it is, and once for
    each source, taken out of the cell, so that those behind it move up. Which fourth differs between cells: many cells
    of which a quarter is read say more of the average than a quarter as many that are read whole.

    Parameters
    ----------
    targets
        int64 `(n_targets,)`, tokens.
    effect
        `"value"` reads the log-normalised expression that is predicted of a target if it is one of the masked genes:
        the mean over their ranks, each by the probability that the target stands there. `"presence"` reads the
        logarithm of how often it is expected among them, the sum of these probabilities.

    Returns
    -------
    Function of a model, the packed tensors of one cell, the positions of n sources among its genes, and the number of
    the first gene that is masked. It gives float32 `(n, n_targets)`, NaN for a target that is visible in the cell. A
    source is not masked while it is asked about. The cell's genes are the first `max_length`.
    """

    @torch.no_grad()
    def falls(
        model: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, sources: Tensor, first: Tensor
    ) -> Tensor:
        most, aims = model.config.max_length, targets.to(tokens.device)
        tokens, values = tokens[:most], values[:most]
        position = torch.arange(len(tokens), device=tokens.device)
        masked = position % PARTS == first
        result = torch.empty((len(sources), len(aims)), device=tokens.device)
        usual = _expected(model, tokens, values, masked, aims, effect)
        for row, source in enumerate(sources.tolist()):
            left = position != source
            # the model has to be given the source, or nothing is taken away
            before = _expected(model, tokens, values, masked & left, aims, effect) if masked[source] else usual
            after = _expected(model, tokens[left], values[left], masked[left], aims, effect)
            result[row] = before - after
            result[row, torch.isin(aims, tokens[~(masked & left)])] = torch.nan
        return result

    return falls


def _expected(model: ScDiVa, tokens: Tensor, values: Tensor, masked: Tensor, targets: Tensor, effect: Effect) -> Tensor:
    """Predict targets from what is visible of a cell, NaN if nothing is masked."""
    positions = masked.nonzero().squeeze(1)
    if not len(positions):
        return torch.full((len(targets),), torch.nan, device=tokens.device)
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
    found = model(tokens.masked_fill(masked, MASK), values, bounds)
    chance = model.logits(found, positions).float().log_softmax(dim=1)[:, targets - N_SPECIAL]
    if effect == "presence":
        return chance.logsumexp(dim=0)
    # a value is what its position gives and what its gene gives: no need to predict each gene at each position
    of_position = model.values(found, torch.full_like(positions, MASK), positions).float()
    at_first = model.values(found, targets, positions[:1].expand(len(targets))).float()
    return at_first + chance.softmax(dim=0).T @ (of_position - of_position[0])
