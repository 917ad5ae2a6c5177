"""Fine-tuning for annotation: cross-entropy of a head on the cell state (paper, section on annotation)."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva.annotation.fit import VARIANCE_OFFSET, balanced_weights
from scdiva.annotation.head import AnnotationHead, Read
from scdiva.data.memory import InMemoryCells
from scdiva.models.scdiva import ScDiVa
from scdiva.train.config import FinetuneConfig
from scdiva.train.finetune import Objective, finetune, network_for


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
