"""Reconstruction of single cells by a model: of masked genes by reverse diffusion, or of every gene from the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva._rng import step_generator
from scdiva.diffusion import sample, values_at_ranks
from scdiva.diffusion.sampler import Denoiser, PartPredictions, likeliest_cell, order_by_score, predict_in_parts
from scdiva.generation.sampling import denoiser_of
from scdiva.models.queries import Context
from scdiva.models.scdiva import ScDiVa

N_PARTS = 10
"""Parts of a cell that are masked in turn."""


@dataclass(frozen=True)
class Reconstruction:
    """Reconstruct one cell.

    Attributes
    ----------
    genes
        Tokens of the genes that are predicted, int64, ascending.
    denominator
        Divisor of the values of each token in the ranking, `(n_tokens,)`.
    mask_ratio
        Share of the genes that are masked; 0: no gene is masked, and each is predicted.
    n_steps
        Steps of the reverse process.
    by_rank
        Whether masked genes keep their ranks.
    mask_free
        With `mask_ratio=0`: `"folds"` predicts each tenth of the genes from the other nine, `"stream"` each gene from
        its hidden state in the unmasked cell.
    seed
        Seed of the masked genes.
    context, context_numbers
        Context cells of the query head, and the number of a cell among them by its row.
    """

    genes: Tensor
    denominator: Tensor
    mask_ratio: float
    n_steps: int
    by_rank: bool
    mask_free: str
    seed: int
    context: Context | None = None
    context_numbers: Mapping[int, int] = field(default_factory=dict)

    def __call__(
        self, network: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, row_number: Tensor
    ) -> Tensor:
        """Predicted tokens and values, and which ranks were masked, float32 `(L, 3)`, given one cell and its row."""
        max_length, row = network.config.max_length, int(row_number)
        cell = tokens[:max_length], values[:max_length], cu_seqlens.clamp_max(max_length)
        if self.mask_ratio:
            predicted_tokens, predicted_values, masked = self._masked_genes(network, *cell, row)
        else:
            by_stream = self.mask_free == "stream"
            predicted_tokens, predicted_values = (
                self._by_stream(network, *cell) if by_stream else self._by_parts(network, *cell, row)
            )
            masked = torch.zeros_like(predicted_values)
        return torch.stack([predicted_tokens.float(), predicted_values, masked.float()], dim=1)

    def _masked_genes(
        self, network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor, row: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask a share of the genes and predict them by the reverse process."""
        panel, generator = self.genes.to(tokens.device), step_generator(self.seed, row, "reconstruct")
        n_masked = min(len(tokens), max(1, round(self.mask_ratio * len(tokens))))
        drawn = torch.randperm(len(tokens), generator=generator)[:n_masked]
        masked = torch.isin(torch.arange(len(tokens)), drawn).to(tokens.device)
        # without ranks, masked genes are placed behind the visible ones
        order = torch.arange(len(tokens), device=tokens.device) if self.by_rank else masked.int().argsort(stable=True)
        hidden = masked[order]
        numbers, predicted_values = sample(
            self._denoiser(network, row, 1, ~hidden),
            (torch.searchsorted(panel, tokens[order]) + N_SPECIAL).masked_fill(hidden, MASK),
            values[order],
            bounds,
            n_steps=self.n_steps,
            score_denominator=None if self.by_rank else F.pad(self.denominator[self.genes], (N_SPECIAL, 0)),
            by_cell=not self.by_rank,
            generator=generator,
        )
        predicted_tokens = panel[numbers - N_SPECIAL]
        if self.by_rank:
            predicted_values = values_at_ranks(
                predicted_tokens, predicted_values, masked, ~masked, bounds, self.denominator
            )
        return predicted_tokens, predicted_values, masked

    def _by_parts(
        self, network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor, row: int
    ) -> tuple[Tensor, Tensor]:
        """Predict every position while its part of the positions is masked."""
        panel, n_parts = self.genes.to(tokens.device), min(N_PARTS, len(tokens))
        order = torch.randperm(len(tokens), generator=step_generator(self.seed, row, "reconstruct"))
        part = (order.argsort() % n_parts).to(tokens.device)
        numbers = torch.searchsorted(panel, tokens) + N_SPECIAL
        denoise = self._denoiser(network, row, n_parts, None)
        numbers, predicted_values = likeliest_cell(
            predict_in_parts(denoise, numbers, values, part, by_cell=not self.by_rank)
        )
        predicted_tokens = panel[numbers - N_SPECIAL]
        if not self.by_rank:
            order = order_by_score(predicted_tokens, predicted_values, torch.zeros_like(part), self.denominator)
            return predicted_tokens[order], predicted_values[order]
        for number in range(n_parts):
            hidden = part == number
            mixed = torch.where(hidden, predicted_tokens, tokens), torch.where(hidden, predicted_values, values)
            predicted_values = torch.where(
                hidden, values_at_ranks(*mixed, hidden, ~hidden, bounds, self.denominator), predicted_values
            )
        return predicted_tokens, predicted_values

    def _by_stream(self, network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Predict every position from its hidden state in the unmasked cell."""
        panel, rows = self.genes.to(tokens.device), torch.arange(len(tokens), device=tokens.device)
        out = network(tokens, values, bounds)
        expected = None
        if network.state_head is not None:
            assert out.head_hidden is not None
            expected = network.state_head.expected(out.head_hidden, panel)
        logits = network.logits(out, rows, genes=panel, expected=expected)
        by_position = network.values(out, torch.full_like(tokens, MASK))
        by_gene = None if expected is None else expected.values
        numbers, predicted_values = likeliest_cell(
            PartPredictions(logits, by_position, by_gene, torch.zeros_like(tokens))
        )
        return panel[numbers - N_SPECIAL], predicted_values

    def _denoiser(self, network: ScDiVa, row: int, n_copies: int, rank_mask: Tensor | None) -> Denoiser:
        """Denoiser of `n_copies` of a cell, with ranks or with context cells."""
        device, number = next(network.parameters()).device, self.context_numbers.get(row, -1)
        return denoiser_of(
            network,
            denominator=self.denominator if self.by_rank and network.state_head is not None else None,
            rank_mask=rank_mask,
            context=None if self.context is None else Context(*(part.to(device) for part in self.context)),
            own_row=None if self.context is None else torch.tensor([number] * n_copies, device=device),
            genes=self.genes,
            stream=self.by_rank,
        )
