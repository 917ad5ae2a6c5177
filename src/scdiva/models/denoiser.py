"""A model as denoiser of :mod:`scdiva.diffusion`, for sampling and likelihoods."""

from __future__ import annotations

import torch
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion.ranks import Ranked
from scdiva.diffusion.sampler import Denoiser
from scdiva.models.heads import Expected
from scdiva.models.queries import Context
from scdiva.models.scdiva import ScDiVa, ScDiVaOutput


def denoiser_of(
    model: ScDiVa,
    *,
    denominator: Tensor | None = None,
    given: Tensor | None = None,
    context: Context | None = None,
    own: Tensor | None = None,
    genes: Tensor | None = None,
    stream: bool = True,
    state: Tensor | None = None,
) -> Denoiser:
    """Denoiser of a model for :func:`scdiva.diffusion.sample` and :func:`scdiva.diffusion.log_likelihood`.

    Parameters
    ----------
    model
        In evaluation mode.
    denominator
        Divisor of the values in the ranking, float32 `(n_tokens,)`. If passed, the prior of a masked gene from its rank
        is added to its logits (:func:`scdiva.diffusion.rank_log_prior`); requires a state head, which predicts the
        values. None: no prior. The transformer uses the ranks in any case, through its rotary positions: to hide the
        ranks of masked genes, move these genes behind the visible ones.
    given
        bool `(T,)`, positions whose ranks are used in the prior: those of the input, and not those sampled since. None:
        all visible ones.
    context, own
        Other cells, and their rows that are the predicted cells, see :meth:`scdiva.models.QueryHead.weigh`: the query
        head then replaces the state head. The context has the columns `genes`; requires `stream=False`.
    genes
        int64 `(n,)` ascending, tokens that may be sampled, such as those of a panel. Tokens of the cells are then
        indices into these, counted from `N_SPECIAL`. None: all.
    stream
        Whether to run the transformer. Without it the state head predicts from the cell state alone: this is faster by
        orders of magnitude, and ignores dependencies between genes given the state. Without ranks, all masked genes of
        a cell then have the same prediction, and logits have one row per cell (`by_cell`).
    state
        `(B, state_dim)`, cell states from which `[LAT]` starts. None: those of the visible genes.

    Returns
    -------
    Function of packed `tokens`, `values`, `cu_seqlens` and `value_mask`.

    Raises
    ------
    ValueError
        If the model lacks a required head, or its cell state requires the transformer and `stream` is False.
    """
    if model.state_head is None and (denominator is not None or not stream):
        raise ValueError(
            "The model has no state head: it can neither use ranks nor do without the transformer. Take a model with "
            "state_head=True, as the bundled one."
        )
    if context is not None and (model.query_head is None or stream or genes is None):
        raise ValueError("context needs a model with query_head=True, stream=False, and genes.")
    if not stream and model.config.anchor == "learned":
        raise ValueError('With anchor="learned" the cell state comes from the transformer: pass stream=True.')

    candidates = None if genes is None else genes.to(next(model.parameters()).device)

    def expected_of(out: ScDiVaOutput, visible: Tensor) -> Expected:
        assert model.state_head is not None
        assert out.read is not None
        expected = model.state_head.expected(out.read, candidates)
        if context is None:
            return expected
        assert model.query_head is not None
        assert out.anchor is not None
        assert candidates is not None
        n_visible = torch.bincount(out.cells[visible], minlength=len(out.anchor))
        return Expected(
            *model.query_head.table(out.anchor, out.read, n_visible, candidates - N_SPECIAL, *expected, context, own)
        )

    def denoise(
        tokens: Tensor, values: Tensor, cu_seqlens: Tensor, value_mask: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        masked, indices = tokens == MASK, tokens
        if candidates is not None:
            tokens = candidates[(indices - N_SPECIAL).clamp_min(0)].masked_fill(masked, MASK)
        visible = ~(value_mask | masked)
        out = model(tokens, values, cu_seqlens, value_mask=value_mask, anchor_state=state, use_transformer=stream)
        expected = None if model.state_head is None else expected_of(out, visible)
        ranked = None
        if denominator is not None:
            with_rank = visible if given is None else given & visible
            ranked = Ranked(tokens, values, cu_seqlens, with_rank, denominator)
        rows = masked if stream or denominator is not None else cu_seqlens[:-1].long()
        logits = model.logits(out, rows, genes=candidates, expected=expected, ranked=ranked)
        if expected is None:
            return logits, model.values(out, tokens)
        return logits, model.values(out, indices, of_genes=expected.values), expected.values

    return denoise
