"""Fine-tune a model on the labels of cells held in memory."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva._rng import step_seed
from scdiva.data.batch import CellBatch
from scdiva.data.corpus import take_cells
from scdiva.models.inference import runs_transformer
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.annotation import AnnotationHead, Read
from scdiva.train.adaptation import AdaptationCells, Split, encoded
from scdiva.train.annotation import HeldOut, Reference, fit_head, label_weights, read_cells, state_centroids
from scdiva.train.base import TaskModule
from scdiva.train.config import AnnotationConfig
from scdiva.train.loop import Limits, continue_training, merge_low_rank, train_states
from scdiva.train.objectives import thinned_at_random

HELD_OUT = 0.1
"""Least share of the cells that training never sees."""
CONTEXT = 256
"""Genes of a cell that a transformer is trained on; it reads all it can afterwards."""


class Tuning(NamedTuple):
    """How a model is fine-tuned: what of it is trained, when that ends, and on which device."""

    how: Literal["lora", "full"]
    limits: Limits
    device: str


class AnnotationModule(TaskModule):
    """Cross-entropy of the labels, of thinned cells while training (paper, section on annotation).

    Parameters
    ----------
    model
        Trained in place.
    head
        Its classifier is trained with it; the rest of it stays.
    config
        Of the training.
    weights
        Of each label in the loss, `(n_labels,)`.
    """

    config: AnnotationConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, head: AnnotationHead, config: AnnotationConfig, weights: np.ndarray) -> None:
        super().__init__(model, config)
        self.head = head
        head.requires_grad_(False)
        head.classifier.requires_grad_(True)
        self.register_buffer("weights", torch.from_numpy(weights).float(), persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy in nats a cell.

        Parameters
        ----------
        batch
            Complete cells, `study` the numbers of their labels.
        generator
            Source of the thinning.
        """
        labels = batch.study
        assert labels is not None
        if self.training:
            batch = thinned_at_random(batch, self.config.max_time, generator)
        logits = self.logits(batch)
        loss = F.cross_entropy(logits, labels, weight=self.get_buffer("weights"))
        return loss, {"accuracy": (logits.argmax(dim=1) == labels).float().mean()}

    def logits(self, batch: CellBatch) -> Tensor:
        """Logits `(B, n_labels)` of cells."""
        packed = batch.packed
        read = Read(self.model.encode(*packed), *packed)
        u = self.head.features(read)
        found: Tensor = self.head.classifier(self.head.inputs(u, self.head.genes(read)))
        return found


def split_by_batch(labels: np.ndarray, batch: np.ndarray, seed: int) -> Split:
    """Hold out whole batches, at least a tenth of the cells; where that leaves none, a tenth of the cells.

    Cells whose label no other cell would be left of are trained on, whatever their batch; so the only cell of a label
    always is, and nothing is held out where all labels have one cell.

    Parameters
    ----------
    labels, batch
        Numbers from 0, `(n_cells,)`.
    seed
        Of the choice.
    """
    rng = np.random.default_rng(step_seed(seed, 0, "split"))
    held = _whole_batches(labels, batch, rng)
    if not held.any():  # one batch, or every label in one only
        left = np.bincount(labels)
        for cell in rng.permutation(len(labels)):
            if left[labels[cell]] > 1:
                held[cell] = True
                left[labels[cell]] -= 1
            if held.sum() >= max(1, round(HELD_OUT * len(labels))):
                break
    return Split(np.flatnonzero(~held), np.flatnonzero(held))


def _whole_batches(labels: np.ndarray, batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mark cells of some batches, but for those whose label is in no other; all False for one batch."""
    names = rng.permutation(np.unique(batch))
    if len(names) == 1:
        return np.zeros(len(labels), dtype=bool)
    shares = np.array([(batch == name).mean() for name in names]).cumsum()
    n = min(int(np.searchsorted(shares, HELD_OUT)) + 1, len(names) - 1)
    held = np.isin(batch, names[:n])
    return held & np.isin(labels, labels[~held])


def fit_with_model(
    model: ScDiVa,
    reference: Reference,
    batch: np.ndarray,
    n_labels: int,
    tuning: Tuning,
    config: AnnotationConfig,
    *,
    progress: bool = True,
) -> tuple[tuple[ScDiVa, AnnotationHead, HeldOut] | None, dict[str, Any]]:
    """Fit a head on some of the labelled cells, and train on with a copy of the model behind it.

    Parameters
    ----------
    model
        Not changed.
    reference
        Labelled cells, and perhaps unlabelled ones beside them.
    batch
        Number of the batch of each cell.
    n_labels
        Number of labels.
    tuning, config
        Of the training.
    progress
        Whether to show a progress bar.

    Returns
    -------
    The trained model, the head on it, and the predictions for held-out cells; None where no cell could be held out, or
    training did not help. And what was found in training.

    Warns
    -----
    UserWarning
        If the first of these is None.
    """
    order = np.argsort(reference.labels, kind="stable")
    order = order[reference.labels[order] >= 0]
    labels = reference.labels[order]
    ragged = take_cells((reference.cells.indptr, reference.cells.tokens, reference.cells.values), order)
    cells = AdaptationCells(*ragged, labels, reference.cells.measured, n_labels)
    split = split_by_batch(labels, batch[order], config.seed)
    if not len(split.held_out):
        warnings.warn(
            "no labelled cell can be held out to end fine-tuning by, as each label has one cell: what is returned is "
            "the logistic regression that it would begin with.",
            UserWarning,
            stacklevel=4,
        )
        return None, {"improved": False}
    # all that is not held out, by batch: principal components are those within batches, not within labels
    rest = np.setdiff1d(np.arange(reference.cells.n_cells), order[split.held_out])
    part = Reference(reference.cells.subset(rest), reference.states[rest], reference.labels[rest])
    head = fit_head(part, "finetune", n_labels, model.config.n_tokens, config)
    new = copy.deepcopy(model).to(tuning.device)
    labelled = Reference(cells, reference.states[order], labels)
    found, predicted = finetune(new, head, labelled, split, tuning.how, config, tuning.limits, progress=progress)
    notes = {key: found[key] for key in ("steps", "stopped", "start_loss", "best_loss", "improved", "history")}
    if not found["improved"]:
        warnings.warn(
            f"fine-tuning did not predict the {len(split.held_out)} held-out cells any better than the logistic "
            "regression that it began with: that is what is returned, fitted on all labelled cells.",
            UserWarning,
            stacklevel=4,
        )
        return None, notes
    return (new, head, predicted), notes


def finetune(
    model: ScDiVa,
    head: AnnotationHead,
    reference: Reference,
    split: Split,
    how: Literal["lora", "full"],
    config: AnnotationConfig,
    limits: Limits,
    *,
    progress: bool = True,
) -> tuple[dict[str, Any], HeldOut]:
    """Train a model and the classifier on it, until held-out cells are predicted no better.

    Parameters
    ----------
    model, head
        Changed in place; the head is one fitted on the training cells.
    reference
        Labelled cells only, ascending by label, which stands as their `batch`.
    split
        Which cells are trained on.
    how
        See :func:`scdiva.train.loop.train_states`.
    config, limits
        Of the training.
    progress
        Whether to show a progress bar.

    Returns
    -------
    What :func:`scdiva.train.loop.continue_training` found, with `improved`, whether held-out cells are predicted
    better than before; and the predictions for them in the end.
    """
    weights = label_weights(reference.labels[split.training], head.sizes.n_labels, config.balanced)
    train_states(model, how, config.seed)
    device = next(model.parameters()).device
    module = AnnotationModule(model, head, config, np.maximum(weights, 1e-6)).to(device)
    context = min(CONTEXT, model.config.max_length) if runs_transformer(model) else None
    found = continue_training(module, reference.cells, split, limits, max_length=context, progress=progress)
    merge_low_rank(model)
    model.requires_grad_(True).eval()
    head.requires_grad_(False)
    with torch.no_grad():
        states = encoded(model, reference.cells)
        head.cpu()
        new = Reference(reference.cells, states, reference.labels)
        u, genes = read_cells(head, new, split.training)
        head.centroids.copy_(state_centroids(head, u, reference.labels[split.training]))
        u, genes = read_cells(head, new, split.held_out)
        logits = head.classifier(head.inputs(u, genes))
        predicted = HeldOut(reference.labels[split.held_out], logits.numpy(), head.cosines(u, head.centroids).numpy())
    return {**found, "improved": found["best_loss"] < found["start_loss"]}, predicted
