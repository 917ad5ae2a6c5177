"""Training of a query head over many studies: a network that takes the study it has not seen from its other cells.

`train_denoiser.py` runs it; `benchmarks/imputation.py` compares it with other methods.
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
from query_head import Context, SingleQueries
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_seed
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.cells import take_cells
from scdiva.data.packed import PackedCells
from scdiva.diffusion.masking import cell_of_token
from scdiva.diffusion.thinning import Counts, chosen, counts_of, keep_counts, log_normalised
from scdiva.models.scdiva import ScDiVa
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train.base import TaskModule
from scdiva.train.config import OptimiserConfig

Packed = tuple[Tensor, Tensor, Tensor]
ODDS_ERROR, VALUE_ERROR = 1.5, 0.4
"""Standard deviations of the errors that are added, in training, to a gene's log-odds and value for a whole batch.
Without them the query head learns to trust the state head and not the context: on four held-out studies, after 600
steps, the log-loss with context was 0.538, with them 0.493."""
LEAST_CONTEXT = 16
STUDY_POWER = 0.6
"""A study is drawn as often as this power of its size says: large ones have more to teach, and not all of it."""


@dataclass(frozen=True, kw_only=True)
class QueryConfig(OptimiserConfig):
    """Training of a query head (:class:`QueryModule`). Ours, not the paper's.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        With defaults of their own; the first counts the cells of a batch that are queried.
    context_cells
        Most cells of the study around them.
    queries
        Queries of presence, and of values, of a cell, at most.
    value_weight
        λ of the value term.
    alone_rate
        Share of the batches without context. In these the errors of the state head have a random scale: how far a study
        is from those that it knows can't be seen.
    captured_rate
        Share of the batches whose genes are captured with efficiencies of their own.
    """

    batch_size: int = 24
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    context_cells: int = 256
    queries: int = 320
    value_weight: float = 1.0
    alone_rate: float = 0.3
    captured_rate: float = 0.5


class Asked(NamedTuple):
    """What cells show, and what is asked of them.

    Attributes
    ----------
    seen
        Tokens, log-normalised values and boundaries of what they show.
    cell, token, present
        `(N,)`: queries of presence, and their answers, float32.
    value_cell, value_token, value
        `(V,)`: queries of values of genes that are expressed, and their answers.
    thinned
        Whether the genes asked about are not detected in a half of the cells' counts, or masked.
    """

    seen: Packed
    cell: Tensor
    token: Tensor
    present: Tensor
    value_cell: Tensor
    value_token: Tensor
    value: Tensor
    thinned: bool


class Drawn(NamedTuple):
    """What a batch asks, and of what cells around: tokens, counts and boundaries; None: of none."""

    asked: Asked
    around: tuple[Tensor, Counts, Tensor] | None


def draw(batch: CellBatch, measured: Tensor, config: QueryConfig, generator: torch.Generator) -> Drawn:
    """Draw what is asked of cells of one study, the first of the batch, given the others.

    Parameters
    ----------
    batch
        On the CPU.
    measured
        bool `(n_studies, n_tokens)`, genes that each study has a column for.
    config
        Of the training.
    generator
        Source of every draw.
    """
    assert batch.study is not None
    tokens, bounds = batch.tokens, batch.cu_seqlens
    counts = counts_of(batch.values, bounds)
    if float(torch.rand((), generator=generator)) < config.captured_rate:
        efficiency = torch.randn(measured.shape[1], generator=generator).clamp_max(0).exp()
        counts = keep_counts(counts, bounds, efficiency[tokens], generator)
        kept = counts.of_token > 0
        tokens, shorter = chosen(tokens, bounds, kept)
        counts, bounds = Counts(counts.of_token[kept], counts.of_cell), shorter
    n = n_query_cells(batch.n_cells, config.batch_size)
    cut = int(bounds[n])
    asked = draw_queries(
        tokens[:cut], Counts(counts.of_token[:cut], counts.of_cell[:n]), bounds[: n + 1],
        measured[batch.study[0]].nonzero().squeeze(1), generator,
        thinned=bool(torch.rand((), generator=generator) < 0.5), most=config.queries,
    )  # fmt: skip
    around = None
    if float(torch.rand((), generator=generator)) >= config.alone_rate:
        around = tokens[cut:], Counts(counts.of_token[cut:], counts.of_cell[n:]), bounds[n:] - cut
    return Drawn(asked, around)


def draw_queries(
    tokens: Tensor,
    counts: Counts,
    cu_seqlens: Tensor,
    measured: Tensor,
    generator: torch.Generator,
    *,
    thinned: bool,
    most: int,
    held_out: float = 0.15,
) -> Asked:
    """Mask part of cells, and query as many genes that are expressed as measured genes that are not.

    Parameters
    ----------
    tokens, counts, cu_seqlens
        Packed cells.
    measured
        int64, tokens that the study has a column for.
    generator
        Source of every draw.
    thinned
        True: cells show half of their counts, and are asked which genes not detected there the other half shows.
        False: cells show whole genes, each masked with a probability t ~ U(0, 1) of the cell: masked diffusion with the
        identity given and the existence masked.
    most
        Queries of presence of a cell, and values of a cell, at most.
    held_out
        With `thinned`, share of the visible genes that is masked, to ask for their values.

    Returns
    -------
    Cells ascend among queries.
    """
    n_cells, cells = cu_seqlens.numel() - 1, cell_of_token(cu_seqlens, tokens.numel())
    draw = torch.rand(tokens.numel(), generator=generator)
    if thinned:
        counts, whole = keep_counts(counts, cu_seqlens, torch.full(tokens.shape, 0.5), generator), counts
        shown = counts.of_token > 0
        asked, held = ~shown & (whole.of_token > 0), shown & (draw < held_out)
        shown = shown & ~held
    else:
        held = draw < torch.rand(n_cells, generator=generator)[cells]
        asked, shown = held, ~held
    values = log_normalised(counts, cu_seqlens)
    there = _some(asked, cells, n_cells, most // 2, generator)
    n_there = torch.bincount(cells[there], minlength=n_cells)
    known = torch.zeros(n_cells, int(measured.max()) + 1, dtype=torch.bool)
    known[cells[inside := tokens <= measured.max()], tokens[inside]] = True
    keys = torch.rand(n_cells, len(measured), generator=generator).masked_fill(known[:, measured], 2.0)
    order = keys.topk(min(int(n_there.max()), len(measured)), dim=1, largest=False)
    taken = (torch.arange(order.indices.shape[1]) < n_there[:, None]) & (order.values < 2)
    absent_cell, at = taken.nonzero().unbind(1)
    absent = measured[order.indices[absent_cell, at]]
    cell = torch.cat([cells[there], absent_cell])
    by_cell = cell.argsort(stable=True)
    present = torch.cat([torch.ones(len(there)), torch.zeros(len(absent))])
    of_value = _some(held, cells, n_cells, most, generator)
    seen_tokens, bounds = chosen(tokens, cu_seqlens, shown)
    return Asked(
        (seen_tokens, values[shown], bounds),
        cell[by_cell],
        torch.cat([tokens[there], absent])[by_cell],
        present[by_cell],
        cells[of_value],
        tokens[of_value],
        values[of_value],
        thinned,
    )


def _some(which: Tensor, cells: Tensor, n_cells: int, most: int, generator: torch.Generator) -> Tensor:
    """Draw at most so many of the marked positions of each cell; cells ascend."""
    at = which.nonzero().squeeze(1)
    at = at[torch.randperm(len(at), generator=generator)]
    at = at[cells[at].argsort(stable=True)]
    number = torch.bincount(cells[at], minlength=n_cells)
    rank = torch.arange(len(at)) - (number.cumsum(0) - number)[cells[at]]
    return at[rank < most]


class QueryModule(TaskModule):
    r"""Train a query head on batches of one study each.

    The loss of a batch is the mean cross-entropy of presence over balanced queries plus λ times the mean squared error
    of masked values. In half of the batches cells show half of their counts
    (:func:`draw_queries`, `thinned`), in the others a part of their genes. In half, genes are captured with
    efficiencies of their own, :math:`\min(1, e^x)` with x ~ N(0, 1), the same for all cells of the batch: a study that
    no one has measured. What the state head predicts of a gene gets a random error, the same for the batch, as it has
    in a study that it was not trained on.

    Parameters
    ----------
    model
        With a state head and a set encoder. All of its weights are frozen.
    config
        See :class:`QueryConfig`.
    measured
        bool `(n_studies, n_tokens)`, genes that each study has a column for.
    """

    config: QueryConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: QueryConfig, measured: Tensor) -> None:
        super().__init__(model, config)
        if model.state_head is None or model.config.anchor == "learned":
            raise ValueError(
                f"The model has state_head={model.config.state_head} and anchor={model.config.anchor!r}; queries need "
                'state_head=True and anchor="encoder".'
            )
        c = model.config
        self.head = SingleQueries(c.state_dim, c.state_rank + 1, c.n_genes)
        self.measured: Tensor
        self.register_buffer("measured", torch.as_tensor(measured), persistent=False)
        model.requires_grad_(False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of cells of one study, the first of them asked about; its parts are `presence` (nats) and `value`."""
        c, device = self.config, self.device
        asked, around = draw(batch.on_host(), self.measured.cpu(), c, generator)
        odds, values = self.answer(asked, around)
        value = F.mse_loss(values, asked.value.to(device)) if len(values) else values.sum()
        presence = F.binary_cross_entropy_with_logits(odds, asked.present.to(device))
        return presence + c.value_weight * value, {"presence": presence.detach(), "value": value.detach()}

    def answer(self, asked: Asked, around: tuple[Tensor, Counts, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Answer queries, of presence and of values, given other cells of the study: tokens, counts and boundaries."""
        with torch.autocast(self.device.type, enabled=False):  # it is little work
            return self._answered(asked, around)

    def _answered(self, asked: Asked, around: tuple[Tensor, Counts, Tensor] | None) -> tuple[Tensor, Tensor]:
        model, head, device = self.model, self.model.state_head, self.device
        assert head is not None
        seen = [part.to(device) for part in asked.seen]
        with torch.no_grad():
            state = model.encode_anchor(*seen)
            assert state is not None
            read = model.read_state(state, torch.ones_like(seen[0], dtype=torch.bool), seen[2])
        tokens = torch.cat([asked.token, asked.value_token])
        cell = torch.cat([asked.cell, asked.value_cell]).to(device)
        genes, column = torch.unique(tokens - N_SPECIAL, return_inverse=True)
        genes, column = genes.to(device), column.to(device)
        gene = genes[column]
        log_odds = (read[cell] * head.gene[gene]).sum(dim=1)
        values = (read[cell] * head.value[gene]).sum(dim=1)
        context = None if around is None else self.context_of(*around, genes)
        if self.training:
            # the state head was trained on these studies: in one that it has not seen it errs gene by gene
            error = torch.randn(2, len(genes), device=device)
            if context is None:
                error = error * torch.rand((), device=device)
            log_odds, values = log_odds + ODDS_ERROR * error[0][column], values + VALUE_ERROR * error[1][column]
            if context is not None:
                context = context._replace(log_odds=context.log_odds + ODDS_ERROR * error[0])
        odds, found = self.head(
            state, read, seen[2].diff(), cell, gene, column, log_odds, values,
            thinned=asked.thinned, context=context,
        )  # fmt: skip
        n = len(asked.cell)
        return odds[:n], found[n:]

    @torch.no_grad()
    def context_of(self, tokens: Tensor, counts: Counts, bounds: Tensor, genes: Tensor) -> Context:
        """Make what queries of these genes read of whole cells around them."""
        model, head, device = self.model, self.model.state_head, self.device
        assert head is not None
        values = log_normalised(counts, bounds).to(device)
        number = counts.of_token.float().to(device)
        tokens, bounds = tokens.to(device), bounds.to(device)
        state = model.encode_anchor(tokens, values, bounds)
        assert state is not None
        read = model.read_state(state, torch.ones_like(tokens, dtype=torch.bool), bounds)
        column = torch.full((model.config.n_genes,), -1, device=device)
        column[genes] = torch.arange(len(genes), device=device)
        at = column[tokens - N_SPECIAL]
        kept, cells = at >= 0, cell_of_token(bounds, tokens.numel())
        missed, shown = (
            torch.ones(len(state), len(genes), device=device),
            torch.zeros(len(state), len(genes), device=device),
        )
        missed[cells[kept], at[kept]] = torch.exp2(-number[kept])
        shown[cells[kept], at[kept]] = values[kept]
        return Context(state, bounds.diff(), missed, shown, head.log_odds(read.mean(dim=0, keepdim=True), genes)[0])


def n_query_cells(n_cells: int, batch_size: int) -> int:
    """Cells of a batch that are asked about, its first: as many as leave 16 around them."""
    return min(batch_size, n_cells - LEAST_CONTEXT)


class StudyBatches(IterableDataset[CellBatch]):
    """Endless batches of one study each, the first cells asked about, the others their context.

    Batch s is a function of (cells, sizes, seed, s) and of nothing else. Of the context there are as many cells as are
    drawn log-uniformly from 16 to `context_cells`, fewer in a small study. Of W processes each takes every W-th batch.

    Parameters
    ----------
    cells
        A packed corpus, read into memory.
    batch_size, context_cells
        Cells asked about, fewer in a small study, and the most around them.
    seed
        Of the draws.
    start_step
        First batch, counted over all processes.
    """

    def __init__(
        self,
        cells: PackedCells,
        batch_size: int,
        context_cells: int,
        seed: int,
        start_step: int = 0,
    ) -> None:
        self.ragged, self.study = cells.read(0, cells.n_obs), cells.study
        cells.close()
        self.batch_size, self.context_cells, self.seed = batch_size, context_cells, seed
        self.start_step = start_step
        self.sizes = np.bincount(self.study, minlength=len(cells.study_names))
        weight = np.where(self.sizes >= 2 * LEAST_CONTEXT, self.sizes, 0) ** STUDY_POWER
        if not weight.any():
            raise ValueError(f"no study has {2 * LEAST_CONTEXT} cells: a batch is of one study, with others around.")
        self.share = weight / weight.sum()
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def batch(self, number: int) -> CellBatch:
        """Make one batch; :func:`n_query_cells` says how many of its cells are asked about."""
        rng = np.random.default_rng(step_seed(self.seed, number, "study"))
        study = rng.choice(len(self.share), p=self.share)
        rows = rng.permutation(np.flatnonzero(self.study == study))
        asked = n_query_cells(len(rows), self.batch_size)
        most = min(self.context_cells, len(rows) - asked)
        n_around = int(np.exp(rng.uniform(np.log(LEAST_CONTEXT), np.log(most + 1))))
        rows = rows[: asked + min(n_around, most)]
        return from_ragged(*take_cells(self.ragged, rows), self.study[rows], copy=False)

    def __iter__(self) -> Iterator[CellBatch]:
        for number in itertools.count(self.start_step + self.rank, self.world_size):
            yield self.batch(number)


class StudyDataModule(pl.LightningDataModule):
    """:class:`StudyBatches` of a packed corpus for :func:`scdiva.train.fit`.

    Parameters
    ----------
    train
        A file that :func:`scdiva.data.pack_files` wrote.
    vocabulary
        Its genes.
    config
        Of the training; sizes and seed are as for :class:`StudyBatches`.
    """

    def __init__(self, train: str | Path, *, vocabulary: Vocabulary, config: QueryConfig | None = None) -> None:
        super().__init__()
        self.file, self.vocabulary, self.start_step = Path(train), vocabulary, 0
        self.config = config or QueryConfig()

    def train_dataloader(self) -> DataLoader[CellBatch]:
        """Load the stream of batches, from `start_step` on."""
        c, cells = self.config, PackedCells(self.file, self.vocabulary)
        stream = StudyBatches(cells, c.batch_size, c.context_cells, c.seed, self.start_step)
        return DataLoader(stream, batch_size=None)

    def val_dataloader(self) -> list[DataLoader[CellBatch]]:
        """There is none: benchmarks/imputation.py uses studies that are held out."""
        return []
