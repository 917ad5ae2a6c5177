"""Fit an integration head on cell states, or the objective by which the whole model is fine-tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar, to_device
from scdiva.data.batch import CellBatch, InMemoryCells
from scdiva.integration.batch_correction import batch_prior, correct_batches
from scdiva.models.heads import IntegrationHead
from scdiva.models.inference import runs_transformer
from scdiva.models.layers import perceptron
from scdiva.models.scdiva import ScDiVa
from scdiva.train.objectives import (
    Objective,
    encode_cells,
    pair_contrast_loss,
    supervised_contrast_loss,
    thinned_at_random,
)
from scdiva.train.steps import shuffled, train_steps

DISCRIMINATOR_WIDTH = 128
"""Hidden width of the batch discriminators."""
BLOCK_TOKENS = 1_000_000
"""Tokens of cells that are encoded at once."""
BATCH_SIZE = 256
"""Cells of a step."""
MOST_VIEWS = 4
"""Maximum number of thinned views of a cell, from which the steps draw."""
LEARNING_RATE, WARMUP = 2e-3, 20
"""Learning rate of AdamW, and number of warm-up steps."""
RISING, FALLING, AVERAGED = 0.25, 0.5, 0.1
"""Shares of `steps` in which the reversal rises, the learning rate falls, and weights are averaged."""
CHECKED, TOLERANCE = 50, 0.01
"""Steps over which the loss is averaged, and the relative decrease of that mean below which training has converged."""
MAX_TIME = 0.3
"""A view omits each gene with probability t ~ U(0, 0.3), drawn for each cell."""
DENOISING_WEIGHT, LABELS_WEIGHT = 10.0, 3.0
"""Weights of the losses other than the reversal; the paper gives none."""
TEMPERATURE = 0.1
"""Temperature τ of the contrastive losses."""
REVERSAL_WEIGHT, REVERSAL_RISE = 0.3, 10.0
"""Weight of the reversed gradient at the end of its schedule without fine-tuning (1 with it), and the schedule's γ."""
HISTORY = ("loss", "denoising", "reversal", "contrast")
"""Losses recorded at each step."""


def reversed_gradient(x: Tensor, weight: float) -> Tensor:
    """Gradient reversal: the identity, with the gradient multiplied by minus a weight (Ganin & Lempitsky 2015)."""
    same = x.view_as(x)
    same.register_hook(lambda gradient: -weight * gradient)
    return same


def reversal_weight(progress: float) -> float:
    r"""Schedule of the reversed gradient, :math:`2 / (1 + e^{-10 p}) - 1` (Ganin & Lempitsky 2015)."""
    return float(2 / (1 + np.exp(-REVERSAL_RISE * progress)) - 1)


def discriminators(dim: int, batches: list[np.ndarray], seed: int) -> nn.ModuleList:
    """Batch discriminators on a state of width `dim`, one for each covariate."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(step_seed(seed, 0, "discriminators"))
        return nn.ModuleList(
            perceptron(dim, DISCRIMINATOR_WIDTH, int(batch.max()) + 1, nn.LeakyReLU(0.2)) for batch in batches
        )


class IntegrationLoss(nn.Module):
    """Loss of an integration head; reversal and supervised contrast follow the paper (section on integration).

    - denoising: from the whole cell and from the thinned cell, the head predicts the corrected state of the whole cell
      (:func:`~scdiva.integration.batch_correction.correct_batches`);
    - reversal: a discriminator predicts the batch from the integrated state, and its reversed gradient removes the
      information that it uses, with a weight that rises during training. The log frequencies of the batches among
      similar cells (:func:`~scdiva.integration.batch_correction.batch_prior`) are added to its logits: otherwise types
      that are rare in some batches would be mixed with others until all batches had the same composition;
    - supervised contrast between labelled cells, those of one label against all others.

    Parameters
    ----------
    head
        Integration head, trained in place; the batch is not an input of it.
    components
        Components of each cell, whole and then thinned in several ways, float32 `(1 + n_views, n_cells, dim)`.
    target
        Corrected states, float32 `(n_cells, dim)`.
    batches
        Batch numbers from 0 by covariate, int64 `(n_cells,)` each.
    labels
        Label numbers from 0, -1 for none, int64 `(n_cells,)`; None without labels.
    seed
        Seed of discriminators and clusters.
    """

    def __init__(
        self,
        head: IntegrationHead,
        components: Tensor,
        target: Tensor,
        batches: list[np.ndarray],
        labels: np.ndarray | None,
        seed: int,
    ) -> None:
        super().__init__()
        device, corrected = components.device, target.numpy(force=True)
        self.head, self.components, self.target = head, components, target.to(device)
        self.discriminators = discriminators(head.dim, batches, seed).to(device)
        self.batches = [torch.from_numpy(batch).to(device) for batch in batches]
        self.priors = []
        for number, batch in enumerate(batches):
            rng = np.random.default_rng(step_seed(seed, number, "batch prior"))
            log_frequency, cluster = batch_prior(corrected, batch, rng)
            self.priors.append(
                (torch.from_numpy(log_frequency).float().to(device), torch.from_numpy(cluster).to(device))
            )
        self.labels = None if labels is None else torch.from_numpy(labels).to(device)

    def losses(self, rows: np.ndarray, weight: float, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses; parts `denoising`, `reversal` (discriminators' cross-entropy) and `contrast`.

        Parameters
        ----------
        rows
            Numbers of the cells of a step.
        weight
            Weight of the reversed gradient.
        generator
            Source of views.
        """
        head, at = self.head, torch.from_numpy(rows).to(self.target.device)
        target, views = self.target[at], [at]
        if len(self.components) > 1:
            drawn = torch.randint(len(self.components) - 1, (len(rows),), generator=generator).to(at.device)
            views.append((1 + drawn) * len(self.target) + at)
        states = head(self.components.flatten(0, 1)[torch.stack(views)])
        state, denoising = states[0], (1 - (states * target).sum(dim=2)).mean()
        reversed_state = reversed_gradient(state, weight)
        reversal = contrast = state.new_zeros(())
        for discriminator, prior, batch in zip(self.discriminators, self.priors, self.batches, strict=True):
            log_frequency, cluster = prior
            logits = log_frequency[cluster[at]] + discriminator(reversed_state * head.dim**0.5)
            reversal = reversal + F.cross_entropy(logits, batch[at])
        if self.labels is not None:
            contrast = supervised_contrast_loss(state, self.labels[at], TEMPERATURE)
        loss = DENOISING_WEIGHT * denoising + reversal + LABELS_WEIGHT * contrast
        parts = {"denoising": denoising, "reversal": reversal, "contrast": contrast}
        return loss, {name: part.detach() for name, part in parts.items()}


def converged(history: dict[str, list[float]]) -> bool:
    """Whether the last mean over 50 steps of the loss without the reversal is not 1% below the lowest before.

    The reversal need not fall, as discriminator and head both learn. The number of steps is a multiple of 50.
    """
    means = np.reshape(np.subtract(history["loss"], history["reversal"]), (-1, CHECKED)).mean(axis=1)
    return len(means) > 1 and bool(means[-1] > (1 - TOLERANCE) * means[:-1].min())


def with_head(model: ScDiVa, seed: int) -> ScDiVa:
    """Copy of a model with an untrained integration head.

    Parameters
    ----------
    model
        Model from :func:`scdiva.tl.adapt` without an integration head; not changed.
    seed
        Seed of the head's weights.
    """
    new = ScDiVa(replace(model.config, integrated=True), generator=step_generator(seed, 0, "head"))
    pretrained = model.state_dict()
    new.load_state_dict({name: pretrained.get(name, value) for name, value in new.state_dict().items()})
    new.vocabulary = model.vocabulary
    return new.to(next(model.parameters()).device).eval()


@torch.no_grad()
def components_of(model: ScDiVa, cells: InMemoryCells, states: Tensor) -> Tensor:
    """Components of all cells, float32 `(n_cells, dim)`.

    Parameters
    ----------
    model
        Adapted model.
    cells, states
        All cells, and their cell states on the model's device.
    """
    dataset_components = model.dataset_components
    assert dataset_components is not None
    batches = ((rows, cells.take(rows).to(states.device)) for rows in _blocks(cells))
    return torch.cat([dataset_components(states[rows], *batch.packed) for rows, batch in batches])


@torch.no_grad()
def _fill_views(model: ScDiVa, cells: InMemoryCells, views: Tensor, seed: int) -> None:
    """Write the components of randomly thinned cells, computed once because encoding is slow."""
    dataset_components = model.dataset_components
    assert dataset_components is not None
    with progress_bar(desc="thinning", unit="cell", total=len(views) * cells.n_cells) as bar:
        for number, view in enumerate(views):
            generator = step_generator(seed, number, "views")
            for rows in _blocks(cells):
                packed = thinned_at_random(cells.take(rows), MAX_TIME, generator).to(views.device).packed
                view[rows[0] : rows[-1] + 1] = dataset_components(model.encode(*packed).float(), *packed)
                bar.update(len(rows))


def _blocks(cells: InMemoryCells) -> list[np.ndarray]:
    """Numbers of the cells that are encoded at once, in order."""
    size = max(1, BLOCK_TOKENS // max(1, int(np.diff(cells.indptr).max())))
    return [np.arange(start, min(start + size, cells.n_cells)) for start in range(0, cells.n_cells, size)]


def integrate_model(
    model: ScDiVa,
    cells: InMemoryCells,
    states: Tensor,
    batches: list[np.ndarray],
    labels: np.ndarray | None,
    *,
    steps: int,
    seed: int,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Fit an integration head; the model itself is not changed.

    Parameters
    ----------
    model
        Adapted to the cells, from :func:`with_head`; its head is changed in place.
    cells
        All cells.
    states
        Their cell states, float32 `(n_cells, state_dim)`, on the model's device.
    batches, labels
        Batch and label numbers of the cells, as for :class:`IntegrationLoss`.
    steps
        Maximum number of training steps. The adversarial weight increases during the first quarter. Afterwards the
        weights are averaged, and once the loss has :func:`converged`, the learning rate decreases to zero within half
        of the steps.
    seed
        Seed of all random numbers.
    precision
        Precision of matrix products in training, `"fp32"` or `"bf16"`; weights and losses are float32.

    Returns
    -------
    `steps`, `stopped` (`"converged"`, `"steps"` or `"interrupted"`) and `history`: lists `loss`, `denoising`,
    `reversal` and `contrast`, a value for each step.

    Raises
    ------
    FloatingPointError
        If the loss becomes NaN or infinite.
    """
    head = model.integration
    assert head is not None
    batch_size = min(BATCH_SIZE, cells.n_cells)
    # at most as many views as the steps use; a second pass through a transformer takes too long
    n_views = 0 if runs_transformer(model) else min(MOST_VIEWS, -(-steps * batch_size // cells.n_cells))
    components = torch.empty(1 + n_views, cells.n_cells, head.dim, device=states.device)
    components[0] = components_of(model, cells, states)
    rng = np.random.default_rng(step_seed(seed, 0, "clusters"))
    target = torch.from_numpy(correct_batches(components[0].numpy(force=True), batches, rng, labels=labels)).float()
    _fill_views(model, cells, components[1:], seed)
    model.requires_grad_(False)
    head.mlp.requires_grad_(True)
    objective = IntegrationLoss(head, components, target, batches, labels, seed)
    history: dict[str, list[float]] = {name: [] for name in HISTORY}
    rows = shuffled(np.arange(cells.n_cells), batch_size, seed, drop_last=True)
    rising, falling = max(1, round(RISING * steps)), max(1, round(FALLING * steps))
    averaged = AveragedModel(head.mlp, multi_avg_fn=get_ema_multi_avg_fn(max(0.0, 1 - 1 / (AVERAGED * steps))))
    last = steps

    def loss_of(step: int) -> Tensor:
        nonlocal last
        if step > rising:
            averaged.update_parameters(head.mlp)
        generator = step_generator(seed, step, "train")
        with torch.autocast(states.device.type, torch.bfloat16, enabled=precision == "bf16"):
            weight = REVERSAL_WEIGHT * reversal_weight(min(1.0, (step - 1) / rising))
            loss, parts = objective.losses(next(rows), weight, generator)
        for name, value in {"loss": loss.detach(), **parts}.items():
            history[name].append(float(value))
        if last == steps and step > rising and step % CHECKED == 0 and converged(history):
            last = min(steps, step + falling)
        return loss

    def rate_of(step: int) -> float:
        return LEARNING_RATE * min(1.0, step / WARMUP, (last - step + 1) / falling)

    done, stopped = train_steps(objective, loss_of, rate_of, steps=steps, desc="integrating")
    averaged.update_parameters(head.mlp)
    head.mlp.load_state_dict(averaged.module.state_dict())
    model.requires_grad_(True).eval()
    return {"steps": done, "stopped": stopped, "history": history}


class IntegrationObjective(Objective):
    """Loss of fine-tuning: gradient reversal and a contrastive loss (paper, section on batch integration).

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
        Width of the cell state; maximum number of genes of each cell (None: all).
    seed
        Seed of the discriminators' weights.
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
        self.discriminators = discriminators(state_dim, batches, seed)

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
        cells = self.cells.take(rows, self.context)
        state = self._direction(network, cells)
        wide = reversed_gradient(state, reversal_weight(progress)) * state.shape[1] ** 0.5
        reversal = state.new_zeros(())
        numbers = [to_device(torch.from_numpy(batch[rows]), device) for batch in self.batches]
        for discriminator, batch in zip(self.discriminators, numbers, strict=True):
            reversal = reversal + F.cross_entropy(discriminator(wide), batch)
        if self.labels is not None:
            contrast = supervised_contrast_loss(state, torch.from_numpy(self.labels[rows]), TEMPERATURE)
        else:
            view = thinned_at_random(cells, MAX_TIME, generator)
            positive = self._direction(network, view)
            present = torch.ones(1, len(rows), dtype=torch.bool, device=device)
            apart = torch.stack([batch[:, None] != batch for batch in numbers]).any(dim=0)
            contrast = pair_contrast_loss(state, positive[None], present, apart, TEMPERATURE)
        loss = reversal + contrast
        return loss, {"reversal": reversal.detach(), "contrast": contrast.detach()}

    def _direction(self, network: ScDiVa, cells: CellBatch) -> Tensor:
        """Cell states of cells on the CPU, minus their mean over the step, scaled to length 1, `(B, state_dim)`.

        Without centring, all cosines would be near 1 and the contrastive loss would have no gradient.
        """
        state = encode_cells(network, cells).float()
        return F.normalize(state - state.mean(dim=0), dim=1)
