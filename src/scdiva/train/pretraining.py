"""Pretraining: the dual denoising loss, and the objectives that make the cell state carry the cell."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.diffusion import cell_of_token, dual_loss, mask_tokens, stratified_times
from scdiva.models.scdiva import ScDiVa
from scdiva.train.base import TaskModule
from scdiva.train.config import PretrainingConfig


def thinned(batch: CellBatch, dropped: Tensor) -> CellBatch:
    """Leave genes out of a batch, as dropout does (paper, theorem "Dropout-Diffusion Isomorphism").

    Parameters
    ----------
    batch
        Cells; not changed.
    dropped
        bool `(T,)`.

    Returns
    -------
    The batch of the genes that are left, in their order; a cell may end up empty.
    """
    kept = ~dropped
    counts = torch.zeros(batch.n_cells, dtype=torch.int64, device=kept.device)
    counts.index_add_(0, cell_of_token(batch.cu_seqlens, kept.numel()), kept.long())
    cu_seqlens = F.pad(counts.cumsum(0), (1, 0)).to(batch.cu_seqlens.dtype)
    return CellBatch(batch.tokens[kept], batch.values[kept], cu_seqlens, batch.study)


def gene_multinomial_loss(logits: Tensor, batch: CellBatch) -> Tensor:
    """Cross-entropy between a cell's genes and a predicted distribution over all genes.

    The target is half the cell's share of counts, `expm1(v) / Σ expm1(v)`, and half its share of log values,
    `v / Σ v`: counts alone would be about a few abundant genes.

    Parameters
    ----------
    logits
        Shape `(B, n_genes)`.
    batch
        The complete cells.

    Returns
    -------
    Nats per cell, `(B,)`; 0 for an empty cell.
    """
    cells = cell_of_token(batch.cu_seqlens, batch.tokens.numel())
    target = torch.zeros_like(batch.values)
    for amount in (torch.expm1(batch.values), batch.values):
        total = torch.zeros(batch.n_cells, dtype=amount.dtype, device=amount.device).index_add_(0, cells, amount)
        target = target + 0.5 * amount / total[cells]
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=1)
    terms = -target * log_p[cells, batch.tokens - N_SPECIAL]
    return torch.zeros(batch.n_cells, dtype=terms.dtype, device=terms.device).index_add_(0, cells, terms)


def contrast_loss(one: Tensor, other: Tensor, study: Tensor | None, temperature: float) -> Tensor:
    """InfoNCE between two views of each cell, negatives from the cell's own study only.

    Mean over cells and both directions of `-log exp(s_ii / τ) / Σ_j exp(s_ij / τ)` with cosine similarity s and j over
    the cells of i's study (van den Oord et al. 2018; the restriction takes away the reward for telling studies apart).

    Parameters
    ----------
    one, other
        States `(B, dim)` of the same cells.
    study
        `(B,)`, or None: all cells are of one study.
    temperature
        τ.
    """
    high = torch.promote_types(one.dtype, torch.float32)
    similarity = F.normalize(one.to(high), dim=1) @ F.normalize(other.to(high), dim=1).T / temperature
    if study is not None:
        similarity = similarity.masked_fill(study[:, None] != study[None, :], -torch.inf)
    own = torch.arange(one.shape[0], device=one.device)
    return 0.5 * (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own))


class PretrainingModule(TaskModule):
    """Masked-diffusion pretraining of a :class:`~scdiva.models.ScDiVa` (paper, algorithm "scDiVa Training").

    Each batch: a time per cell, stratified; genes masked with that probability; one pass; identity cross-entropy on
    the masked positions plus λ times the squared error of hidden values. The gene head sees masked positions only.
    The anchor objectives of :class:`PretrainingConfig` come on top; what they need beyond the model (a linear decoder)
    belongs to this module and is not part of a saved model.

    Parameters
    ----------
    model
        Trained in place.
    config
        See :class:`PretrainingConfig`.
    n_studies
        Studies in the corpus, for the decoder's covariate; 0 does without.
    """

    config: PretrainingConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: PretrainingConfig, n_studies: int = 0) -> None:
        super().__init__(model, config)
        self.n_studies = n_studies
        self.decoder: nn.Linear | None = None
        self.study_bias: nn.Embedding | None = None
        if "genes" in config.anchor_objectives:
            # from zeros, all genes alike; made inside a fork because the constructors draw from torch's stream
            with torch.random.fork_rng(devices=[]):
                self.decoder = nn.Linear(model.state_dim, model.config.n_genes)
                nn.init.zeros_(self.decoder.weight)
                nn.init.zeros_(self.decoder.bias)
                if n_studies:
                    self.study_bias = nn.Embedding(n_studies, model.config.n_genes)
                    nn.init.zeros_(self.study_bias.weight)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Dual loss and anchor terms of one batch.

        Parameters
        ----------
        batch
            Complete cells, with `study` where the module was given `n_studies` (-1: a study that is not trained on).
        generator
            Source of times and masks.

        Returns
        -------
        The loss, and `identity`, `value`, `identity_per_token`, `value_per_token`, `n_masked`, and `genes` and
        `contrast` where these are asked for.

        Raises
        ------
        ValueError
            If studies are needed and missing, or their numbers are out of range.
        """
        c = self.config
        self._check_study(batch)
        times = stratified_times(batch.n_cells, generator, c.min_time).to(batch.tokens.device)
        corrupted = mask_tokens(
            batch.tokens, batch.values, batch.cu_seqlens, times, generator, value_mask_rate=c.value_mask_rate
        )
        view_state = None
        if {"two_view", "contrast"} & set(c.anchor_objectives):
            view_state = self._view_state(batch, generator)
        out = self.model(
            corrupted.tokens,
            corrupted.values,
            batch.cu_seqlens,
            value_mask=corrupted.value_mask,
            time=times if self.model.config.time_conditioning else None,
            anchor_state=view_state if "two_view" in c.anchor_objectives else None,
        )
        loss, parts = dual_loss(
            out.hidden,
            self.model.gene_weight,
            self.model.predict_values(out.hidden),
            batch.tokens,
            batch.values,
            corrupted,
            batch.cu_seqlens,
            times,
            loss_norm=c.loss_norm,
            value_weight=c.value_weight,
            value_mask_rate=c.value_mask_rate,
            chunk=c.loss_chunk,
        )
        if "genes" in c.anchor_objectives:
            if "two_view" in c.anchor_objectives and view_state is not None:
                state, asked = view_state, torch.ones_like(times)
            else:
                state, asked = out.cell_state, (times <= c.anchor_max_time).to(times)
            genes = self._genes_term(state, batch, asked)
            loss = loss + c.genes_weight * genes
            parts["genes"] = genes.detach()
        if "contrast" in c.anchor_objectives and view_state is not None:
            contrast = contrast_loss(out.cell_state, view_state, batch.study, c.contrast_temperature)
            loss = loss + c.contrast_weight * contrast
            parts["contrast"] = contrast.detach()
        return loss, parts

    def _check_study(self, batch: CellBatch) -> None:
        if not self.n_studies:
            return
        if batch.study is None:
            raise ValueError(f"The module was made for {self.n_studies} studies, but the batch does not say which.")
        if bool(((batch.study < -1) | (batch.study >= self.n_studies)).any()):
            low, high = int(batch.study.min()), int(batch.study.max())
            raise ValueError(
                f"Study numbers must be in 0 ... {self.n_studies - 1}, or -1 for another one; got {low} to {high}."
            )

    def _view_state(self, batch: CellBatch, generator: torch.Generator) -> Tensor:
        """State of another view of the cells, with up to `anchor_max_time` of their genes left out, `(B, state_dim)`.

        Left out, not masked: at inference a cell comes without masks too, and it is half the work.
        """
        c = self.config
        times = stratified_times(batch.n_cells, generator, c.min_time).to(batch.tokens.device) * c.anchor_max_time
        dropped = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, generator).masked
        view = thinned(batch, dropped)
        time = torch.zeros_like(times) if self.model.config.time_conditioning else None
        return self.model(view.tokens, view.values, view.cu_seqlens, time=time).cell_state

    def _genes_term(self, state: Tensor, batch: CellBatch, asked: Tensor) -> Tensor:
        """Mean over the asked cells of the multinomial loss of their genes, predicted from their states."""
        assert self.decoder is not None
        logits = self.decoder(state)
        if self.study_bias is not None and batch.study is not None:
            # a study that is not trained on (-1) gets what the others have in common
            known = torch.ge(batch.study, 0)[:, None]
            common = self.study_bias.weight.mean(0)
            logits = logits + torch.where(known, self.study_bias(batch.study.clamp_min(0)), common)
        return (gene_multinomial_loss(logits, batch) * asked).sum() / asked.sum().clamp_min(1)
