"""A model as the denoiser that :mod:`scdiva.diffusion` samples from and scores with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion import cell_of_token, place_log_prior
from scdiva.diffusion.sampler import Denoiser
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.heads import hidden_gene_logits
from scdiva.nn.queries import Context


class Prompt(NamedTuple):
    """What is known of the cells that are to be drawn, beside what they show.

    Attributes
    ----------
    state
        `(B, state_dim)`, the state that `[LAT]` starts from.
    log_odds
        `(B, n)`, that a cell expresses a gene, of the genes that may be drawn.
    values
        `(B, n)`, the log-normalised value expected of a gene where it is expressed.
    """

    state: Tensor
    log_odds: Tensor
    values: Tensor


def denoiser_of(
    model: ScDiVa,
    *,
    denominator: Tensor | None = None,
    given: Tensor | None = None,
    prompt: Prompt | None = None,
    context: Context | None = None,
    own: Tensor | None = None,
    genes: Tensor | None = None,
    stream: bool = True,
    spread: bool = True,
) -> Denoiser:
    """Make a denoiser of a model, for :func:`scdiva.diffusion.sample` and :func:`scdiva.diffusion.log_likelihood`.

    Parameters
    ----------
    model
        In evaluation mode.
    denominator
        By which the cells were ranked, float32 `(n_tokens,)`. If given, what the place of a hidden gene says of it is
        added to its logits (:func:`scdiva.diffusion.place_log_prior`); needs a model with a state head, which says what
        values are expected. None: nothing is added. The transformer reads the ranks all the same, by its rotary
        positions: whoever is not to know those of hidden genes puts these behind the visible ones.
    given
        bool `(T,)`, the positions by which places are known: those given, and not those drawn since. None: all that is
        visible.
    prompt
        What is known of the cells. None: what they show, read anew at each step.
    context, own
        Other cells, and which of them are those asked about, as :meth:`scdiva.nn.QueryHead.weigh` takes it: the query
        head then predicts in the place of the state head, and `stream` is off. The context has the columns `genes`.
    genes
        int64 `(n,)`, tokens that may be drawn, such as those that a panel measures; no other is computed. None: all.
    stream
        Whether the transformer is run. Without it (and with a state head) the cell state alone speaks: orders of
        magnitude faster, and blind to how genes go together beyond it.
    spread
        Whether logits and values have a column for every gene of the vocabulary, with -inf where it may not be drawn;
        False: for `genes` only.

    Returns
    -------
    Function of packed `tokens`, `values`, `cu_seqlens` and `value_mask`.

    Raises
    ------
    ValueError
        If the model has no state head and one is needed, or none of its cell states can be had without the
        transformer.
    """
    if model.state_head is None and (denominator is not None or prompt is not None or not stream):
        raise ValueError(
            "The model has no state head: it can neither use places nor a prompt, nor do without the transformer. "
            "Take a model with state_head=True, as the bundled one."
        )
    if context is not None and (model.query_head is None or stream or prompt is not None or genes is None):
        raise ValueError("context needs a model with query_head=True, stream=False, genes, and no prompt.")
    if not stream and prompt is None and model.config.anchor == "learned":
        raise ValueError('With anchor="learned" the cell state comes from the transformer: pass stream=True.')

    c, head = model.config, model.state_head
    drawn = None if genes is None else (genes - N_SPECIAL).to(next(model.parameters()).device)
    laid_out = drawn if spread else None
    weight = model.gene_weight if drawn is None else model.gene_weight[drawn]

    def denoise(
        tokens: Tensor, values: Tensor, cu_seqlens: Tensor, value_mask: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        masked = tokens == MASK
        hidden, shown = value_mask | masked, value_mask & ~masked
        n_cells = cu_seqlens.numel() - 1
        cells = cell_of_token(cu_seqlens, tokens.numel())
        lengths = cu_seqlens.diff().clamp_min(1)
        logits, predicted, read, state = None, torch.zeros_like(values), None, None
        if stream:
            time = torch.bincount(cells[hidden], minlength=n_cells) / lengths if c.time_conditioning else None
            state = None if prompt is None else prompt.state
            out = model(tokens, values, cu_seqlens, value_mask=hidden, time=time, anchor_state=state)
            logits = torch.nn.functional.linear(out.hidden[masked], weight)
            predicted = model.heads.value(out.hidden).squeeze(-1)
            read = out.read
        if head is None:
            assert logits is not None
            return _spread(logits, laid_out, c.n_genes, -torch.inf), predicted
        if prompt is not None:
            log_odds, expected = prompt.log_odds, prompt.values
        else:
            if read is None:
                state = model.encode_anchor(tokens, values, cu_seqlens, value_mask=hidden)
                assert state is not None
                read = model.read_state(state, ~hidden, cu_seqlens)
            log_odds, expected = head.log_odds(read, drawn), head.values(read, drawn)
            if context is not None:
                assert model.query_head is not None
                assert drawn is not None
                assert state is not None
                n_visible = torch.bincount(cells[~hidden], minlength=n_cells)
                log_odds, expected = model.query_head.table(
                    state, read, n_visible, drawn, log_odds, expected, context, own
                )
        share = torch.bincount(cells[masked], minlength=n_cells).to(log_odds.dtype) / lengths
        of_cells = hidden_gene_logits(log_odds, share)[cells[masked]]
        logits = of_cells if logits is None else of_cells + logits
        if denominator is not None:
            known = ~hidden if given is None else given & ~hidden
            of_place = place_log_prior(tokens, values, masked, known, cu_seqlens, expected, denominator, genes)
            logits = logits + of_place
        every = _spread(expected, drawn, c.n_genes, 0.0)
        predicted = predicted.clone()
        predicted[shown] += every[cells[shown], tokens[shown] - N_SPECIAL]
        return _spread(logits, laid_out, c.n_genes, -torch.inf), predicted, every if spread else expected

    return denoise


def _spread(columns: Tensor, genes: Tensor | None, n_genes: int, fill: float) -> Tensor:
    """Put the columns of some genes where they belong among all."""
    if genes is None:
        return columns
    return columns.new_full((len(columns), n_genes), fill).index_copy_(1, genes, columns)
