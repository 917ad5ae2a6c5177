"""Fine-tune a whole model on cells in memory: one Lightning module, one runner, an objective for each task (paper).

An objective is a module that maps a network and the numbers of some training examples to a loss. It holds the examples
and the layers that are new. :func:`finetune` trains both.
"""

from __future__ import annotations

import hashlib
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
from torch.utils.data import DataLoader, IterableDataset

from scdiva._checks import check_choices, check_least, refuse_unwritable
from scdiva._constants import FINETUNED
from scdiva._files import output_path
from scdiva._rng import step_generator, step_seed
from scdiva._settings import settings
from scdiva.annotation.fit import VARIANCE_OFFSET, balanced_weights
from scdiva.annotation.head import AnnotationHead, Read
from scdiva.data.batch import CellBatch
from scdiva.data.memory import InMemoryCells
from scdiva.integration.objective import reversed_gradient
from scdiva.metrics.perturbation import WMSE_ALPHA
from scdiva.models.config import ScDiVaConfig
from scdiva.models.inference import out_of_memory, runs_transformer
from scdiva.models.layers import Block, perceptron
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.response_head import ResponseHead, head_inputs, predicted_change
from scdiva.train.base import Result, TaskModule, decay_groups
from scdiva.train.callbacks import CHECKPOINT, CHECKPOINT_KEY, read_checkpoint
from scdiva.train.config import FinetuneConfig
from scdiva.train.loop import shuffled
from scdiva.train.objectives import pair_contrast_loss, supervised_contrast_loss, thinned_at_random
from scdiva.train.runner import fit

HEAD_RATE = 10.0
"""Learning rate of new layers, in units of the model's."""
LORA_SCALE = 2.0
"""Factor of a low-rank update, alpha / rank of Hu et al. 2022."""
HIDDEN = 128
"""Hidden width of the batch discriminators."""
TEMPERATURE = 0.1
"""Of both contrastive losses."""
CONTRAST_WEIGHT, REVERSAL_WEIGHT, REVERSAL_RISE = 1.0, 1.0, 10.0
"""Weights of the contrastive loss and of the reversed gradient at the end of its schedule, and the schedule's γ."""
MAX_TIME = 0.3
"""Without labels, a second view of a cell leaves each gene out with probability t ~ U(0, 0.3)."""


CELLS_SEEN = 8_000
"""Training examples that are shown where no number of epochs is given."""


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
        As given by the user; None where they were not.
    through
        Whether the task reads the transformer's output; None: where the cell state comes from it.

    Returns
    -------
    Fields of :class:`FinetuneConfig`, and `epochs`; None without fine-tuning.

    Raises
    ------
    ValueError
        If one is given without `finetune=True`, is out of range, or does not apply to this model; or if
        `checkpoint_dir` holds a checkpoint of another task, model or configuration.
    TypeError
        If one has the wrong type.
    """
    check_choices(finetune=(finetune, (True, False)))
    given = {"epochs": epochs, "lr": lr, "freeze": freeze, "lora": lora, "context": context}
    named = {name: value for name, value in (given | {"checkpoint_dir": checkpoint_dir}).items() if value is not None}
    if not finetune:
        if named:
            raise ValueError(f"{', '.join(named)} set how the model is fine-tuned: pass finetune=True too.")
        return None
    if checkpoint_dir is not None:
        refuse_unwritable(output_path(checkpoint_dir, "checkpoint_dir") / CHECKPOINT)
    c = model.config
    wanted = {"learning_rate": lr, "freeze": freeze, "lora": lora, "context": context}
    fields: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    try:
        config = FinetuneConfig(**fields)
    except (TypeError, ValueError) as error:  # as the user named it
        raise type(error)(str(error).replace("learning_rate", "lr", 1)) from None
    if epochs is not None:
        check_least(epochs=(epochs, 1))
    if config.freeze > c.n_layers:
        raise ValueError(f"freeze={config.freeze} is more than the {c.n_layers} blocks of the model.")
    if config.lora > c.dim:
        raise ValueError(f"lora={config.lora} is more than the width of the model, {c.dim}: pass a rank such as 8.")
    if config.lora and config.freeze == c.n_layers:
        raise ValueError(f"freeze={config.freeze} leaves no block that lora could update: freeze fewer.")
    if not (runs_transformer(model) if through is None else through):
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


def _refuse_other_run(file: Path, model: ScDiVa, task: type[Objective], fields: dict[str, Any]) -> None:
    """Refuse a checkpoint, if there is one, of what is known to differ before cells are read."""
    if not file.exists():
        return
    saved, config = read_checkpoint(file)[CHECKPOINT_KEY], FinetuneConfig(**fields)
    remedy = f"Pass another checkpoint_dir, or delete {str(file)!r}."
    if saved.get("objective") != task.__name__:
        raise ValueError(f"{str(file)!r} is a checkpoint of another task than {task.task}. {remedy}")
    given = {"learning_rate": "lr", "freeze": "freeze", "lora": "lora", "context": "context"}
    for name, argument in given.items():
        then, now = saved["config"].get(name), getattr(config, name)
        if then != now:
            raise ValueError(f"{str(file)!r} is a checkpoint of a run with {argument}={then}, not {now}. {remedy}")
    if saved["model"] != model_digest(network_for(model, replace(config, lora=0), 0)):
        raise ValueError(f"{str(file)!r} is a checkpoint of a run from a model with other weights. {remedy}")


def planned(fields: dict[str, Any], n_items: int, seed: int, precision: str) -> FinetuneConfig:
    """Complete the result of :func:`finetune_config`: steps from the epochs and the number of training examples.

    Parameters
    ----------
    fields
        From :func:`finetune_config`. With `epochs=None` there are as many as show 8,000 examples, at least one and at
        most 250.
    n_items
        Training examples of an epoch.
    seed, precision
        Of the run.
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


class Objective(nn.Module):
    """Loss of a task; its parameters are the layers that the task adds to the network."""

    n_items: int
    """Training examples of an epoch."""
    task: ClassVar[str]
    """Name of the task in messages and in the metadata of a fine-tuned model."""

    def through_blocks(self, network: ScDiVa) -> bool:
        """Whether the loss depends on the transformer blocks, which can run over a batch in parts."""
        return runs_transformer(network)

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the examples `rows`, and its parts for the log.

        Parameters
        ----------
        network
            The model that is trained.
        rows
            Numbers of training examples, 0 to `n_items - 1`.
        progress
            Completed share of the training steps, 0 to 1.
        generator
            CPU generator to draw everything random from.
        """
        raise NotImplementedError

    def data(self) -> Iterator[np.ndarray]:
        """Arrays that define the training examples; a resumed run must have the same."""
        raise NotImplementedError


def reversal_schedule(progress: float) -> float:
    r"""Weight of the reversed gradient, :math:`2 / (1 + e^{-10 p}) - 1` (Ganin & Lempitsky 2015)."""
    return REVERSAL_WEIGHT * float(2 / (1 + np.exp(-REVERSAL_RISE * progress)) - 1)


class IntegrationObjective(Objective):
    """Gradient reversal against a batch discriminator plus a contrastive loss (paper, section on batch integration).

    With labels, the supervised contrastive loss of Khosla et al. 2020. Without, each cell is contrasted with the other
    cells of its batch, and its own second view, with genes left out at random, is the positive: negatives from other
    batches would reward the model for telling batches apart.

    Parameters
    ----------
    cells
        Training cells.
    batches
        Batch numbers from 0 by covariate, int64 `(n_cells,)` each.
    labels
        Label numbers from 0, -1 for none, int64 `(n_cells,)`; None without labels.
    state_dim, context
        Width of the cell state; genes kept of each cell, None for all.
    seed
        Of the discriminators' weights.
    """

    task = "integrate"

    def __init__(
        self,
        cells: InMemoryCells,
        batches: list[np.ndarray],
        labels: np.ndarray | None,
        *,
        state_dim: int,
        context: int | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.cells, self.context, self.n_items = cells, context, cells.n_cells
        self.batches, self.labels = batches, labels
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(step_seed(seed, 0, "discriminators"))
            self.discriminators = nn.ModuleList(
                perceptron(state_dim, HIDDEN, int(batch.max()) + 1, nn.LeakyReLU(0.2)) for batch in batches
            )

    def data(self) -> Iterator[np.ndarray]:
        """Cells, batches and labels."""
        yield from (self.cells.indptr, self.cells.tokens, self.cells.values, *self.batches)
        if self.labels is not None:
            yield self.labels

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and its parts `reversal` (cross-entropy of the discriminators) and `contrast`."""
        device = next(network.parameters()).device
        taken = self.cells.take(rows, self.context)
        state = self._direction(network, taken.to(device))
        wide = reversed_gradient(state, reversal_schedule(progress)) * state.shape[1] ** 0.5
        reversal = state.new_zeros(())
        numbers = [torch.from_numpy(batch[rows]).to(device) for batch in self.batches]
        for discriminator, batch in zip(self.discriminators, numbers, strict=True):
            reversal = reversal + F.cross_entropy(discriminator(wide), batch)
        if self.labels is not None:
            contrast = supervised_contrast_loss(state, torch.from_numpy(self.labels[rows]).to(device), TEMPERATURE)
        else:
            view = thinned_at_random(taken, MAX_TIME, generator).to(device)
            positive = self._direction(network, view)
            present = torch.ones(1, len(rows), dtype=torch.bool, device=device)
            apart = torch.stack([batch[:, None] != batch for batch in numbers]).any(dim=0)
            contrast = pair_contrast_loss(state, positive[None], present, apart, TEMPERATURE)
        loss = reversal + CONTRAST_WEIGHT * contrast
        return loss, {"reversal": reversal.detach(), "contrast": contrast.detach()}

    def _direction(self, network: ScDiVa, cells: CellBatch) -> Tensor:
        """Cell states less their mean over the step, at length 1, `(B, state_dim)`.

        What all cells share would leave all cosines near 1, and the contrastive loss without a gradient.
        """
        state = network.encode(*cells.packed).float()
        return F.normalize(state - state.mean(dim=0), dim=1)


class AnnotationObjective(Objective):
    r"""Cross-entropy of an MLP head on the cell state (paper, section on annotation).

    Every label weighs the same: :math:`\sum_i w_{y_i} \ell_i / \sum_i w_{y_i}` over the cells of a batch, with w the
    inverse number of training cells of the label. The paper names no weights.

    Features are standardised within the batch (Ioffe & Szegedy 2015, without their affine map), since the moments of
    the head's former state no longer hold once the state changes.

    Parameters
    ----------
    cells
        Training cells.
    labels
        Label numbers from 0, int64 `(n_cells,)`.
    head
        A head of method `"probe"`; its classifier is trained in place. Its moments are not used and not changed:
        :func:`scdiva.annotation.fit.set_moments`.
    context
        Genes kept of each cell.
    """

    task = "annotate"
    weights: Tensor

    def __init__(self, cells: InMemoryCells, labels: np.ndarray, head: AnnotationHead, *, context: int) -> None:
        super().__init__()
        self.cells, self.labels, self.context, self.n_items = cells, labels, context, cells.n_cells
        self.head = head.requires_grad_(True)
        self.register_buffer("weights", balanced_weights(labels, head.sizes.n_labels), persistent=False)

    def data(self) -> Iterator[np.ndarray]:
        """Cells and labels."""
        yield from (self.cells.indptr, self.cells.tokens, self.cells.values, self.labels)

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and `accuracy`, the share of the cells whose label has the largest logit."""
        packed = self.cells.take(rows, self.context).to(self.weights.device).packed
        features = self.head.features(Read(network.encode(*packed), *packed))
        variance, mean = torch.var_mean(features, dim=0)
        logits = self.head.classifier((features - mean) / (variance + VARIANCE_OFFSET).sqrt()).float()
        labels = torch.from_numpy(self.labels[rows]).to(logits.device)
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return F.cross_entropy(logits, labels, weight=self.weights), {"accuracy": accuracy}


@dataclass(frozen=True)
class _Rows:
    """A batch: numbers of training examples."""

    rows: np.ndarray

    @property
    def n_cells(self) -> int:
        return len(self.rows)

    def to(self, *_: Any, **__: Any) -> _Rows:
        """Return itself: the objective moves what it reads."""
        return self


class _Epochs(IterableDataset):  # type: ignore[type-arg]
    """Batches without end from a number on; each epoch is a permutation, a function of seed and epoch."""

    def __init__(self, n_items: int, size: int, seed: int, start: int) -> None:
        self.n_items, self.size, self.seed, self.start = n_items, size, seed, start

    def __iter__(self) -> Iterator[_Rows]:
        for number, rows in enumerate(shuffled(np.arange(self.n_items), self.size, self.seed, whole=True)):
            if number >= self.start:
                yield _Rows(rows)


class _Data(pl.LightningDataModule):
    """Serves the numbers of training examples."""

    def __init__(self, n_items: int, size: int, seed: int) -> None:
        super().__init__()
        self.n_items, self.size, self.seed, self.start_step = n_items, size, seed, 0

    def train_dataloader(self) -> DataLoader[_Rows]:
        return DataLoader(_Epochs(self.n_items, self.size, self.seed, self.start_step), batch_size=None)


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
        Loss and its parts, a scalar tensor for each step; saved with every checkpoint.
    """

    config: FinetuneConfig
    model: ScDiVa
    other_run = "Choose another checkpoint_dir, or pass the former arguments."
    less_memory = "A smaller context needs less memory"

    def __init__(self, model: ScDiVa, objective: Objective, config: FinetuneConfig) -> None:
        super().__init__(model, config)
        self.objective = objective
        self.history: dict[str, list[Tensor]] = {}
        self._parts: dict[str, Tensor] = {}
        self._digests = {
            "model": model_digest(model),
            "data": _digest(objective.data()),
        }

    def _in_parts(self, run: Callable[[int], Result], n_cells: int) -> Result:
        """Run a step; without blocks, smaller parts need no less memory."""
        return super()._in_parts(run, n_cells if self.objective.through_blocks(self.model) else 1)

    def compute_loss(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch of training examples, from the objective."""
        progress = self.batches_seen / self.config.steps
        loss, parts = self.objective(self.model, batch.rows, progress, generator)
        self._parts = {"loss": loss.detach(), **parts}
        return loss, parts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Train on one batch and record its losses; called by Lightning."""
        loss = super().training_step(batch, batch_idx)
        for name, value in self._parts.items():
            self.history.setdefault(name, []).append(value.float())
        return loss

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters of the network, and those of the objective at ten times the learning rate."""
        c = self.config
        new = [group | {"lr": HEAD_RATE * c.learning_rate} for group in decay_groups(self.objective, c.weight_decay)]
        return [*decay_groups(self.model, c.weight_decay), *new]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run must know. Called by Lightning."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY] |= self._digests | {"objective": type(self.objective).__name__}
        checkpoint[CHECKPOINT_KEY]["history"] = {
            name: torch.stack(values).cpu() for name, values in self.history.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue a run, or refuse if it was another one. Called by Lightning.

        Raises
        ------
        ValueError
            If the checkpoint is of another task, configuration, model or data.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint[CHECKPOINT_KEY]
        for name, what in (("data", "on other cells or labels"), ("model", "from a model with other weights")):
            if saved[name] != self._digests[name]:
                raise ValueError(f"The checkpoint was trained {what}. Choose another checkpoint_dir.")
        self.history = {name: list(values) for name, values in saved["history"].items()}


def model_digest(network: ScDiVa) -> str:
    """SHA-256 of the weights of a network from :func:`network_for`, low-rank updates excepted."""
    weights = network.state_dict()
    return _digest(
        weight.detach().float().cpu().numpy()
        for name, weight in weights.items()
        if name.rpartition(".")[0] + ".layer.weight" not in weights
    )


def _digest(arrays: Iterable[np.ndarray]) -> str:
    """Return the SHA-256 of the bytes of some arrays."""
    made = hashlib.sha256()
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


class LowRankLinear(nn.Module):
    r"""A fixed linear layer with a trained low-rank update, :math:`W + 2\,U D` (Hu et al. 2022).

    Parameters
    ----------
    layer
        The layer, without bias; not changed until :meth:`merged`.
    rank
        Rows of D; U starts at zero.
    generator
        Draws D.
    """

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        drawn = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        self.down = nn.Parameter(drawn.to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))

    @property
    def weight(self) -> Tensor:
        """Weight of the layer without the update."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        whole: Tensor = self.layer(x) + LORA_SCALE * F.linear(F.linear(x, self.down), self.up)
        return whole

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Add the update to the layer's weight, and return the layer."""
        self.layer.weight += LORA_SCALE * self.up @ self.down
        return self.layer


def tuned_config(model: ScDiVa, config: FinetuneConfig) -> ScDiVaConfig:
    """Architecture of a model after fine-tuning: a state that comes from the transformer then reads `context` genes.

    Parameters
    ----------
    model
        Before it.
    config
        `context` is read.
    """
    length = config.context if runs_transformer(model) else model.config.max_length
    return replace(model.config, max_length=length, integrated=False, adapted=0)


def network_for(model: ScDiVa, config: FinetuneConfig, seed: int) -> ScDiVa:
    """Copy a model for fine-tuning, with fixed weights and low-rank updates as configured.

    What `tl.adapt` and `tl.integrate` fitted on the previous cell state is left out: the copy's embedding is its state.

    Parameters
    ----------
    model
        Not changed.
    config
        `freeze`, `lora` and `context` are read. A model whose state comes from the transformer reads at most `context`
        genes afterwards.
    seed
        Of the low-rank updates.
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
    """Linear layers of the blocks from a number on: the module that holds each, its name there, and the layer."""
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
    """Train a network and what a task adds to it, in place.

    Parameters
    ----------
    network
        From :func:`network_for`.
    objective
        The task.
    config
        From :func:`planned`.
    device
        Torch device to train on; network and objective are on it afterwards.
    checkpoint_dir
        Folder for a checkpoint after every epoch. If it holds one of the same run, training continues from there and
        gives the same bits as a run that was never interrupted. None: no checkpoints.

    Returns
    -------
    Loss and its parts at every step, by name.

    Raises
    ------
    FloatingPointError
        If a loss or gradient is NaN or infinite.
    MemoryError
        If the device has too little memory for a single cell, or for a batch of a model that can't run it in parts.
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
    begun = checkpoint_dir is not None and (output_path(checkpoint_dir, "checkpoint_dir") / CHECKPOINT).exists()
    try:
        fit(
            module,
            _Data(objective.n_items, config.batch_size, config.seed),
            out_dir=None if checkpoint_dir is None else Path(checkpoint_dir).expanduser(),
            resume_from=Path(str(checkpoint_dir)).expanduser() if begun else None,
            progress=settings.progress,
            limit_val_batches=0,
            **where,
        )
    except FloatingPointError as error:
        lower = min(config.learning_rate / 3, FinetuneConfig.learning_rate)
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
    return {name: [float(value) for value in values] for name, values in module.history.items()}


def finetune_for_integration(
    model: ScDiVa,
    cells: InMemoryCells,
    batches: list[np.ndarray],
    labels: np.ndarray | None,
    fields: dict[str, Any],
    seed: int,
    precision: str,
    device: str,
    checkpoint_dir: str | PathLike[str] | None,
) -> tuple[ScDiVa, dict[str, list[float]]]:
    """Fine-tune a copy of a model so that its cell state integrates batches.

    Parameters
    ----------
    model, cells
        The model, not changed, and the cells.
    batches, labels
        As for :class:`IntegrationObjective`.
    fields
        From :func:`finetune_config`.
    seed, precision, device, checkpoint_dir
        As for :func:`finetune`.

    Returns
    -------
    The fine-tuned model, and the losses at every step.
    """
    config = planned(fields, cells.n_cells, seed, precision)
    network = network_for(model, config, seed)
    objective = IntegrationObjective(
        cells, batches, labels, state_dim=network.state_dim, context=network.config.input_length, seed=seed
    )
    history = finetune(network, objective, config, device=device, checkpoint_dir=checkpoint_dir)
    return network, history


def finetune_for_annotation(
    model: ScDiVa,
    cells: InMemoryCells,
    labels: np.ndarray,
    head: AnnotationHead,
    config: FinetuneConfig,
    device: str,
    checkpoint_dir: str | PathLike[str] | None,
) -> tuple[ScDiVa, dict[str, list[float]]]:
    """Fine-tune a copy of a model, and a head on its cell state, to predict labels.

    Parameters
    ----------
    model
        Not changed.
    cells, labels, head
        As for :class:`AnnotationObjective`; the head is trained in place, from its present weights, and on the CPU
        afterwards.
    config
        From :func:`planned`.
    device, checkpoint_dir
        As for :func:`finetune`.

    Returns
    -------
    The fine-tuned model, and the losses at every step.
    """
    network = network_for(model, config, config.seed)
    objective = AnnotationObjective(cells, labels, head, context=network.config.input_length)
    history = finetune(network, objective, config, device=device, checkpoint_dir=checkpoint_dir)
    head.cpu()
    return network, history


CELLS_OF_CONDITION = 64
"""Training examples that an epoch draws of each condition of a perturbation screen."""


@dataclass(frozen=True)
class MeasuredChanges:
    """What a screen measured, as numbers.

    Attributes
    ----------
    cells
        Control cells, ordered by group; `cells.batch` is the number of the group.
    parts
        bool `(n, n_parts)`, what is perturbed in each condition.
    part_tokens
        int64 `(n_parts,)`, tokens of the perturbed genes; -1 for a label that is not a gene.
    group
        int64 `(n,)`, number of the group of cells of each condition.
    strength
        float `(n,)`, strength of the perturbation: the logarithm of its dose.
    delta
        float32 `(n, n_genes)`, mean of the perturbed cells minus that of the group's control cells.
    control
        float32 `(n_groups, n_genes)`, mean of the control cells.
    """

    cells: InMemoryCells
    parts: np.ndarray
    part_tokens: np.ndarray
    group: np.ndarray
    strength: np.ndarray
    delta: np.ndarray
    control: np.ndarray

    @property
    def n_items(self) -> int:
        """Training examples of an epoch."""
        return CELLS_OF_CONDITION * len(self.group)


class ResponseObjective(Objective):
    r"""Signal-weighted mean squared error of the predicted change (paper, eqs. `wmse_weights` and `wmse`).

    :math:`\sum_j w_j (\hat\Delta_j - \Delta_j)^2`, :math:`w_j = (\bar v_j + \alpha) / \sum_k (\bar v_k + \alpha)`, with
    :math:`\bar v` the mean expression of the group's control cells. An example is a measured condition and a control
    cell of its group, drawn anew every time.

    Parameters
    ----------
    measured
        What the screen measured.
    head
        The response head.
    context
        Maximum number of genes of a cell.
    """

    task = "perturbation"

    def __init__(self, measured: MeasuredChanges, head: ResponseHead, context: int) -> None:
        super().__init__()
        self.measured, self.head, self.context, self.n_items = measured, head, context, measured.n_items
        weights = measured.control.astype(np.float64) + WMSE_ALPHA
        self.weights = nn.Buffer(
            torch.from_numpy(weights / weights.sum(axis=1, keepdims=True)).float(), persistent=False
        )
        self.delta = nn.Buffer(torch.from_numpy(measured.delta), persistent=False)
        groups = np.arange(len(measured.control))
        self._start, self._stop = (np.searchsorted(measured.cells.batch, groups, side) for side in ("left", "right"))

    def through_blocks(self, network: ScDiVa) -> bool:
        """Return True: the head reads the transformer's output."""
        return True

    @torch.no_grad()
    def standardise(self, network: ScDiVa) -> None:
        """Standardise what the head reads by the states of the network, from four control cells for each condition."""
        m, inputs = self.measured, []
        for condition, group in enumerate(m.group):
            cells = np.linspace(self._start[group], self._stop[group] - 1, 4).round().astype(np.int64)
            parts = np.repeat(m.parts[condition : condition + 1], len(cells), axis=0)
            inputs.append(head_inputs(network, self.head, m.cells, cells, parts, m.part_tokens, self.context)[0])
        self.head.standardise(torch.cat(inputs))

    def data(self) -> Iterator[np.ndarray]:
        """Cells and conditions."""
        m = self.measured
        yield from (m.cells.indptr, m.cells.tokens, m.cells.values, m.cells.batch)
        yield from (m.parts, m.part_tokens, m.group, m.strength, m.delta, m.control)

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted mean squared error, averaged over the examples."""
        m, condition = self.measured, rows % len(self.measured.group)
        group = m.group[condition]
        drawn = torch.rand(len(rows), generator=generator, dtype=torch.float64).numpy()
        cell = self._start[group] + (drawn * (self._stop - self._start)[group]).astype(np.int64)
        change = predicted_change(
            network, self.head, m.cells, cell, m.parts[condition], m.part_tokens, m.strength[condition], self.context
        )
        device = change.device
        error = (change - self.delta[torch.from_numpy(condition).to(device)]).square()
        return (self.weights[torch.from_numpy(group).to(device)] * error).sum(dim=1).mean(), {}


def finetune_for_perturbation(
    model: ScDiVa,
    measured: MeasuredChanges,
    fields: dict[str, Any],
    seed: int,
    precision: str,
    device: str,
    checkpoint_dir: str | PathLike[str] | None,
) -> tuple[ScDiVa, ResponseHead, dict[str, list[float]]]:
    """Fine-tune a copy of a model so that it predicts how perturbations change mean expression.

    Parameters
    ----------
    model, measured
        The model, not changed, and the screen.
    fields
        From :func:`finetune_config`.
    seed, precision, device, checkpoint_dir
        As for :func:`finetune`.

    Returns
    -------
    The fine-tuned model, its response head, and the losses at every step.
    """
    config = planned(fields, measured.n_items, seed, precision)
    network = network_for(model, config, seed)
    head = ResponseHead.for_changes(
        network.config.dim, measured.part_tokens, measured.delta, measured.parts.sum(axis=1), measured.strength, seed
    )
    objective = ResponseObjective(measured, head, config.context)
    objective.to(device).standardise(network.to(device).eval())
    history = finetune(network, objective, config, device=device, checkpoint_dir=checkpoint_dir)
    return network, head, history
