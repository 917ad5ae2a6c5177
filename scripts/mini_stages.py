"""Parts of a model trained alone, in minutes: the set encoder before the transformer, and the state head.

`mini_parts.py` says with which settings the bundled model's were trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.diffusion import cell_of_token, mask_tokens, stratified_times
from scdiva.models.encoder import SetEncoder
from scdiva.models.heads import hidden_gene_logits
from scdiva.models.scdiva import ScDiVa
from scdiva.train.base import TaskModule
from scdiva.train.config import OptimiserConfig
from scdiva.train.linear_map import LinearMap, set_linear_map
from scdiva.train.objectives import GeneDecoder, gene_multinomial_loss, thinned, thinned_at_random

PRIOR_CELLS = 0.5
"""Cells that a gene is taken to be expressed in beside those counted, so that logarithms stay finite."""


@dataclass(frozen=True, kw_only=True)
class AnchorConfig(OptimiserConfig):
    """Training of the set encoder alone (:class:`AnchorModule`), before the transformer.

    The paper has no such stage; its figure shows a latent encoder and its text none. Defaults are ours.

    Attributes
    ----------
    genes_weight, contrast_weight
        Weights of the two objectives.
    contrast_temperature
        Of InfoNCE.
    max_time
        A view leaves out at most this share of a cell's genes in expectation, t ~ U(0, max_time) per cell.
    panel_rate
        Share of the views of a batch that go through a random gene panel, one for all its cells, as targeted and
        filtered data do.
    min_panel
        Smallest panel, as a share of the genes; the share is drawn log-uniformly up to 1.
    study_power
        Cells are weighted by the size of their study to minus this power.
    """

    genes_weight: float = 1.0
    contrast_weight: float = 0.2
    contrast_temperature: float = 0.1
    max_time: float = 0.8
    panel_rate: float = 0.3
    min_panel: float = 0.05
    study_power: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_time == 0:
            raise ValueError("max_time must be above 0: two views of a cell would be the same.")


@dataclass(frozen=True, kw_only=True)
class StateHeadConfig(OptimiserConfig):
    """Training of the state head alone (:class:`StateHeadModule`). Ours, not the paper's.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        With defaults of their own.
    value_weight
        λ of the value term.
    min_time
        Least diffusion time.
    """

    batch_size: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    value_weight: float = 1.0
    min_time: float = 1e-3


def contrast_loss(one: Tensor, other: Tensor, study: Tensor, temperature: float) -> Tensor:
    """InfoNCE between two views of each cell, negatives from the cell's own study only.

    Mean over cells and both directions of `-log exp(s_ii / τ) / Σ_j exp(s_ij / τ)` with cosine similarity s and j over
    the cells of i's study (van den Oord et al. 2018; the restriction takes away the reward for distinguishing studies).

    Parameters
    ----------
    one, other
        States `(B, dim)` of the same cells.
    study
        `(B,)`.
    temperature
        τ.

    Returns
    -------
    A scalar in nats; 0 without cells.
    """
    high = torch.promote_types(one.dtype, torch.float32)
    similarity = F.normalize(one.to(high), dim=1) @ F.normalize(other.to(high), dim=1).T / temperature
    similarity = similarity.masked_fill(study[:, None] != study[None, :], -torch.inf)
    own = torch.arange(one.shape[0], device=one.device)
    both = F.cross_entropy(similarity, own, reduction="sum") + F.cross_entropy(similarity.T, own, reduction="sum")
    return 0.5 * both / max(1, len(own))


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
        assert batch.study is not None
        loss = gene_multinomial_loss(self.decoder(one, batch.study), batch)
        known = torch.ge(batch.study, 0)
        weight = torch.where(known, self.study_weight[batch.study.clamp_min(0)], torch.ones_like(loss))
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
        view = thinned_at_random(batch, c.max_time, generator)
        if float(torch.rand((), generator=generator)) >= c.panel_rate:
            return view
        share = c.min_panel ** float(torch.rand((), generator=generator))
        panel = torch.rand(self.model.config.n_tokens, generator=generator) < share
        return thinned(view, ~panel.to(view.tokens.device)[view.tokens])


class StateHeadModule(TaskModule):
    r"""Train a model's state head by masked diffusion without the transformer.

    Genes are masked as in pretraining. From the state of what is left of a cell, the head alone predicts which of the
    genes not visible are masked, and how much of each there is (:class:`~scdiva.models.StateHead`). All positions of a
    cell share one prediction, so a batch of hundreds of cells takes a fraction of a second.

    Parameters
    ----------
    model
        With a state head and an anchor that is made of the cell's genes; trained in place. All other weights are
        frozen, and stay so: `model.requires_grad_(True)` before another training.
    config
        See :class:`StateHeadConfig`.
    measured
        int64, tokens that the data have a column for; None: all. No other gene is predicted, or learns.

    Raises
    ------
    ValueError
        If the model has no state head, or `[LAT]` starts from nothing but its own vector.
    """

    config: StateHeadConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: StateHeadConfig, measured: np.ndarray | None = None) -> None:
        super().__init__(model, config)
        if model.state_head is None or model.config.anchor == "learned":
            raise ValueError(
                f"The model has state_head={model.config.state_head} and anchor={model.config.anchor!r}; this "
                'training needs state_head=True and anchor="encoder".'
            )
        model.requires_grad_(False)
        model.state_head.requires_grad_(True)
        every = np.arange(N_SPECIAL, model.config.n_tokens)
        genes = torch.from_numpy(np.array(every if measured is None else measured, dtype=np.int64)) - N_SPECIAL
        column = torch.full((model.config.n_genes,), -1)
        column[genes] = torch.arange(len(genes))
        self.genes: Tensor
        self.column: Tensor
        self.register_buffer("genes", genes, persistent=False)
        self.register_buffer("column", column, persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over cells of the cross-entropy of a masked gene plus λ times the squared error of its value.

        Parameters
        ----------
        batch
            Complete cells.
        generator
            Source of times and masks.

        Returns
        -------
        The loss, and its parts `identity` (nats) and `value`.
        """
        c, head = self.config, self.model.state_head
        assert head is not None
        times = stratified_times(batch.n_cells, generator, c.min_time).to(batch.tokens.device)
        seen = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, generator)
        with torch.no_grad():
            state = self.model.encode_anchor(seen.tokens, seen.values, batch.cu_seqlens)
        assert state is not None
        read = self.model.read_state(state, ~seen.masked, batch.cu_seqlens)
        cells = cell_of_token(batch.cu_seqlens, batch.tokens.numel())
        genes = batch.tokens - N_SPECIAL
        shown = ~seen.masked
        number = torch.bincount(cells[seen.masked], minlength=batch.n_cells)
        share = number / batch.cu_seqlens.diff().clamp_min(1)
        logits = hidden_gene_logits(head.log_odds(read, self.genes), share)
        taken = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        taken[cells[shown], self.column[genes[shown]]] = True
        log_p = torch.log_softmax(logits.masked_fill(taken, -torch.inf), dim=1)
        masked, of_cell = genes[seen.masked], cells[seen.masked]
        weight = 1 / (number.clamp_min(1) * (number > 0).sum().clamp_min(1))
        identity = -(log_p[of_cell, self.column[masked]] * weight[of_cell]).sum()
        error = (read[of_cell] * head.value[masked]).sum(dim=1) - batch.values[seen.masked]
        value = (error.square() * weight[of_cell]).sum()
        return identity + c.value_weight * value, {"identity": identity.detach(), "value": value.detach()}


@torch.no_grad()
def start_state_head(model: ScDiVa, tokens: np.ndarray, values: np.ndarray, n_cells: int) -> None:
    """Start the biases of a model's state head from how often genes are expressed, and how much.

    Parameters
    ----------
    model
        With a state head; changed in place. Nothing else of the head changes.
    tokens, values
        Of all cells, one after the other.
    n_cells
        Their number.
    """
    head = model.state_head
    assert head is not None
    n = np.bincount(tokens, minlength=model.config.n_tokens)[N_SPECIAL:]
    total = np.bincount(tokens, values, minlength=model.config.n_tokens)[N_SPECIAL:]
    mean = np.where(n > 0, total / np.maximum(n, 1), values.mean())
    head.gene[:, -1] = torch.from_numpy(np.log(n + PRIOR_CELLS) - np.log(n_cells - n + PRIOR_CELLS))
    head.value[:, -1] = torch.from_numpy(mean)
