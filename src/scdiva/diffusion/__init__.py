"""Masked (absorbing-state) diffusion over packed cells: tensors in, tensors out, any callable denoiser.

Packed layout: the genes of all cells are concatenated to length `T` (`tokens` int64, `values` float), and `cu_seqlens`,
int32 of length `B + 1`, contains the boundaries of the `B` cells. There is no `[LAT]` and no padding.
"""

from __future__ import annotations

from scdiva.diffusion.likelihood import log_likelihood
from scdiva.diffusion.loss import dual_loss, loss_weights, masked_cross_entropy
from scdiva.diffusion.masking import Corrupted, cell_of_token, mask_tokens, stratified_times
from scdiva.diffusion.ranks import rank_log_prior, values_at_ranks
from scdiva.diffusion.sampler import sample

__all__ = [
    "Corrupted",
    "cell_of_token",
    "dual_loss",
    "log_likelihood",
    "loss_weights",
    "mask_tokens",
    "masked_cross_entropy",
    "rank_log_prior",
    "sample",
    "stratified_times",
    "values_at_ranks",
]
