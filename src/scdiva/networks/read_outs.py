"""What a model says of pairs of genes in one cell: how they attend to each other, and what each loses without another.

Made to be read out by :func:`scdiva.models.inference.open_encoder`, one cell a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva.models.scdiva import ScDiVa

Effect = Literal["value", "presence"]
Removal = Literal["remove", "mask"]
PARTS = 4
"""One gene in so many is hidden at a time."""


def attention_ranks(
    layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Callable[[ScDiVa, Tensor, Tensor, Tensor], Tensor]:
    r"""Make a read-out of how the genes of one cell attend to each other.

    Attention weights (paper, eq. `mha`), without the column of `[LAT]`, are averaged over layers and heads; then the
    keys of each query are ranked and the ranks divided by their number (paper, section "Gene Regulatory Network
    Inference and Logic", rank-normalised weights), so that long and short cells count equally.

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
        order = total.cpu().numpy().argsort(axis=1)  # numpy sorts rows several times faster than torch
        result = np.empty(order.shape, dtype=np.float32)
        np.put_along_axis(result, order, np.arange(1, len(order) + 1, dtype=np.float32) / len(order), axis=1)
        return torch.from_numpy(result)

    return ranks


def knockout_falls(
    targets: Tensor, effect: Effect = "value", removal: Removal = "remove"
) -> Callable[[ScDiVa, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make a read-out of how far what the model expects of genes falls in a cell without each of some others.

    Every fourth gene of the ranking is hidden and predicted from all others: once with the cell as it is, and once for
    each source without it. Which fourth differs between cells: many cells of which a quarter is read tell more of the
    average than a quarter as many that are read whole.

    Parameters
    ----------
    targets
        int64 `(n_targets,)`, tokens.
    effect
        `"value"` reads the log-normalised expression that is predicted of a target if it is one of the hidden genes:
        the mean over their places, each by the probability that the target stands there. `"presence"` reads the
        logarithm of how often it is expected among them, the sum of these probabilities.
    removal
        `"remove"` takes a source out of the cell, so that those behind it move up; `"mask"` hides its identity and its
        value, so that the model is given a gene there but not which.

    Returns
    -------
    Function of a model, the packed tensors of one cell, the places of n sources among its genes, and the number of the
    first gene that is hidden. It gives float32 `(n, n_targets)`, NaN for a target that is visible in the cell. A source
    is not hidden while it is asked about. The cell's genes are the first `max_length`.

    Raises
    ------
    ValueError
        If `effect` or `removal` is none of these.
    """
    if effect not in ("value", "presence"):
        raise ValueError(f'effect must be "value" or "presence", got {effect!r}.')
    if removal not in ("remove", "mask"):
        raise ValueError(f'removal must be "remove" or "mask", got {removal!r}.')

    @torch.no_grad()
    def falls(
        model: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, sources: Tensor, first: Tensor
    ) -> Tensor:
        most, aims = model.config.max_length, targets.to(tokens.device)
        tokens, values = tokens[:most], values[:most]
        place = torch.arange(len(tokens), device=tokens.device)
        hidden = place % PARTS == first
        result = torch.empty((len(sources), len(aims)), device=tokens.device)
        usual = _expected(model, tokens, values, hidden, aims, effect)
        for row, source in enumerate(sources.tolist()):
            still, before = hidden, usual
            if hidden[source]:  # the model has to be given it, or nothing is taken away
                still = hidden & (place != source)
                before = _expected(model, tokens, values, still, aims, effect)
            if removal == "remove":
                left = place != source
                after = _expected(model, tokens[left], values[left], still[left], aims, effect)
            else:
                masked = tokens.masked_fill(place == source, MASK)
                after = _expected(model, masked, values, still, aims, effect)
            result[row] = before - after
            result[row, torch.isin(aims, tokens[~still])] = torch.nan
        return result

    return falls


def _expected(model: ScDiVa, tokens: Tensor, values: Tensor, hidden: Tensor, targets: Tensor, effect: Effect) -> Tensor:
    """Predict targets from what is visible of a cell, NaN if nothing is hidden."""
    places = hidden.nonzero().squeeze(1)
    if not len(places):
        return torch.full((len(targets),), torch.nan, device=tokens.device)
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
    found = model(tokens.masked_fill(hidden, MASK), values, bounds)
    chance = model.logits(found, places).float().log_softmax(dim=1)[:, targets - N_SPECIAL]
    if effect == "presence":
        return chance.logsumexp(dim=0)
    # a value is what its place gives and what its gene gives: no need to predict each gene at each place
    of_place = model.values(found, torch.full_like(places, MASK), places).float()
    at_first = model.values(found, targets, places[:1].expand(len(targets))).float()
    return at_first + chance.softmax(dim=0).T @ (of_place - of_place[0])
