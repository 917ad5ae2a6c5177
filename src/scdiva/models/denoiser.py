"""A model as the denoiser that :mod:`scdiva.diffusion` samples from and scores with."""

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
    """Make a denoiser of a model, for :func:`scdiva.diffusion.sample` and :func:`scdiva.diffusion.log_likelihood`.

    Parameters
    ----------
    model
        In evaluation mode.
    denominator
        By which the cells were ranked, float32 `(n_tokens,)`. If given, what the rank of a masked gene implies is
        added to its logits (:func:`scdiva.diffusion.rank_log_prior`); needs a model with a state head, which says what
        values are expected. None: nothing is added. The transformer reads the ranks all the same, by its rotary
        positions: whoever is not to know those of masked genes puts these behind the visible ones.
    given
        bool `(T,)`, the positions by which ranks are known: those given, and not those drawn since. None: all that is
        visible.
    context, own
        Other cells, and which of them are those asked about, as :meth:`scdiva.models.QueryHead.weigh` takes it: the
        query head then predicts in the place of the state head, and `stream` is off. The context has the columns
    `genes`. genes
        int64 `(n,)` ascending, tokens that may be drawn, such as those that a panel measures. Cells then hold the
        numbers of their genes among these, counted from `N_SPECIAL`, and nothing is computed of others. None: all.
    stream
        Whether the transformer is run. Without it (and with a state head) the cell state alone speaks: orders of
        magnitude faster, and blind to how genes go together beyond it. Unless ranks are read, one prediction then holds
        for all masked genes of a cell, and logits have a row for each cell (`by_cell`).
    state
        `(B, state_dim)`, cell states that `[LAT]` starts from. None: as the model reads them from what is visible.

    Returns
    -------
    Function of packed `tokens`, `values`, `cu_seqlens` and `value_mask`.

    Raises
    ------
    ValueError
        If the model has no state head and one is needed, or none of its cell states can be had without the
        transformer.
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

    drawn = None if genes is None else genes.to(next(model.parameters()).device)

    def expected_of(out: ScDiVaOutput, visible: Tensor) -> Expected:
        assert model.state_head is not None
        assert out.read is not None
        expected = model.state_head.expected(out.read, drawn)
        if context is None:
            return expected
        assert model.query_head is not None
        assert out.anchor is not None
        assert drawn is not None
        n_visible = torch.bincount(out.cells[visible], minlength=len(out.anchor))
        return Expected(
            *model.query_head.table(out.anchor, out.read, n_visible, drawn - N_SPECIAL, *expected, context, own)
        )

    def denoise(
        tokens: Tensor, values: Tensor, cu_seqlens: Tensor, value_mask: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        masked, numbers = tokens == MASK, tokens
        if drawn is not None:
            tokens = drawn[(numbers - N_SPECIAL).clamp_min(0)].masked_fill(masked, MASK)
        visible = ~(value_mask | masked)
        out = model(tokens, values, cu_seqlens, value_mask=value_mask, anchor_state=state, use_transformer=stream)
        expected = None if model.state_head is None else expected_of(out, visible)
        ranked = None
        if denominator is not None:
            known = visible if given is None else given & visible
            ranked = Ranked(tokens, values, cu_seqlens, known, denominator)
        rows = masked if stream or denominator is not None else cu_seqlens[:-1].long()
        logits = model.logits(out, rows, genes=drawn, expected=expected, ranked=ranked)
        if expected is None:
            return logits, model.values(out, tokens)
        return logits, model.values(out, numbers, of_genes=expected.values), expected.values

    return denoise
