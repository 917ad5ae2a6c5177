"""Low-rank updates of weights (LoRA), put on for training and merged afterwards."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from scdiva._rng import step_generator
from scdiva.models.inference import runs_transformer
from scdiva.models.scdiva import ScDiVa

RANK = 8
"""Rank of a low-rank update."""


class LowRankUpdate(nn.Module):
    """`W + A B` with W kept as it is and B from zero (Hu et al. 2021, LoRA), as a parametrisation of a weight.

    Parameters
    ----------
    weight
        W, `(n, m)`.
    rank
        Columns of A; at most n and m.
    generator
        Source of A.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rank = min(rank, *weight.shape)
        down = torch.randn(weight.shape[0], rank, generator=generator) * rank**-0.5
        self.a = nn.Parameter(down.to(weight))
        self.b = nn.Parameter(weight.new_zeros(rank, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        """Add the update."""
        return weight + self.a @ self.b


def add_low_rank(module: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Put a low-rank update on the weight of a layer, and freeze the weight itself; in place.

    Parameters
    ----------
    module
        With a matrix `weight`.
    rank, generator
        As for :class:`LowRankUpdate`.
    """
    weight = cast(Tensor, module.weight)
    weight.requires_grad_(False)
    parametrize.register_parametrization(module, "weight", LowRankUpdate(weight, rank, generator))


def merge_low_rank(model: nn.Module) -> None:
    """Add all low-rank updates to their weights; the model has the stock layout again. In place.

    Parameters
    ----------
    model
        Any.
    """
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def train_states(model: ScDiVa, how: Literal["lora", "full"], seed: int, *, transformer: bool | None = None) -> None:
    """Say that what a model's cell state comes from is trained, and nothing else; in place.

    That is the set encoder where the state is its alone, else the transformer.

    Parameters
    ----------
    model
        Changed in place; :func:`merge_low_rank` puts it back.
    how
        `"lora"`: low-rank updates of the linear layers. `"full"`: all weights.
    seed
        Of the updates.
    transformer
        True: train the transformer, wherever the state comes from.
    """
    model.requires_grad_(False)
    through = runs_transformer(model) if transformer is None else transformer
    source = model if through else model.anchor
    assert source is not None
    if how == "full":
        source.requires_grad_(True)
        return
    layers = [m for m in (model.blocks if through else source).modules() if isinstance(m, nn.Linear)]
    for number, layer in enumerate(layers):
        add_low_rank(layer, RANK, step_generator(seed, number, "low rank"))
