"""The set encoder trained alone: minutes on a laptop, and the start that the transformer keeps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scdiva.data.batch import CellBatch
from scdiva.diffusion import cell_of_token
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.encoder import SetEncoder
from scdiva.train.base import TaskModule
from scdiva.train.config import AnchorConfig
from scdiva.train.gene_decoder import GeneDecoder, gene_multinomial_loss
from scdiva.train.linear_map import LinearMap
from scdiva.train.views import contrast_loss, thinned


def check_linear_map(encoder: SetEncoder, linear_map: LinearMap) -> None:
    """Raise ValueError if a linear map is not of a set encoder's shape.

    Parameters
    ----------
    encoder
        Of a model.
    linear_map
        Of a corpus.
    """
    if linear_map.weight.shape != tuple(encoder.table.weight.shape):
        raise ValueError(
            f"The linear map is {linear_map.weight.shape} (tokens, dimensions); the set encoder's table is "
            f"{tuple(encoder.table.weight.shape)}. Fit it on the model's vocabulary with "
            f"n_dims={encoder.table.embedding_dim}."
        )


@torch.no_grad()
def set_linear_map(encoder: SetEncoder, linear_map: LinearMap) -> None:
    """Make a linear map the linear part of a set encoder.

    Parameters
    ----------
    encoder
        Changed in place.
    linear_map
        Of the same vocabulary and width.

    Raises
    ------
    ValueError
        If it does not fit.
    """
    check_linear_map(encoder, linear_map)
    encoder.table.weight.copy_(torch.from_numpy(linear_map.weight))
    encoder.bias.copy_(torch.from_numpy(linear_map.bias))
    encoder.full_total.fill_(float(linear_map.full_total))


class AnchorModule(TaskModule):
    """Train the learned part of a model's set encoder; its linear part is set from the corpus SVD and kept.

    Each batch is seen in two views, each with genes left out at random (as dropout does) and now and then through a
    random gene panel. From the learned part of one view a linear decoder with the study as covariate predicts all genes
    of the cell; and the two views of a cell must be nearer to each other than to other cells of the study.

    Parameters
    ----------
    model
        With `anchor="encoder"`; trained in place. All weights but the learned part's are frozen, and stay so:
        `model.requires_grad_(True)` before another training.
    config
        See :class:`AnchorConfig`.
    linear_map
        Of the same corpus; its directions become the linear part, its frequencies the decoder's start.
    study_sizes
        Cells of each study, `(n_studies,)`.

    Raises
    ------
    ValueError
        If the model has no set encoder, or the map does not fit it.
    """

    config: AnchorConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: AnchorConfig, linear_map: LinearMap, study_sizes: np.ndarray) -> None:
        super().__init__(model, config)
        anchor = model.anchor
        if not isinstance(anchor, SetEncoder):
            raise ValueError(f'The model has anchor={model.config.anchor!r}; only anchor="encoder" is trained alone.')
        check_linear_map(anchor, linear_map)
        self.decoder = GeneDecoder(
            model.config.anchor_learned_dim, model.config.n_genes, len(study_sizes), linear_map.frequency
        )
        set_linear_map(anchor, linear_map)
        model.requires_grad_(False)
        anchor.mlp.requires_grad_(True)
        sizes = np.maximum(np.asarray(study_sizes, dtype=np.float64), 1)
        weight = sizes**-config.study_power
        weight *= sizes.sum() / (weight * sizes).sum()
        self.study_weight: Tensor
        self.register_buffer("study_weight", torch.from_numpy(weight.astype(np.float32)), persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted mean over cells of the genes' cross-entropy, plus the contrast; parts `genes` and `contrast`.

        Parameters
        ----------
        batch
            Complete cells with their `study` (-1: one that is not trained on).
        generator
            Source of the views.
        """
        c = self.config
        one, other = (self._learned(self._view(batch, generator)) for _ in range(2))
        loss = gene_multinomial_loss(self.decoder(one, batch.study), batch)
        weight = torch.ones_like(loss)
        if batch.study is not None:
            known = torch.ge(batch.study, 0)
            weight = torch.where(known, self.study_weight[batch.study.clamp_min(0)], weight)
        genes = (weight * loss).sum() / weight.sum()
        contrast = contrast_loss(one, other, batch.study, c.contrast_temperature)
        parts = {"genes": genes.detach(), "contrast": contrast.detach()}
        return c.genes_weight * genes + c.contrast_weight * contrast, parts

    def _learned(self, view: CellBatch) -> Tensor:
        anchor = self.model.anchor
        assert isinstance(anchor, SetEncoder)
        visible = torch.ones_like(view.tokens, dtype=torch.bool)
        return anchor.parts(view.tokens, view.values, view.cu_seqlens, visible)[1]

    def _view(self, batch: CellBatch, generator: torch.Generator) -> CellBatch:
        """Leave each gene out with its cell's probability, and now and then all genes that a random panel lacks."""
        c = self.config
        times = torch.rand(batch.n_cells, generator=generator) * c.max_time
        cells = cell_of_token(batch.cu_seqlens, batch.tokens.numel()).cpu()
        dropped = torch.rand(cells.numel(), generator=generator) < times[cells]
        if float(torch.rand((), generator=generator)) < c.panel_rate:
            share = c.min_panel ** float(torch.rand((), generator=generator))
            panel = torch.rand(self.model.config.n_tokens, generator=generator) < share
            dropped |= ~panel[batch.tokens.cpu()]
        return thinned(batch, dropped.to(batch.tokens.device))
