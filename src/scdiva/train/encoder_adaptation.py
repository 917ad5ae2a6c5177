"""Adapt a set encoder to one data set: its linear part refitted, its learned part trained on, each kept if it helps."""

from __future__ import annotations

import copy
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.anchor import SetEncoder
from scdiva.train.adaptation import AdaptationCells, Limits, Split, continue_training
from scdiva.train.anchor import AnchorModule
from scdiva.train.config import AnchorConfig
from scdiva.train.gene_decoder import GeneDecoder, gene_multinomial_loss
from scdiva.train.linear_map import LinearMap
from scdiva.train.linear_refit import carried_variance, refit_linear
from scdiva.train.low_rank import RANK, add_low_rank, merge_low_rank
from scdiva.train.views import contrast_loss


class EncoderAdaptation(AnchorModule):
    """The objectives of :class:`~scdiva.train.AnchorModule` on one data set, whose batches are the "studies".

    The decoder reads the whole state, linear part and learned part: the loss is that of the embedding a user gets. It
    predicts the genes that the data measure and no others: that is what can be learned from them, and a fraction of the
    work.

    Parameters
    ----------
    model
        With a set encoder; trained in place.
    config
        See :class:`~scdiva.train.AnchorConfig`.
    cells
        All cells.
    """

    def __init__(self, model: ScDiVa, config: AnchorConfig, cells: AdaptationCells) -> None:
        encoder = model.anchor
        assert isinstance(encoder, SetEncoder)
        weight = encoder.table.weight.detach().cpu().numpy().copy()
        bias, total = encoder.bias.detach().cpu().numpy().copy(), float(encoder.full_total)
        frequency = cells.frequency(model.config.n_tokens)
        own = LinearMap(weight, bias, np.ones(weight.shape[1]), frequency, total)
        super().__init__(model, config, own, np.bincount(cells.batch))
        measured = torch.from_numpy(cells.measured.astype(np.int64))
        self.decoder = GeneDecoder(
            encoder.dim,
            len(measured),
            cells.n_batches if cells.n_batches > 1 else 0,
            np.concatenate([np.zeros(N_SPECIAL), frequency[cells.measured]]),
        )
        column = torch.full((model.config.n_tokens,), -1)
        column[measured] = torch.arange(len(measured)) + N_SPECIAL
        self.column: Tensor
        self.register_buffer("column", column, persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over cells of the genes' cross-entropy, plus the contrast; parts `genes` and `contrast`.

        Held-out cells are judged by their genes alone: how far views of a cell agree says little of what they tell.

        Parameters
        ----------
        batch
            Complete cells, `study` their batch.
        generator
            Source of the views.
        """
        c = self.config
        anchor = self.model.anchor
        assert isinstance(anchor, SetEncoder)
        view = self._view(batch, generator)
        linear, learned = anchor.parts(
            view.tokens, view.values, view.cu_seqlens, torch.ones_like(view.tokens, dtype=torch.bool)
        )
        target = CellBatch(self.column[batch.tokens], batch.values, batch.cu_seqlens, batch.study)
        genes = gene_multinomial_loss(self.decoder(anchor.join(linear, learned), batch.study), target).mean()
        if not self.training:
            return genes, {"genes": genes.detach()}
        other = self._learned(self._view(batch, generator))
        contrast = contrast_loss(learned, other, batch.study, c.contrast_temperature)
        parts = {"genes": genes.detach(), "contrast": contrast.detach()}
        return c.genes_weight * genes + c.contrast_weight * contrast, parts


def adapt_encoder(
    model: ScDiVa,
    config: AnchorConfig,
    cells: AdaptationCells,
    split: Split,
    limits: Limits,
    method: Literal["full", "lora"],
    *,
    progress: bool = True,
) -> dict[str, Any]:
    """Refit a set encoder's linear part, then train it; keep of both what held-out cells are better told by.

    Refitted, the learned part is silent: it was made for the coordinates of the corpus, and has to learn the new ones
    before it may speak. Held-out cells judge by :func:`scdiva.train.linear_refit.carried_variance`, which has no
    decoder to train and counts the leading directions of the embedding alone, as neighbours and clusters do.

    Parameters
    ----------
    model
        Whose state is its set encoder's; changed in place.
    config
        Of the training.
    cells, split, limits, progress
        As for :func:`scdiva.train.adaptation.continue_training`.
    method
        Whether the whole gene table is trained beside the learned part, or a low-rank update of it.

    Returns
    -------
    `kept` (`"given"`, `"refitted"` or `"trained"`: the weights that the model is left with), `variance_given`,
    `variance_refitted` and `variance_trained` (carried, of held-out cells), and what
    :func:`~scdiva.train.linear_refit.refit_linear` and :func:`~scdiva.train.adaptation.continue_training` return.
    """
    encoder = model.anchor
    assert isinstance(encoder, SetEncoder)
    best, variance = copy.deepcopy(encoder.state_dict()), {"given": carried_variance(encoder, cells, split)}
    refitted = refit_linear(encoder, cells.subset(split.training))
    start = copy.deepcopy(encoder.state_dict())
    for parameter in encoder.mlp[-1].parameters():
        nn.init.zeros_(parameter)
    variance["refitted"] = carried_variance(encoder, cells, split)
    if variance["refitted"] > variance["given"]:
        best = copy.deepcopy(encoder.state_dict())
        encoder.load_state_dict(start)
    else:
        encoder.load_state_dict(best)
    module = EncoderAdaptation(model, config, cells).to(encoder.bias.device)
    if method == "full":
        encoder.table.requires_grad_(True)
    else:
        add_low_rank(encoder.table, RANK, step_generator(config.seed, 0, "low rank"))
    trained = continue_training(module, cells, split, limits, progress=progress)
    merge_low_rank(model)
    variance["trained"] = carried_variance(encoder, cells, split)
    kept = max(variance, key=lambda name: variance[name])  # of equal ones the first
    if kept != "trained":
        encoder.load_state_dict(best)
    return {"kept": kept, **{f"variance_{name}": value for name, value in variance.items()}, **refitted, **trained}
