"""Predicts a cell's genes from its state: what makes a state carry the cell. Not part of a saved model."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.diffusion import cell_of_token

LEAST_FREQUENCY = 1e-7
"""A gene's share of counts below which it is taken as this, so that logarithms stay finite."""


class GeneDecoder(nn.Module):
    """Linear map from a cell state to logits over all genes, with the study as covariate.

    The state is brought to coordinates of mean square 1 first. That of a set encoder has length 1, whatever its width;
    as it is it would train the map an order of magnitude slower than a state of `[LAT]`, which is normalised.

    What only tells studies apart is explained by the covariate and need not be in the state.

    Parameters
    ----------
    state_dim, n_genes
        Width of the state and number of genes.
    n_studies
        Studies with a covariate of their own; 0 does without.
    frequency
        Mean share of the counts of each token, `(n_genes + N_SPECIAL,)`, whose logarithm the logits start from; None
        starts with all genes equal, which takes thousands of steps to unlearn.

    Raises
    ------
    ValueError
        If `frequency` has another shape or is not finite.
    """

    def __init__(self, state_dim: int, n_genes: int, n_studies: int = 0, frequency: np.ndarray | None = None) -> None:
        super().__init__()
        if frequency is not None and (frequency.shape != (n_genes + N_SPECIAL,) or not np.isfinite(frequency).all()):
            raise ValueError(
                f"frequency must be finite and ({n_genes + N_SPECIAL},), one share for each token; "
                f"got shape {frequency.shape}, {int((~np.isfinite(frequency)).sum())} values not finite."
            )
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
            `(B,)`, where -1 gets what the studies have in common; not looked at without a covariate.

        Raises
        ------
        ValueError
            If studies are needed and missing, or their numbers are out of range.
        """
        logits: Tensor = self.linear(F.rms_norm(state, state.shape[-1:]))
        if self.study_bias is None:
            return logits
        if study is None:
            raise ValueError(
                f"The module knows {self.study_bias.num_embeddings} studies; the batch does not say which."
            )
        if bool(((study < -1) | (study >= self.study_bias.num_embeddings)).any()):
            raise ValueError(
                f"Study numbers must be in 0 ... {self.study_bias.num_embeddings - 1}, or -1 for another one; "
                f"got {int(study.min())} to {int(study.max())}."
            )
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
