"""Pretraining: the dual denoising loss, objectives of the cell state, and how well masked genes are predicted."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._device import to_device
from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.data.sampler import ValidationBatches
from scdiva.diffusion import Corrupted, cell_of_token, dual_loss, mask_tokens, stratified_times
from scdiva.diffusion.ranks import Ranked
from scdiva.kernels import autotune_attention, keep_attention_plan, resolve_backend
from scdiva.models.scdiva import ScDiVa, ScDiVaOutput, check_input
from scdiva.train.base import TaskModule
from scdiva.train.callbacks import CHECKPOINT_KEY
from scdiva.train.config import PretrainingConfig
from scdiva.train.objectives import GeneDecoder, gene_multinomial_loss

DECODED_TIME = 0.8
"""Cells with a greater share of their genes masked are not asked for their genes: of almost none, nothing is known."""
MASK_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of masked genes in validation; each cell has one of them, always the same."""
MOST_SCORED = 32
"""Masked genes of a cell whose identity is scored, in expectation: the others are largely redundant, and costly."""
TABLE = "validation.csv"
"""Name of the table, beside `metrics.csv`."""
_ROWS = 1024
"""Logits held at once."""


class MaskedScores(NamedTuple):
    """A group of cells' scores.

    Attributes
    ----------
    n_cells
        Cells.
    perplexity
        exp of the mean cross-entropy of masked genes. All genes equally likely give the number of genes.
    accuracy
        Share of masked genes that the network predicts as the likeliest.
    value_error
        Root of the mean squared error of masked values, in log-normalised units.
    """

    n_cells: int
    perplexity: float
    accuracy: float
    value_error: float


def ratios_of(first: int, n_cells: int) -> Tensor:
    """Share of masked genes of each cell of a batch: they take turns, so that each study has all.

    Parameters
    ----------
    first
        Number of the batch's first cell among the validation cells.
    n_cells
        Cells of the batch.

    Returns
    -------
    float32 `(n_cells,)`.
    """
    turn = torch.arange(first, first + n_cells) % len(MASK_RATIOS)
    return torch.tensor(MASK_RATIOS)[turn]


def score_cells(
    logits_of: Callable[[Tensor], Tensor],
    predicted_values: Tensor,
    batch: CellBatch,
    corrupted: Corrupted,
    scored: Tensor,
) -> np.ndarray:
    """Sum up the predictions of each cell's masked genes.

    Parameters
    ----------
    logits_of
        Gives the logits `(N, n_genes)` of positions, int64 `(N,)`.
    predicted_values
        `(T,)`.
    batch
        The complete cells.
    corrupted
        What the network saw of them.
    scored
        bool `(T,)`, positions whose identity is scored, where it is masked.

    Returns
    -------
    float64 `(n_cells, 5)`: scored genes, their cross-entropy in nats, how many of them were the likeliest; masked
    values, and their squared error.
    """
    cells = cell_of_token(batch.cu_seqlens, batch.tokens.numel())
    each = torch.zeros(batch.n_cells, 5, dtype=torch.float64)
    for rows in (corrupted.masked & scored).nonzero().squeeze(1).split(_ROWS):
        genes, logits = batch.tokens[rows] - N_SPECIAL, logits_of(rows).float()
        nll = torch.nn.functional.cross_entropy(logits, genes, reduction="none")
        of_scored = torch.stack([torch.ones_like(nll), nll, (logits.argmax(1) == genes).to(nll)], 1)
        each[:, :3].index_add_(0, cells[rows].cpu(), of_scored.cpu().double())
    error = (predicted_values.float() - batch.values.float()).square()[corrupted.masked].cpu().double()
    each[:, 3:].index_add_(0, cells[corrupted.masked].cpu(), torch.stack([torch.ones_like(error), error], 1))
    return each.numpy()


def scores_of(each: np.ndarray) -> MaskedScores:
    """Join the sums of some cells.

    Parameters
    ----------
    each
        `(n_cells, 5)`, from :func:`score_cells`.

    Returns
    -------
    Their scores; NaN where nothing was masked.
    """
    n, nll, right, n_values, error = each.sum(axis=0)
    mean, accuracy = (nll / n, right / n) if n else (math.nan, math.nan)
    root = math.sqrt(error / n_values) if n_values else math.nan
    return MaskedScores(len(each), math.exp(min(mean, 700.0)), accuracy, root)


def write_table(file: Path, step: int, each: np.ndarray, names: Sequence[str], study: np.ndarray | None) -> None:
    """Add the scores of one validation to a table, as lines of step, study, mask_ratio and scores.

    Parameters
    ----------
    file
        A CSV file; made if need be.
    step
        Optimiser step.
    each
        `(n_cells, 5)` of all validation cells in order, from :func:`score_cells`.
    names, study
        Names of the studies, and the number of each cell's, int `(n_cells,)`; None if that is not known.
    """
    n = len(MASK_RATIOS)
    lines: list[tuple[Any, ...]] = [(step, "", "", *scores_of(each))]
    lines += [(step, "", ratio, *scores_of(each[i::n])) for i, ratio in enumerate(MASK_RATIOS) if i < len(each)]
    if study is not None:
        lines += [(step, name, "", *scores_of(each[study == i])) for i, name in enumerate(names)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as out:
        writer = csv.writer(out)
        if not out.tell():
            writer.writerow(["step", "study", "mask_ratio", *MaskedScores._fields])
        writer.writerows(lines)


class PretrainingModule(TaskModule):
    """Masked-diffusion pretraining of a :class:`~scdiva.models.ScDiVa` (paper, algorithm "scDiVa Training").

    Each batch: a time per cell, stratified; genes masked with that probability; one pass; identity cross-entropy on
    the masked positions plus λ times the squared error of masked values. The gene head sees masked positions only.
    The anchor objective of :class:`PretrainingConfig` comes on top; its linear decoder belongs to this module and is
    not part of a saved model.

    Validation logs, beside the loss, perplexity and accuracy of masked genes and the error of masked values, and keeps
    a table with those at 10, 30, 50, 70 and 90% of genes masked and of each study, `validation.csv`.

    Parameters
    ----------
    model
        Trained in place.
    config
        See :class:`PretrainingConfig`.
    n_studies
        Studies in the corpus, for the decoder's covariate; 0 does without.
    frequency
        Mean share of the counts of each token, from which the decoder starts; see :class:`GeneDecoder`.
    denominator
        `(n_tokens,)`, by which the cells are ranked; needed with `place_prior`.

    Raises
    ------
    ValueError
        If `place_prior` lacks a state head or the denominator.
    """

    config: PretrainingConfig
    model: ScDiVa
    attention_plan: dict[str, Any] | None = None
    """How the fused kernel was tuned, and on what (`"tuned_on"`, `"plan"`); in the checkpoint, for a resumed run."""

    def __init__(
        self,
        model: ScDiVa,
        config: PretrainingConfig,
        n_studies: int = 0,
        frequency: np.ndarray | None = None,
        denominator: np.ndarray | None = None,
    ) -> None:
        super().__init__(model, config)
        if config.place_prior and (model.state_head is None or denominator is None):
            raise ValueError("place_prior needs a model with state_head=True, and the denominator of the ranking.")
        config.check_scored_genes(model.config.state_head)
        self.denominator = None if denominator is None else torch.from_numpy(np.asarray(denominator, np.float32))
        self._scores: list[np.ndarray] = []
        self.decoder: GeneDecoder | None = None
        if config.anchor_objective == "genes":
            self.decoder = GeneDecoder(model.state_dim, model.config.n_genes, n_studies, frequency)
        # the heads of other tasks, and what only an objective of the state asks for
        idle = model.query_head, model.integration, model.dataset_components
        self.all_trained = not any([*idle, None if self.decoder else model.anchor_out])

    def on_train_start(self) -> None:
        """Make the network ready for its device, by the configuration. Called by Lightning."""
        on_gpu = self.device.type == "cuda"
        if self.config.autotune and on_gpu:
            self._tune_attention()
        if self.config.compile_blocks == "yes" or (self.config.compile_blocks == "auto" and on_gpu):
            self.model.compile_blocks()

    def on_train_end(self) -> None:
        """Leave the network as it came, for any device. Called by Lightning."""
        self.model.blocks.release_each()

    def _tune_attention(self) -> None:
        """Tune the fused kernel, once a run: all ranks, and the run when it is resumed, add in the same order."""
        c = self.model.config
        dtype = torch.bfloat16 if "bf16" in str(self.trainer.precision) else torch.float32
        kind: dict[str, Any] = {"head_dim": c.head_dim, "dtype": dtype, "device": self.device}
        if resolve_backend("auto", **kind) != "triton":
            return
        where = [torch.cuda.get_device_name(self.device), c.head_dim, str(dtype)]
        if self.attention_plan is None or self.attention_plan["tuned_on"] != where:
            length = min(c.max_length, self.config.context) + 1
            plan = None
            if self.trainer.is_global_zero:
                plan = autotune_attention(n_heads=c.n_heads, length=length, **kind)
            self.attention_plan = {"tuned_on": where, "plan": self.trainer.strategy.broadcast(plan)}
        keep_attention_plan(self.attention_plan["plan"], **kind)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run must know. Called by Lightning."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY]["attention_plan"] = self.attention_plan

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up a run, or refuse if it was another one. Called by Lightning."""
        super().on_load_checkpoint(checkpoint)
        self.attention_plan = checkpoint[CHECKPOINT_KEY].get("attention_plan")

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Dual loss and anchor term of one batch.

        Parameters
        ----------
        batch
            Complete cells, with `study` where the module was given `n_studies` (-1: a study that is not trained on).
        generator
            Source of times and masks.

        Returns
        -------
        The loss, and `identity`, `value`, `identity_per_token`, `value_per_token`, `n_masked`, and `genes` where it is
        asked for.

        Raises
        ------
        ValueError
            If studies are needed and missing, or their numbers are out of range.
        """
        # what follows from the cells and the draws is worked out on the CPU: the device is asked for nothing
        c, host = self.config, batch.on_host()
        times = stratified_times(host.n_cells, generator)
        corrupted = mask_tokens(*host.packed, times, generator, value_mask_rate=c.value_mask_rate)
        out = self._denoised(corrupted, batch)
        scored = self._scored(corrupted.masked, host.cu_seqlens, generator)
        logits = None
        if self.model.state_head is not None and scored is not None:
            logits = self._logits(out, (corrupted.masked & scored).nonzero().squeeze(1), corrupted, host)
        cells = self.model.values(out, batch.tokens), host.tokens, host.values, corrupted, host.cu_seqlens
        loss, parts = dual_loss(
            out.hidden, self.model.gene_weight, *cells, value_weight=c.value_weight, scored=scored, logits=logits
        )
        if self.decoder is not None:
            weight = to_device((times <= DECODED_TIME).to(times), loss.device)
            terms = gene_multinomial_loss(self.decoder(out.cell_state, host.study), batch)
            genes = (terms * weight).sum() / weight.sum().clamp_min(1)
            loss = loss + genes
            parts["genes"] = genes.detach()
        return loss, parts

    def on_validation_epoch_start(self) -> None:
        """Begin without scores. Called by Lightning."""
        self._scores = []

    def validation_step(self, batch: CellBatch, batch_idx: int) -> None:
        """One batch of the fixed validation set: its loss, and how genes are predicted at known shares of masked ones.

        Called by Lightning.
        """
        super().validation_step(batch, batch_idx)
        generator = step_generator(self.config.seed, batch_idx, "validation/ratios")
        host = batch.on_host()
        ratios = ratios_of(sum(len(each) for each in self._scores), host.n_cells)
        corrupted = mask_tokens(*host.packed, ratios, generator)
        out = self._denoised(corrupted, batch)
        most = min(MOST_SCORED, self.config.scored_genes or MOST_SCORED)
        scored = self._scored(corrupted.masked, host.cu_seqlens, generator, most)
        assert scored is not None

        values = self.model.values(out, batch.tokens).cpu()
        self._scores.append(
            score_cells(lambda rows: self._logits(out, rows, corrupted, host).cpu(), values, host, corrupted, scored)
        )

    def on_validation_epoch_end(self) -> None:
        """Log the scores, and add those of each study to the run's table. Called by Lightning."""
        each = np.concatenate(self._scores) if self._scores else np.zeros((0, 5))
        values = {f"val/{name}": value for name, value in scores_of(each)._asdict().items() if name != "n_cells"}
        # every process has seen all of it, so that their mean is that of each
        self.log_dict({name: value for name, value in values.items() if np.isfinite(value)}, sync_dist=True)
        if not self.trainer.is_global_zero or not len(each):
            return
        batches = getattr(self.trainer.val_dataloaders, "dataset", None)
        names, study = batches.studies() if isinstance(batches, ValidationBatches) else ([], None)
        study = None if study is None else study[: len(each)]  # Lightning may look at some batches only
        for log in self.trainer.loggers:
            if isinstance(log, CSVLogger):
                write_table(Path(log.log_dir) / TABLE, self.trainer.global_step, each, names, study)

    def _denoised(self, corrupted: Corrupted, batch: CellBatch) -> ScDiVaOutput:
        """Run the network over what is left of a batch."""
        host = batch.on_host()
        check_input(self.model.config, *host.packed)
        tokens, values, _, value_mask = (to_device(x, batch.tokens.device) for x in corrupted)
        out: ScDiVaOutput = self.model(tokens, values, host.cu_seqlens, value_mask=value_mask)
        return out

    def _logits(self, out: ScDiVaOutput, rows: Tensor, corrupted: Corrupted, batch: CellBatch) -> Tensor:
        """Logits of the genes at masked positions, int64 `(N,)`, with what their ranks imply if that is asked for.

        All but `out` is on the CPU.
        """
        ranked = None
        if self.config.place_prior and self.denominator is not None:
            seen = ~corrupted.value_mask
            ranked = Ranked(batch.tokens, batch.values, batch.cu_seqlens, seen, self.denominator)
        return self.model.logits(out, rows, ranked=ranked)

    def _scored(
        self, masked: Tensor, cu_seqlens: Tensor, generator: torch.Generator, most: int | None = None
    ) -> Tensor | None:
        """Draw about `most` (None: `scored_genes`) of each cell's masked positions."""
        most = self.config.scored_genes if most is None else most
        if most is None:
            return None
        cells = cell_of_token(cu_seqlens, masked.numel())
        number = torch.bincount(cells[masked], minlength=cu_seqlens.numel() - 1).clamp_min(1)
        return torch.rand(masked.numel(), generator=generator) < (most / number)[cells]
