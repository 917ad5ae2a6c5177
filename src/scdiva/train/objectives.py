"""Losses of the cell state: decoding of the genes from the state, and contrast between cells; base of objectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva._settings import to_device
from scdiva.data.batch import CellBatch
from scdiva.diffusion import cell_of_token
from scdiva.models.inference import runs_transformer
from scdiva.models.scdiva import ScDiVa, check_input

LEAST_FREQUENCY = 1e-7
"""Minimum share of the counts of a gene, which keeps logarithms finite."""


class Objective(nn.Module):
    """Loss of a task; its parameters are the layers that the task adds to the network."""

    n_items: int
    """Training examples of an epoch."""
    task: ClassVar[str]
    """Name of the task in messages and in the metadata of a fine-tuned model."""

    def through_blocks(self, network: ScDiVa) -> bool:
        """Whether the loss depends on the transformer blocks, which can process a batch in parts."""
        return runs_transformer(network)

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the training examples `rows`, and its terms for the log.

        Parameters
        ----------
        network
            The model.
        rows
            Indices of training examples, 0 to `n_items - 1`.
        progress
            Completed share of the training steps, 0 to 1.
        generator
            CPU generator of all random numbers.
        """
        raise NotImplementedError

    def data(self) -> Iterator[np.ndarray]:
        """Yield the arrays that define the training examples; they must be the same in a resumed run."""
        raise NotImplementedError


def encode_cells(network: ScDiVa, batch: CellBatch) -> Tensor:
    """Cell states of a batch on the CPU, `(B, state_dim)`, on the device of the network, without waiting for it."""
    device = next(network.parameters()).device
    if device.type != "cpu":  # inputs on a device are not checked
        check_input(network.config, *batch.packed, max_length=network.config.input_length)
    return network.encode(to_device(batch.tokens, device), to_device(batch.values, device), batch.cu_seqlens)


class GeneDecoder(nn.Module):
    """Linear map from a cell state to logits over all genes, with the study as covariate.

    The state is first scaled to mean square 1. The state of a set encoder has length 1, whatever its width, and would
    train the map an order of magnitude more slowly than `[LAT]`, which is normalised. Differences between studies are
    explained by the covariate and need not be in the state.

    Parameters
    ----------
    state_dim, n_genes
        Width of the state and number of genes.
    n_studies
        Number of studies; 0: no covariate.
    frequency
        Mean share of the counts of each token, `(n_genes + N_SPECIAL,)`, whose logarithm is the initial bias; None: 0,
        which takes thousands of steps to correct.
    """

    def __init__(self, state_dim: int, n_genes: int, n_studies: int = 0, frequency: np.ndarray | None = None) -> None:
        super().__init__()
        # the constructors draw from torch's global stream
        with torch.random.fork_rng(devices=[]):
            self.linear = nn.Linear(state_dim, n_genes)
            self.study_bias = nn.Embedding(n_studies, n_genes) if n_studies else None
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if frequency is not None:
            logits = np.log(np.maximum(frequency[N_SPECIAL:], LEAST_FREQUENCY))
            with torch.no_grad():
                self.linear.bias.copy_(torch.from_numpy(logits))
        if self.study_bias is not None:
            nn.init.zeros_(self.study_bias.weight)

    def forward(self, state: Tensor, study: Tensor | None) -> Tensor:
        """Logits `(B, n_genes)`.

        Parameters
        ----------
        state
            `(B, state_dim)`.
        study
            `(B,)`, on the CPU so that the host does not wait for a device; -1: the mean over the studies. Ignored
            without covariate.

        Raises
        ------
        ValueError
            If studies are required and missing, or out of range.
        """
        logits: Tensor = self.linear(F.rms_norm(state, state.shape[-1:]))
        if self.study_bias is None:
            return logits
        n = self.study_bias.num_embeddings
        if study is None or bool(((study < -1) | (study >= n)).any()):
            raise ValueError(f"The decoder knows {n} studies: batches need their numbers, from 0; -1 for another.")
        study = to_device(study, state.device)
        bias = torch.where(study[:, None] >= 0, self.study_bias(study.clamp_min(0)), self.study_bias.weight.mean(0))
        return logits + bias


def gene_multinomial_loss(logits: Tensor, batch: CellBatch) -> Tensor:
    """Cross-entropy between the genes of a cell and a predicted distribution over all genes.

    The target is the mean of the shares of counts, `expm1(v) / Σ expm1(v)`, and of log values, `v / Σ v`: counts alone
    would be dominated by a few abundant genes.

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


def thinned(batch: CellBatch, dropped: Tensor) -> CellBatch:
    """Remove genes from a batch, as dropout does (paper, theorem "Dropout-Diffusion Isomorphism").

    Parameters
    ----------
    batch
        Cells; not changed.
    dropped
        bool `(T,)`.

    Returns
    -------
    The batch with the remaining genes in their order; cells may be empty.
    """
    remaining = (~dropped).nonzero().squeeze(1)
    # number of remaining positions, which ascend, before each boundary
    cu_seqlens = torch.searchsorted(remaining, batch.cu_seqlens.long(), out_int32=batch.cu_seqlens.dtype == torch.int32)
    return CellBatch(batch.tokens[remaining], batch.values[remaining], cu_seqlens, batch.study)


def thinned_at_random(batch: CellBatch, max_time: float, generator: torch.Generator) -> CellBatch:
    """Remove each gene of a cell with probability t ~ U(0, max_time), one t per cell.

    Parameters
    ----------
    batch
        Cells; not changed.
    max_time
        At most 1.
    generator
        CPU generator.
    """
    times = torch.rand(batch.n_cells, generator=generator) * max_time
    of_token = times.repeat_interleave(batch.cu_seqlens.diff().cpu(), output_size=batch.tokens.numel())
    dropped = torch.rand(len(of_token), generator=generator) < of_token
    return thinned(batch, dropped.to(batch.tokens.device))


def supervised_contrast_loss(state: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss of the cell states (Khosla et al. 2020; paper).

    Mean over labelled cells with a partner of `-1/|P_i| Σ_p log exp(s_ip / τ) / Σ_j exp(s_ij / τ)`, s the cosine
    similarity, P_i the other cells of i's label, j over all other labelled cells.

    Parameters
    ----------
    state
        `(B, dim)`.
    labels
        int64 `(B,)`; -1: no label. On the CPU, so that the host does not wait for a device.
    temperature
        τ.

    Returns
    -------
    A scalar in nats; 0 if no two cells share a label.
    """
    labelled = (labels >= 0).nonzero().squeeze(1)
    labels = labels[labelled]
    partners = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
    paired = partners.any(dim=1).nonzero().squeeze(1)
    if not len(paired):
        return state.new_zeros(())
    labelled, partners, paired = (to_device(x, state.device) for x in (labelled, partners, paired))
    z = F.normalize(state[labelled].to(torch.promote_types(state.dtype, torch.float32)), dim=1)
    diagonal = torch.eye(len(z), dtype=torch.bool, device=z.device)
    log_share = ((z @ z.T).to(z) / temperature).masked_fill(diagonal, -torch.inf).log_softmax(dim=1)
    of_cell = torch.where(partners, log_share, 0.0).sum(dim=1) / partners.sum(dim=1).clamp_min(1)
    return -of_cell[paired].mean()


def pair_contrast_loss(
    state: Tensor, positives: Tensor, present: Tensor, left_out: Tensor, temperature: float
) -> Tensor:
    """InfoNCE loss of each cell with its positives against the other cells.

    Mean over the positives p of cells i of `-log exp(s_ip / τ) / (exp(s_ip / τ) + Σ_j exp(s_ij / τ))`,
    s the cosine similarity, j over the other cells except those excluded (van den Oord et al. 2018).

    Parameters
    ----------
    state
        `(B, dim)`, rows of length 1.
    positives
        `(P, B, dim)`, rows of length 1: P positives of each cell.
    present
        bool `(P, B)`, positives that exist.
    left_out
        bool `(B, B)`, pairs that are excluded from the negatives.
    temperature
        τ.

    Returns
    -------
    A scalar in nats; 0 if there is no positive.
    """
    high = torch.promote_types(state.dtype, torch.float32)
    z, same = state.to(high), positives.to(high)
    diagonal = torch.eye(len(z), dtype=torch.bool, device=z.device)
    # with -inf the gradient of a cell without negatives would be NaN
    log_negatives = ((z @ z.T).to(high) / temperature).masked_fill(left_out | diagonal, -1e9).logsumexp(dim=1)
    loss = F.softplus(log_negatives - (same * z).sum(dim=2) / temperature)
    return (loss * present).sum() / present.sum().clamp_min(1)
