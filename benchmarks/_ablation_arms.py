"""What the ablation compares: a base of each family, arms that change one thing of it, and the cells that they see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from _scripts import AnchorModule
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.corpus import take_cells
from scdiva.data.order import Order
from scdiva.data.packed import PackedCells
from scdiva.data.pool import CellPool
from scdiva.data.stream import TrainingStream
from scdiva.diffusion import cell_of_token, mask_tokens, stratified_times
from scdiva.diffusion.thinning import chosen, counts_of, keep_counts, log_normalised
from scdiva.models import ScDiVaConfig
from scdiva.tokenizer import Vocabulary
from scdiva.tokenizer.serialize import score_denominator, serialize
from scdiva.train import LinearMap, PretrainingConfig

MODEL: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "ffn_dim": 192,
    "max_length": 256,
    "tie_gene_head": True,
    "anchor": "encoder",
    "anchor_residual": True,
}
"""The small network that all arms start from; what is not here is the package's default, the set encoder with it."""
SET_TRAINING: dict[str, Any] = {"batch_size": 128, "learning_rate": 1e-3, "weight_decay": 0.01, "precision": "fp32"}
TRAINING: dict[str, Any] = {
    "batch_size": 8,
    "context": 256,
    "learning_rate": 2e-3,
    "anchor_objective": "none",
    "precision": "auto",
    "autotune": False,
}
SET, ANCHOR, DIFFUSION = "set encoder", "anchor", "diffusion"
BASES = {SET: "set", ANCHOR: "encoder", DIFFUSION: "encoder"}
"""The arm that each family's differences are taken to."""


@dataclass(frozen=True)
class Arm:
    """One row of a family's table.

    Attributes
    ----------
    family
        Which table it belongs to; the base of the anchors is the base of the diffusion arms too.
    what
        Its meaning, in one line.
    model, training
        Fields of the model's and of the training's configuration that differ from the base.
    start
        Of the linear map (set encoder) or of the gene table (transformer): `"svd"` or `"random"`.
    trains_table
        Whether the linear map is trained with the rest rather than kept.
    untrained
        Score the linear start alone.
    study
        Whether the gene decoder knows the study.
    thinning
        Views, or training cells, are binomially thinned counts.
    order
        How genes are ranked: `"entropy"`, by v / H, or `"expression"`, by v, or `"median"`, by v / median.
    """

    family: str
    what: str
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    start: str = "svd"
    trains_table: bool = False
    untrained: bool = False
    study: bool = True
    thinning: bool = False
    order: str = "entropy"


NO_DROPOUT = 1e-9
"""A share of genes left out that is none; the configuration refuses zero."""
ENCODER = "set encoder, residual R·[LAT] from zero"

ARMS: dict[str, Arm] = {
    "set": Arm(SET, "base: corpus SVD kept, learned part on genes + contrast"),
    "linear": Arm(SET, "the corpus SVD alone, nothing trained", untrained=True),
    "random": Arm(SET, "directions drawn at random in place of the SVD, kept", start="random"),
    "random_trained": Arm(SET, "drawn at random, trained with the rest", start="random", trains_table=True),
    "svd_trained": Arm(SET, "the SVD's table trained with the rest", trains_table=True),
    "genes_only": Arm(SET, "no contrast", training={"contrast_weight": 0.0}),
    "contrast_only": Arm(SET, "no genes from the state", training={"genes_weight": 0.0}),
    "no_study": Arm(SET, "no study covariate in the decoder", study=False),
    "thinning": Arm(
        SET, "views are binomially thinned counts, no gene dropout", training={"max_time": NO_DROPOUT}, thinning=True
    ),
    "whole": Arm(SET, "views are the whole cell, no panels", training={"max_time": NO_DROPOUT, "panel_rate": 0.0}),
    "learned_32": Arm(SET, "learned part of 32 dimensions, not 64", {"anchor_learned_dim": 32}),
    "learned_128": Arm(SET, "learned part of 128 dimensions", {"anchor_learned_dim": 128}),
    "hidden_1024": Arm(SET, "hidden width 1,024, not 512", {"anchor_hidden": 1024}),
    "encoder": Arm(ANCHOR, f"{ENCODER}; no objective"),
    "encoder_genes": Arm(ANCHOR, f"{ENCODER}; the cell's genes from its state", training={"anchor_objective": "genes"}),
    "learned": Arm(ANCHOR, "a learned vector, as in the paper's text", {"anchor": "learned"}),
    "learned_random": Arm(
        ANCHOR, "a learned vector, gene table drawn at random", {"anchor": "learned"}, start="random"
    ),
    "value_mask_0": Arm(DIFFUSION, "no value-only masks", training={"value_mask_rate": 0.0}),
    "value_mask_20": Arm(DIFFUSION, "value-only masks on 20%, not 10%", training={"value_mask_rate": 0.2}),
    "floor_0.1": Arm(DIFFUSION, "entropy floor 0.1 nats, not 0.3", {"entropy_floor": 0.1}),
    "floor_1": Arm(DIFFUSION, "entropy floor 1 nat", {"entropy_floor": 1.0}),
    "by_expression": Arm(DIFFUSION, "genes ranked by expression alone", order="expression"),
    "by_median": Arm(DIFFUSION, "genes ranked by expression over the gene's non-zero median", order="median"),
    "no_rope": Arm(DIFFUSION, "no position", {"position": "none"}),
    "lambda_1": Arm(DIFFUSION, "λ = 1, not 10", training={"value_weight": 1.0}),
    "lambda_30": Arm(DIFFUSION, "λ = 30", training={"value_weight": 30.0}),
    "wide": Arm(DIFFUSION, "1 layer of 96, not 2 of 64", {"dim": 96, "n_layers": 1, "ffn_dim": 288}),
    "deep": Arm(DIFFUSION, "4 layers of 48", {"dim": 48, "n_layers": 4, "ffn_dim": 144}),
    "context_128": Arm(DIFFUSION, "context of 128 genes, not 256", training={"context": 128}),
    "context_512": Arm(DIFFUSION, "context of 512 genes", {"max_length": 512}, {"context": 512}),
    "context_1200": Arm(DIFFUSION, "context of 1,200 genes", {"max_length": 1200}, {"context": 1200}),
    "thinned": Arm(DIFFUSION, "training cells are binomially thinned counts", thinning=True),
}

REMOVED = (
    "encoder_two_view",
    "encoder_contrast",
    "encoder_genes_contrast",
    "inv_t",
    "pooled",
    *(f"pooled_{of}" for of in ("two_view", "genes", "contrast", "genes_contrast")),
)
"""Arms of options that the package had and has no more, as none was better: their rows stay as they were recorded."""

LEAST_SHARE = 0.2
"""Of the counts of a cell, thinning keeps a share drawn between this and 1, as gene dropout does of its genes."""


@dataclass
class Cells:
    """Studies in memory, with what training and the linear map read of a packed corpus."""

    indptr: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    study: np.ndarray
    study_names: list[str]
    measured: np.ndarray

    @property
    def n_obs(self) -> int:
        return len(self.study)

    @property
    def n_tokens(self) -> int:
        return self.measured.shape[1]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.indptr)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        indptr = self.indptr[start : stop + 1]
        at = slice(int(indptr[0]), int(indptr[-1]))
        return indptr - indptr[0], self.tokens[at], self.values[at]

    def read_ranges(self, ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        return take_cells((self.indptr, self.tokens, self.values), rows)

    def close(self) -> None:
        """Nothing is open."""


def load_cells(file: Path, vocabulary: Vocabulary, left_out: tuple[str, ...] = ()) -> Cells:
    """Read the studies of a packed corpus that are not left out."""
    packed = PackedCells(file, vocabulary)
    kept = [number for number, name in enumerate(packed.study_names) if name not in left_out]
    parts = []
    for number in kept:
        rows = np.flatnonzero(packed.study == number)  # a packed study is one run of rows
        parts.append(packed.read(int(rows[0]), int(rows[-1]) + 1))
    packed.close()
    lengths = [np.diff(indptr) for indptr, _, _ in parts]
    return Cells(
        np.concatenate([[0], np.cumsum(np.concatenate(lengths))]),
        np.concatenate([tokens for _, tokens, _ in parts]),
        np.concatenate([values for _, _, values in parts]),
        np.repeat(np.arange(len(kept)), [len(length) for length in lengths]),
        [packed.study_names[number] for number in kept],
        packed.measured[kept],
    )


def restricted(cells: Cells, tokens: np.ndarray) -> Cells:
    """The same cells with some genes only, numbered anew as :meth:`Vocabulary.subset` does."""
    number = np.full(cells.n_tokens, -1, dtype=np.int32)
    number[tokens] = np.arange(len(tokens)) + N_SPECIAL
    found = number[cells.tokens]
    kept = found >= 0
    indptr = np.concatenate([[0], np.cumsum(kept)])[cells.indptr]
    measured = np.hstack([cells.measured[:, :N_SPECIAL], cells.measured[:, tokens]])
    return Cells(indptr, found[kept], cells.values[kept], cells.study, cells.study_names, measured)


def matrix(cells: Cells) -> sp.csr_matrix:
    """The cells in token space."""
    parts = cells.values, cells.tokens, cells.indptr
    # copied, since sorting would sort the cells themselves
    found = sp.csr_matrix(parts, shape=(cells.n_obs, cells.n_tokens), copy=True)
    found.sort_indices()
    return found


def ranked(cells: Cells, divide_by: np.ndarray) -> Cells:
    """The same cells, their genes in another order."""
    indptr, tokens, values = serialize(matrix(cells), divide_by, int(cells.lengths.max()))
    return Cells(indptr, tokens, values, cells.study, cells.study_names, cells.measured)


def denominator(arm: Arm, vocabulary: Vocabulary, cells: Cells) -> np.ndarray:
    """What values are divided by where the arm ranks genes, float32 (n_tokens,)."""
    if arm.order == "expression":
        return np.ones(cells.n_tokens, dtype=np.float32)
    if arm.order == "median":
        by_gene = matrix(cells).tocsc()
        pairs = zip(by_gene.indptr[:-1], by_gene.indptr[1:], strict=True)
        found = np.array([np.median(by_gene.data[a:b]) if b > a else np.nan for a, b in pairs])
        # a gene that no cell has is ranked as an average one
        return np.where(np.isnan(found), np.nanmedian(found), found).astype(np.float32)
    return score_denominator(vocabulary.entropy, model_config(arm, vocabulary).entropy_floor)


def model_config(arm: Arm, vocabulary: Vocabulary) -> ScDiVaConfig:
    """The network of an arm; a set encoder trained alone is the whole cell state."""
    alone = {"anchor_residual": False} if arm.family == SET else {}
    return ScDiVaConfig(n_genes=vocabulary.n_genes, **{**MODEL, **alone, **arm.model})


def thinned_counts(batch: CellBatch, share: Tensor, generator: torch.Generator) -> CellBatch:
    """Whole cells sequenced less deep: of each count c, Binomial(c, the cell's share) are kept, and normalised anew."""
    counts = counts_of(batch.values, batch.cu_seqlens)
    shares = share[cell_of_token(batch.cu_seqlens, batch.tokens.numel())]
    thin = keep_counts(counts, batch.cu_seqlens, shares, generator)
    seen = thin.of_token > 0
    tokens, cu_seqlens = chosen(batch.tokens, batch.cu_seqlens, seen)
    return CellBatch(tokens, log_normalised(thin, batch.cu_seqlens)[seen], cu_seqlens, batch.study)


def order_of(tokens: Tensor, values: Tensor, cu_seqlens: Tensor, divide_by: np.ndarray) -> Tensor:
    """Positions of a batch, cell by cell in the order of the score, ties by token."""
    score = values.numpy() / divide_by[tokens.numpy()]
    cells = cell_of_token(cu_seqlens, tokens.numel()).numpy()
    return torch.from_numpy(np.lexsort((tokens.numpy(), -score, cells)))


def random_shares(n_cells: int, generator: torch.Generator) -> Tensor:
    return LEAST_SHARE + (1 - LEAST_SHARE) * torch.rand(n_cells, generator=generator)


BLOCK_ROWS = 16
"""Small blocks mix the studies in buffers that are read in no time."""

Batches = Callable[[int], CellBatch]
"""From the number of a batch to the batch."""


def stream(cells: Cells, batch_size: int, context: int, seed: int) -> Batches:
    pool = CellPool([cells], [cells.study], 1, context, BLOCK_ROWS)
    return TrainingStream(Order(pool, seed, batch_size)).batch


def thinned_stream(cells: Cells, config: PretrainingConfig, divide_by: np.ndarray) -> Batches:
    """Batches of thinned cells: whole cells are thinned, ranked anew and then cut to the context."""
    whole = stream(cells, config.batch_size, int(cells.lengths.max()), config.seed)

    def batch(number: int) -> CellBatch:
        generator = step_generator(config.seed, number, "thinning")
        thin = thinned_counts(found := whole(number), random_shares(found.n_cells, generator), generator)
        order = order_of(thin.tokens, thin.values, thin.cu_seqlens, divide_by).numpy()
        bounds = thin.cu_seqlens.tolist()
        rows = np.concatenate([order[a:b][: config.context] for a, b in itertools.pairwise(bounds)])
        indptr = np.concatenate([[0], np.cumsum(np.minimum(np.diff(bounds), config.context))])
        assert thin.study is not None
        return from_ragged(indptr, thin.tokens.numpy()[rows], thin.values.numpy()[rows], thin.study.numpy())

    return batch


class Judged(NamedTuple):
    """Validation cells in the order of the base, and what of them is hidden."""

    tokens: Tensor
    values: Tensor
    cu_seqlens: Tensor
    masked: Tensor
    value_mask: Tensor


def hidden(cells: Cells, n_cells: int, *, drawn: bool) -> Judged:
    """Hide genes of some cells: of their first 256 in the order of the base, or of 256 drawn from all they have."""
    rng, generator = np.random.default_rng(0), step_generator(0, 0, "judged")
    rows = np.arange(0, cells.n_obs, max(1, cells.n_obs // n_cells))[:n_cells]
    whole = take_cells((cells.indptr, cells.tokens, cells.values), rows)
    chosen = []
    for start, end in itertools.pairwise(whole[0]):
        n = min(end - start, MODEL["max_length"])
        chosen.append(start + (np.sort(rng.permutation(end - start)[:n]) if drawn else np.arange(n)))
    at, lengths = np.concatenate(chosen), [len(one) for one in chosen]
    batch = from_ragged(np.concatenate([[0], np.cumsum(lengths)]), whole[1][at], whole[2][at])
    times = stratified_times(batch.n_cells, generator)
    masks = mask_tokens(
        batch.tokens, batch.values, batch.cu_seqlens, times, generator,
        value_mask_rate=PretrainingConfig.value_mask_rate,
    )  # fmt: skip
    return Judged(batch.tokens, batch.values, batch.cu_seqlens, masks.masked, masks.value_mask)


class ThinnedViews(AnchorModule):
    """Views by thinning of counts; the random panels stay."""

    def _view(self, batch: CellBatch, generator: torch.Generator) -> CellBatch:
        share = random_shares(batch.n_cells, generator)
        return super()._view(thinned_counts(batch, share, generator), generator)


def random_map(start: LinearMap, cells: Cells, seed: int) -> LinearMap:
    """A linear map with the genes of another, each row as long as there, in directions drawn at random; centred."""
    rng = np.random.default_rng(seed)
    length = np.linalg.norm(start.weight, axis=1, keepdims=True)
    weight = (rng.normal(size=start.weight.shape) * length / start.weight.shape[1] ** 0.5).astype(np.float32)
    mean = np.bincount(cells.tokens, weights=cells.values, minlength=cells.n_tokens) / cells.n_obs
    return start._replace(weight=weight, bias=(-mean @ weight).astype(np.float32))
