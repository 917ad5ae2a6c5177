"""Train a head that removes batch effects from cell states, on cells held in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar, progress_clock
from scdiva.data.batch import CellBatch
from scdiva.models.inference import runs_transformer
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.heads import IntegrationHead
from scdiva.nn.layers import perceptron
from scdiva.train.adaptation import AdaptationCells
from scdiva.train.base import TaskModule, decay_groups, learning_rate_factor
from scdiva.train.batch_correction import batch_prior, correct_batches, draw_partners, mutual_neighbors
from scdiva.train.config import IntegrationConfig
from scdiva.train.loop import merge_low_rank, shuffled, train_states, train_steps
from scdiva.train.objectives import pair_contrast_loss, supervised_contrast_loss, thinned_at_random
from scdiva.train.own_components import centred, own_directions

DISCRIMINATOR_WIDTH = 128
BLOCK_TOKENS = 1_000_000
"""Tokens of cells that are encoded at once."""
MOST_VIEWS = 8
"""Most times that a cell is thinned, where what is behind the head stays as it is: the steps draw among these."""
Strategy = Literal["head", "lora", "full"]
HISTORY = ("step", "loss", "denoising", "reversal", "contrast", "pairs")
"""What is recorded of the training."""


class Covariates(NamedTuple):
    """Batches and labels of the cells.

    Attributes
    ----------
    batches
        Batch numbers from 0 by covariate, int64 `(n_cells,)` each.
    labels
        Label numbers from 0, -1 for none, int64 `(n_cells,)`; None without labels.
    """

    batches: list[np.ndarray]
    labels: np.ndarray | None


class _Reversed(torch.autograd.Function):
    """Identity whose gradient is multiplied by minus a weight (Ganin & Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradients[0], None


class IntegrationModule(TaskModule):
    """Objectives of batch integration; reversal and supervised contrast are the paper's (section on integration).

    - denoising: of the whole cell, and of the same cell thinned, the head gives the corrected state of the whole
      (:func:`~scdiva.train.batch_correction.correct_batches`): two corruption levels meet in one state;
    - reversal: from the integrated state a discriminator predicts the batch, and its gradient, reversed, removes what
      it predicts it by, more so as training goes on. It is given how often each batch is met among similar cells
      (:func:`~scdiva.train.batch_correction.batch_prior`) and has to predict more than that: else types that
      some batches have few of would be drawn into others, until all batches had the same;
    - supervised contrast between labelled cells, those of one label against all others;
    - without labels, contrast of pairs: what should be near a cell is picked out among others, the same cell thinned
      (the other corruption level) and a partner, drawn from its mutual nearest neighbours in other batches among the
      corrected states (:func:`~scdiva.train.batch_correction.mutual_neighbors`). Similar cells are not pushed apart:
      mutual neighbours, and those whose corrected states have a cosine above `alike`.

    Parameters
    ----------
    model
        With an integration head; trained in place.
    config
        See :class:`~scdiva.train.IntegrationConfig`.
    target
        Corrected states, float32 `(n_cells, dim)`.
    covariates
        Of the same cells.
    features
        The head's input of each cell, whole and then thinned in several ways, float32 `(1 + n_views, n_cells, dim)`,
        where nothing behind the head is trained. None: cells are encoded at each step, whole and thinned; whole only
        where they have to go through the transformer, as two passes a step would be too dear.
    """

    config: IntegrationConfig
    model: ScDiVa

    def __init__(
        self,
        model: ScDiVa,
        config: IntegrationConfig,
        target: Tensor,
        covariates: Covariates,
        features: Tensor | None = None,
    ) -> None:
        super().__init__(model, config)
        head = model.integration
        if head is None:
            raise ValueError("The model has no integration head: its configuration needs integrated=True.")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(step_seed(config.seed, 0, "discriminators"))
            self.discriminators = nn.ModuleList(
                perceptron(head.dim, DISCRIMINATOR_WIDTH, int(batch.max()) + 1, nn.LeakyReLU(0.2))
                for batch in covariates.batches
            )
        labels = np.full(len(target), -1) if covariates.labels is None else covariates.labels
        kept = {"target": target, "labels": torch.from_numpy(labels), "features": features}
        for number, batch in enumerate(covariates.batches):
            rng = np.random.default_rng(step_seed(config.seed, number, "batch prior"))
            prior = batch_prior(target.cpu().numpy(), batch, rng)
            kept |= {f"batch{number}": torch.from_numpy(batch), f"prior{number}": torch.from_numpy(prior).float()}
        for name, value in kept.items():
            self.register_buffer(name, value, persistent=False)
        self.pairs: sp.csr_matrix | None = None
        if covariates.labels is None and config.pairs_weight > 0:
            rng = np.random.default_rng(step_seed(config.seed, 0, "pairs"))
            self.pairs = mutual_neighbors(target.numpy(force=True), covariates.batches, config.n_neighbors, rng)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the objectives; parts `denoising`, `reversal` (discriminators' cross-entropy), `contrast`, `pairs`.

        Parameters
        ----------
        batch
            Complete cells, `study` their row numbers.
        generator
            Source of the thinning, and of partners.
        """
        c, rows = self.config, batch.study
        assert rows is not None
        head = _head(self.model)
        buffers = dict(self.named_buffers(recurse=False))
        target = buffers["target"][rows]
        whole, thinned = self._inputs(batch, generator)
        state = head.integrated(whole)
        denoising, view = (1 - (state * target).sum(dim=1)).mean(), None
        if thinned is not None:
            view = head.integrated(thinned)
            denoising = (denoising + (1 - (view * target).sum(dim=1)).mean()) / 2
        reversed_state = _Reversed.apply(state, self.reversal())  # type: ignore[no-untyped-call]
        reversal = state.new_zeros(())
        for number, discriminator in enumerate(self.discriminators):
            logits = buffers[f"prior{number}"][rows] + discriminator(reversed_state * head.dim**0.5)
            reversal = reversal + F.cross_entropy(logits, buffers[f"batch{number}"][rows])
        contrast = supervised_contrast_loss(state, buffers["labels"][rows], c.temperature)
        pairs = self._pairs(state, view, rows, generator)
        loss = c.target_weight * denoising + reversal + c.supervised_weight * contrast + c.pairs_weight * pairs
        parts = {"denoising": denoising, "reversal": reversal, "contrast": contrast, "pairs": pairs}
        return loss, {name: part.detach() for name, part in parts.items()}

    def _pairs(self, state: Tensor, view: Tensor | None, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Contrast of cells with themselves thinned and with partners; 0 with labels."""
        if self.pairs is None:
            return state.new_zeros(())
        head, buffers, numbers = _head(self.model), dict(self.named_buffers(recurse=False)), rows.numpy(force=True)
        drawn = draw_partners(self.pairs, numbers, generator).to(rows.device)
        paired, partners = drawn >= 0, drawn.clamp_min(0)
        # where cells are encoded at each step a partner would have to be, too; its corrected state is at hand
        if "features" in buffers:
            near = head.integrated(buffers["features"][0, partners])
        else:
            near = buffers["target"][partners]
        positives = torch.stack([near if view is None else view, near])
        present = torch.stack([torch.full_like(paired, view is not None), paired])
        target = buffers["target"][rows]
        similar = torch.from_numpy(self.pairs[numbers][:, numbers].toarray()).to(rows.device)
        similar |= target @ target.T > self.config.alike
        return pair_contrast_loss(state, positives, present, similar, self.config.pairs_temperature)

    def _inputs(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Give the head's input of whole cells, and of the same cells thinned, None where they are not looked at."""
        rows, features = batch.study, dict(self.named_buffers(recurse=False)).get("features")
        if features is None:
            whole = _encoded(self.model, batch)
            if runs_transformer(self.model):
                return whole, None
            return whole, _encoded(self.model, thinned_at_random(batch, self.config.max_time, generator))
        n_views = len(features) - 1
        if not n_views:
            return features[0, rows], None
        view = torch.randint(n_views, (batch.n_cells,), generator=generator).to(features.device)
        return features[0, rows], features[1 + view, rows]

    def reversal(self) -> float:
        """Weight of the reversed gradient at this step: from 0 along a logistic curve (Ganin & Lempitsky 2015)."""
        c = self.config
        progress = min(1.0, self.batches_seen / c.steps)
        return c.reversal_weight * float(2 / (1 + np.exp(-c.reversal_rise * progress)) - 1)


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
def fit_projection(head: IntegrationHead, cells: AdaptationCells) -> int:
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
    own = own_directions(cells, head.table.num_embeddings, head.table.embedding_dim).to(head.table.weight.device)
    head.table.weight.zero_()
    if own.shape[1]:  # torch sums no rows of width 0
        head.table.weight[:, : own.shape[1]] = centred(own, cells)
    return own.shape[1]


@torch.no_grad()
def integrated_states(model: ScDiVa, cells: AdaptationCells, states: Tensor) -> Tensor:
    """Integrated state of each cell, float32 `(n_cells, dim)`, of what the model makes of it before its head."""
    head, device = _head(model), next(model.parameters()).device
    batches = ((rows, cells.take(rows).to(device)) for rows in _blocks(cells))
    return torch.cat([head(states[rows].to(device), *batch.packed) for rows, batch in batches])


@torch.no_grad()
def head_features(head: IntegrationHead, cells: AdaptationCells, states: Tensor) -> Tensor:
    """Input of the integration head for each cell, float32 `(n_cells, dim)`, of states `(n_cells, state_dim)`."""
    batches = ((rows, cells.take(rows).to(states.device)) for rows in _blocks(cells))
    return torch.cat([head.features(states[rows], *batch.packed) for rows, batch in batches])


@torch.no_grad()
def _views(model: ScDiVa, cells: AdaptationCells, config: IntegrationConfig, progress: bool) -> list[Tensor]:
    """Input of the head for cells thinned at random, so often that no step need see a view again, at most 8 times.

    Made once, as thinning and encoding anew at each step costs several times what the step itself does.
    """
    n_views = min(MOST_VIEWS, -(-config.steps * config.batch_size // cells.n_cells))
    device, views = next(model.parameters()).device, []
    with progress_bar(desc="thinning", unit="cell", total=n_views * cells.n_cells, shown=progress) as bar:
        for number in range(n_views):
            generator, parts = step_generator(config.seed, number, "views"), []
            for rows in _blocks(cells):
                batch = thinned_at_random(cells.take(rows), config.max_time, generator).to(device)
                parts.append(_encoded(model, batch))
                bar.update(len(rows))
            views.append(torch.cat(parts))
    return views


def _blocks(cells: AdaptationCells) -> list[np.ndarray]:
    """Numbers of the cells that are encoded at once, in order."""
    size = max(1, BLOCK_TOKENS // max(1, int(np.diff(cells.indptr).max())))
    return [np.arange(start, min(start + size, cells.n_cells)) for start in range(0, cells.n_cells, size)]


def _encoded(model: ScDiVa, batch: CellBatch) -> Tensor:
    """Input of the head for a batch of cells."""
    return _head(model).features(model.encode(*batch.packed).float(), *batch.packed)


def _head(model: ScDiVa) -> IntegrationHead:
    head = model.integration
    assert isinstance(head, IntegrationHead)
    return head


def integrate_model(
    model: ScDiVa,
    cells: AdaptationCells,
    states: Tensor,
    covariates: Covariates,
    strategy: Strategy,
    config: IntegrationConfig,
    *,
    seconds: float = np.inf,
    progress: bool = True,
) -> dict[str, Any]:
    """Fit an integration head, and with it, by strategy, the model behind it.

    Parameters
    ----------
    model
        From :func:`with_head`; changed in place.
    cells
        All cells.
    states
        What the model makes of each, float32 `(n_cells, state_dim)`.
    covariates
        Their batches and labels, in the same order.
    strategy
        `"head"`: the head alone. `"lora"`: and low-rank updates of what gives the state. `"full"`: and all of its
        weights.
    config
        Of the training. Of what all tasks share, steps, batch size, learning rate and its schedule, weight decay,
        clipping and seed are looked at.
    seconds
        Most wall time of the training.
    progress
        Whether to show a progress bar.

    Returns
    -------
    `own_directions`, `steps`, `stopped` (`"steps"`, `"minutes"` or `"interrupted"`) and `history`: lists `step`,
    `loss`, `denoising`, `reversal`, `contrast`, `pairs`, about forty points.

    Raises
    ------
    FloatingPointError
        If the loss becomes NaN or infinite.
    """
    begun, device = time.monotonic(), next(model.parameters()).device
    n_own = fit_projection(_head(model), cells)
    features = head_features(_head(model), cells, states.to(device))
    rng = np.random.default_rng(step_seed(config.seed, 0, "clusters"))
    with progress_clock("finding batch effects", shown=progress):
        corrected = correct_batches(features.numpy(force=True), covariates.batches, rng, labels=covariates.labels)
        target = torch.from_numpy(corrected.astype(np.float32))
    frozen = strategy == "head"
    views = _views(model, cells, config, progress) if frozen and not runs_transformer(model) else []
    _choose_weights(model, strategy, config.seed)
    with progress_clock("finding pairs", shown=progress):
        seen = torch.stack([features, *views]) if frozen else None
        module = IntegrationModule(model, config, target, covariates, seen).to(device)
    history: dict[str, list[float]] = {name: [] for name in HISTORY}
    every, parts = max(1, config.steps // 40), {}
    rows = shuffled(np.arange(cells.n_cells), min(config.batch_size, cells.n_cells), config.seed, whole=True)

    def loss_of(step: int) -> Tensor:
        batch = _take(cells, next(rows), not frozen).to(device)
        loss, of_loss = module.drawn_loss(batch, step, "train")
        parts.update(of_loss)
        return loss

    def after(step: int, loss: Tensor) -> None:
        module.batches_seen = step
        if step % every == 0 or step == config.steps:
            for name, column in history.items():
                column.append(step if name == "step" else float({"loss": loss, **parts}[name]))

    module.train()
    with progress_bar(desc="integrating", unit="step", total=config.steps, shown=progress) as bar:
        found = train_steps(
            module,
            loss_of,
            lambda step: config.learning_rate * learning_rate_factor(step - 1, config),
            steps=config.steps,
            groups=decay_groups(module, config.weight_decay),
            clip=config.clip,
            ends=begun + seconds,
            after=after,
            bar=bar,
        )
    merge_low_rank(model)
    model.requires_grad_(True).eval()
    return {"own_directions": n_own, "steps": found.steps, "stopped": found.stopped, "history": history}


def _choose_weights(model: ScDiVa, strategy: Strategy, seed: int) -> None:
    """Say which weights are trained: the head's network, and by strategy those that the state comes from."""
    head = _head(model)
    if strategy == "head":
        model.requires_grad_(False)
    else:
        train_states(model, strategy, seed)
        head.requires_grad_(False)
    head.mlp.requires_grad_(True)


def _take(cells: AdaptationCells, rows: np.ndarray, whole: bool) -> CellBatch:
    """Cells with their row numbers as `study`; without their genes where those are not looked at."""
    if whole:
        batch = cells.take(rows)
        return CellBatch(batch.tokens, batch.values, batch.cu_seqlens, torch.from_numpy(rows))
    empty = torch.zeros(len(rows) + 1, dtype=torch.int32)
    return CellBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(0), empty, torch.from_numpy(rows))
