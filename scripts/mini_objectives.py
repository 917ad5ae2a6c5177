"""Training objectives of scdiva-mini apart from masked diffusion: set encoder, state head and query head.

`train_mini.py` runs them. They are not part of the package: the paper has no such stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_seed
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.cells import take_cells
from scdiva.data.packed import PackedCells
from scdiva.diffusion import cell_of_token, mask_tokens, stratified_times
from scdiva.diffusion.masking import Counts, chosen, counts_of, keep_counts, log_normalised
from scdiva.models.heads import hidden_gene_logits
from scdiva.models.layers import SetEncoder
from scdiva.models.queries import FEW, HEADS, LEAST, QueryHead
from scdiva.models.scdiva import ScDiVa
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train.base import TaskModule
from scdiva.train.config import OptimiserConfig
from scdiva.train.linear_map import LinearMap, set_linear_map
from scdiva.train.objectives import GeneDecoder, gene_multinomial_loss, thinned, thinned_at_random

PRIOR_CELLS = 0.5
"""Pseudocount of cells for the log-odds of a gene."""
ODDS_ERROR, VALUE_ERROR = 1.5, 0.4
"""Standard deviations of the errors that are added, in training, to a gene's log-odds and value for a whole batch.
Without these errors the query head relies on the state head and ignores the context: on four held-out studies, after
600 steps, the log-loss with context was 0.538, and 0.493 with the errors."""
MIN_CONTEXT = 16
STUDY_POWER = 0.6
"""Studies are drawn with probability proportional to this power of their size."""
Packed = tuple[Tensor, Tensor, Tensor]
Around = tuple[Tensor, Counts, Tensor] | None
"""Tokens, counts and boundaries of the other cells of a study; None without context."""


# set encoder


@dataclass(frozen=True, kw_only=True)
class AnchorConfig(OptimiserConfig):
    """Training of the set encoder alone (:class:`AnchorModule`), before the transformer; not in the paper."""

    genes_weight: float = 1.0
    contrast_weight: float = 0.2
    contrast_temperature: float = 0.1
    max_time: float = 0.8  # a view lacks a share t ~ U(0, max_time) of the genes of a cell, in expectation
    panel_rate: float = 0.3  # share of the views with a random gene panel, the same for all cells of a batch
    min_panel: float = 0.05  # minimum share of the genes in a panel; the share is log-uniform up to 1
    study_power: float = 0.5  # cells are weighted by the size of their study to minus this power


def contrast_loss(one: Tensor, other: Tensor, study: Tensor, temperature: float) -> Tensor:
    """InfoNCE between two views of each cell, negatives from the cell's own study only.

    Mean over cells and both directions of `-log exp(s_ii / τ) / Σ_j exp(s_ij / τ)` with cosine similarity s and j over
    the cells of i's study (van den Oord et al. 2018; the restriction removes the incentive to distinguish studies).
    States are `(B, dim)`, studies `(B,)`; without cells the loss is 0.
    """
    high = torch.promote_types(one.dtype, torch.float32)
    similarity = F.normalize(one.to(high), dim=1) @ F.normalize(other.to(high), dim=1).T / temperature
    similarity = similarity.masked_fill(study[:, None] != study[None, :], -torch.inf)
    target = torch.arange(one.shape[0], device=one.device)
    loss = F.cross_entropy(similarity, target, reduction="sum") + F.cross_entropy(similarity.T, target, reduction="sum")
    return 0.5 * loss / max(1, len(target))


class AnchorModule(TaskModule):
    """Train the learned part of a model's set encoder; its linear part is set from the corpus SVD and kept.

    Each batch is encoded in two views, each with genes removed at random (as by dropout), and a share of them reduced
    to a random gene panel. A linear decoder with the study as covariate predicts all genes of the cell from the learned
    part of one view, and a contrastive loss makes the two views of a cell more similar to each other than to other
    cells of the study. The linear map is computed from the same corpus: its directions become the linear part, its
    frequencies the initial bias of the decoder. `study_sizes` are numbers of cells. All other weights are frozen and
    remain frozen afterwards.
    """

    config: AnchorConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: AnchorConfig, linear_map: LinearMap, study_sizes: np.ndarray) -> None:
        super().__init__(model, config)
        anchor = model.anchor
        assert isinstance(anchor, SetEncoder)
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
        """Weighted mean over cells of the genes' cross-entropy, plus the contrast; parts `genes` and `contrast`."""
        c = self.config
        one, other = (self._learned(self._view(batch, generator)) for _ in range(2))
        assert batch.study is not None
        loss = gene_multinomial_loss(self.decoder(one, batch.study), batch)
        has_study = torch.ge(batch.study, 0)
        weight = torch.where(has_study, self.study_weight[batch.study.clamp_min(0)], torch.ones_like(loss))
        genes = (weight * loss).sum() / weight.sum()
        contrast = contrast_loss(one, other, batch.study, c.contrast_temperature)
        parts = {"genes": genes.detach(), "contrast": contrast.detach()}
        return c.genes_weight * genes + c.contrast_weight * contrast, parts

    def _learned(self, view: CellBatch) -> Tensor:
        visible = torch.ones_like(view.tokens, dtype=torch.bool)
        return self.model.anchor.parts(view.tokens, view.values, view.cu_seqlens, visible)[1]  # type: ignore[union-attr]

    def _view(self, batch: CellBatch, generator: torch.Generator) -> CellBatch:
        """Remove each gene with its cell's probability, and in some views all genes outside a random panel."""
        c = self.config
        view = thinned_at_random(batch, c.max_time, generator)
        if float(torch.rand((), generator=generator)) >= c.panel_rate:
            return view
        share = c.min_panel ** float(torch.rand((), generator=generator))
        panel = torch.rand(self.model.config.n_tokens, generator=generator) < share
        return thinned(view, ~panel.to(view.tokens.device)[view.tokens])


# state head


@dataclass(frozen=True, kw_only=True)
class StateHeadConfig(OptimiserConfig):
    """Training of the state head alone (:class:`StateHeadModule`); not in the paper."""

    value_weight: float = 1.0
    min_time: float = 1e-3


class StateHeadModule(TaskModule):
    r"""Train a model's state head by masked diffusion without the transformer.

    Genes are masked as in pretraining. From the state of the visible genes of a cell, the head alone predicts which
    other genes are masked, and how strongly each is expressed (:class:`~scdiva.models.StateHead`). All positions of a
    cell share one prediction, so a batch of hundreds of cells takes a fraction of a second. All other weights are
    frozen and remain frozen afterwards.
    """

    config: StateHeadConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: StateHeadConfig) -> None:
        super().__init__(model, config)
        assert model.state_head is not None
        model.requires_grad_(False)
        model.state_head.requires_grad_(True)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over cells of the cross-entropy of masked genes plus λ times the squared error of their values."""
        c, head = self.config, self.model.state_head
        assert head is not None
        times = stratified_times(batch.n_cells, generator, c.min_time).to(batch.tokens.device)
        view = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, generator)
        with torch.no_grad():
            state = self.model.encode_anchor(view.tokens, view.values, batch.cu_seqlens)
        assert state is not None
        visible = ~view.masked
        head_hidden = self.model.read_state(state, visible, batch.cu_seqlens)
        cells = cell_of_token(batch.cu_seqlens, batch.tokens.numel())
        genes = batch.tokens - N_SPECIAL
        number = torch.bincount(cells[view.masked], minlength=batch.n_cells)
        share = number / batch.cu_seqlens.diff().clamp_min(1)
        logits = hidden_gene_logits(head.log_odds(head_hidden), share)
        is_visible = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        is_visible[cells[visible], genes[visible]] = True
        log_p = torch.log_softmax(logits.masked_fill(is_visible, -torch.inf), dim=1)
        masked, of_cell = genes[view.masked], cells[view.masked]
        weight = 1 / (number.clamp_min(1) * (number > 0).sum().clamp_min(1))
        identity = -(log_p[of_cell, masked] * weight[of_cell]).sum()
        error = (head_hidden[of_cell] * head.value[masked]).sum(dim=1) - batch.values[view.masked]
        value = (error.square() * weight[of_cell]).sum()
        return identity + c.value_weight * value, {"identity": identity.detach(), "value": value.detach()}


@torch.no_grad()
def start_state_head(model: ScDiVa, tokens: np.ndarray, values: np.ndarray, n_cells: int) -> None:
    """Initialise the biases of a model's state head from the frequency and mean value of each gene in all cells."""
    head = model.state_head
    assert head is not None
    n = np.bincount(tokens, minlength=model.config.n_tokens)[N_SPECIAL:]
    total = np.bincount(tokens, values, minlength=model.config.n_tokens)[N_SPECIAL:]
    mean = np.where(n > 0, total / np.maximum(n, 1), values.mean())
    head.gene[:, -1] = torch.from_numpy(np.log(n + PRIOR_CELLS) - np.log(n_cells - n + PRIOR_CELLS))
    head.value[:, -1] = torch.from_numpy(mean)


# query head


class Context(NamedTuple):
    """Other cells of the study in training: fields of :class:`scdiva.models.queries.Context`, and `missed`.

    Attributes
    ----------
    missed
        `(M, n)`, probability 2^-c that a gene with c counts is not detected in a random half of a cell's counts, for
        the n queried genes.
    """

    state: Tensor
    n_genes: Tensor
    missed: Tensor
    values: Tensor
    log_odds: Tensor


class SingleQueries(QueryHead):
    r"""Query head for single pairs of cell and gene, with or without context; cells are thinned or partly masked.

    If a gene is not detected in half of a cell's counts, one feature is the weighted share of context cells that
    express it in one half of their counts, among those in which it is not detected in the other half,
    :math:`\sum_m a_{hm} 2^{-c_{mg}} [c_{mg} > 0] / \sum_m a_{hm} 2^{-c_{mg}}`.
    """

    def forward(
        self, state: Tensor, head_hidden: Tensor, n_genes: Tensor, cell: Tensor, gene: Tensor, column: Tensor,
        log_odds: Tensor, values: Tensor, *, thinned: bool, context: Context | None = None,
        own_row: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Predict the expression of a gene in a cell, for N queries.

        Parameters
        ----------
        state, head_hidden, n_genes
            `(B, state_dim)`, `(B, read_dim)` and `(B,)`: from the visible genes of the queried cells.
        cell, gene, column
            int64 `(N,)`: the cell and the gene of each query, and the gene's column in `context`.
        log_odds, values
            `(N,)`, predictions of the state head.
        thinned
            Whether queried genes are those not detected in half of a cell's counts (True), or masked genes (False).
        context
            Other cells of the study, shared by all queried cells.
        own_row
            As for :meth:`weigh`.

        Returns
        -------
        `(N,)` log-odds that the gene is expressed, and its expected log-normalised value if it is.
        """
        if context is None:
            features, mean = log_odds.new_zeros(len(cell), 4 * (HEADS + 1)), log_odds
        else:
            weights = self.weigh(state, context, own_row)
            features = self._context_features(weights, cell, column, log_odds, values, context, thinned=thinned)
            mean = context.log_odds[column]
        of_cell = self.cell(self._of_cell(head_hidden, n_genes, context, thinned=thinned))
        base = torch.stack([log_odds, values, log_odds - mean], dim=1)
        line = torch.cat([features, base], dim=1)
        parts = [line, self.gene(gene), of_cell[cell]]
        added = self.line(line) + self.out(self.hidden(torch.cat(parts, dim=1)))
        return log_odds + added[:, 0], values + added[:, 1]

    def _context_features(
        self, weights: Tensor, cell: Tensor, column: Tensor, log_odds: Tensor, values: Tensor, context: Context, *,
        thinned: bool,
    ) -> Tensor:  # fmt: skip
        """Features of the queried genes in the context, by head, `(N, 4 (HEADS + 1))`."""
        expressed = (context.values > 0).to(weights.dtype)
        numbers = torch.stack([context.missed * expressed, context.missed, expressed, context.values])
        # heads and cells in one product: (4, B H, n)
        rows = weights.flatten(0, 1) @ numbers
        rows = rows.view(4, *weights.shape[:2], -1)[:, cell, :, column]  # (N, 4, H): numbers of queries come first
        late, missed, detected, total = rows.unbind(1)
        if not thinned:  # of a masked gene nothing is known yet
            late, missed = detected, torch.ones_like(detected)
        n = (1 / weights.square().sum(dim=2))[cell]
        prior = F.softplus(self.prior)
        p = log_odds.sigmoid()[:, None]
        odds = (late * n + prior[0] * p).clamp_min(LEAST) / ((missed - late) * n + prior[0] * (1 - p)).clamp_min(LEAST)
        value = (total * n + prior[1] * values[:, None]) / (detected * n + prior[1])
        parts = [odds.log() + 3, (missed + FEW / 30).log(), value - values[:, None], (detected * n + FEW).log()]
        return torch.cat(parts, dim=1)

    def _of_cell(self, head_hidden: Tensor, n_genes: Tensor, context: Context | None, *, thinned: bool) -> Tensor:
        """Features of each cell, `(B, read_dim + 4)`."""
        log_n = torch.log1p(n_genes.to(head_hidden.dtype)) - 6
        context_log_n = torch.zeros_like(log_n)
        if context is not None:
            context_log_n = (torch.log1p(context.n_genes.to(head_hidden.dtype)).mean() - 6).expand_as(log_n)
        flags = head_hidden.new_tensor([context is not None, thinned]).expand(len(head_hidden), 2)
        return torch.cat([head_hidden, log_n[:, None], context_log_n[:, None], flags], dim=1)


@dataclass(frozen=True, kw_only=True)
class QueryConfig(OptimiserConfig):
    """Training of a query head (:class:`QueryModule`); not in the paper."""

    batch_size: int = 24  # queried cells
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    context_cells: int = 256  # maximum number of other cells of the study in a batch
    queries: int = 320  # maximum number of queries of presence, and of values, in a cell
    value_weight: float = 1.0
    alone_rate: float = 0.3  # share of the batches without context; the state head's errors then have a random scale
    captured_rate: float = 0.5  # share of the batches in which each gene has its own capture efficiency


class Queries(NamedTuple):
    """Visible genes of cells, and queries with their true answers.

    Attributes
    ----------
    visible
        Tokens, log-normalised values and boundaries of the visible genes.
    cell, token, present
        `(N,)`: queries of presence, and their answers, float32.
    value_cell, value_token, value
        `(V,)`: queries of values of genes that are expressed, and their answers.
    thinned
        Whether queried genes are those not detected in half of a cell's counts (True), or masked genes (False).
    """

    visible: Packed
    cell: Tensor
    token: Tensor
    present: Tensor
    value_cell: Tensor
    value_token: Tensor
    value: Tensor
    thinned: bool


def draw(batch: CellBatch, measured: Tensor, config: QueryConfig, generator: torch.Generator) -> tuple[Queries, Around]:
    """Draw queries for the first cells of a batch of one study, on the CPU; the other cells are the context, or None.

    `measured` is bool `(n_studies, n_tokens)`: genes measured in each study.
    """
    assert batch.study is not None
    tokens, bounds = batch.tokens, batch.cu_seqlens
    counts = counts_of(batch.values, bounds)
    if float(torch.rand((), generator=generator)) < config.captured_rate:
        efficiency = torch.randn(measured.shape[1], generator=generator).clamp_max(0).exp()
        counts = keep_counts(counts, bounds, efficiency[tokens], generator)
        is_kept = counts.of_token > 0
        tokens, shorter = chosen(tokens, bounds, is_kept)
        counts, bounds = Counts(counts.of_token[is_kept], counts.of_cell), shorter
    n = n_query_cells(batch.n_cells, config.batch_size)
    cut = int(bounds[n])
    queries = draw_queries(
        tokens[:cut], Counts(counts.of_token[:cut], counts.of_cell[:n]), bounds[: n + 1],
        measured[batch.study[0]].nonzero().squeeze(1), generator,
        thinned=bool(torch.rand((), generator=generator) < 0.5), max_queries=config.queries,
    )  # fmt: skip
    around: Around = None
    if float(torch.rand((), generator=generator)) >= config.alone_rate:
        around = tokens[cut:], Counts(counts.of_token[cut:], counts.of_cell[n:]), bounds[n:] - cut
    return queries, around


def draw_queries(
    tokens: Tensor, counts: Counts, cu_seqlens: Tensor, measured: Tensor, generator: torch.Generator, *,
    thinned: bool, max_queries: int, held_out: float = 0.15,
) -> Queries:  # fmt: skip
    """Mask genes or counts of cells, and query equal numbers of expressed and of measured but not expressed genes.

    Parameters
    ----------
    tokens, counts, cu_seqlens
        Packed cells.
    measured
        int64, tokens of the genes measured in the study.
    generator
        Source of all random numbers.
    thinned
        True: half of the counts of a cell are visible; queries ask whether genes that are not detected in this half
        are in the other. False: all counts of a gene are masked with probability t ~ U(0, 1), one t per cell: masked
        diffusion in which the identity of a gene is given and its presence is masked.
    max_queries
        Maximum number of queries of presence, and of values, per cell.
    held_out
        With `thinned`, share of the visible genes that are masked and whose values are queried.

    Returns
    -------
    The queries, ordered by cell.
    """
    n_cells, cells = cu_seqlens.numel() - 1, cell_of_token(cu_seqlens, tokens.numel())
    draw = torch.rand(tokens.numel(), generator=generator)
    if thinned:
        counts, all_counts = keep_counts(counts, cu_seqlens, torch.full(tokens.shape, 0.5), generator), counts
        visible = counts.of_token > 0
        queried, held = ~visible & (all_counts.of_token > 0), visible & (draw < held_out)
        visible = visible & ~held
    else:
        held = draw < torch.rand(n_cells, generator=generator)[cells]
        queried, visible = held, ~held
    values = log_normalised(counts, cu_seqlens)
    positive = _draw_positions(queried, cells, n_cells, max_queries // 2, generator)
    n_positive = torch.bincount(cells[positive], minlength=n_cells)
    is_expressed = torch.zeros(n_cells, int(measured.max()) + 1, dtype=torch.bool)
    is_expressed[cells[inside := tokens <= measured.max()], tokens[inside]] = True
    keys = torch.rand(n_cells, len(measured), generator=generator).masked_fill(is_expressed[:, measured], 2.0)
    order = keys.topk(min(int(n_positive.max()), len(measured)), dim=1, largest=False)
    is_drawn = (torch.arange(order.indices.shape[1]) < n_positive[:, None]) & (order.values < 2)
    absent_cell, at = is_drawn.nonzero().unbind(1)
    absent = measured[order.indices[absent_cell, at]]
    cell = torch.cat([cells[positive], absent_cell])
    by_cell = cell.argsort(stable=True)
    present = torch.cat([torch.ones(len(positive)), torch.zeros(len(absent))])
    of_value = _draw_positions(held, cells, n_cells, max_queries, generator)
    visible_tokens, bounds = chosen(tokens, cu_seqlens, visible)
    return Queries(
        (visible_tokens, values[visible], bounds), cell[by_cell], torch.cat([tokens[positive], absent])[by_cell],
        present[by_cell], cells[of_value], tokens[of_value], values[of_value], thinned,
    )  # fmt: skip


def _draw_positions(mask: Tensor, cells: Tensor, n_cells: int, n_max: int, generator: torch.Generator) -> Tensor:
    """Draw at most `n_max` masked positions of each cell; `cells` must be in ascending order."""
    at = mask.nonzero().squeeze(1)
    at = at[torch.randperm(len(at), generator=generator)]
    at = at[cells[at].argsort(stable=True)]
    number = torch.bincount(cells[at], minlength=n_cells)
    rank = torch.arange(len(at)) - (number.cumsum(0) - number)[cells[at]]
    return at[rank < n_max]


class QueryModule(TaskModule):
    r"""Train a query head on batches of one study each.

    The loss of a batch is the mean cross-entropy of presence over balanced queries plus λ times the mean squared error
    of masked values. In half of the batches, half of the counts of each cell are visible (:func:`draw_queries`,
    `thinned`), in the others a part of its genes. In half of the batches, each gene has a random capture efficiency,
    :math:`\min(1, e^x)` with x ~ N(0, 1), the same for all cells of the batch, which simulates a new study. A random
    error, the same for the batch, is added to the predictions of the state head for a gene, as in a study that it was
    not trained on. All weights of the model are frozen; `measured` as for :func:`draw`.
    """

    config: QueryConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: QueryConfig, measured: Tensor) -> None:
        super().__init__(model, config)
        c = model.config
        self.head = SingleQueries(c.state_dim, c.state_rank + 1, c.n_genes)
        self.measured: Tensor
        self.register_buffer("measured", torch.as_tensor(measured), persistent=False)
        model.requires_grad_(False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of cells of one study, the first of which are queried; its parts are `presence` (nats) and `value`."""
        c, device = self.config, self.device
        queries, around = draw(batch.on_host(), self.measured.cpu(), c, generator)
        odds, values = self.answer(queries, around)
        value = F.mse_loss(values, queries.value.to(device)) if len(values) else values.sum()
        presence = F.binary_cross_entropy_with_logits(odds, queries.present.to(device))
        return presence + c.value_weight * value, {"presence": presence.detach(), "value": value.detach()}

    def answer(self, queries: Queries, around: Around) -> tuple[Tensor, Tensor]:
        """Predict presence and values for queries; `around` are tokens, counts and boundaries of the context cells."""
        model, head, device = self.model, self.model.state_head, self.device
        assert head is not None
        packed = [part.to(device) for part in queries.visible]
        with torch.no_grad():
            state = model.encode_anchor(*packed)
            assert state is not None
            head_hidden = model.read_state(state, torch.ones_like(packed[0], dtype=torch.bool), packed[2])
        tokens = torch.cat([queries.token, queries.value_token])
        cell = torch.cat([queries.cell, queries.value_cell]).to(device)
        genes, column = torch.unique(tokens - N_SPECIAL, return_inverse=True)
        genes, column = genes.to(device), column.to(device)
        gene = genes[column]
        log_odds = (head_hidden[cell] * head.gene[gene]).sum(dim=1)
        values = (head_hidden[cell] * head.value[gene]).sum(dim=1)
        context = None if around is None else self.context_of(*around, genes)
        if self.training:  # the state head knows these studies; in others it errs gene by gene
            error = torch.randn(2, len(genes), device=device)
            if context is None:
                error = error * torch.rand((), device=device)
            log_odds, values = log_odds + ODDS_ERROR * error[0][column], values + VALUE_ERROR * error[1][column]
            if context is not None:
                context = context._replace(log_odds=context.log_odds + ODDS_ERROR * error[0])
        log_odds, values = self.head(
            state, head_hidden, packed[2].diff(), cell, gene, column, log_odds, values,
            thinned=queries.thinned, context=context,
        )  # fmt: skip
        n = len(queries.cell)
        return log_odds[:n], values[n:]

    @torch.no_grad()
    def context_of(self, tokens: Tensor, counts: Counts, bounds: Tensor, genes: Tensor) -> Context:
        """Compute the context of queries of these genes from complete cells."""
        model, head, device = self.model, self.model.state_head, self.device
        assert head is not None
        values = log_normalised(counts, bounds).to(device)
        number = counts.of_token.float().to(device)
        tokens, bounds = tokens.to(device), bounds.to(device)
        state = model.encode_anchor(tokens, values, bounds)
        assert state is not None
        head_hidden = model.read_state(state, torch.ones_like(tokens, dtype=torch.bool), bounds)
        column = torch.full((model.config.n_genes,), -1, device=device)
        column[genes] = torch.arange(len(genes), device=device)
        at = column[tokens - N_SPECIAL]
        queried, cells = at >= 0, cell_of_token(bounds, tokens.numel())
        missed = torch.ones(len(state), len(genes), device=device)
        context_values = torch.zeros(len(state), len(genes), device=device)
        missed[cells[queried], at[queried]] = torch.exp2(-number[queried])
        context_values[cells[queried], at[queried]] = values[queried]
        log_odds = head.log_odds(head_hidden.mean(dim=0, keepdim=True), genes)[0]
        return Context(state, bounds.diff(), missed, context_values, log_odds)


def n_query_cells(n_cells: int, batch_size: int) -> int:
    """Number of queried cells (the first cells of a batch), such that at least 16 others remain as context."""
    return min(batch_size, n_cells - MIN_CONTEXT)


class StudyBatches(IterableDataset[CellBatch]):
    """Endless batches of one study each; the first cells are queried, the others are their context.

    Batch s depends only on (cells, sizes, seed, s). The number of context cells is drawn log-uniformly from 16 to
    `context_cells`, and up to `batch_size` cells are queried; both numbers are lower for a small study. The packed
    corpus is read into memory.
    """

    def __init__(self, cells: PackedCells, batch_size: int, context_cells: int, seed: int, start_step: int = 0) -> None:
        self.ragged, self.study = cells.read(0, cells.n_obs), cells.study
        cells.close()
        self.batch_size, self.context_cells, self.seed = batch_size, context_cells, seed
        self.start_step = start_step
        self.sizes = np.bincount(self.study, minlength=len(cells.study_names))
        weight = np.where(self.sizes >= 2 * MIN_CONTEXT, self.sizes, 0) ** STUDY_POWER
        if not weight.any():
            raise ValueError(f"no study has {2 * MIN_CONTEXT} cells: a batch is of one study, with others around.")
        self.share = weight / weight.sum()

    def batch(self, number: int) -> CellBatch:
        """Make one batch; :func:`n_query_cells` is the number of its queried cells."""
        rng = np.random.default_rng(step_seed(self.seed, number, "study"))
        study = rng.choice(len(self.share), p=self.share)
        rows = rng.permutation(np.flatnonzero(self.study == study))
        n_queried = n_query_cells(len(rows), self.batch_size)
        max_around = min(self.context_cells, len(rows) - n_queried)
        n_around = int(np.exp(rng.uniform(np.log(MIN_CONTEXT), np.log(max_around + 1))))
        rows = rows[: n_queried + min(n_around, max_around)]
        return from_ragged(*take_cells(self.ragged, rows), self.study[rows], copy=False)

    def __iter__(self) -> Iterator[CellBatch]:
        yield from map(self.batch, itertools.count(self.start_step))


class StudyDataModule(pl.LightningDataModule):
    """:class:`StudyBatches` of a packed corpus for :func:`scdiva.train.fit`."""

    def __init__(self, train: str | Path, vocabulary: Vocabulary, config: QueryConfig) -> None:
        super().__init__()
        self.file, self.vocabulary, self.config, self.start_step = Path(train), vocabulary, config, 0

    def train_dataloader(self) -> DataLoader[CellBatch]:
        """Load the stream of batches, from `start_step` on."""
        c, cells = self.config, PackedCells(self.file, self.vocabulary)
        stream = StudyBatches(cells, c.batch_size, c.context_cells, c.seed, self.start_step)
        return DataLoader(stream, batch_size=None)

    def val_dataloader(self) -> list[DataLoader[CellBatch]]:
        """No validation."""
        return []
