"""Mask genes of cells and have a model fill them in."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._checks import check_least
from scdiva._docs import with_shared_docs
from scdiva._rng import seed_of
from scdiva._running import how_to_run, open_for, row_numbers, run_cells
from scdiva._settings import logger
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_writable, write

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa
    from scdiva.nn.queries import Context

_ENDINGS = ("", *(f"_{name}" for name in (C.RANK, C.TRUE, C.TRUE_RANK, C.MASKED)))
"""Of the layers that are written."""
_HELD_TOKENS = 65_536
"""Genes of the cells whose results wait to be taken."""


@with_shared_docs
def reconstruct(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    mask_ratio: float = 0.3,
    n_steps: int = 1,
    use_ranks: bool = False,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str = C.RECONSTRUCTED,
    copy: bool = False,
) -> AnnData | None:
    r"""Mask a share of each cell's genes, identity and value, and fill them in again.

    Paper, section "Rank-Value Joint Reconstruction" and algorithm "scDiVa Inference": `mask_ratio=0` is its mask-free
    setting, in which a masked-diffusion model copies what it is shown, so that every score is perfect by construction;
    one step and 32 steps from a mask ratio of .3 are the others. Masked genes and visible ones are scored apart.

    A model with a query head (:class:`scdiva.nn.QueryHead`) predicts masked genes from what the cell shows and from up
    to 256 other cells of `adata`, else its state head does; the reconstructed cell is ranked by its own values. The
    transformer is not run: without the ranks of masked genes its error in their values is larger than that of gene
    means. It is where a model has no state head.

    A cell's genes are ranked by falling score, so the true rank of a masked gene says much of its identity and value.
    In the paper masked genes keep their ranks, and with `use_ranks=True` so they do here: the transformer sees them by
    its rotary positions, what follows from the ranking alone is added to its logits
    (:func:`scdiva.diffusion.rank_log_prior`), and values are kept between those that a rank allows. Such scores are of
    a task that no data set poses.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    mask_ratio
        Share of each cell's genes that is masked, 0 to 1; drawn at random, at least one where above 0.
    n_steps
        Steps in which masked genes are revealed, the surest first. Each is the likeliest.
    use_ranks
        Whether masked genes keep their true ranks, as in the paper, and the transformer is run; without, all that is
        known of them is how many there are.
    %(reading)s
    rng
        Seed, or a generator, of what is masked and drawn; None takes `scdiva.settings.seed`. A cell's result depends on
        the seed and its row, and of a model with a query head on the cells read beside it, not on threads or batches.
    device, precision
        As for :func:`embed`.
    key_added
        Name of what is written.
    copy
        Whether to return a copy with the result instead of writing it to `adata`.

    Returns
    -------
    None, or the copy. Written are, with the columns of `adata` and float32 or int32 CSR:

    - `layers[key_added]`: log-normalised value of each gene of the reconstructed cell; `..._rank`, its rank, from 1.
    - `layers[key_added + "_true"]`, `..._true_rank`: the same of the cell as it was; `..._masked`, bool: its genes that
      were masked.
    - `uns["scdiva"][key_added]`: the arguments, and `scores`, the means over cells of
      :func:`scdiva.metrics.reconstruction_scores`, where `masked_recall` is the share of masked genes found, beside
      `marginal_recall`, the same for the genes most frequent in the other cells. Scores that compare rank by rank are
      NaN without `use_ranks`, as ranks of the two cells then do not answer each other.

    Of a cell longer than the model's `max_length` the first so many genes are taken. Only genes that `adata` measures
    are filled in.

    Raises
    ------
    ValueError
        If an argument is out of range, ranks are asked of a model without a state head, a cell has no known gene, or
        the matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata, mask_ratio=0.3)
    >>> adata.layers["scdiva_reconstructed"].shape
    (12, 60)
    >>> 0 <= adata.uns["scdiva"]["scdiva_reconstructed"]["scores"]["masked_recall"] <= 1
    True
    """
    written = [f"{key_added}{ending}" for ending in _ENDINGS]
    check_writable(adata, copy=copy, call="tl.reconstruct", entry=key_added, layers=written)
    check_least(n_steps=(n_steps, 1))
    if not 0 <= mask_ratio <= 1:
        raise ValueError(f"mask_ratio must be in [0, 1], got {mask_ratio!r}.")
    running = how_to_run(None, device, precision)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)

    from scdiva.data.genes import columns_of

    seed = seed_of(rng)
    loaded, source, parameters = open_for(model, adata, running, reading, empty="error")
    if use_ranks and loaded.state_head is None:
        raise ValueError("This model has no state head, so that ranks can't be used: leave out use_ranks=True.")
    measured = source.measured_tokens.astype(np.int64)
    around = None if use_ranks else _around(loaded, source, measured, seed)
    what = _filled_in(loaded, float(mask_ratio), n_steps, measured, seed, by_rank=use_ranks, around=around)
    running = running._replace(what=what, batch_size=1)

    cells: list[Any] = [None] * adata.n_obs
    most = loaded.config.max_length
    for rows, (indptr, tokens, values), results in run_cells(
        loaded, source, running, held_tokens=_HELD_TOKENS, beside=row_numbers
    ):
        for (cell,), found in results:
            true = slice(indptr[cell], min(indptr[cell + 1], indptr[cell] + most))
            cells[rows[cell]] = (tokens[true], values[true], found)
    layers = _layers(cells, columns_of(source.tokens, source.scan.counts_per_gene), adata.shape, written)
    scores = _scores(cells, source.n_tokens, by_rank=use_ranks)
    parameters |= {
        "mask_ratio": float(mask_ratio),
        "n_steps": int(n_steps),
        "use_ranks": bool(use_ranks),
        "seed": str(seed),
        "scores": scores,
    }
    logger.info("reconstructed %d cells: recall of masked genes %.3f", adata.n_obs, scores["masked_recall"])
    return write(adata, "tl.reconstruct", key_added, parameters, copy=copy, layers=layers)


def _around(
    model: ScDiVa, source: CellSource, measured: np.ndarray, seed: int
) -> tuple[Context, dict[int, int]] | None:
    """Read the cells that the query head reads beside the one it is asked about, and say which row is which of them.

    None without a query head, or where there are fewer than it was trained with.
    """
    from scdiva._rng import step_seed
    from scdiva.data.corpus import take_cells
    from scdiva.populations.states import CONTEXT, LEAST_CONTEXT, context_of, on_cpu, states_of
    from scdiva.train.adaptation import AdaptationCells

    if model.query_head is None or source.n_obs <= LEAST_CONTEXT:
        return None
    rows = sorted(np.random.default_rng(step_seed(seed, 0, "around")).permutation(source.n_obs)[:CONTEXT].tolist())
    # cut off as the cells that are asked about
    ragged = take_cells(
        source.read_ranges([(row, row + 1) for row in rows]), np.arange(len(rows)), model.config.max_length
    )
    cells = AdaptationCells(*ragged, np.zeros(len(rows), dtype=np.int64), measured, 1)
    with on_cpu(model):
        context = context_of(model, cells, states_of(model, cells), measured)
    return context, {row: number for number, row in enumerate(rows)}


def _filled_in(
    model: ScDiVa,
    mask_ratio: float,
    n_steps: int,
    measured: np.ndarray,
    seed: int,
    *,
    by_rank: bool,
    around: tuple[Context, dict[int, int]] | None,
) -> Callable[..., Tensor]:
    """Make a read-out of one cell: its new tokens and values, and which true ranks were masked, `(L, 3)`."""
    import torch
    import torch.nn.functional as F

    from scdiva._constants import MASK, N_SPECIAL
    from scdiva._rng import step_generator
    from scdiva.diffusion import sample, values_at_ranks
    from scdiva.models.denoiser import denoiser_of
    from scdiva.tokenizer.serialize import score_denominator

    denominator = torch.from_numpy(score_denominator(model.vocabulary.entropy, model.config.entropy_floor))
    genes = torch.from_numpy(measured)
    context, among = around or (None, {})

    def fill(network: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, row: Tensor) -> Tensor:
        most = network.config.max_length
        tokens, values, bounds = tokens[:most], values[:most], cu_seqlens.clamp_max(most)
        panel = genes.to(tokens.device)
        generator = step_generator(seed, int(row), "reconstruct")
        number = min(len(tokens), max(1, round(mask_ratio * len(tokens)))) if mask_ratio else 0
        drawn = torch.randperm(len(tokens), generator=generator)[:number]
        masked = torch.isin(torch.arange(len(tokens)), drawn).to(tokens.device)
        # Without ranks, masked genes stand behind the visible ones: as all are [MASK], in no order.
        order = torch.arange(len(tokens), device=tokens.device) if by_rank else masked.int().argsort(stable=True)
        masked_last = masked[order]
        own = None if context is None else torch.tensor([among.get(int(row), -1)], device=tokens.device)
        stream = by_rank or model.state_head is None or model.config.anchor == "learned"
        denoiser = denoiser_of(
            network,
            denominator=denominator if by_rank else None,
            given=~masked_last,
            context=None if context is None else type(context)(*(part.to(tokens.device) for part in context)),
            own=own,
            genes=genes,
            stream=stream,
        )
        made_genes, filled = sample(
            denoiser,
            (torch.searchsorted(panel, tokens[order]) + N_SPECIAL).masked_fill(masked_last, MASK),
            values[order],
            bounds,
            n_steps=n_steps,
            score_denominator=None if by_rank else F.pad(denominator[genes], (N_SPECIAL, 0)),
            by_cell=not stream,
            generator=generator,
        )
        made_tokens = panel[made_genes - N_SPECIAL]
        if by_rank:
            filled = values_at_ranks(made_tokens, filled, masked, ~masked, bounds, denominator)
        return torch.stack([made_tokens.float(), filled, masked.float()], dim=1)

    return fill


def _layers(cells: list[Any], column: np.ndarray, shape: tuple[int, int], names: list[str]) -> dict[str, sp.csr_matrix]:
    """Lay ranks out by gene, as the layers of these names."""
    lengths = np.array([len(tokens) for tokens, _, _ in cells])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    tokens, values, found = (np.concatenate(part) for part in zip(*cells, strict=True))
    rank = (np.arange(len(tokens)) - np.repeat(indptr[:-1], lengths) + 1).astype(np.int32)
    true, made = column[tokens], column[found[:, 0].astype(np.int64)]

    def matrix(data: np.ndarray, columns: np.ndarray) -> sp.csr_matrix:
        # a copy: sorting works in place, and columns and bounds belong to several matrices
        laid = sp.csr_matrix((data, columns, indptr), shape=shape, copy=True)
        laid.sort_indices()
        return laid

    masked = matrix(found[:, 2] > 0, true)
    masked.eliminate_zeros()
    predicted, observed = matrix(found[:, 1].astype(np.float32), made), matrix(values.astype(np.float32), true)
    laid = (predicted, matrix(rank, made), observed, matrix(rank, true), masked)
    return dict(zip(names, laid, strict=True))


def _scores(cells: list[Any], n_tokens: int, *, by_rank: bool) -> dict[str, float]:
    """Means over cells of the scores; NaN where no cell has one."""
    import pandas as pd

    from scdiva.metrics import marginal_recall, reconstruction_scores

    often = np.bincount(np.concatenate([tokens for tokens, _, _ in cells]), minlength=n_tokens)
    rows = []
    for tokens, values, found in cells:
        masked = found[:, 2] > 0
        made = found[:, 0].astype(np.int64)
        row = reconstruction_scores(tokens, made, values, found[:, 1], masked)._asdict()
        if not by_rank:
            row.update({name: np.nan for name in row if name.startswith(("masked_", "visible_"))})
            row["visible_recall"] = float(np.isin(tokens[~masked], made).mean()) if not masked.all() else np.nan
            if masked.any():
                row["masked_recall"] = float(np.isin(tokens[masked], made).mean())
        elsewhere = often - np.bincount(tokens, minlength=n_tokens)
        row["marginal_recall"] = marginal_recall(tokens[masked], tokens[~masked], elsewhere) if masked.any() else np.nan
        rows.append(row)
    return dict(pd.DataFrame(rows, dtype=float).mean().to_dict())
