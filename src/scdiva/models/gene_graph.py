"""What a model says of pairs of genes in one cell: how they attend to each other, and what each loses without another.

Made to be read out by :func:`scdiva.models.inference.open_encoder`, one cell a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scdiva._constants import MASK
from scdiva.models.in_silico import PARTS, Ranked, hidden_values
from scdiva.models.scdiva import ScDiVa

Removal = Literal["remove", "mask"]


def attention_ranks(
    layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Callable[[ScDiVa, Tensor, Tensor, Tensor], Tensor]:
    r"""Make a read-out of how the genes of one cell attend to each other.

    Attention weights (paper, eq. `mha`), without the column of `[LAT]`, are averaged over layers and heads; then the
    keys of each query are ranked and the ranks divided by their number (paper, section "Gene Regulatory Network
    Inference and Logic", rank-normalised weights), so that long and short cells count alike.

    Parameters
    ----------
    layers, heads
        Their numbers, from 0; None: all.

    Returns
    -------
    Function of a model and the packed tensors of one cell that gives float32 `(L, L)` (query, key): ranks in (0, 1], 1
    for the key that the query attends to most. The genes are the first `max_length`.
    """

    def ranks(model: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        most = model.config.max_length
        seen = tokens[:most], values[:most], cu_seqlens.clamp_max(most)
        total: Tensor | None = None
        for _, _, weights in model.attention_weights(*seen, layers=layers, heads=heads):
            of_layer = weights[:, 1:, 1:].mean(dim=0)
            total = of_layer if total is None else total.add_(of_layer)
        assert total is not None  # a model has a layer
        n = total.shape[0]
        order = total.argsort(dim=1, stable=True)
        result = torch.empty_like(total)
        places = torch.arange(1, n + 1, dtype=total.dtype, device=total.device).div_(n)
        return result.scatter_(1, order, places.expand(n, n))

    return ranks


def value_falls(removal: Removal = "remove") -> Callable[[ScDiVa, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make a read-out of how far predicted values of a cell's genes fall without each of some others.

    The values of every fourth gene of the ranking are hidden and predicted from all others: once with the cell as it
    is, and once for each source without it. Which fourth differs between cells: many cells of which a quarter is read
    tell more of the average than a quarter as many that are read whole.

    Parameters
    ----------
    removal
        `"remove"` takes a source out of the cell, so that those behind it move up; `"mask"` hides its identity and its
        value, so that the model is told of a gene there but not of which.

    Returns
    -------
    Function of a model, the packed tensors of one cell, the places of n sources among its genes, and the number of the
    first gene that is hidden. It gives float32 `(n, L)`, NaN where a gene is the source itself or not hidden. The genes
    are the first `max_length`.

    Raises
    ------
    ValueError
        If `removal` is none of these.
    """
    if removal not in ("remove", "mask"):
        raise ValueError(f'removal must be "remove" or "mask", got {removal!r}.')

    def falls(
        model: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, sources: Tensor, first: Tensor
    ) -> Tensor:
        most = model.config.max_length
        whole = tokens[:most].cpu().numpy(), values[:most].cpu().numpy()
        n = len(whole[0])
        turn = np.where(np.arange(n) % PARTS == int(first), 0, -1)
        place = {int(token): i for i, token in enumerate(whole[0])}
        result = np.full((len(sources), n), np.nan, dtype=np.float32)
        before = hidden_values(model, Ranked(*whole, turn))
        for row, source in enumerate(sources.tolist()):
            if removal == "remove":
                cell = Ranked(*(np.delete(part, source) for part in (*whole, turn)))
            else:
                cell = Ranked(whole[0].copy(), whole[1], turn.copy())
                cell.tokens[source], cell.turn[source] = MASK, -1
            for token, value in hidden_values(model, cell).items():
                result[row, place[token]] = before[token] - value
        return torch.from_numpy(result)

    return falls
