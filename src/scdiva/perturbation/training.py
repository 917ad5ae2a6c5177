"""Train a network on what a base leaves of the changes of conditions."""

from __future__ import annotations

import copy
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.metrics.perturbation import WMSE_ALPHA
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.network import PerturbationHead, PerturbationSizes, change_of, treatments
from scdiva.perturbation.screen import Examples, Screen, numbered_labels
from scdiva.train.adaptation import AdaptationCells, Split
from scdiva.train.base import TaskModule
from scdiva.train.config import PerturbationConfig
from scdiva.train.loop import Limits, continue_training, merge_low_rank, train_states

STEPS_AN_EPOCH = 20
"""Control cells are drawn for so many steps; each is drawn again and again, with another perturbation each time."""
MOST_HELD_OUT = 128
"""Control cells on which the conditions that are held out are looked at."""
LEAST = 20
"""Conditions that a network is trained on; fewer are memorised."""
GAIN = 0.05
"""Share of the error on held-out conditions that a network has to take away to be kept,"""
SURE = 2.0
"""and standard errors of what it takes away, over these conditions: they are few."""


class PerturbationModule(TaskModule):
    """Weighted squared error of what is left of the change, for control cells with perturbations drawn at random.

    The mean over the perturbed cells stands for each of them: the expected loss is that of pairing a control cell with
    any perturbed cell, but for a constant.

    Parameters
    ----------
    model, head
        Trained in place.
    config
        Of the training.
    screen, examples
        What is learned.
    """

    config: PerturbationConfig
    model: ScDiVa

    def __init__(
        self,
        model: ScDiVa,
        head: PerturbationHead,
        config: PerturbationConfig,
        screen: Screen,
        examples: Examples,
    ) -> None:
        super().__init__(model, config)
        self.head = head
        conditions = screen.conditions.only(examples.row)
        self.parts, self.labels, self.dose = treatments(model, screen, conditions.parts, conditions.dose)
        self.residual = torch.from_numpy(examples.residual)
        self.weight = torch.from_numpy(loss_weights(screen, examples.row, config.loss)).float()
        self.of_group = {
            (int(group), held): np.flatnonzero((conditions.group == group) & (examples.held_out == held))
            for group in np.unique(conditions.group)
            for held in (False, True)
        }

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Error of a gene on average, weighted.

        Parameters
        ----------
        batch
            Complete control cells, `study` the numbers of their groups.
        generator
            Draws the perturbation of each.
        """
        assert batch.study is not None
        draw = torch.rand(batch.n_cells, generator=generator).numpy()
        choices = [self.of_group[int(group), not self.training] for group in batch.study.cpu()]
        chosen = torch.from_numpy(np.array([rows[int(u * len(rows))] for rows, u in zip(choices, draw, strict=True)]))
        return self.errors(batch, chosen).mean(), {}

    def errors(self, batch: CellBatch, chosen: Tensor) -> Tensor:
        """Error of a gene on average, weighted, for each cell `(B,)` with the example chosen for it."""
        change = change_of(
            self.model, self.head, batch.packed, self.parts[chosen], self.labels[chosen], self.dose[chosen]
        )
        target, weight = self.residual[chosen].to(change), self.weight[chosen].to(change)
        return (weight * (change - target).square()).sum(dim=1)


def loss_weights(screen: Screen, rows: NDArray[np.int64], loss: Literal["wmse", "de", "mse"]) -> NDArray[np.float64]:
    """Give the weight of each gene in the error of each condition, `(n, n_genes)`, rows that sum to 1.

    Parameters
    ----------
    screen
        What was measured.
    rows
        Numbers of the conditions.
    loss
        `"wmse"`: by mean control expression (paper, eq. wmse_weights;
        :data:`scdiva.metrics.perturbation.WMSE_ALPHA`). `"de"`: half evenly, half by the change over its standard
        error. `"mse"`: evenly.
    """
    n_genes = len(screen.genes)
    even = np.full((len(rows), n_genes), 1.0 / n_genes)
    if loss == "mse":
        return even
    if loss == "wmse":
        weight = screen.control[screen.conditions.group[rows]].astype(np.float64) + WMSE_ALPHA
        scaled: NDArray[np.float64] = weight / weight.sum(axis=1, keepdims=True)
        return scaled
    error = np.sqrt(screen.variance / screen.n_cells[rows, None]) + 1e-6
    clear = np.abs(screen.delta[rows]) / error + 1e-12  # evenly where nothing changes
    found: NDArray[np.float64] = 0.5 * even + 0.5 * clear / clear.sum(axis=1, keepdims=True)
    return found


def train_network(
    model: ScDiVa,
    screen: Screen,
    controls: AdaptationCells,
    examples: Examples,
    strategy: Literal["head", "lora", "full"],
    config: PerturbationConfig,
    limits: Limits,
    *,
    alone: bool = False,
    device: str = "cpu",
    progress: bool = True,
) -> tuple[ScDiVa, PerturbationHead | None, dict[str, Any]]:
    """Train a network, and keep it if it helps with conditions that are held out.

    Parameters
    ----------
    model
        Not changed.
    screen, examples
        What was measured, and what is learned of it.
    controls
        Control cells, `batch` the numbers of their groups.
    strategy
        What is trained: marks and head, low-rank updates of the transformer too, or all its weights.
    config, limits
        Of the training.
    alone
        Whether the network predicts alone; it is then kept however good it is.
    device
        Where it is trained.
    progress
        Whether to show a progress bar.

    Returns
    -------
    The model, changed only by `"lora"` and `"full"`; the head, None if it did not help or there are too few conditions;
    and notes of the training.

    Raises
    ------
    ValueError
        If there are too few conditions for a network that is to predict alone.
    """
    usable = [_usable(controls, screen, examples, held_out) for held_out in (False, True)]
    n_learned = len(set(examples.row[~examples.held_out]))
    if n_learned < (1 if alone else LEAST) or not all(map(len, usable)):
        if alone:
            raise ValueError(
                "residual=None leaves the prediction to the network alone, and the screen has too few conditions to "
                'train it and to hold some out: take residual="auto".'
            )
        return model, None, {"network": "too few conditions"}
    new = model if strategy == "head" else copy.deepcopy(model)
    head = _head(new, screen, examples, config)
    home = next(model.parameters()).device
    required, training = [p.requires_grad for p in new.parameters()], new.training
    try:
        if strategy == "head":
            new.requires_grad_(False)
        else:
            train_states(new, strategy, config.seed, transformer=True)
        module = PerturbationModule(new, head, config, screen, examples).to(device)
        rng = np.random.default_rng(config.seed)
        looked_at = np.sort(rng.permutation(usable[1])[:MOST_HELD_OUT])
        n = STEPS_AN_EPOCH * config.batch_size
        drawn = np.concatenate([rng.permutation(usable[0]) for _ in range(-(-n // len(usable[0])))])[:n]
        before = _held_out_errors(module, controls)
        found = continue_training(module, controls, Split(np.sort(drawn), looked_at), limits, progress=progress)
        after = _held_out_errors(module, controls)
        merge_low_rank(new)
    finally:
        new.to(home).train(training)
        for parameter, was in zip(new.parameters(), required, strict=False):
            parameter.requires_grad_(was)
    gain = before - after
    chance = SURE * gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
    kept = alone or gain.mean() >= max(GAIN * before.mean(), chance)
    notes = {
        "network": "kept" if kept else "did not help",
        "steps": found["steps"],
        "stopped": found["stopped"],
        "loss_without": float(before.mean()),
        "loss_with": float(after.mean()),
        "history": {name: np.asarray(column, dtype=np.float64) for name, column in found["history"].items()},
    }
    return (new, head.to(home).requires_grad_(False).eval(), notes) if kept else (model, None, notes)


def _usable(controls: AdaptationCells, screen: Screen, examples: Examples, held_out: bool) -> NDArray[np.intp]:
    """Give the numbers of the control cells of groups that have something to learn, or to look at."""
    groups = screen.conditions.group[examples.row[examples.held_out == held_out]]
    return np.flatnonzero(np.isin(controls.batch, groups))


@torch.no_grad()
def _held_out_errors(module: PerturbationModule, cells: AdaptationCells) -> NDArray[np.float64]:
    """Error on each held-out condition, mean over some control cells."""
    module.eval()
    found = []
    for (group, held_out), examples in module.of_group.items():
        rows = np.flatnonzero(cells.batch == group)[: module.config.batch_size]
        if held_out and len(rows):
            batch = cells.take(rows).to(module.device)
            found += [float(module.errors(batch, torch.full((len(rows),), int(e))).mean()) for e in examples]
    return np.array(found)


def _head(model: ScDiVa, screen: Screen, examples: Examples, config: PerturbationConfig) -> PerturbationHead:
    """Make a head whose directions of change are the leading ones of what is to be learned, the others drawn small."""
    c, n_genes = model.config, len(screen.genes)
    n_labels = len(numbered_labels(model, screen))
    sizes = PerturbationSizes(c.dim, c.state_dim, n_labels, n_genes, config.rank, config.hidden)
    source = step_generator(config.seed, 0, "perturbation head")
    with torch.random.fork_rng(devices=[]):  # what layers begin with is overwritten, and the user's stream stays
        head = PerturbationHead(sizes, source)
    learned = examples.residual[~examples.held_out].astype(np.float64)
    _, size, right = np.linalg.svd(learned, full_matrices=False)
    k = min(config.rank, int((size > 1e-8 * max(float(size[0]), 1e-12)).sum()))
    scale = float(np.sqrt(np.square(learned).mean()))
    with torch.no_grad():
        head.directions.mul_(0.1 * scale)
        head.directions[:, :k] = torch.from_numpy(right[:k].T * scale * n_genes**0.5 / max(k, 1) ** 0.5).float()
    return head
