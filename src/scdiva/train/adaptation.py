"""Training a model on, without labels, on cells held in memory; nothing is written to disk."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator, step_seed
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.packed import take_cells
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.anchor import SetEncoder, weighted_sum
from scdiva.train.anchor import AnchorModule
from scdiva.train.base import TaskModule, decay_groups
from scdiva.train.config import AnchorConfig
from scdiva.train.gene_decoder import GeneDecoder, gene_multinomial_loss
from scdiva.train.linear_map import LinearMap
from scdiva.train.views import contrast_loss

FIRST_CHECK = 10
"""Least steps between two looks at the validation cells: of few cells an epoch is a step or two."""
WARM_CHECKS = 6
"""Most such looks while the decoder alone learns."""
WARM_RATE = 5.0
"""How much faster it then learns: it is linear, and starts from nothing."""
TOLERANCE = 1e-4
"""Share of the loss by which a look must be better to count as such."""


@dataclass(frozen=True)
class AdaptationCells:
    """Serialised cells in memory.

    Attributes
    ----------
    indptr, tokens, values
        As :func:`scdiva.tokenizer.serialize.serialize` returns them; no cell is empty.
    batch
        int64 `(n_cells,)`, number of the batch of each cell, from 0.
    measured
        int64, tokens that the data have a column for, ascending.
    n_batches
        Number of batches.
    """

    indptr: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    batch: np.ndarray
    measured: np.ndarray
    n_batches: int

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.batch)

    def take(self, rows: np.ndarray, max_length: int | None = None) -> CellBatch:
        """Make a batch of cells.

        Parameters
        ----------
        rows
            Numbers of the cells.
        max_length
            Genes kept of each; None keeps all.
        """
        ragged = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return from_ragged(*ragged, self.batch[rows])

    def frequency(self, n_tokens: int) -> np.ndarray:
        """Mean share of a cell's counts that each token has.

        Parameters
        ----------
        n_tokens
            Size of the token space.

        Returns
        -------
        float64 `(n_tokens,)`.
        """
        cells = np.repeat(np.arange(self.n_cells), np.diff(self.indptr))
        counts = np.expm1(self.values.astype(np.float64))
        share = counts / np.bincount(cells, counts, self.n_cells)[cells]
        return np.bincount(self.tokens, share, n_tokens) / self.n_cells


class EncoderAdaptation(AnchorModule):
    """The objectives of :class:`~scdiva.train.AnchorModule` on one data set, whose batches are the "studies".

    The decoder predicts the genes that the data measure and no others: that is what can be learned from them, and a
    fraction of the work.

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
        own = LinearMap(weight, encoder.bias.detach().cpu().numpy().copy(), np.ones(weight.shape[1]), np.zeros(0))
        n_tokens = model.config.n_tokens
        frequency = cells.frequency(n_tokens)
        super().__init__(model, config, own._replace(frequency=frequency), np.bincount(cells.batch))
        measured = torch.from_numpy(cells.measured.astype(np.int64))
        self.decoder = GeneDecoder(
            model.config.anchor_learned_dim,
            len(measured),
            cells.n_batches if cells.n_batches > 1 else 0,
            np.concatenate([np.zeros(N_SPECIAL), frequency[cells.measured]]),
        )
        column = torch.full((n_tokens,), -1)
        column[measured] = torch.arange(len(measured)) + N_SPECIAL
        self.column: Tensor
        self.register_buffer("column", column, persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over cells of the genes' cross-entropy, plus the contrast; parts `genes` and `contrast`.

        Parameters
        ----------
        batch
            Complete cells, `study` their batch.
        generator
            Source of the views.
        """
        c = self.config
        one, other = (self._learned(self._view(batch, generator)) for _ in range(2))
        target = CellBatch(self.column[batch.tokens], batch.values, batch.cu_seqlens, batch.study)
        genes = gene_multinomial_loss(self.decoder(one, batch.study), target).mean()
        contrast = contrast_loss(one, other, batch.study, c.contrast_temperature)
        parts = {"genes": genes.detach(), "contrast": contrast.detach()}
        return c.genes_weight * genes + c.contrast_weight * contrast, parts


@torch.no_grad()
def focus_linear(encoder: SetEncoder, cells: AdaptationCells, n_directions: int) -> float:
    r"""Keep of a set encoder's linear part what varies between these cells.

    With :math:`\Sigma` the covariance of :math:`x` within batches, V its leading eigenvectors and :math:`\mu` the mean,
    the table becomes :math:`A V V^\top` and the bias :math:`(b - \mu) V V^\top`: the coordinates keep their meaning,
    what is learned on them keeps working, and the directions in which these cells only differ by noise no longer count.
    In place.

    Parameters
    ----------
    encoder
        Changed in place.
    cells
        The cells.
    n_directions
        Columns of V; as many as x has dimensions only centre it.

    Returns
    -------
    Share of the variance within batches that is kept.
    """
    table = encoder.table.weight.detach().cpu()
    parts = []
    for start in range(0, cells.n_cells, 2048):
        batch = cells.take(np.arange(start, min(start + 2048, cells.n_cells)))
        parts.append(weighted_sum(table, batch.tokens, batch.values, batch.cu_seqlens) + encoder.bias.cpu())
    x = torch.cat(parts).double().numpy()
    size = np.bincount(cells.batch, minlength=cells.n_batches)
    sums = np.zeros((cells.n_batches, x.shape[1]))
    np.add.at(sums, cells.batch, x)
    centred = x - (sums / np.maximum(size, 1)[:, None])[cells.batch]
    values, vectors = np.linalg.eigh(centred.T @ centred)
    leading = vectors[:, ::-1][:, :n_directions]
    # a low-rank update, which starts from 0, stands on a weight of its own
    table_weight = dict(encoder.table.named_parameters())
    weight = table_weight.get("parametrizations.weight.original", table_weight.get("weight"))
    assert weight is not None
    onto = torch.from_numpy(leading @ leading.T).to(weight)
    mean = torch.from_numpy(x.mean(axis=0)).to(encoder.bias)
    weight.copy_(weight @ onto)
    encoder.bias.copy_((encoder.bias - mean) @ onto)
    return float(values[::-1][:n_directions].sum() / max(values.sum(), 1e-12))


class Limits(NamedTuple):
    """When training ends: passes over the cells, looks without a better loss, seconds from the start of the call."""

    max_epochs: int
    patience: int
    seconds: float


def continue_training(
    module: TaskModule,
    cells: AdaptationCells,
    limits: Limits,
    *,
    validation_share: float = 0.1,
    max_length: int | None = None,
    prepare: Callable[[], dict[str, Any]] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train a module's network on, looking at held-out cells, and leave it with the best weights seen.

    First only what is not of the network (the decoder of the objective) learns, until the validation loss no longer
    falls: that loss is the start which the network has to beat. Else any training would seem to help. Then the network
    learns too. Validation cells are corrupted in the same way at each look, so that losses can be compared.

    Parameters
    ----------
    module
        Its `model` is trained in place: the parameters that have `requires_grad`. Batch size, learning rate, warm-up,
        weight decay, clipping and seed are its `config`'s; the learning rate does not fall.
    cells
        All cells, at least two.
    limits
        When to end. Training always ends with the best weights.
    validation_share
        Share of the cells held out; at least one, and at least one is left.
    max_length
        Genes of a cell that the network sees; None: all.
    prepare
        Called once the start is known, before the network learns; may change the network. What it returns goes into the
        history.
    progress
        Whether to show a progress bar.

    Returns
    -------
    `start_loss`, `best_loss` (validation; nats a cell), `improved`, `improvement` (their difference), `steps`,
    `stopped` (`"patience"`, `"max_epochs"`, `"minutes"` or `"interrupted"`), `seconds`, `n_training`,
    `n_validation`, and the columns `step`, `training_loss`, `validation_loss` of `history`. If no look was better, the
    weights are those of the start.

    Raises
    ------
    FloatingPointError
        If the loss becomes NaN or infinite.
    """
    from tqdm.auto import tqdm

    c, begun = module.config, time.monotonic()
    order = np.random.default_rng(step_seed(c.seed, 0, "split")).permutation(cells.n_cells)
    n_validation = min(max(1, round(validation_share * cells.n_cells)), cells.n_cells - 1)
    held, rows = np.sort(order[:n_validation]), order[n_validation:]
    per_epoch = -(-len(rows) // c.batch_size)
    network = [p for p in module.model.parameters() if p.requires_grad]
    rest = [p for name, p in module.named_parameters() if not name.startswith("model.")]
    history: dict[str, list[float]] = {"step": [], "training_loss": [], "validation_loss": []}
    stream = _batches(cells, rows, c.batch_size, c.seed, max_length)
    before = [p.detach().clone() for p in module.model.parameters()]

    def loss_of(batch: CellBatch, seed: str, step: int) -> Tensor:
        with module._seeded(step_seed(c.seed, step, f"dropout/{seed}")):
            return module.compute_loss(batch.to(module.device), step_generator(c.seed, step, seed))[0]

    @torch.no_grad()
    def look() -> float:
        parts = [held[i : i + c.batch_size] for i in range(0, len(held), c.batch_size)]
        losses = [float(loss_of(cells.take(part, max_length), "validation", i)) for i, part in enumerate(parts)]
        module.train()
        return float(np.average(losses, weights=[len(part) for part in parts]))

    def learn(
        parameters: list[nn.Parameter], most: int, patience: int, best: float, rate: float, seconds: float
    ) -> tuple[float, str]:
        """Train these parameters; leave them as they were at the best look (or the start). Why it ended comes last."""
        optimizer = torch.optim.AdamW(_groups(module, parameters, c.weight_decay), lr=rate)
        kept = [p.detach().clone() for p in parameters]
        since, every, why, total = 0, max(per_epoch, FIRST_CHECK), "max_epochs", 0.0
        try:
            for step in range(1, most + 1):
                number, batch = next(stream)
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(1.0, step / max(1, c.warmup_steps))
                loss = loss_of(batch, "train", number)
                if not bool(torch.isfinite(loss)):
                    raise FloatingPointError(f"The loss is {float(loss)} at step {step}. Lower learning_rate.")
                optimizer.zero_grad()
                loss.backward()
                if c.clip:
                    nn.utils.clip_grad_norm_(parameters, c.clip)
                optimizer.step()
                total += float(loss.detach())
                bar.update()
                late = time.monotonic() - begun > seconds
                if step % every and step < most and not late:
                    continue
                found = look()
                history["step"].append(number + 1)
                history["training_loss"].append(total / ((step - 1) % every + 1))
                history["validation_loss"].append(found)
                total = 0.0
                bar.set_postfix(validation_loss=f"{found:.4f}")
                if found < best - TOLERANCE * abs(best) or not math.isfinite(best):
                    best, since, kept = found, 0, [p.detach().clone() for p in parameters]
                else:
                    since += 1
                if since >= patience or late:
                    why = "minutes" if late else "patience"
                    break
        except KeyboardInterrupt:
            why = "interrupted"
        finally:
            _restore(parameters, kept)
        return best, why

    with tqdm(disable=not progress, unit="step", desc="adapt") as bar:
        module.train()
        start, why = look(), ""
        for p in network:
            p.requires_grad_(False)
        if rest:
            most = WARM_CHECKS * max(per_epoch, FIRST_CHECK)
            start, why = learn(rest, most, 2, start, WARM_RATE * c.learning_rate, limits.seconds / 3)
        for p in network:
            p.requires_grad_(True)
        found: dict[str, Any] = {}
        best = start
        if time.monotonic() - begun > limits.seconds:
            why = "minutes"
        elif why != "interrupted":
            found = {} if prepare is None else prepare()
            most = limits.max_epochs * per_epoch
            best, why = learn([*network, *rest], most, limits.patience, start, c.learning_rate, limits.seconds)
    improved = best < start
    if not improved:
        _restore(list(module.model.parameters()), before)
    module.eval()
    return {
        **found,
        "start_loss": start,
        "best_loss": best,
        "improved": improved,
        "improvement": start - best,
        "stopped": why,
        "steps": int(history["step"][-1]) if history["step"] else 0,
        "seconds": time.monotonic() - begun,
        "n_training": len(rows),
        "n_validation": len(held),
        "history": history,
    }


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _groups(module: nn.Module, parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of these parameters only, decayed or spared as in all training."""
    chosen = {id(p) for p in parameters}
    groups = decay_groups(module, weight_decay)
    return [group | {"params": [p for p in group["params"] if id(p) in chosen]} for group in groups]


def _batches(
    cells: AdaptationCells, rows: np.ndarray, size: int, seed: int, max_length: int | None
) -> Iterator[tuple[int, CellBatch]]:
    """Yield step and batch without end; each epoch is a permutation of its own, a function of (seed, epoch)."""
    step = 0
    for epoch in itertools.count():
        order = np.random.default_rng(step_seed(seed, epoch, "order")).permutation(rows)
        for start in range(0, len(order), size):
            yield step, cells.take(order[start : start + size], max_length)
            step += 1
