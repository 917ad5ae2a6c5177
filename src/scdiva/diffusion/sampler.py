"""The reverse process: from (partly) masked cells to cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from scdiva._checks import check_choices, check_least
from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion.masking import cell_of_token, check_packed

Denoiser = Callable[[Tensor, Tensor, Tensor, Tensor], "tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]"]
"""`(tokens, values, cu_seqlens, value_mask) -> (logits, values[, gene_values])`, see :func:`sample`."""
DrawValues = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(expected, cells, genes) -> values`, see :func:`sample`."""
Remasking = Literal["low_confidence", "random"]


class Sampled(NamedTuple):
    """Completed cells: `tokens` int64 `(T,)` without any `MASK`, `values` `(T,)`."""

    tokens: Tensor
    values: Tensor


def checked_logits(logits: Tensor, n_masked: int) -> Tensor:
    """Logits in float32 or better, or an error if they are not what a denoiser must return.

    Parameters
    ----------
    logits
        What the denoiser returned.
    n_masked
        How many rows it must have.

    Raises
    ------
    ValueError
        If the number of rows is wrong, or a logit is NaN or +inf (-inf, an impossible gene, is legal).
    """
    if logits.ndim != 2 or logits.shape[0] != n_masked:
        raise ValueError(
            f"The denoiser must return one row of logits for each of the {n_masked} masked tokens, got a tensor of "
            f"shape {tuple(logits.shape)}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bad = torch.isnan(logits) | (logits == torch.inf)
    if bool(bad.any()):
        raise ValueError(f"The denoiser returned {int(bad.sum())} logits that are NaN or +inf: damaged weights?")
    return logits


def available_logits(
    logits: Tensor, tokens: Tensor, cells: Tensor, n_cells: int, allowed: Tensor | None, of_rows: Tensor
) -> Tensor:
    """Gene logits of masked positions, -inf for genes that the cell shows already.

    Parameters
    ----------
    logits
        Shape `(N, n_genes)`.
    tokens
        Shape `(T,)`.
    cells
        Cell of each token, `(T,)`.
    n_cells
        `B`.
    allowed
        bool `(n_genes,)`, or None for all genes.
    of_rows
        int64 `(N,)`, cell of each row.

    Returns
    -------
    float32 (or float64 for float64 input) of shape `(N, n_genes)`; a new tensor.

    Raises
    ------
    ValueError
        If the denoiser returned the wrong number of rows, NaN or +inf.
    """
    shown = tokens != MASK
    logits = checked_logits(logits, len(of_rows))
    taken = torch.zeros(n_cells, logits.shape[1], dtype=torch.bool, device=logits.device)
    taken[cells[shown], tokens[shown] - N_SPECIAL] = True
    if allowed is not None:
        taken |= ~allowed.to(taken.device)
    return logits.masked_fill(taken[of_rows], -torch.inf)


def gumbel(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw standard Gumbel noise in float64.

    In float32 `-log(-log u)` cannot exceed about 17, which cuts the tail off and makes samples too likely (known from
    masked diffusion language models), so it is always float64.

    Parameters
    ----------
    shape
        Shape of the noise.
    generator
        Source of the draws.
    device
        Where the noise is needed.
    """
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    # a uniform of exactly 0 would give -inf
    return -torch.log(-torch.log(uniform.clamp_min(torch.finfo(torch.float64).tiny))).to(device)


def assign_genes(logits: Tensor, cells: Tensor, priority: Tensor, generator: torch.Generator) -> Tensor:
    """One gene for each row, no gene twice in a cell.

    Rows of a cell are served in order of priority: each draws from its softmax over the genes that no row before it
    took, so that the result is an exact sample without replacement. The loop runs over the rank within the cell, for
    all cells at once.

    Parameters
    ----------
    logits
        Shape `(N, n_genes)`; -inf for genes that may not be drawn.
    cells
        int64 `(N,)`: which cell a row belongs to.
    priority
        `(N,)`: higher is served first.
    generator
        Source of the Gumbel noise.

    Returns
    -------
    int64 of shape `(N,)`: gene index (token minus `N_SPECIAL`).

    Raises
    ------
    ValueError
        If a row has no gene left.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if not logits.shape[0]:
        return chosen
    order = torch.argsort(priority, descending=True, stable=True)
    order = order[torch.argsort(cells[order], stable=True)]
    cell_ids, counts = torch.unique_consecutive(cells[order], return_counts=True)
    starts = torch.cumsum(counts, 0) - counts
    taken = torch.zeros(cell_ids.numel(), logits.shape[1], dtype=torch.bool, device=logits.device)
    exhausted = torch.zeros((), dtype=torch.bool, device=logits.device)
    for rank in range(int(counts.max())):
        active = counts > rank
        rows = order[starts[active] + rank]
        scores = logits[rows].double().masked_fill(taken[active], -torch.inf)
        scores = scores + gumbel(scores.shape, generator, scores.device)
        best, genes = scores.max(1)
        exhausted |= (best == -torch.inf).any()
        chosen[rows] = genes
        taken[active.nonzero().squeeze(1), genes] = True
    if bool(exhausted):
        raise ValueError("A masked position has no gene left that it could become: too few genes are allowed.")
    return chosen


def likeliest_genes(logits: Tensor, cells: Tensor, share: float, row: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the genes that are surest to be masked in each cell, and assign them to positions.

    The number of masked genes found is, in expectation, the sum over the chosen ones of their probabilities at all
    positions: those with the largest sums are taken. Then they are given positions, none twice, so that the logarithms
    of their probabilities there add up to most: a linear assignment (Crouse 2016). Taking the likeliest gene of one
    position after the other finds fewer: common genes are used up on positions that are not theirs.

    Parameters
    ----------
    logits
        Shape `(R, n_genes)`; -inf for genes that may not be chosen.
    cells
        int64 `(N,)`: which cell a position belongs to; those of a cell stand together.
    share
        Share of each cell's positions that gets a gene.
    row
        int64 `(N,)`: the row of logits of each position, its own or one for all of its cell.

    Returns
    -------
    Positions `(n,)`, ascending, and their genes `(n,)`, both int64.

    Raises
    ------
    ValueError
        If a cell has fewer genes left than rows.
    """
    from scipy.optimize import linear_sum_assignment

    rows, genes = [], []
    for of_cell in cells.unique_consecutive():
        own = (cells == of_cell).nonzero().squeeze(1)
        number = round(len(own) * share)
        p = torch.softmax(logits[row[own].unique_consecutive()].float(), dim=1)
        total, best = p.sum(dim=0).topk(min(number, p.shape[1]))
        if number > len(best) or not bool((total > 0).all()):
            raise ValueError("A masked position has no gene left that it could become: too few genes are allowed.")
        at = which = torch.arange(number)  # of positions that share a row each may get any
        if len(p) > 1:
            gain = p[:, best].clamp_min(torch.finfo(p.dtype).tiny).log()
            at, which = map(torch.from_numpy, linear_sum_assignment(gain.cpu().numpy(), maximize=True))
        rows.append(own[at.to(own.device)])
        genes.append(best[which.to(best.device)])
    return torch.cat(rows), torch.cat(genes)


def order_by_score(tokens: Tensor, values: Tensor, cells: Tensor, denominator: Tensor) -> Tensor:
    """Order of packed positions by cell, falling score and token, as the serialiser has it.

    Parameters
    ----------
    tokens, values, cells
        `(T,)`, of each position.
    denominator
        float32 `(n_tokens,)`, by which values are divided.

    Returns
    -------
    int64 `(T,)`.
    """
    score = values.float() / denominator.to(values.device)[tokens].float()
    order = torch.argsort(tokens, stable=True)
    order = order[torch.argsort(score[order], descending=True, stable=True)]
    return order[torch.argsort(cells[order], stable=True)]


class Predicted(NamedTuple):
    """What a denoiser predicts at each position of one cell, see :func:`predict_in_parts`.

    Attributes
    ----------
    logits
        `(L, n_genes)`; -inf for genes that were visible.
    values
        `(L,)`.
    gene_values
        `(n_parts, n_genes)`, what is added to the value of a gene at a position of each part; None: nothing.
    part
        int64 `(L,)`.
    """

    logits: Tensor
    values: Tensor
    gene_values: Tensor | None
    part: Tensor

    def values_of(self, genes: Tensor) -> Tensor:
        """Return the values `(L,)` of these genes (token minus `N_SPECIAL`), one at each position; 0 or more."""
        values = self.values
        if self.gene_values is not None:
            values = values + self.gene_values[self.part, genes]
        return values.clamp_min(0)


@torch.no_grad()
def predict_in_parts(
    denoiser: Denoiser, tokens: Tensor, values: Tensor, part: Tensor, *, by_cell: bool = False
) -> Predicted:
    """Predict every position of one complete cell from the others: its parts are masked one at a time.

    Parameters
    ----------
    denoiser
        As in :func:`sample`; called once, with a copy of the cell for each part.
    tokens, values
        The cell, `(L,)`, in the order of its ranks; masked positions keep theirs.
    part
        int64 `(L,)`, number of the part that each position belongs to, from 0, none of them empty.
    by_cell
        As in :func:`sample`.

    Returns
    -------
    The predictions at each position, made where its own part was masked and the rest was visible.

    Raises
    ------
    ValueError
        If the denoiser returned the wrong number of rows, NaN or +inf.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion.sampler import predict_in_parts
    >>> def denoiser(tokens, values, cu_seqlens, value_mask):  # knows nothing of eight genes
    ...     return torch.zeros(int((tokens == 1).sum()), 8), torch.ones(len(tokens))
    ...
    >>> found = predict_in_parts(denoiser, torch.arange(3, 7), torch.ones(4), torch.tensor([0, 1, 0, 1]))
    >>> found.logits.softmax(1)[0, :4]  # of the four genes two are visible
    tensor([0.1667, 0.0000, 0.1667, 0.0000])
    """
    n_parts, length = int(part.max()) + 1, len(tokens)
    masked = (part == torch.arange(n_parts, device=part.device)[:, None]).flatten()
    copies = tokens.repeat(n_parts).masked_fill(masked, MASK)
    bounds = torch.arange(n_parts + 1, dtype=torch.int32, device=tokens.device) * length
    cells = cell_of_token(bounds, len(copies))
    logits, predicted, *of_genes = denoiser(copies, values.repeat(n_parts).masked_fill(masked, 0.0), bounds, masked)
    if predicted.shape != copies.shape or not bool(torch.isfinite(predicted[masked]).all()):
        raise ValueError(
            f"The denoiser must return {len(copies)} values, finite where they are asked for, got shape "
            f"{tuple(predicted.shape)}. If that is right, the weights may be damaged."
        )
    at = masked.nonzero().squeeze(1)
    of_rows = torch.arange(n_parts, device=tokens.device) if by_cell else cells[at]
    logits = available_logits(logits, copies, cells, n_parts, None, of_rows)
    back = (at % length).argsort()  # rows come part by part
    row = part if by_cell else back
    return Predicted(logits[row], predicted[at][back].to(values.dtype), of_genes[0] if of_genes else None, part)


def likeliest_cell(predicted: Predicted) -> Sampled:
    """Choose the gene of each position of a cell that was predicted part by part, no gene twice, and its value.

    As one step of :func:`sample` for each part, one after the other (:func:`likeliest_genes`). A gene of the cell can
    only be chosen in its own part, since it was visible in the others.

    Parameters
    ----------
    predicted
        Of the cell.

    Returns
    -------
    `tokens` and `values`, `(L,)`.
    """
    logits, part = predicted.logits, predicted.part
    chosen, taken = torch.empty_like(part), torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    for number in range(int(part.max()) + 1):
        at = (part == number).nonzero().squeeze(1)
        rows = torch.arange(len(at), device=at.device)
        which, genes = likeliest_genes(logits[at].masked_fill(taken, -torch.inf), torch.zeros_like(rows), 1.0, rows)
        chosen[at[which]] = genes
        taken[genes] = True
    return Sampled(chosen + N_SPECIAL, predicted.values_of(chosen))


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    n_steps: int = 1,
    remasking: Remasking = "low_confidence",
    allowed: Tensor | None = None,
    draw_values: DrawValues | None = None,
    score_denominator: Tensor | None = None,
    by_cell: bool = False,
    generator: torch.Generator,
) -> Sampled:
    """Fill every masked position of a packed batch.

    Paper, algorithm "scDiVa Inference", from any partly masked state: step k of `n_steps` reveals the share
    `(t_k - t_{k-1}) / t_k` of what is still masked, with `t_k = k / n_steps`. A gene that the cell shows is never
    drawn again, within a step neither. One step is what the paper's benchmarks use; 32 are its multi-step setting.

    `remasking="low_confidence"` reveals the surest first (for reconstruction): the genes that are surest to be masked
    in the cell, at positions that suit them (:func:`likeliest_genes`). `"random"` reveals each masked position with the
    posterior probability of the process and draws its gene (ancestral: for drawing populations). With it and many more
    steps than masked positions the draws follow the any-order model whose likelihood :func:`log_likelihood` bounds.

    Parameters
    ----------
    denoiser
        Called as `denoiser(tokens, values, cu_seqlens, value_mask)`, at most `n_steps` times. Returns logits, one row
        for each `MASK` token in their order (with `by_cell` for each cell) and one column for each gene (token minus
        `N_SPECIAL`), one predicted value for each of the `T` positions, and, where the value depends on the gene that
        is chosen, `(B, n_genes)`: what is added to it at a `MASK`, by cell and gene. The logits are the largest thing
        held in memory, so pass as many cells at a time as they allow.
    tokens, values, cu_seqlens
        Packed batch, `MASK` where a gene is asked for. Not changed.
    n_steps
        K.
    remasking
        See above.
    allowed
        bool `(n_genes,)`: genes that may appear, for instance those that a panel measures. None: all.
    draw_values
        Called with the expected values of the genes revealed in a step, their cells and genes (token minus
        `N_SPECIAL`), each `(n,)`; returns the values they get. None: the expected ones.
    score_denominator
        float32 `(n_tokens,)`; if given, each cell is re-sorted by `value / denominator`, ties by token, as the
        serialiser would have it. None leaves every gene at its position.
    by_cell
        As in :func:`log_likelihood`: one row of logits holds for all masked genes of a cell.
    generator
        Source of all draws.

    Returns
    -------
    Completed `tokens` and `values`; predictions below 0 are set to 0, which no log-normalised value can fall below.

    Raises
    ------
    ValueError
        If the batch or an option is malformed, the denoiser returns NaN, or a cell asks for more genes than there are.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import sample
    >>> generator = torch.Generator().manual_seed(0)
    >>> def denoiser(tokens, values, cu_seqlens, value_mask):  # knows nothing of eight genes
    ...     return torch.zeros(int((tokens == 1).sum()), 8), torch.ones(len(tokens))
    ...
    >>> hidden = torch.full((5,), 1)  # five [MASK]: cells of 3 and of 2 genes
    >>> found = sample(denoiser, hidden, torch.zeros(5), torch.tensor([0, 3, 5]), generator=generator)
    >>> len(set(found[0][:3].tolist()))  # no gene twice in a cell
    3
    """
    check_packed(tokens, values, cu_seqlens)
    check_least(n_steps=(n_steps, 1))
    check_choices(remasking=(remasking, get_args(Remasking)))
    if bool(((tokens < N_SPECIAL) & (tokens != MASK)).any()):
        raise ValueError("Cells to complete may hold gene tokens and MASK only, neither PAD nor LAT.")
    n_cells = cu_seqlens.numel() - 1
    cells = cell_of_token(cu_seqlens.to(tokens.device), tokens.numel())
    tokens, values = tokens.clone(), values.masked_fill(tokens == MASK, 0.0)
    for k in range(n_steps, 0, -1):
        masked = tokens == MASK
        if not bool(masked.any()):
            break
        logits, predicted, *of_genes = denoiser(tokens, values, cu_seqlens, masked)
        if predicted.shape != masked.shape or not bool(torch.isfinite(predicted[masked]).all()):
            raise ValueError(
                f"The denoiser must return {masked.numel()} values, finite where they are asked for, got shape "
                f"{tuple(predicted.shape)}. If that is right, the weights may be damaged."
            )
        predicted = predicted.to(values.dtype)
        where = masked.nonzero().squeeze(1)
        own = cells[where]
        row = own if by_cell else torch.arange(len(own), device=own.device)
        of_rows = torch.arange(n_cells, device=own.device) if by_cell else own
        logits = available_logits(logits, tokens, cells, n_cells, allowed, of_rows)
        share = (k / n_steps - (k - 1) / n_steps) / (k / n_steps)
        if remasking == "low_confidence":
            rows, genes = likeliest_genes(logits, own, share, row)
        else:
            # each masked token on its own with the posterior probability; the second use of the same draw as an order
            # is harmless, because among the revealed it is still uniform
            draws = torch.rand(len(own), generator=generator, device=generator.device, dtype=torch.float64)
            priority = draws.to(logits.device)
            rows = (priority < share).nonzero().squeeze(1)
            genes = assign_genes(logits[row[rows]], own[rows], priority[rows], generator)
        at, own = where[rows], own[rows]
        expected = predicted[at] + (of_genes[0][own, genes].to(values.dtype) if of_genes else 0.0)
        expected = expected.clamp_min(0)
        tokens[at] = genes + N_SPECIAL
        values[at] = expected if draw_values is None else draw_values(expected, own, genes)
    if score_denominator is not None:
        order = order_by_score(tokens, values, cells, score_denominator)
        tokens, values = tokens[order], values[order]
    return Sampled(tokens, values)
