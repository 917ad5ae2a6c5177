"""Fine-tuning of all weights on cells in memory: one Lightning module and an objective for each task of the paper.

An objective is a module that maps a network and the indices of training examples to a loss. It holds the examples and
the new layers. :func:`finetune` trains the network and these layers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._checks import check_choices, check_least, refuse_unwritable
from scdiva._constants import FINETUNED
from scdiva._files import output_path
from scdiva._rng import step_generator
from scdiva._settings import settings, to_device
from scdiva.data.batch import CellBatch
from scdiva.models.config import ScDiVaConfig
from scdiva.models.inference import out_of_memory, runs_transformer
from scdiva.models.layers import Block
from scdiva.models.scdiva import ScDiVa, check_input
from scdiva.train.base import Result, TaskModule, decay_groups, network_groups, shuffled
from scdiva.train.callbacks import CHECKPOINT, CHECKPOINT_KEY, read_checkpoint
from scdiva.train.config import FinetuneConfig
from scdiva.train.runner import fit

HEAD_RATE = 10.0
"""Learning rate of new layers relative to that of the model."""
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


def encode_cells(network: ScDiVa, batch: CellBatch) -> Tensor:
    """Cell states of a batch on the CPU, `(B, state_dim)`, on the device of the network, without waiting for it."""
    device = next(network.parameters()).device
    if device.type != "cpu":  # inputs on a device are not checked
        check_input(network.config, *batch.packed, max_length=network.config.input_length)
    return network.encode(to_device(batch.tokens, device), to_device(batch.values, device), batch.cu_seqlens)


class Objective(nn.Module):
    """Loss of a task; its parameters are the layers that the task adds to the network."""

    n_items: int
    """Training examples of an epoch."""
    task: ClassVar[str]
    """Name of the task in messages and in the metadata of a fine-tuned model."""

    def through_blocks(self, network: ScDiVa) -> bool:
        """Whether the loss depends on the transformer blocks, which can process a batch in parts."""
        return runs_transformer(network)

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the training examples `rows`, and its terms for the log.

        Parameters
        ----------
        network
            The model.
        rows
            Indices of training examples, 0 to `n_items - 1`.
        progress
            Completed share of the training steps, 0 to 1.
        generator
            CPU generator of all random numbers.
        """
        raise NotImplementedError

    def data(self) -> Iterator[np.ndarray]:
        """Arrays that define the training examples; a resumed run must have the same."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Rows:
    """A batch: indices of training examples."""

    rows: np.ndarray

    @property
    def n_cells(self) -> int:
        return len(self.rows)

    def to(self, *_: Any, **__: Any) -> _Rows:
        """Return self: the objective moves its own tensors."""
        return self


class _Data(pl.LightningDataModule):
    """Batches of training examples without end; each epoch is a permutation, a function of seed and epoch."""

    def __init__(self, n_items: int, size: int, seed: int) -> None:
        super().__init__()
        self.n_items, self.size, self.seed, self.start_step = n_items, size, seed, 0

    def train_dataloader(self) -> Iterator[_Rows]:
        batches = shuffled(np.arange(self.n_items), self.size, self.seed, drop_last=True)
        return map(_Rows, itertools.islice(batches, self.start_step, None))


class FinetuneModule(TaskModule):
    """Fine-tuning of a network by the objective of a task.

    Parameters
    ----------
    model
        The network; its parameters with `requires_grad` are trained in place.
    objective
        The task's loss and new layers, trained in place.
    config
        See :class:`FinetuneConfig`.

    Attributes
    ----------
    history
        Loss and its terms at every step; saved with every checkpoint.
    """

    config: FinetuneConfig
    model: ScDiVa
    other_run = "Choose another checkpoint_dir, or pass the former arguments."
    less_memory = "A smaller context needs less memory"

    def __init__(self, model: ScDiVa, objective: Objective, config: FinetuneConfig) -> None:
        super().__init__(model, config)
        self.objective = objective
        self.history: dict[str, list[float]] = {}
        self._digests = {"model": model_digest(model), "data": _digest(objective.data())}

    def _in_parts(self, run: Callable[[int], Result], n_cells: int) -> Result:
        """Run a step; without transformer blocks, smaller parts would not need less memory."""
        return super()._in_parts(run, n_cells if self.objective.through_blocks(self.model) else 1)

    def compute_loss(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch of training examples, from the objective."""
        progress = self.batches_seen / self.config.steps
        loss, parts = self.objective(self.model, batch.rows, progress, generator)
        return loss, parts

    def record(self, means: dict[str, float]) -> None:
        """Append the losses of a step to the history."""
        for name, value in means.items():
            self.history.setdefault(name, []).append(value)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters of the network, and those of the objective at ten times the learning rate."""
        c = self.config
        new = [group | {"lr": HEAD_RATE * c.learning_rate} for group in decay_groups(self.objective, c.weight_decay)]
        return [*network_groups(self.model, c), *new]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add digests and history to a checkpoint. Called by Lightning."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY] |= self._digests | {"objective": type(self.objective).__name__}
        checkpoint[CHECKPOINT_KEY]["history"] = {name: torch.tensor(values) for name, values in self.history.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint. Called by Lightning.

        Raises
        ------
        ValueError
            If the checkpoint is of another task, configuration, model or data.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint[CHECKPOINT_KEY]
        for name, differs in (("data", "on other cells or labels"), ("model", "from a model with other weights")):
            if saved[name] != self._digests[name]:
                raise ValueError(f"The checkpoint was trained {differs}. Choose another checkpoint_dir.")
        self.history = {name: values.tolist() for name, values in saved["history"].items()}


def model_digest(network: ScDiVa) -> str:
    """SHA-256 of the weights of a network from :func:`network_for`, without low-rank updates."""
    weights = network.state_dict()
    return _digest(
        weight.detach().float().cpu().numpy()
        for name, weight in weights.items()
        if name.rpartition(".")[0] + ".layer.weight" not in weights
    )


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


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
        for layers, name, layer in _linears(new, config.freeze):
            assert isinstance(layer, nn.Linear)
            setattr(layers, name, LowRankLinear(layer, config.lora, generator))
    return new


def _linears(network: ScDiVa, first: int) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Linear layers of the blocks from the index `first` on: parent module, name and layer."""
    for block in list(network.blocks)[first:]:
        assert isinstance(block, Block)
        for layers in (block.attention, block.ffn):
            for name, layer in list(layers.named_children()):
                yield layers, name, layer


def finetune(
    network: ScDiVa,
    objective: Objective,
    config: FinetuneConfig,
    *,
    device: str,
    checkpoint_dir: str | PathLike[str] | None = None,
) -> dict[str, list[float]]:
    """Train a network and the new layers of a task, in place.

    Parameters
    ----------
    network
        From :func:`network_for`.
    objective
        Objective of the task.
    config
        From :func:`planned`.
    device
        Torch device of the training; network and objective remain there.
    checkpoint_dir
        Folder for a checkpoint after every epoch. If it holds a checkpoint of the same run, training continues from it,
        and the result has the same bits as without an interruption. None: no checkpoints.

    Returns
    -------
    Loss and its terms at every step, by name.

    Raises
    ------
    FloatingPointError
        If a loss or gradient is NaN or infinite.
    MemoryError
        If the device lacks memory for one cell, or for one batch if the model can't process it in parts.
    ValueError
        If `checkpoint_dir` holds a checkpoint of another run.
    KeyboardInterrupt
        On Ctrl-C; with `checkpoint_dir` the same call continues.
    """
    module = FinetuneModule(network.train(), objective.train(), config)
    target = torch.device(device)
    where: dict[str, Any] = {"accelerator": "cpu"}
    if target.type != "cpu":
        where = {"accelerator": "gpu", "devices": [target.index or 0]}
    folder = None if checkpoint_dir is None else output_path(checkpoint_dir, "checkpoint_dir")
    try:
        fit(
            module,
            _Data(objective.n_items, config.batch_size, config.seed),
            out_dir=folder,
            resume_from=folder if folder is not None and (folder / CHECKPOINT).exists() else None,
            progress=settings.progress,
            limit_val_batches=0,
            **where,
        )
    except FloatingPointError as error:
        lower = min(config.learning_rate / 3, default_rate(network.config.dim))
        also = "" if checkpoint_dir is None else " and another checkpoint_dir"
        raise FloatingPointError(
            f"{str(error).partition(' The weights were left')[0]} The AnnData object was not changed. Pass a lower "
            f"learning rate, lr={lower:.1g} in place of {config.learning_rate:.2g}{also}; if that does not help, check "
            "the counts and the model."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        remedy = 'Free memory on it, or train on another: device="cpu"'
        if objective.through_blocks(network):
            remedy += f", or pass a smaller context than {config.context} genes"
        raise MemoryError(
            f"{device} is out of memory after {module.batches_seen} of {config.steps} steps of {config.batch_size} "
            f"examples. The AnnData object was not changed. {remedy}."
        ) from error
    for layers, name, layer in _linears(network, 0):
        if isinstance(layer, LowRankLinear):
            setattr(layers, name, layer.merged())
    tuned = {"task": objective.task, "training": config.to_dict()}
    network.metadata = {**(network.metadata or {}), FINETUNED: tuned}
    network.requires_grad_(True).eval().to(target)
    objective.requires_grad_(False).eval().to(target)
    return module.history
