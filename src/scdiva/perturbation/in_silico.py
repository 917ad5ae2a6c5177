"""What a model that never saw a perturbation says of other genes when one gene of a cell is taken away or raised."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva.models.scdiva import ScDiVa

PARTS = 4
"""Turns in which the values of a cell's genes are hidden, each gene's in one."""

Tokens = NDArray[np.int64]
Values = NDArray[np.float32]


class Ranked(NamedTuple):
    """A cell's genes by rank: tokens, expression, and the turn in which each is hidden (-1: in none)."""

    tokens: Tokens
    expression: Values
    turn: NDArray[np.int64]


def changed(
    cell: Ranked, sources: Tokens, raised: Values | None, denominator: NDArray[np.float32], max_length: int
) -> tuple[Ranked, Ranked]:
    """Rank a cell's genes as they are, and without some of them, or with these raised.

    Parameters
    ----------
    cell
        All of its genes.
    sources
        Genes to take away, or to raise; their own values are never hidden.
    raised
        What to raise them to, where they are lower; None takes them away.
    denominator
        Of the ranking score, by token.
    max_length
        Genes kept, as many as there are sources or more. Of a longer cell the last ones are left out, but never a
        source.

    Returns
    -------
    The cell before and after.
    """
    own = np.isin(cell.tokens, sources)
    turn = np.where(own, -1, cell.turn)
    there = np.ones(len(own), dtype=bool)
    there[np.flatnonzero(~own)[max_length - int(own.sum()) :]] = False
    before = Ranked(cell.tokens[there], cell.expression[there], turn[there])
    left = there & ~own
    rest = Ranked(cell.tokens[left], cell.expression[left], turn[left])
    if raised is None:
        return before, rest
    was = {int(token): float(value) for token, value in zip(cell.tokens[own], cell.expression[own], strict=True)}
    high = np.array([max(was.get(int(s), 0.0), float(r)) for s, r in zip(sources, raised, strict=True)], np.float32)
    room = max_length - len(sources)
    tokens = np.concatenate([sources, rest.tokens[:room]])
    values = np.concatenate([high, rest.expression[:room]])
    turns = np.concatenate([np.full(len(sources), -1), rest.turn[:room]])
    order = np.lexsort((tokens, -values / denominator[tokens]))  # ties as the serialiser breaks them
    return before, Ranked(tokens[order], values[order], turns[order])


@torch.inference_mode()
def hidden_values(model: ScDiVa, cell: Ranked) -> dict[int, float]:
    """Predict the value of each gene of a cell from the others, a quarter of them hidden at a time.

    Identities stay visible. A gene whose turn is -1 is not predicted.

    Parameters
    ----------
    model
        The model.
    cell
        Its genes.

    Returns
    -------
    By token.
    """
    n = len(cell.tokens)
    turns = np.unique(cell.turn[cell.turn >= 0])
    if not len(turns):
        return {}
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.tile(cell.tokens, len(turns))).to(device)
    values = torch.from_numpy(np.tile(cell.expression, len(turns))).to(device)
    hidden = torch.from_numpy((cell.turn == turns[:, None]).ravel()).to(device)
    bounds = torch.arange(0, n * len(turns) + 1, n, dtype=torch.int32, device=device)
    out = model(tokens, values, bounds, value_mask=hidden)
    found: Tensor = model.values(out, tokens[hidden], hidden).float().cpu()
    return dict(zip(tokens[hidden].tolist(), found.tolist(), strict=True))


def value_change(before: dict[int, float], after: dict[int, float]) -> dict[int, float]:
    """Difference of predicted values, of the genes that both cells hold."""
    return {token: after[token] - value for token, value in before.items() if token in after}
