"""Options and network of fine-tuning. Without Lightning, which takes seconds to load and which only training needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._checks import check_choices, check_least, refuse_unwritable
from scdiva._files import output_path
from scdiva._rng import step_generator
from scdiva.models.config import ScDiVaConfig
from scdiva.models.inference import runs_transformer
from scdiva.models.layers import Block
from scdiva.models.scdiva import ScDiVa
from scdiva.train.config import FinetuneConfig
from scdiva.train.objectives import Objective

WIDTH = 192
"""Width of the blocks above which the default learning rate is lower."""
LORA_SCALE = 2.0
"""Factor of a low-rank update, alpha / rank of Hu et al. 2022."""
CELLS_SEEN = 8_000
"""Training examples of a run with `epochs=None`."""


def finetune_config(
    finetune: bool,
    model: ScDiVa,
    task: type[Objective],
    *,
    epochs: int | None = None,
    lr: float | None = None,
    freeze: int | None = None,
    lora: int | None = None,
    context: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    through: bool | None = None,
) -> dict[str, Any] | None:
    """Check the fine-tuning arguments of a call against a model, before any cell is read.

    Parameters
    ----------
    finetune
        Whether fine-tuning was requested.
    model
        The model.
    task
        Class of the objective.
    epochs, lr, freeze, lora, context, checkpoint_dir
        Arguments of the user, or None.
    through
        Whether the task uses the output of the transformer; None: if the cell state comes from it.

    Returns
    -------
    Fields of :class:`FinetuneConfig`, and `epochs`; None without fine-tuning.

    Raises
    ------
    ValueError
        If an argument is passed without `finetune=True`, is out of range, or does not apply to this model; or if
        `checkpoint_dir` holds a checkpoint of another task, model or configuration.
    TypeError
        If an argument has the wrong type.
    """
    check_choices(finetune=(finetune, (True, False)))
    options = {"learning_rate": lr, "freeze": freeze, "lora": lora, "context": context}
    if not finetune:
        arguments = {
            "epochs": epochs, "lr": lr, "freeze": freeze, "lora": lora, "context": context,
            "checkpoint_dir": checkpoint_dir,
        }  # fmt: skip
        if used := [name for name, value in arguments.items() if value is not None]:
            raise ValueError(
                f"fine-tuning options without fine-tuning: {', '.join(used)}. Pass finetune=True, or omit them."
            )
        return None
    if checkpoint_dir is not None:
        from scdiva.train.callbacks import CHECKPOINT  # loads Lightning

        refuse_unwritable(output_path(checkpoint_dir, "checkpoint_dir") / CHECKPOINT)
    c = model.config
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    trains_blocks = runs_transformer(model) if through is None else through
    fields.setdefault("learning_rate", default_rate(c.dim) if trains_blocks else FinetuneConfig.learning_rate)
    try:
        config = FinetuneConfig(**fields)
    except (TypeError, ValueError) as error:  # the user passed lr
        raise type(error)(str(error).replace("learning_rate", "lr", 1)) from None
    if epochs is not None:
        check_least(epochs=(epochs, 1))
    if config.freeze > c.n_layers:
        raise ValueError(f"freeze={config.freeze} is more than the {c.n_layers} blocks of the model.")
    if config.lora > c.dim:
        raise ValueError(f"lora={config.lora} is more than the width of the model, {c.dim}: pass a rank such as 8.")
    if config.lora and config.freeze == c.n_layers:
        raise ValueError(f"freeze={config.freeze} leaves no block that lora could update: freeze fewer.")
    if not trains_blocks:
        if unused := [name for name in ("freeze", "lora") if fields.get(name)]:
            raise ValueError(
                f"{' and '.join(unused)}: the cell state of this model comes from its set encoder, and no transformer "
                'block is trained. Omit the argument, or use a model with anchor="learned", such as '
                '"scdiva-paper-mini".'
            )
    elif config.context > c.max_length:
        if context is not None:
            raise ValueError(f"context={context} is more than the {c.max_length} genes that the model reads.")
        fields["context"] = c.max_length
    if checkpoint_dir is not None:
        _refuse_other_run(output_path(checkpoint_dir, "checkpoint_dir") / CHECKPOINT, model, task, fields)
    return fields | {"epochs": epochs}


def default_rate(width: int) -> float:
    """Default maximum learning rate for transformer blocks, scaled by 192 / width for wider blocks, after muP [1]_.

    References
    ----------
    .. [1] Yang et al., Tensor programs V: tuning large neural networks via zero-shot hyperparameter transfer, 2022.
    """
    return FinetuneConfig.learning_rate * min(1.0, WIDTH / width)


def _refuse_other_run(file: Path, model: ScDiVa, task: type[Objective], fields: dict[str, Any]) -> None:
    """Raise ValueError before cells are read if a checkpoint is of another task, configuration or model."""
    if not file.exists():
        return
    from scdiva.train.callbacks import CHECKPOINT_KEY, read_checkpoint

    saved, config = read_checkpoint(file)[CHECKPOINT_KEY], FinetuneConfig(**fields)
    remedy = f"Pass another checkpoint_dir, or delete {str(file)!r}."
    if saved.get("objective") != task.__name__:
        raise ValueError(f"{str(file)!r} is a checkpoint of another task than {task.task}. {remedy}")
    arguments = {"learning_rate": "lr", "freeze": "freeze", "lora": "lora", "context": "context"}
    for name, argument in arguments.items():
        then, now = saved["config"].get(name), getattr(config, name)
        if then != now:
            raise ValueError(
                f"{str(file)!r} is a checkpoint of a run with {argument}={then}, not {now}. {remedy[:-1]}, or pass "
                f"{argument}={then} to continue it."
            )
    if saved["model"] != model_digest(network_for(model, replace(config, lora=0), 0)):
        raise ValueError(f"{str(file)!r} is a checkpoint of a run from a model with other weights. {remedy}")


def planned(fields: dict[str, Any], n_items: int, seed: int, precision: str) -> FinetuneConfig:
    """Complete the result of :func:`finetune_config`: steps from the epochs and the number of training examples.

    Parameters
    ----------
    fields
        From :func:`finetune_config`. With `epochs=None` about 8,000 examples are used, in 1 to 250 epochs.
    n_items
        Training examples of an epoch.
    seed, precision
        Seed and precision of the run.
    """
    fields = dict(fields)
    epochs = fields.pop("epochs") or max(1, round(CELLS_SEEN / max(n_items, FinetuneConfig.batch_size)))
    size = min(FinetuneConfig.batch_size, n_items)
    per_epoch = n_items // size
    steps = epochs * per_epoch
    return FinetuneConfig(
        **fields,
        batch_size=size,
        steps=steps,
        warmup_steps=min(FinetuneConfig.warmup_steps, steps // 4),
        checkpoint_every=per_epoch,
        seed=seed,
        precision="bf16" if precision == "bf16" else "fp32",
    )


class LowRankLinear(nn.Module):
    r"""A fixed linear layer with a trained low-rank update, :math:`W + 2\,U D` (Hu et al. 2022).

    Parameters
    ----------
    layer
        The layer, without bias; not changed until :meth:`merged`.
    rank
        Rows of D; U starts at zero.
    generator
        Source of the initial D.
    """

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        drawn = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        self.down = nn.Parameter(drawn.to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))

    @property
    def weight(self) -> Tensor:
        """Weight of the layer, without the update."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        y: Tensor = self.layer(x) + LORA_SCALE * F.linear(F.linear(x, self.down), self.up)
        return y

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Add the update to the layer's weight, and return the layer."""
        self.layer.weight += LORA_SCALE * self.up @ self.down
        return self.layer


def tuned_config(model: ScDiVa, config: FinetuneConfig) -> ScDiVaConfig:
    """Architecture of a model after fine-tuning, which reads `context` genes if its state comes from the transformer.

    Parameters
    ----------
    model
        The model before fine-tuning.
    config
        `context` is used.
    """
    length = config.context if runs_transformer(model) else model.config.max_length
    return replace(model.config, max_length=length, integrated=False, adapted=0, reader=False)


def network_for(model: ScDiVa, config: FinetuneConfig, seed: int) -> ScDiVa:
    """Copy a model for fine-tuning, with fixed weights and low-rank updates as configured.

    The copy has no heads of `tl.adapt` and `tl.integrate`, which were fitted to the former cell state, and no reader,
    which was trained with the former gene codes.

    Parameters
    ----------
    model
        Not changed.
    config
        `freeze`, `lora` and `context` are used. A model whose state comes from the transformer reads at most `context`
        genes afterwards.
    seed
        Seed of the low-rank updates.
    """
    new = ScDiVa(tuned_config(model, config), generator=step_generator(seed, 0, "weights"))
    weights = model.state_dict()
    new.load_state_dict({name: weights[name] for name in new.state_dict()})
    new.vocabulary, new.origin = model.vocabulary, model.origin
    new.metadata = {name: value for name, value in (model.metadata or {}).items() if name != "adaptation"}
    if config.freeze or config.lora:
        fixed = new if config.lora else nn.ModuleList([new.embedding, *list(new.blocks)[: config.freeze]])
        fixed.requires_grad_(False)
    if config.lora:
        generator = step_generator(seed, 0, "low rank")
        for layers, name, layer in linears(new, config.freeze):
            assert isinstance(layer, nn.Linear)
            setattr(layers, name, LowRankLinear(layer, config.lora, generator))
    return new


def linears(network: ScDiVa, first: int) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the linear layers of the blocks from the index `first` on: parent module, name and layer."""
    for block in list(network.blocks)[first:]:
        assert isinstance(block, Block)
        for layers in (block.attention, block.ffn):
            for name, layer in list(layers.named_children()):
                yield layers, name, layer


def model_digest(network: ScDiVa) -> str:
    """SHA-256 of the weights of a network from :func:`network_for`, without low-rank updates."""
    weights = network.state_dict()
    return digest_of(
        weight.detach().float().cpu().numpy()
        for name, weight in weights.items()
        if name.rpartition(".")[0] + ".layer.weight" not in weights
    )


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """SHA-256 of the bytes of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
