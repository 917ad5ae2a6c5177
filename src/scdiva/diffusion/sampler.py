"""The reverse process: predict the masked positions of cells."""

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


def checked_values(predicted: Tensor, masked: Tensor) -> Tensor:
    """Check the values of a denoiser: one for each position, finite at masked positions."""
    if predicted.shape != masked.shape or not bool(torch.isfinite(predicted[masked]).all()):
        raise ValueError(
            f"The denoiser must return {masked.numel()} values, finite at masked positions, got shape "
            f"{tuple(predicted.shape)}. If the shape is right, the weights may be damaged."
        )
    return predicted


def checked_logits(logits: Tensor, n_rows: int) -> Tensor:
    """Check the logits of a denoiser, `n_rows` rows without NaN or +inf, and return them as float32 or float64."""
    if logits.ndim != 2 or logits.shape[0] != n_rows:
        raise ValueError(
            f"The denoiser must return one row of logits for each of the {n_rows} masked tokens, got a tensor of "
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
    """Gene logits of masked positions, -inf for genes that are visible in the cell.

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
    visible = tokens != MASK
    logits = checked_logits(logits, len(of_rows))
    unavailable = torch.zeros(n_cells, logits.shape[1], dtype=torch.bool, device=logits.device)
    unavailable[cells[visible], tokens[visible] - N_SPECIAL] = True
    if allowed is not None:
        unavailable |= ~allowed.to(unavailable.device)
    return logits.masked_fill(unavailable[of_rows], -torch.inf)


def gumbel(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Standard Gumbel noise in float64.

    In float32 `-log(-log u)` cannot exceed about 17, which truncates the tail and makes samples too likely.
    """
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    # a uniform of exactly 0 would give -inf
    return -torch.log(-torch.log(uniform.clamp_min(torch.finfo(torch.float64).tiny))).to(device)


def assign_genes(logits: Tensor, cells: Tensor, priority: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one gene for each row, no gene twice in a cell.

    Each row of a cell, in order of priority, draws from its softmax over the genes that no earlier row has drawn, so
    the result is an exact sample without replacement. The loop runs over the rank within the cell, for all cells at
    once.

    Parameters
    ----------
    logits
        Shape `(N, n_genes)`; -inf for genes that may not be drawn.
    cells
        int64 `(N,)`: which cell a row belongs to.
    priority
        `(N,)`: rows with a higher priority draw first.
    generator
        Random numbers.

    Returns
    -------
    int64 of shape `(N,)`: gene index (token minus `N_SPECIAL`).

    Raises
    ------
    ValueError
        If no gene is left for a row.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if not logits.shape[0]:
        return chosen
    order = torch.argsort(priority, descending=True, stable=True)
    order = order[torch.argsort(cells[order], stable=True)]
    cell_ids, counts = torch.unique_consecutive(cells[order], return_counts=True)
    starts = torch.cumsum(counts, 0) - counts
    is_drawn = torch.zeros(cell_ids.numel(), logits.shape[1], dtype=torch.bool, device=logits.device)
    exhausted = torch.zeros((), dtype=torch.bool, device=logits.device)
    for rank in range(int(counts.max())):
        active = counts > rank
        rows = order[starts[active] + rank]
        scores = logits[rows].double().masked_fill(is_drawn[active], -torch.inf)
        scores = scores + gumbel(scores.shape, generator, scores.device)
        best, genes = scores.max(1)
        exhausted |= (best == -torch.inf).any()
        chosen[rows] = genes
        is_drawn[active.nonzero().squeeze(1), genes] = True
    if bool(exhausted):
        raise ValueError("A masked position has no gene left that it could become: too few genes are allowed.")
    return chosen


def likeliest_genes(logits: Tensor, cells: Tensor, share: float, row: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the most probable masked genes of each cell, and assign them to positions.

    The expected number of recovered genes is the sum, over the chosen genes, of their probabilities at all positions,
    so the genes with the largest sums are chosen. They are assigned to positions, none twice, such that the sum of
    their log-probabilities there is maximal (linear assignment; Crouse 2016). A greedy choice, position by position,
    recovers fewer genes, because common genes are assigned to positions of other genes.

    Parameters
    ----------
    logits
        Shape `(R, n_genes)`; -inf for genes that cannot be chosen.
    cells
        int64 `(N,)`: cell of each position; positions of a cell are contiguous.
    share
        Share of each cell's positions that gets a gene.
    row
        int64 `(N,)`: row of logits of each position; all positions of a cell may share one.

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
        cell_positions = (cells == of_cell).nonzero().squeeze(1)
        number = round(len(cell_positions) * share)
        p = torch.softmax(logits[row[cell_positions].unique_consecutive()].float(), dim=1)
        total, best = p.sum(dim=0).topk(min(number, p.shape[1]))
        if number > len(best) or not bool((total > 0).all()):
            raise ValueError("A masked position has no gene left that it could become: too few genes are allowed.")
        at = which = torch.arange(number)  # positions with one row of logits are interchangeable
        if len(p) > 1:
            gain = p[:, best].clamp_min(torch.finfo(p.dtype).tiny).log()
            at, which = map(torch.from_numpy, linear_sum_assignment(gain.cpu().numpy(), maximize=True))
        rows.append(cell_positions[at.to(cell_positions.device)])
        genes.append(best[which.to(best.device)])
    return torch.cat(rows), torch.cat(genes)


def order_by_score(tokens: Tensor, values: Tensor, cells: Tensor, denominator: Tensor) -> Tensor:
    """Order of packed positions by cell, decreasing score and token, as in serialised cells.

    Parameters
    ----------
    tokens, values, cells
        `(T,)`, for each position.
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


class PartPredictions(NamedTuple):
    """Predictions at each position of one cell, see :func:`predict_in_parts`.

    Attributes
    ----------
    logits
        `(L, n_genes)`; -inf for genes that were visible.
    values
        `(L,)`.
    gene_values
        `(n_parts, n_genes)`, added to the value of a gene at a position of each part; None: 0.
    part
        int64 `(L,)`.
    """

    logits: Tensor
    values: Tensor
    gene_values: Tensor | None
    part: Tensor

    def values_of(self, genes: Tensor) -> Tensor:
        """Values `(L,)` of genes (token minus `N_SPECIAL`), one at each position; 0 or more."""
        values = self.values
        if self.gene_values is not None:
            values = values + self.gene_values[self.part, genes]
        return values.clamp_min(0)


@torch.no_grad()
def predict_in_parts(
    denoiser: Denoiser, tokens: Tensor, values: Tensor, part: Tensor, *, by_cell: bool = False
) -> PartPredictions:
    """Predict every position of one complete cell while its part of the positions is masked.

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
    Predictions at each position from the pass in which its part was masked.

    Raises
    ------
    ValueError
        If the denoiser returned the wrong number of rows, NaN or +inf.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion.sampler import predict_in_parts
    >>> def denoiser(tokens, values, cu_seqlens, value_mask):  # uniform over eight genes
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
    predicted = checked_values(predicted, masked)
    at = masked.nonzero().squeeze(1)
    of_rows = torch.arange(n_parts, device=tokens.device) if by_cell else cells[at]
    logits = available_logits(logits, copies, cells, n_parts, None, of_rows)
    back = (at % length).argsort()  # rows come part by part
    row = part if by_cell else back
    return PartPredictions(logits[row], predicted[at][back].to(values.dtype), of_genes[0] if of_genes else None, part)


def likeliest_cell(predicted: PartPredictions) -> Sampled:
    """Choose a gene and a value for each position of a cell that was predicted part by part, no gene twice.

    Each part is one step of :func:`sample` (:func:`likeliest_genes`). A gene of the cell can only be chosen in its own
    part, because it was visible in the others.

    Parameters
    ----------
    predicted
        Predictions for each position of the cell, from :func:`predict_in_parts`.

    Returns
    -------
    `tokens` and `values`, `(L,)`.
    """
    logits, part = predicted.logits, predicted.part
    chosen, is_chosen = torch.empty_like(part), torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    for number in range(int(part.max()) + 1):
        at = (part == number).nonzero().squeeze(1)
        rows = torch.arange(len(at), device=at.device)
        which, genes = likeliest_genes(logits[at].masked_fill(is_chosen, -torch.inf), torch.zeros_like(rows), 1.0, rows)
        chosen[at[which]] = genes
        is_chosen[genes] = True
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
    `(t_k - t_{k-1}) / t_k` of the masked positions, with `t_k = k / n_steps`. No gene occurs twice in a cell. The
    paper's benchmarks use one step, or 32 in the multi-step setting.

    `remasking="low_confidence"` reveals the most probable masked genes first (:func:`likeliest_genes`), for
    reconstruction. `"random"` reveals each masked position with the posterior probability of the process and draws its
    gene (ancestral sampling), for generation; with many more steps than masked positions, samples follow the any-order
    model whose likelihood :func:`log_likelihood` bounds.

    Parameters
    ----------
    denoiser
        Called as `denoiser(tokens, values, cu_seqlens, value_mask)`, at most `n_steps` times. Returns logits, one row
        for each `MASK` token in their order (with `by_cell` for each cell) and one column for each gene (token minus
        `N_SPECIAL`), one predicted value for each of the `T` positions, and, if the value depends on the chosen gene,
        `(B, n_genes)` values that are added to it at a `MASK`. The logits need most memory and limit the number of
        cells.
    tokens, values, cu_seqlens
        Packed batch, `MASK` at positions to predict. Not changed.
    n_steps
        K.
    remasking
        Which masked positions a step reveals: `"low_confidence"` or `"random"`.
    allowed
        bool `(n_genes,)`: genes that can be drawn, such as those of a panel. None: all.
    draw_values
        Function of the expected values of the genes revealed in a step, their cells and genes (token minus
        `N_SPECIAL`), each `(n,)`, that returns their values. None: the expected values.
    score_denominator
        float32 `(n_tokens,)`, by which each cell is sorted by decreasing `value / denominator`, ties by token, as in
        serialised cells. None: genes keep their positions.
    by_cell
        As in :func:`log_likelihood`: one row of logits for all masked genes of a cell.
    generator
        Random numbers.

    Returns
    -------
    Completed `tokens` and `values`; negative values are set to 0.

    Raises
    ------
    ValueError
        If the batch or an option is malformed, the denoiser returns NaN, or too few genes are allowed.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import sample
    >>> generator = torch.Generator().manual_seed(0)
    >>> def denoiser(tokens, values, cu_seqlens, value_mask):  # uniform over eight genes
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
        predicted = checked_values(predicted, masked).to(values.dtype)
        where = masked.nonzero().squeeze(1)
        masked_cells = cells[where]
        row = masked_cells if by_cell else torch.arange(len(masked_cells), device=masked_cells.device)
        of_rows = torch.arange(n_cells, device=masked_cells.device) if by_cell else masked_cells
        logits = available_logits(logits, tokens, cells, n_cells, allowed, of_rows)
        share = (k / n_steps - (k - 1) / n_steps) / (k / n_steps)
        if remasking == "low_confidence":
            rows, genes = likeliest_genes(logits, masked_cells, share, row)
        else:
            # the same draws set the order: among the revealed positions they are still uniform
            draws = torch.rand(len(masked_cells), generator=generator, device=generator.device, dtype=torch.float64)
            priority = draws.to(logits.device)
            rows = (priority < share).nonzero().squeeze(1)
            genes = assign_genes(logits[row[rows]], masked_cells[rows], priority[rows], generator)
        at, revealed_cells = where[rows], masked_cells[rows]
        expected = predicted[at] + (of_genes[0][revealed_cells, genes].to(values.dtype) if of_genes else 0.0)
        expected = expected.clamp_min(0)
        tokens[at] = genes + N_SPECIAL
        values[at] = expected if draw_values is None else draw_values(expected, revealed_cells, genes)
    if score_denominator is not None:
        order = order_by_score(tokens, values, cells, score_denominator)
        tokens, values = tokens[order], values[order]
    return Sampled(tokens, values)
