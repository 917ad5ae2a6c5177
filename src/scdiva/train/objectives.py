"""Objectives that make a state carry the cell: its genes decoded from the state, and views of a cell that agree."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva._device import to_device
from scdiva.data.batch import CellBatch
from scdiva.diffusion import cell_of_token

LEAST_FREQUENCY = 1e-7
"""A gene's share of counts below which it is taken as this, so that logarithms stay finite."""


class GeneDecoder(nn.Module):
    """Linear map from a cell state to logits over all genes, with the study as covariate.

    The state is brought to coordinates of mean square 1 first. That of a set encoder has length 1, whatever its width;
    as it is it would train the map an order of magnitude slower than a state of `[LAT]`, which is normalised.

    What only distinguishes studies is explained by the covariate and need not be in the state.

    Parameters
    ----------
    state_dim, n_genes
        Width of the state and number of genes.
    n_studies
        Studies with a covariate of their own; 0 does without.
    frequency
        Mean share of the counts of each token, `(n_genes + N_SPECIAL,)`, whose logarithm the logits start from; None
        starts with all genes equal, which takes thousands of steps to unlearn.
    """

    def __init__(self, state_dim: int, n_genes: int, n_studies: int = 0, frequency: np.ndarray | None = None) -> None:
        super().__init__()
        # inside a fork because the constructors draw from torch's global stream
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
        """Return logits `(B, n_genes)`.

        Parameters
        ----------
        state
            `(B, state_dim)`.
        study
            `(B,)`, where -1 gets what the studies have in common; not used without a covariate. On the CPU, no device
            is waited for.

        Raises
        ------
        ValueError
            If studies are needed and missing, or their numbers are out of range.
        """
        logits: Tensor = self.linear(F.rms_norm(state, state.shape[-1:]))
        if self.study_bias is None:
            return logits
        n = self.study_bias.num_embeddings
        if study is None or bool(((study < -1) | (study >= n)).any()):
            raise ValueError(f"The decoder knows {n} studies: batches need their numbers, from 0; -1 for another.")
        study = to_device(study, state.device)
        known = torch.ge(study, 0)[:, None]
        common = self.study_bias.weight.mean(0)
        return logits + torch.where(known, self.study_bias(study.clamp_min(0)), common)


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
    kept = (~dropped).nonzero().squeeze(1)
    # how many are left before each boundary: positions ascend
    cu_seqlens = torch.searchsorted(kept, batch.cu_seqlens.long(), out_int32=batch.cu_seqlens.dtype == torch.int32)
    return CellBatch(batch.tokens[kept], batch.values[kept], cu_seqlens, batch.study)


def thinned_at_random(batch: CellBatch, max_time: float, generator: torch.Generator) -> CellBatch:
    """Leave each gene of a cell out with probability t ~ U(0, max_time), one t a cell.

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
    """Supervised contrast: cells of one label near each other, those of others away (Khosla et al. 2020; paper).

    Mean over labelled cells that have a partner of `-1/|P_i| Σ_p log exp(s_ip / τ) / Σ_j exp(s_ij / τ)`, s the cosine
    similarity, P_i the other cells of i's label, j over all other labelled cells.

    Parameters
    ----------
    state
        `(B, dim)`.
    labels
        int64 `(B,)`; -1 for none.
    temperature
        τ.

    Returns
    -------
    A scalar in nats; 0 if no two cells share a label.
    """
    known = labels >= 0
    z, labels = F.normalize(state[known].to(torch.promote_types(state.dtype, torch.float32)), dim=1), labels[known]
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    partners = (labels[:, None] == labels[None, :]) & ~itself
    paired = partners.any(dim=1)
    if not bool(paired.any()):
        return state.new_zeros(())
    log_share = ((z @ z.T).to(z) / temperature).masked_fill(itself, -torch.inf).log_softmax(dim=1)
    of_cell = torch.where(partners, log_share, 0.0).sum(dim=1) / partners.sum(dim=1).clamp_min(1)
    return -of_cell[paired].mean()


def pair_contrast_loss(
    state: Tensor, positives: Tensor, present: Tensor, left_out: Tensor, temperature: float
) -> Tensor:
    """InfoNCE of each cell with what is given as the same cell, or one like it, against the other cells.

    Mean over the positives that there are, p of cell i, of `-log exp(s_ip / τ) / (exp(s_ip / τ) + Σ_j exp(s_ij / τ))`,
    s the cosine similarity, j over the other cells but those left out (van den Oord et al. 2018).

    Parameters
    ----------
    state
        `(B, dim)`, rows of length 1.
    positives
        `(P, B, dim)`, likewise: P states for each cell.
    present
        bool `(P, B)`: which of them there are.
    left_out
        bool `(B, B)`: which cells are no negatives of which.
    temperature
        τ.

    Returns
    -------
    A scalar in nats; 0 if there is no positive.
    """
    high = torch.promote_types(state.dtype, torch.float32)
    z, same = state.to(high), positives.to(high)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    # -inf would do, were the gradient of a cell without negatives not NaN
    others = ((z @ z.T).to(high) / temperature).masked_fill(left_out | itself, -1e9).logsumexp(dim=1)
    loss = F.softplus(others - (same * z).sum(dim=2) / temperature)
    return (loss * present).sum() / present.sum().clamp_min(1)
