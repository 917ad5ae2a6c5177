"""The forward process: which genes of a cell are masked at time t."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL, TARGET_SUM


class Corrupted(NamedTuple):
    """A packed batch at time t; every field has length `T`.

    Attributes
    ----------
    tokens
        int64; `MASK` at masked identities, the gene's token elsewhere.
    values
        Log-normalised expression; 0 at masked values.
    masked
        bool; identity and value masked.
    value_mask
        bool; value masked. Contains `masked`; `value_mask & ~masked` are genes with visible identity and masked value.
        `ScDiVa.forward` takes it under the same name.
    """

    tokens: Tensor
    values: Tensor
    masked: Tensor
    value_mask: Tensor


def check_packed(tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError for tensors that are not a packed batch.

    Parameters
    ----------
    tokens, values
        Shape `(T,)`.
    cu_seqlens
        Shape `(B + 1,)`, integer.

    Raises
    ------
    ValueError
        If lengths disagree, or `cu_seqlens` does not rise from 0 to `T`.
    """
    if tokens.ndim != 1 or values.shape != tokens.shape or tokens.is_floating_point() or not values.is_floating_point():
        raise ValueError(
            "A packed batch has integer tokens and float values of one shape (T,), got "
            f"{tokens.dtype} {tuple(tokens.shape)} and {values.dtype} {tuple(values.shape)}."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError("cu_seqlens must be an integer tensor of shape (B + 1,) that starts with 0.")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens.numel() or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens ({tokens.numel()}), got {bounds[:8]}...")


def cell_of_token(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """Cell that each packed token belongs to.

    Parameters
    ----------
    cu_seqlens
        Shape `(B + 1,)`.
    n_tokens
        `T`; passed to avoid a synchronisation with the device.

    Returns
    -------
    int64 tensor of shape `(T,)` with entries `0 ... B - 1`.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import cell_of_token
    >>> cell_of_token(torch.tensor([0, 3, 5]), 5).tolist()
    [0, 0, 0, 1, 1]
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    cells = torch.arange(lengths.numel(), device=cu_seqlens.device)
    return torch.repeat_interleave(cells, lengths, output_size=n_tokens)


def stratified_times(n_cells: int, generator: torch.Generator, min_time: float = 1e-3) -> Tensor:
    """One diffusion time per cell, spread evenly over the batch.

    The unit interval is divided into `n_cells` strata; each cell has one stratum (in random order) and a uniform
    position in it. Each time is therefore uniform, as in the paper (`t ~ Unif(0, 1)`), and the times of a batch are
    spread evenly, which removes most of the variance of the loss.

    Parameters
    ----------
    n_cells
        `B`.
    generator
        Random numbers.
    min_time
        Smallest time; `t = min_time + (1 - min_time) * u`. Keeps `1 / t` bounded.

    Returns
    -------
    float32 tensor of shape `(B,)` on the generator's device, in `[min_time, 1]`.

    Raises
    ------
    ValueError
        If `n_cells < 1` or `min_time` is outside [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import stratified_times
    >>> generator = torch.Generator().manual_seed(0)
    >>> times = stratified_times(4, generator)
    >>> sorted((4 * times).int().tolist())  # one in each quarter
    [0, 1, 2, 3]
    """
    if n_cells < 1:
        raise ValueError(f"Times are drawn for at least one cell, got n_cells={n_cells}.")
    if not 0 <= min_time < 1:
        raise ValueError(f"min_time must be in [0, 1), got {min_time}.")
    device = generator.device
    strata = torch.randperm(n_cells, generator=generator, device=device)
    inside = torch.rand(n_cells, generator=generator, device=device, dtype=torch.float64)
    uniform = (strata + inside) / n_cells
    return (min_time + (1 - min_time) * uniform).float()


def mask_tokens(
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    times: Tensor,
    generator: torch.Generator,
    *,
    value_mask_rate: float = 0.0,
) -> Corrupted:
    """Draw x_t from the forward kernel q(x_t^i | x_0^i) = (1 - t) δ(x_t^i, x_0^i) + t δ(x_t^i, [MASK]).

    Equation of the paper's section "Problem Formulation and Diffusion Modeling": each gene is masked with probability
    t of its cell, independently of the others, identity and value together. Of the remaining genes, a share can have
    only its value masked, so that the value of a given gene is trained, too (not in the paper).

    Parameters
    ----------
    tokens, values, cu_seqlens
        A packed batch: `(T,)`, `(T,)`, `(B + 1,)`. Not changed.
    times
        Shape `(B,)`, each in [0, 1].
    generator
        Random numbers. A CPU generator gives the same masks on every device.
    value_mask_rate
        Probability that the value of a visible gene is masked.

    Returns
    -------
    The corrupted batch, see :class:`Corrupted`.

    Raises
    ------
    ValueError
        If the batch is not packed, contains special tokens, or a time or the rate is not a probability.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import mask_tokens
    >>> tokens, values = torch.tensor([3, 4, 5, 3, 6]), torch.tensor([2.0, 1.5, 1.0, 3.0, 0.5])
    >>> cu_seqlens = torch.tensor([0, 3, 5])  # two cells, of 3 and of 2 genes
    >>> generator = torch.Generator().manual_seed(0)
    >>> hidden = mask_tokens(tokens, values, cu_seqlens, torch.tensor([1.0, 0.0]), generator)
    >>> hidden.masked.tolist()
    [True, True, True, False, False]
    """
    check_packed(tokens, values, cu_seqlens)
    n_cells = cu_seqlens.numel() - 1
    if times.shape != (n_cells,):
        raise ValueError(f"One time per cell is needed: {n_cells} cells, times of shape {tuple(times.shape)}.")
    if not bool(((times >= 0) & (times <= 1)).all()):
        raise ValueError("Diffusion times must lie in [0, 1].")
    if not 0 <= value_mask_rate <= 1:
        raise ValueError(f"value_mask_rate must be in [0, 1], got {value_mask_rate}.")
    special = tokens < N_SPECIAL
    if bool(special.any()):
        raise ValueError(
            f"{int(special.sum())} of {tokens.numel()} tokens are not genes (first: {int(tokens[special][0])}). Only "
            f"gene tokens, {N_SPECIAL} and up, can be masked; pass the cells as serialised."
        )
    draws = torch.rand(2, tokens.numel(), generator=generator, device=generator.device).to(tokens.device)
    times_per_token = times.to(tokens.device)[cell_of_token(cu_seqlens.to(tokens.device), tokens.numel())]
    masked = draws[0] < times_per_token
    value_mask = masked | (draws[1] < value_mask_rate)
    return Corrupted(tokens.masked_fill(masked, MASK), values.masked_fill(value_mask, 0.0), masked, value_mask)


# --- binomial thinning ------------------------------------------------------------------------------------------------
class Counts(NamedTuple):
    """Counts of packed cells.

    Attributes
    ----------
    of_token
        float64 `(T,)`, whole numbers from 1 up.
    of_cell
        float64 `(B,)`, total of each cell, including genes that are not in the vocabulary.
    """

    of_token: Tensor
    of_cell: Tensor


def sum_by_cell(numbers: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum `(T,)` over each cell, float64 `(B,)`."""
    total = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=numbers.device)
    return total.index_add_(0, cell_of_token(cu_seqlens, numbers.numel()), numbers.double())


def counts_of(values: Tensor, cu_seqlens: Tensor) -> Counts:
    """Counts from log-normalised expression.

    The smallest value of a cell is taken as one count.

    Parameters
    ----------
    values
        `(T,)`, above 0.
    cu_seqlens
        `(B + 1,)`.

    Returns
    -------
    Counts of each gene and each cell.
    """
    cells = cell_of_token(cu_seqlens, values.numel())
    amount = torch.expm1(values.double())
    one = torch.full((cu_seqlens.numel() - 1,), torch.inf, dtype=torch.float64, device=values.device)
    one = one.scatter_reduce(0, cells, amount, "amin")
    return Counts((amount / one[cells]).round(), TARGET_SUM / one)


def keep_counts(counts: Counts, cu_seqlens: Tensor, share: Tensor, generator: torch.Generator) -> Counts:
    """Replace each count c by Binomial(c, share) (binomial thinning; Batson, Royer & Webber 2019).

    Parameters
    ----------
    counts
        Counts of packed cells.
    cu_seqlens
        `(B + 1,)`.
    share
        `(T,)`, of each gene of each cell, in [0, 1].
    generator
        Random numbers.

    Returns
    -------
    Thinned counts, some of them 0. Counts of genes outside the vocabulary are reduced by the same overall share.
    """
    thinned = torch.binomial(counts.of_token, share.double(), generator=generator)
    before, after = sum_by_cell(counts.of_token, cu_seqlens), sum_by_cell(thinned, cu_seqlens)
    outside_vocabulary = (counts.of_cell - before).clamp_min(0)
    return Counts(thinned, after + outside_vocabulary * after / before.clamp_min(1))


def log_normalised(counts: Counts, cu_seqlens: Tensor) -> Tensor:
    """log1p of counts per 10,000, float32 `(T,)`."""
    total = counts.of_cell.clamp_min(1)[cell_of_token(cu_seqlens, counts.of_token.numel())]
    return torch.log1p(TARGET_SUM * counts.of_token / total).float()


def chosen(numbers: Tensor, cu_seqlens: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Entries at selected positions, bool `(T,)`, of packed cells, and the new boundaries of cells."""
    lengths = sum_by_cell(selected, cu_seqlens).to(cu_seqlens.dtype)
    return numbers[selected], torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
