"""Train a head that removes batch effects from cell states, on cells held in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar
from scdiva.data.memory import InMemoryCells
from scdiva.embedding.dataset_pcs import own_directions
from scdiva.integration.batch_correction import batch_prior, correct_batches, draw_partners, mutual_neighbors
from scdiva.models.heads import IntegrationHead
from scdiva.models.inference import runs_transformer
from scdiva.models.layers import perceptron
from scdiva.models.scdiva import ScDiVa
from scdiva.train.loop import shuffled, train_steps
from scdiva.train.objectives import pair_contrast_loss, supervised_contrast_loss, thinned_at_random

DISCRIMINATOR_WIDTH = 128
BLOCK_TOKENS = 1_000_000
"""Tokens of cells that are encoded at once."""
BATCH_SIZE = 256
"""Cells of a step."""
MOST_VIEWS = 4
"""Most times that a cell is thinned: the steps draw among these."""
LEARNING_RATE, WARMUP = 2e-3, 20
"""Of AdamW, and the steps in which it rises."""
RISING, FALLING, AVERAGED = 0.25, 0.5, 0.1
"""Shares of `steps`: while the reversal rises, while the learning rate falls, and over which weights are averaged."""
CHECKED, TOLERANCE = 50, 0.01
"""Steps over which the loss is averaged, and the share by which such a mean has to fall below the lowest before."""
MAX_TIME = 0.3
"""A view leaves each gene out with probability t ~ U(0, 0.3), drawn for each cell."""
DENOISING_WEIGHT, LABELS_WEIGHT, PAIRS_WEIGHT = 10.0, 3.0, 0.8
"""Weights of the objectives but the reversal's; ours, as the paper gives none."""
LABELS_TEMPERATURE, PAIRS_TEMPERATURE = 0.1, 0.2
"""τ of the two contrasts."""
N_NEIGHBORS = 10
"""Cells of another batch are partners where each is among so many nearest of the other."""
SIMILAR = 0.85
"""Cells whose corrected states have a cosine above this are not pushed apart."""
REVERSAL_WEIGHT, REVERSAL_RISE = 1.2, 10.0
"""Weight of the reversed gradient at the end of its schedule, and the schedule's γ."""
HISTORY = ("loss", "denoising", "reversal", "contrast", "pairs")
"""What is recorded of each step."""


def reversed_gradient(x: Tensor, weight: float) -> Tensor:
    """Gradient reversal: the identity, with the gradient multiplied by minus a weight (Ganin & Lempitsky 2015)."""
    same = x.view_as(x)
    same.register_hook(lambda gradient: -weight * gradient)
    return same


class IntegrationLoss(nn.Module):
    """Objectives of batch integration; reversal and supervised contrast are the paper's (section on integration).

    - denoising: of the whole cell, and of the same cell thinned, the head gives the corrected state of the whole
      (:func:`~scdiva.integration.batch_correction.correct_batches`): two corruption levels meet in one state;
    - reversal: from the integrated state a discriminator predicts the batch, and its gradient, reversed, removes what
      it predicts it by, more so as training goes on. It is given how often each batch is met among similar cells
      (:func:`~scdiva.integration.batch_correction.batch_prior`) and has to predict more than that: else types that
      some batches have few of would be drawn into others, until all batches had the same;
    - supervised contrast between labelled cells, those of one label against all others;
    - without labels, contrast of pairs: what should be near a cell is picked out among others, the same cell thinned
      (the other corruption level) and a partner, drawn from its mutual nearest neighbours in other batches among the
      corrected states (:func:`~scdiva.integration.batch_correction.mutual_neighbors`). Similar cells are not pushed
      apart: mutual neighbours, and those whose corrected states have a cosine above 0.85.

    Parameters
    ----------
    head
        Trained; it is given no batch.
    features
        The head's input of each cell, whole and then thinned in several ways, float32 `(1 + n_views, n_cells, dim)`.
    target
        Corrected states, float32 `(n_cells, dim)`.
    batches
        Batch numbers from 0 by covariate, int64 `(n_cells,)` each.
    labels
        Label numbers from 0, -1 for none, int64 `(n_cells,)`; None without labels.
    seed
        Of discriminators, clusters and pairs.
    """

    def __init__(
        self,
        head: IntegrationHead,
        features: Tensor,
        target: Tensor,
        batches: list[np.ndarray],
        labels: np.ndarray | None,
        seed: int,
    ) -> None:
        super().__init__()
        device, corrected = features.device, target.numpy(force=True)
        self.head, self.features, self.target = head, features, target.to(device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(step_seed(seed, 0, "discriminators"))
            self.discriminators = nn.ModuleList(
                perceptron(head.dim, DISCRIMINATOR_WIDTH, int(batch.max()) + 1, nn.LeakyReLU(0.2)) for batch in batches
            ).to(device)
        self.batches = [torch.from_numpy(batch).to(device) for batch in batches]
        self.priors = []
        for number, batch in enumerate(batches):
            prior = batch_prior(corrected, batch, np.random.default_rng(step_seed(seed, number, "batch prior")))
            self.priors.append(torch.from_numpy(prior).float().to(device))
        self.labels = None if labels is None else torch.from_numpy(labels).to(device)
        self.pairs: sp.csr_matrix | None = None
        if labels is None:
            rng = np.random.default_rng(step_seed(seed, 0, "pairs"))
            self.pairs = mutual_neighbors(corrected, batches, N_NEIGHBORS, rng)

    def losses(
        self, rows: np.ndarray, reversal_weight: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the objectives; parts `denoising`, `reversal` (discriminators' cross-entropy), `contrast`, `pairs`.

        Parameters
        ----------
        rows
            Numbers of the cells of a step.
        reversal_weight
            From :func:`reversal_at`.
        generator
            Source of views and partners.
        """
        head, at = self.head, torch.from_numpy(rows).to(self.target.device)
        target, given = self.target[at], [at]
        if thinned := len(self.features) > 1:
            drawn = torch.randint(len(self.features) - 1, (len(rows),), generator=generator).to(at.device)
            given.append((1 + drawn) * len(self.target) + at)
        if self.pairs is not None:
            partners = draw_partners(self.pairs, rows, generator).to(at.device)
            given.append(partners.clamp_min(0))
        made = head.integrated(self.features.flatten(0, 1)[torch.stack(given)])
        state, denoising = made[0], (1 - (made[: 1 + thinned] * target).sum(dim=2)).mean()
        reversed_state = reversed_gradient(state, reversal_weight)
        reversal = contrast = pairs = state.new_zeros(())
        for discriminator, prior, batch in zip(self.discriminators, self.priors, self.batches, strict=True):
            reversal = reversal + F.cross_entropy(prior[at] + discriminator(reversed_state * head.dim**0.5), batch[at])
        if self.labels is not None:
            contrast = supervised_contrast_loss(state, self.labels[at], LABELS_TEMPERATURE)
        if self.pairs is not None:
            present = (torch.arange(len(made) - 1, device=at.device) < thinned)[:, None] | (partners >= 0)
            similar = torch.from_numpy(self.pairs[rows][:, rows].toarray()).to(at.device)
            similar |= target @ target.T > SIMILAR
            pairs = pair_contrast_loss(state, made[1:], present, similar, PAIRS_TEMPERATURE)
        loss = DENOISING_WEIGHT * denoising + reversal + LABELS_WEIGHT * contrast + PAIRS_WEIGHT * pairs
        parts = {"denoising": denoising, "reversal": reversal, "contrast": contrast, "pairs": pairs}
        return loss, {name: part.detach() for name, part in parts.items()}


def reversal_at(progress: float) -> float:
    """Weight of the reversed gradient when this share of the steps is done (Ganin & Lempitsky 2015)."""
    return REVERSAL_WEIGHT * float(2 / (1 + np.exp(-REVERSAL_RISE * progress)) - 1)


def converged(history: dict[str, list[float]]) -> bool:
    """Whether the loss without the reversal's, a mean of 50 steps, is not 1% below the lowest before; of whole fifties.

    The reversal's has no part in that: where discriminator and head both learn, it need not fall.
    """
    means = np.reshape(np.subtract(history["loss"], history["reversal"]), (-1, CHECKED)).mean(axis=1)
    return len(means) > 1 and bool(means[-1] > (1 - TOLERANCE) * means[:-1].min())


def with_head(model: ScDiVa, seed: int) -> ScDiVa:
    """Copy a model and put an integration head on it, whose own projection is still empty.

    Parameters
    ----------
    model
        Without one; not changed.
    seed
        Of the head's weights.
    """
    new = ScDiVa(replace(model.config, integrated=True), generator=step_generator(seed, 0, "head"))
    known = model.state_dict()
    new.load_state_dict({name: known.get(name, value) for name, value in new.state_dict().items()})
    new.vocabulary = model.vocabulary
    return new.to(next(model.parameters()).device).eval()


@torch.no_grad()
def fit_projection(head: IntegrationHead, cells: InMemoryCells) -> int:
    """Set a head's own projection: principal components within batches, shrunk by the noise in them; in place.

    Parameters
    ----------
    head
        Changed in place.
    cells
        The cells.

    Returns
    -------
    The number of components; fewer than the head has room for where cells are few.
    """
    own = own_directions(cells, head.table.num_embeddings, head.table.embedding_dim)
    head.table.weight.copy_(F.pad(own, (0, head.table.embedding_dim - own.shape[1])))
    return own.shape[1]


@torch.no_grad()
def of_cells(read: Callable[..., Tensor], cells: InMemoryCells, states: Tensor) -> Tensor:
    """Run a head, or its `features`, over all cells: float32 `(n_cells, dim)`.

    Parameters
    ----------
    read
        Given states and packed cells.
    cells, states
        All cells, and what the model makes of each before its head, on the head's device.
    """
    batches = ((rows, cells.take(rows).to(states.device)) for rows in _blocks(cells))
    return torch.cat([read(states[rows], *batch.packed) for rows, batch in batches])


@torch.no_grad()
def _views(model: ScDiVa, head: IntegrationHead, cells: InMemoryCells, n_views: int, seed: int) -> list[Tensor]:
    """Input of the head for cells thinned at random.

    Made once, as thinning and encoding anew at each step costs several times what the step itself does.
    """
    device, views = next(model.parameters()).device, []
    with progress_bar(desc="thinning", unit="cell", total=n_views * cells.n_cells) as bar:
        for number in range(n_views):
            generator, parts = step_generator(seed, number, "views"), []
            for rows in _blocks(cells):
                packed = thinned_at_random(cells.take(rows), MAX_TIME, generator).to(device).packed
                parts.append(head.features(model.encode(*packed).float(), *packed))
                bar.update(len(rows))
            views.append(torch.cat(parts))
    return views


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
    """Fit an integration head; the model behind it stays as it is.

    Parameters
    ----------
    model
        From :func:`with_head`; its head is changed in place.
    cells
        All cells.
    states
        What the model makes of each, float32 `(n_cells, state_dim)`, on its device.
    batches, labels
        Of the cells, as for :class:`IntegrationLoss`.
    steps
        Most steps of training. The reversal rises in the first quarter. From then on weights are averaged, which the
        head keeps, and once the loss has :func:`converged`, the learning rate falls to zero in half of the steps, and
        training ends.
    seed
        Of everything that is drawn.
    precision
        Of the products of training, `"fp32"` or `"bf16"`; weights, losses and their sums are float32.

    Returns
    -------
    `own_directions`, `steps`, `stopped` (`"converged"`, `"steps"` or `"interrupted"`) and `history`: lists `loss`,
    `denoising`, `reversal`, `contrast`, `pairs`, a value for each step.

    Raises
    ------
    FloatingPointError
        If the loss becomes NaN or infinite.
    """
    head = model.integration
    assert head is not None
    n_own = fit_projection(head, cells)
    features = of_cells(head.features, cells, states)
    rng = np.random.default_rng(step_seed(seed, 0, "clusters"))
    corrected = correct_batches(features.numpy(force=True), batches, rng, labels=labels)
    batch_size = min(BATCH_SIZE, cells.n_cells)
    # no more than steps see a cell; two passes through a transformer would be too dear
    n_views = 0 if runs_transformer(model) else min(MOST_VIEWS, -(-steps * batch_size // cells.n_cells))
    views = _views(model, head, cells, n_views, seed)
    model.requires_grad_(False)
    head.mlp.requires_grad_(True)
    target = torch.from_numpy(corrected.astype(np.float32))
    objectives = IntegrationLoss(head, torch.stack([features, *views]), target, batches, labels, seed)
    history: dict[str, list[float]] = {name: [] for name in HISTORY}
    rows = shuffled(np.arange(cells.n_cells), batch_size, seed, whole=True)
    rising, falling = max(1, round(RISING * steps)), max(1, round(FALLING * steps))
    averaged = AveragedModel(head.mlp, multi_avg_fn=get_ema_multi_avg_fn(max(0.0, 1 - 1 / (AVERAGED * steps))))
    last = steps

    def loss_of(step: int) -> Tensor:
        nonlocal last
        if step > rising:
            averaged.update_parameters(head.mlp)
        generator = step_generator(seed, step, "train")
        with torch.autocast(states.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss, parts = objectives.losses(next(rows), reversal_at(min(1.0, (step - 1) / rising)), generator)
        for name, value in {"loss": loss.detach(), **parts}.items():
            history[name].append(float(value))
        if last == steps and step > rising and step % CHECKED == 0 and converged(history):
            last = min(steps, step + falling)
        return loss

    def rate_of(step: int) -> float:
        return LEARNING_RATE * min(1.0, step / WARMUP, (last - step + 1) / falling)

    done, stopped = train_steps(objectives, loss_of, rate_of, steps=steps, desc="integrating")
    averaged.update_parameters(head.mlp)
    head.mlp.load_state_dict(averaged.module.state_dict())
    model.requires_grad_(True).eval()
    return {"own_directions": n_own, "steps": done, "stopped": stopped, "history": history}
