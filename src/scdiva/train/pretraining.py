"""Pretraining: the dual denoising loss, the objective of the cell state, and validation scores."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva._settings import to_device
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
"""Maximum share of masked genes of cells that enter the gene term: almost empty states carry no information."""
MASK_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of masked genes in validation; each cell always has the same one."""
N_SCORED = 32
"""Expected number of masked genes per cell whose identity is scored in validation; more are largely redundant."""
TABLE = "validation.csv"
"""Name of the table of validation scores, in the folder of the first logger."""
_ROWS = 1024
"""Positions whose logits are computed at once."""


class MaskedScores(NamedTuple):
    """Validation scores of a group of cells.

    Attributes
    ----------
    n_cells
        Number of cells.
    perplexity
        exp of the mean cross-entropy of masked genes; the number of genes for a uniform prediction.
    accuracy
        Share of masked genes with the highest predicted probability.
    value_error
        Root mean squared error of masked values, log-normalised.
    """

    n_cells: int
    perplexity: float
    accuracy: float
    value_error: float


def ratios_of(first: int, n_cells: int) -> Tensor:
    """Share of masked genes of each cell of a batch, in rotation, so that each study has all shares.

    Parameters
    ----------
    first
        Index of the first cell of the batch among the validation cells.
    n_cells
        Number of cells of the batch.

    Returns
    -------
    float32 `(n_cells,)`.
    """
    return torch.tensor(MASK_RATIOS)[torch.arange(first, first + n_cells) % len(MASK_RATIOS)]


def score_cells(
    logits_of: Callable[[Tensor], Tensor],
    predicted_values: Tensor,
    batch: CellBatch,
    corrupted: Corrupted,
    scored: Tensor,
) -> np.ndarray:
    """Sums of the scores over the masked genes of each cell.

    Scores are computed on the device of the predictions and copied once, three numbers per gene.

    Parameters
    ----------
    logits_of
        Function of positions, int64 `(N,)`, that returns their logits `(N, n_genes)`.
    predicted_values
        `(T,)`.
    batch
        The complete cells, on the CPU.
    corrupted
        The masked cells, on the CPU.
    scored
        bool `(T,)`, positions whose identity is scored if it is masked, on the CPU.

    Returns
    -------
    float64 `(n_cells, 5)`: number of scored genes, their cross-entropy in nats, number of correct predictions; number
    of masked values, and their squared error.
    """
    device, cells = predicted_values.device, cell_of_token(batch.cu_seqlens, batch.tokens.numel())
    rows, masked = ((corrupted.masked & where).nonzero().squeeze(1) for where in (scored, corrupted.masked))
    identity = []
    for chunk in rows.split(_ROWS):
        genes, logits = to_device(batch.tokens[chunk] - N_SPECIAL, device), logits_of(chunk).float()
        nll = torch.nn.functional.cross_entropy(logits, genes, reduction="none")
        identity.append(torch.stack([torch.ones_like(nll), nll, (logits.argmax(1) == genes).to(nll)], 1))
    error = predicted_values.float()[to_device(masked, device)] - to_device(batch.values.float()[masked], device)
    value = torch.stack([torch.ones_like(error), error.square()], 1)
    each = torch.zeros(batch.n_cells, 5, dtype=torch.float64)
    each[:, :3].index_add_(0, cells[rows], torch.cat(identity).cpu().double())
    each[:, 3:].index_add_(0, cells[masked], value.cpu().double())
    return each.numpy()


def scores_of(each: np.ndarray) -> MaskedScores:
    """Scores of a group of cells from their sums, `(n_cells, 5)` of :func:`score_cells`; NaN without masked genes."""
    n, nll, correct, n_values, error = each.sum(axis=0)
    mean, accuracy = (nll / n, correct / n) if n else (math.nan, math.nan)
    root = math.sqrt(error / n_values) if n_values else math.nan
    return MaskedScores(len(each), math.exp(min(mean, 700.0)), accuracy, root)


def write_table(file: Path, step: int, each: np.ndarray, names: Sequence[str], study: np.ndarray | None) -> None:
    """Append the scores of one validation to a table with the columns step, study, mask_ratio and the scores.

    Parameters
    ----------
    file
        A CSV file, which is created if it does not exist.
    step
        Optimiser step.
    each
        `(n_cells, 5)` of all validation cells in order, from :func:`score_cells`.
    names, study
        Names of the studies, and the index of the study of each cell, int `(n_cells,)`, or None.
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

    For each batch a stratified time per cell is drawn, genes are masked with that probability, and the loss of one
    forward pass is the cross-entropy of the masked genes plus λ times the squared error of the masked values. The
    anchor objective of :class:`PretrainingConfig` is added; its linear decoder belongs to this module and is not saved
    with the model.

    Validation logs the loss, the perplexity and accuracy of masked genes and the error of masked values.
    `validation.csv` holds these scores with 10, 30, 50, 70 and 90% of the genes masked, and for each study.

    Parameters
    ----------
    model
        Trained in place.
    config
        See :class:`PretrainingConfig`.
    n_studies
        Number of studies of the corpus, the covariate of the decoder; 0: no covariate.
    frequency
        Mean share of the counts of each token, the initial bias of the decoder; see :class:`GeneDecoder`.
    denominator
        `(n_tokens,)`, divisor of the values in the ranking; required with `place_prior`.

    Raises
    ------
    ValueError
        If `place_prior` lacks a state head or the denominator.
    """

    config: PretrainingConfig
    model: ScDiVa
    attention_plan: dict[str, Any] | None = None
    """Launch plan of the fused kernel and its device (`"plan"`, `"tuned_on"`); stored in checkpoints."""

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
        # heads of other tasks are not trained, and the residual only with an objective of the state
        untrained = model.query_head, model.reader, model.integration, model.dataset_components
        self.all_trained = not any([*untrained, None if self.decoder else model.anchor_out])

    def on_train_start(self) -> None:
        """Tune the kernel and compile the blocks, as configured. Called by Lightning."""
        on_gpu = self.device.type == "cuda"
        if self.config.autotune and on_gpu:
            self._tune_attention()
        if self.config.compile_blocks == "yes" or (self.config.compile_blocks == "auto" and on_gpu):
            self.model.compile_blocks()

    def on_train_end(self) -> None:
        """Check the last step and restore the blocks without compilation. Called by Lightning."""
        super().on_train_end()
        self.model.blocks.release_each()

    def _tune_attention(self) -> None:
        """Tune the fused kernel once per run, so that all ranks and resumed runs sum in the same order."""
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
        """Add the launch plan to a checkpoint. Called by Lightning."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY]["attention_plan"] = self.attention_plan

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint. Called by Lightning."""
        super().on_load_checkpoint(checkpoint)
        self.attention_plan = checkpoint[CHECKPOINT_KEY].get("attention_plan")

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Dual loss and anchor term of one batch.

        Parameters
        ----------
        batch
            Complete cells, with `study` if the module has `n_studies` (-1: a study that is not in the training data).
        generator
            Source of times and masks.

        Returns
        -------
        The loss, and `identity`, `value`, `identity_per_token`, `value_per_token`, `n_masked`, and `genes` with the
        anchor objective.

        Raises
        ------
        ValueError
            If studies are required and missing, or out of range.
        """
        # computed on the CPU as far as it depends on cells and random numbers only, so that the host never waits
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
        """Clear the scores. Called by Lightning."""
        self._scores = []

    def validation_step(self, batch: CellBatch, batch_idx: int) -> None:
        """Loss and scores of one batch of the validation set. Called by Lightning."""
        super().validation_step(batch, batch_idx)
        generator = step_generator(self.config.seed, batch_idx, "validation/ratios")
        host = batch.on_host()
        ratios = ratios_of(sum(len(each) for each in self._scores), host.n_cells)
        corrupted = mask_tokens(*host.packed, ratios, generator)
        out = self._denoised(corrupted, batch)
        n_scored = min(N_SCORED, self.config.scored_genes or N_SCORED)
        scored = self._scored(corrupted.masked, host.cu_seqlens, generator, n_scored)
        assert scored is not None
        values = self.model.values(out, batch.tokens)
        self._scores.append(
            score_cells(lambda rows: self._logits(out, rows, corrupted, host), values, host, corrupted, scored)
        )

    def on_validation_epoch_end(self) -> None:
        """Log the scores, and append them to the table of the run. Called by Lightning."""
        each = np.concatenate(self._scores) if self._scores else np.zeros((0, 5))
        values = {f"val/{name}": value for name, value in scores_of(each)._asdict().items() if name != "n_cells"}
        # every process validates on all cells, so the mean over processes is the score
        self.log_dict({name: value for name, value in values.items() if np.isfinite(value)}, sync_dist=True)
        folder = self.trainer.log_dir if self.trainer.loggers else None  # in all processes
        if not self.trainer.is_global_zero or not len(each) or folder is None:
            return
        batches = getattr(self.trainer.val_dataloaders, "dataset", None)
        names, study = batches.studies() if isinstance(batches, ValidationBatches) else ([], None)
        study = None if study is None else study[: len(each)]  # Lightning may use a part of the batches
        write_table(Path(folder) / TABLE, self.trainer.global_step, each, names, study)

    def _denoised(self, corrupted: Corrupted, batch: CellBatch) -> ScDiVaOutput:
        """Run the network on a masked batch."""
        host = batch.on_host()
        check_input(self.model.config, *host.packed)
        tokens, values, _, value_mask = (to_device(x, batch.tokens.device) for x in corrupted)
        out: ScDiVaOutput = self.model(tokens, values, host.cu_seqlens, value_mask=value_mask)
        return out

    def _logits(self, out: ScDiVaOutput, rows: Tensor, corrupted: Corrupted, batch: CellBatch) -> Tensor:
        """Logits at masked positions, int64 `(N,)`, with the prior from their ranks if `place_prior` is set.

        All tensors but those of `out` are on the CPU.
        """
        ranked = None
        if self.config.place_prior and self.denominator is not None:
            visible = ~corrupted.value_mask
            ranked = Ranked(batch.tokens, batch.values, batch.cu_seqlens, visible, self.denominator)
        return self.model.logits(out, rows, ranked=ranked)

    def _scored(
        self, masked: Tensor, cu_seqlens: Tensor, generator: torch.Generator, n_scored: int | None = None
    ) -> Tensor | None:
        """Draw about `n_scored` (None: `scored_genes`) of each cell's masked positions."""
        n_scored = self.config.scored_genes if n_scored is None else n_scored
        if n_scored is None:
            return None
        cells = cell_of_token(cu_seqlens, masked.numel())
        number = torch.bincount(cells[masked], minlength=cu_seqlens.numel() - 1).clamp_min(1)
        return torch.rand(masked.numel(), generator=generator) < (n_scored / number)[cells]
