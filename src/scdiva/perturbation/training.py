"""Fit a perturbation model: choose what to predict from, and train a network on what that leaves."""

from __future__ import annotations

import copy
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.metrics.perturbation import WMSE_ALPHA
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.choice import METHODS, LeftOut, best_base, errors, predict_left_out, summary
from scdiva.perturbation.model import change_of, gene_tokens, numbered_labels, similarities_of
from scdiva.perturbation.network import PerturbationHead, PerturbationSizes, part_tensors
from scdiva.perturbation.screen import KINDS, Kind, Screen
from scdiva.train.adaptation import AdaptationCells, Split
from scdiva.train.base import TaskModule
from scdiva.train.config import PerturbationConfig
from scdiva.train.loop import Limits, continue_training, merge_low_rank, train_states

STEPS_AN_EPOCH = 20
"""Control cells are drawn for so many steps; they are shown again and again, each time with another perturbation."""
MOST_HELD_OUT = 128
"""Control cells on which the conditions that are held out are looked at."""
LEAST = 20
"""Conditions that a network is trained on; of fewer it learns them by heart."""
GAIN = 0.05
"""Share of the error on held-out conditions that a network has to take away to be kept,"""
SURE = 2.0
"""and standard errors of what it takes away, over these conditions: they are few."""


class Examples(NamedTuple):
    """What a network learns from: what a base leaves of a condition's change.

    Attributes
    ----------
    row
        int64 `(n,)`, number of the condition.
    residual
        float32 `(n, n_genes)`.
    held_out
        bool `(n,)`, whether it is looked at and not trained on.
    """

    row: NDArray[np.int64]
    residual: NDArray[np.float32]
    held_out: NDArray[np.bool_]


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
        genes = gene_tokens(model, screen.part_names)
        self.parts, self.labels = part_tensors(conditions.parts, genes, numbered_labels(model, screen))
        self.dose = torch.from_numpy(np.log2(conditions.dose / np.median(screen.conditions.dose))).float()
        self.residual = torch.from_numpy(examples.residual)
        self.weight = torch.from_numpy(loss_weights(screen, examples.row, config.loss)).float()
        self.of_group = {
            (int(group), held): np.flatnonzero((conditions.group == group) & (examples.held_out == held))
            for group in np.unique(conditions.group)
            for held in (False, True)
        }

    def usable(self, group: NDArray[np.int64], held_out: bool) -> NDArray[np.bool_]:
        """Whether there is something to learn (or to look at) for cells of these groups."""
        return np.array([len(self.of_group.get((int(g), held_out), ())) > 0 for g in group], dtype=bool)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Error of a gene on average, weighted.

        Parameters
        ----------
        batch
            Complete control cells, `study` the numbers of their groups.
        generator
            Draws what is done to each.
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


class FittedResponses(NamedTuple):
    """What :func:`fit_responses` gives: the model (changed only by `"lora"` and `"full"`), base, network, notes."""

    model: ScDiVa
    base: dict[Kind, str]
    head: PerturbationHead | None
    notes: dict[str, Any]


def fit_responses(
    model: ScDiVa,
    screen: Screen,
    controls: AdaptationCells,
    asked: set[Kind],
    strategy: Literal["none", "head", "lora", "full"],
    residual: str | None,
    config: PerturbationConfig,
    limits: Limits,
    *,
    device: str = "cpu",
    progress: bool = True,
) -> FittedResponses:
    """Choose what to predict from by predicting conditions that are left out, then train a network on what is left.

    Parameters
    ----------
    model
        Not changed.
    screen
        What was measured.
    controls
        Control cells, `batch` the numbers of their groups.
    asked
        Kinds of conditions that will be predicted.
    strategy
        Whether there is a network, and what of it is trained: marks and head, low-rank updates of the transformer too,
        or all its weights.
    residual
        `"auto"`, a baseline or `"expected"`; None: the network alone predicts the change.
    config, limits
        Of the training.
    device
        Where the network is trained.
    progress
        Whether to show a progress bar.
    """
    similarities = similarities_of(
        model, screen, screen.conditions.only(np.array([], dtype=np.int64)), screen.states[:0]
    )
    left_out = predict_left_out(screen, similarities, asked, config.seed)
    mse, pearson = errors(screen, left_out)
    named = "no_change" if residual is None else residual
    base = best_base(left_out, pearson) if named == "auto" else dict.fromkeys((*KINDS, "measured"), named)
    notes: dict[str, Any] = {
        "validation": summary(left_out, mse, pearson),
        "strategy": strategy,
        "network": "not asked for",
    }
    if strategy == "none":
        return FittedResponses(model, base, None, notes)
    examples = _examples(screen, left_out, base)
    alone = residual is None  # then the network is what was asked for, however good it is
    if len(set(examples.row[~examples.held_out])) < (1 if alone else LEAST) or not examples.held_out.any():
        return _without_network(model, base, notes, alone)
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
        rows = np.flatnonzero(module.usable(controls.batch, False))
        looked_at = np.flatnonzero(module.usable(controls.batch, True))
        if not len(rows) or not len(looked_at):
            return _without_network(model, base, notes, alone)
        rng = np.random.default_rng(config.seed)
        looked_at = np.sort(rng.permutation(looked_at)[:MOST_HELD_OUT])
        n = STEPS_AN_EPOCH * config.batch_size
        drawn = np.concatenate([rng.permutation(rows) for _ in range(-(-n // len(rows)))])[:n]
        split = Split(np.sort(drawn), looked_at)
        before = _held_out_errors(module, controls)
        found = continue_training(module, controls, split, limits, progress=progress)
        after = _held_out_errors(module, controls)
        merge_low_rank(new)
    finally:
        new.to(home).train(training)
        for parameter, was in zip(new.parameters(), required, strict=False):
            parameter.requires_grad_(was)
    notes |= {
        "steps": found["steps"],
        "stopped": found["stopped"],
        "loss_without": float(before.mean()),
        "loss_with": float(after.mean()),
        "history": {name: np.asarray(column, dtype=np.float64) for name, column in found["history"].items()},
    }
    gain = before - after
    chance = SURE * gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
    if not alone and gain.mean() < max(GAIN * before.mean(), chance):
        notes["network"] = "did not help"
        return FittedResponses(model, base, None, notes)
    notes["network"] = "kept"
    return FittedResponses(new, base, head.to(home).requires_grad_(False).eval(), notes)


def _without_network(model: ScDiVa, base: dict[Kind, str], notes: dict[str, Any], alone: bool) -> FittedResponses:
    """Do without a network, for which there are too few conditions; refuse if it was to predict alone."""
    if alone:
        raise ValueError(
            "residual=None leaves the prediction to the network alone, and the screen has too few conditions to train "
            'it and to hold some out: take residual="auto".'
        )
    return FittedResponses(model, base, None, notes | {"network": "too few conditions"})


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


def _examples(screen: Screen, left_out: list[LeftOut], base: dict[Kind, str]) -> Examples:
    """Make examples of what the base, fitted without a condition, leaves of it; one fold of each kind is held out."""
    c = screen.conditions
    last: dict[Kind, int] = {}
    for one in left_out:
        last[one.kind] = max(last.get(one.kind, 0), one.fold)
    held = sorted({one.row for one in left_out if one.fold == last[one.kind]})
    new_parts = {c.parts[one.row][0] for one in left_out if one.kind == "single" and one.fold == last["single"]}
    near = c.holding(sorted(new_parts)).sum(axis=1) > 0
    rows, residuals, looked = [], [], []
    for one in left_out:
        looking = one.fold == last[one.kind]
        left = screen.delta[one.row] - one.predicted[METHODS.index(base[one.kind])]
        if np.isnan(left).any() or (not looking and (one.row in held or near[one.row])):
            continue
        rows.append(one.row)
        residuals.append(left)
        looked.append(looking)
    n_genes = len(screen.genes)
    return Examples(
        np.array(rows, dtype=np.int64),
        np.array(residuals, dtype=np.float32).reshape(len(rows), n_genes),
        np.array(looked, dtype=bool),
    )


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
