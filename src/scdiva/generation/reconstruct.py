"""Reconstruction of genes and values of cells by masked diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least
from scdiva._docs import with_shared_docs
from scdiva._rng import seed_of
from scdiva._running import RunConfig, model_name, open_cells_for_model, resolve_run_config, row_numbers, run_cells
from scdiva._settings import logger
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_writable, write

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.data.cells import CellSource
    from scdiva.diffusion.sampler import Denoiser, Sampled
    from scdiva.models import ScDiVa
    from scdiva.models.queries import Context

_ENDINGS = ("", *(f"_{name}" for name in (C.RANK, C.TRUE, C.TRUE_RANK, C.MASKED)))
"""Of the layers that are written."""
_HELD_TOKENS = 65_536
"""Genes of the cells whose results wait to be taken."""
N_PARTS = 10
"""Parts of a cell's positions that are masked in turn where nothing else is masked."""


@check_arguments
@with_shared_docs
def reconstruct(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    mask_ratio: float | Sequence[float] = 0.3,
    n_steps: int | Sequence[int] = 1,
    use_ranks: bool | None = None,
    mask_free: Literal["folds", "stream"] = "folds",
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
    r"""Reconstruct genes and values of each cell by masked diffusion, and score them.

    Paper, section "Rank-Value Joint Reconstruction" and algorithm "scDiVa Inference". A share of each cell's genes is
    masked, identity and value, and predicted in one step or several. Masked and visible genes are scored separately.

    Serialised genes are ordered by decreasing score, so the rank of a masked gene is informative about its identity and
    value. In the paper masked genes keep their ranks (`use_ranks=True`): the transformer sees these as rotary
    positions, and predicted values are limited to the range that the neighbouring visible genes allow
    (:func:`scdiva.diffusion.values_at_ranks`). If the model has a state head, the information in the ranks is also
    added to its logits (:func:`scdiva.diffusion.rank_log_prior`). A model that predicts through its transformer alone
    (no state head, as in the paper, or a cell state from the transformer) was only trained in this way. A model with
    a state head also reconstructs without ranks, which is its default: its query head, if it has one, predicts masked
    genes from the visible ones and from up to 256 other cells of `adata`, otherwise its state head does, the
    transformer is not run, and the reconstructed cell is ordered by its own predicted scores.

    **Mask-free reconstruction.** The paper's table 1 uses "a mask-free strategy, reordering sampled gene-value pairs
    based on model probabilities" and does not define it further. With `mask_ratio=0` every position is predicted.
    `mask_free="folds"` is our reading: the positions are divided at random into ten parts, each of which is masked at
    its ranks and predicted from the other nine in one step. `mask_free="stream"` is the literal reading: one pass over
    the unmasked cell, identity and value read from the hidden state of each position. No loss trains visible
    positions of a masked diffusion model, so it does this poorly. A copy of the input would score 0, 1 and 1 (L-Dist,
    BLEU, Spearman) by construction; neither reading copies.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    mask_ratio
        Share of each cell's genes that is masked at random, 0 to 1; above 0 at least one gene is masked. 0: mask-free.
        Several values, here or in `n_steps`, make several reconstructions with the same masks: `[0, 0.3, 0.3]` and
        `[1, 1, 32]` are those of the paper's figure, which :func:`scdiva.pl.reconstruction` draws.
    n_steps
        Number of steps in which masked genes are revealed, most confident first; 1 if nothing is masked.
    use_ranks
        Whether masked genes keep their true ranks, as in the paper, and the transformer is run. None: True for models
        that predict through their transformer alone, False for others. If False, only the number of masked genes is
        known.
    mask_free
        How all positions are predicted with `mask_ratio=0`, see above. Ignored for other ratios.
    %(reading)s
    rng
        Seed, or a generator, of the masks; None takes `scdiva.settings.seed`. A cell's result depends on the seed and
        its row, and of a model with a query head on the cells that it reads, not on threads or batches.
    device, precision
        As for :func:`embed`.
    key_added
        Name of the result. Of several reconstructions the names end in `_1`, `_2` and so on.
    copy
        Whether to return a copy with the result instead of writing it to `adata`.

    Returns
    -------
    None, or the copy. Written are, with the columns of `adata` and float32 or int32 CSR:

    - `layers[key_added]`: log-normalised value of each gene of the reconstructed cell; `..._rank`, its rank, from 1.
    - `layers[key_added + "_true"]`, `..._true_rank`: the same of the input cell; `..._masked`, bool: its masked genes
      (none with `mask_ratio=0`).
    - `uns["scdiva"][key_added]`: the arguments, and `scores`, the means over cells of
      :func:`scdiva.metrics.reconstruction_scores`. `l_dist`, `bleu` and `value_spearman` are those of the paper's
      table 1. `masked_recall` is the share of masked genes that were recovered, `marginal_recall` the same for
      predicting the genes most frequent in the other cells. Scores that compare rank by rank are NaN without
      `use_ranks`. With `mask_ratio=0` the scores of the predicted positions are those named `visible_...`.

    Of a cell longer than the model's `max_length` only the first `max_length` genes are used. Only genes that `adata`
    measures are predicted.

    Raises
    ------
    ValueError
        If an argument is out of range, `use_ranks=False` is given for a model that predicts through its transformer
        alone, `mask_free="stream"` without ranks, a cell has no known gene, or the matrix is refused as by
        :func:`embed`.
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
    plans = _plans(mask_ratio, n_steps)
    several = np.ndim(mask_ratio) or np.ndim(n_steps)
    keys = [f"{key_added}_{number + 1}" if several else key_added for number in range(len(plans))]
    for key in keys:
        written = [f"{key}{ending}" for ending in _ENDINGS]
        check_writable(adata, copy=copy, call="tl.reconstruct", entry=key, layers=written)
    check_choices(mask_free=(mask_free, ("folds", "stream")))
    run_config = resolve_run_config(None, device, precision)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)

    from scdiva.data.genes import columns_of
    from scdiva.models.pretrained import load_for

    seed = seed_of(rng)
    loaded = load_for(model, run_config.device)
    by_rank = _by_rank(loaded, use_ranks, mask_free if any(not ratio for ratio, _ in plans) else None)
    _, source, parameters = open_cells_for_model(loaded, adata, run_config, reading, empty="error")
    parameters["model"] = model_name(model)
    measured = source.measured_tokens.astype(np.int64)
    around = None if by_rank else _around(loaded, source, measured, seed)
    columns = columns_of(source.tokens, source.scan.counts_per_gene)
    results = []
    for key, (ratio, steps) in zip(keys, plans, strict=True):
        what = _filled_in(loaded, ratio, steps, measured, seed, by_rank=by_rank, around=around, mask_free=mask_free)
        cells = _run(loaded, source, run_config._replace(what=what, batch_size=1))
        layers = _layers(cells, columns, adata.shape, [f"{key}{ending}" for ending in _ENDINGS])
        scores = _scores(cells, source.n_tokens, by_rank=by_rank)
        notes = {"mask_ratio": ratio, "n_steps": steps, "use_ranks": by_rank, "seed": str(seed), "scores": scores}
        results.append((key, layers, parameters | notes | ({} if ratio else {"mask_free": mask_free})))
        name, recall = ("masked", "masked_recall") if ratio else ("all", "visible_recall")
        logger.info("reconstructed %d cells: recall of %s genes %.3f", adata.n_obs, name, scores[recall])
    made = None
    for key, layers, notes in results:
        first = made is None
        written_to = write(made or adata, "tl.reconstruct", key, notes, copy=copy and first, layers=layers)
        made = written_to if first else made
    return made


def _plans(mask_ratio: float | Sequence[float], n_steps: int | Sequence[int]) -> list[tuple[float, int]]:
    """Pair mask ratios with numbers of steps."""
    sizes = {np.size(x) for x in (mask_ratio, n_steps) if np.ndim(x)}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"mask_ratio has {np.size(mask_ratio)} values and n_steps {np.size(n_steps)}: give one value each, or the "
            "same number."
        )
    size = max(sizes, default=1)
    ratios = list(mask_ratio) if isinstance(mask_ratio, Sequence | np.ndarray) else [mask_ratio] * size
    steps = list(n_steps) if isinstance(n_steps, Sequence | np.ndarray) else [n_steps] * size
    for ratio, number in zip(ratios, steps, strict=True):
        check_least(n_steps=(number, 1))
        if not 0 <= ratio <= 1:
            raise ValueError(f"mask_ratio must be in [0, 1], got {ratio!r}.")
        if not ratio and number > 1:
            raise ValueError(f"With mask_ratio=0 each part is predicted in one step: pass n_steps=1, not {number}.")
    return [(float(ratio), int(number)) for ratio, number in zip(ratios, steps, strict=True)]


def _by_rank(model: ScDiVa, use_ranks: bool | None, mask_free: str | None) -> bool:
    """Whether masked genes keep their ranks; raise ValueError for an order that the model was not trained on."""
    c = model.config
    if use_ranks is False and c.by_transformer:
        raise ValueError(
            f"The model (state_head={c.state_head}, anchor={c.anchor!r}) predicts through its transformer, which was "
            "trained with masked genes at their ranks only: leave out use_ranks=False."
        )
    by_rank = c.by_transformer if use_ranks is None else bool(use_ranks)
    if mask_free == "stream" and not by_rank:
        raise ValueError('mask_free="stream" reads the transformer, which runs with ranks only: pass use_ranks=True.')
    return by_rank


def _run(model: ScDiVa, source: CellSource, run_config: RunConfig) -> list[Any]:
    """Reconstruct all cells: of each its tokens, values, and what was made of them."""
    cells: list[Any] = [None] * source.n_obs
    most = model.config.max_length
    for rows, (indptr, tokens, values), results in run_cells(
        model, source, run_config, held_tokens=_HELD_TOKENS, beside=row_numbers
    ):
        for (cell,), found in results:
            true = slice(indptr[cell], min(indptr[cell + 1], indptr[cell] + most))
            cells[rows[cell]] = (tokens[true], values[true], found)
    return cells


def _around(
    model: ScDiVa, source: CellSource, measured: np.ndarray, seed: int
) -> tuple[Context, dict[int, int]] | None:
    """Read the cells that the query head reads beside the one it is asked about, and say which row is which of them.

    None without a query head, or where there are fewer than it was trained with.
    """
    from scdiva._rng import step_seed
    from scdiva.data.cells import take_cells
    from scdiva.data.memory import InMemoryCells
    from scdiva.generation.states import CONTEXT, LEAST_CONTEXT, context_of, on_cpu, states_of

    if model.query_head is None or source.n_obs <= LEAST_CONTEXT:
        return None
    rows = sorted(np.random.default_rng(step_seed(seed, 0, "around")).permutation(source.n_obs)[:CONTEXT].tolist())
    # cut off as the cells that are asked about
    ragged = take_cells(
        source.read_ranges([(row, row + 1) for row in rows]), np.arange(len(rows)), model.config.max_length
    )
    cells = InMemoryCells(*ragged, np.zeros(len(rows), dtype=np.int64), measured, 1)
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
    mask_free: str = "folds",
) -> Callable[..., Tensor]:
    """Make a read-out of one cell: its new tokens and values, and which true ranks were masked, `(L, 3)`."""
    import torch
    import torch.nn.functional as F

    from scdiva._constants import MASK, N_SPECIAL
    from scdiva._rng import step_generator
    from scdiva.diffusion import sample, values_at_ranks
    from scdiva.diffusion.sampler import Predicted, likeliest_cell, order_by_score, predict_in_parts
    from scdiva.models.denoiser import denoiser_of
    from scdiva.tokenizer.serialize import score_denominator

    denominator = torch.from_numpy(score_denominator(model.vocabulary.entropy, model.config.entropy_floor))
    genes = torch.from_numpy(measured)
    context, among = around or (None, {})

    def denoiser(network: ScDiVa, row: int, n_copies: int, given: Tensor | None) -> Denoiser:
        device = next(network.parameters()).device
        return denoiser_of(
            network,
            denominator=denominator if by_rank and network.state_head is not None else None,
            given=given,
            context=None if context is None else type(context)(*(part.to(device) for part in context)),
            own=None if context is None else torch.tensor([among.get(row, -1)] * n_copies, device=device),
            genes=genes,
            stream=by_rank,
        )

    def from_stream(network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor) -> Sampled:
        """Read genes and values of the unmasked cell from the hidden states of their own positions."""
        panel, rows = genes.to(tokens.device), torch.arange(len(tokens), device=tokens.device)
        out = network(tokens, values, bounds)
        expected = None
        if network.state_head is not None:
            assert out.read is not None
            expected = network.state_head.expected(out.read, panel)
        logits = network.logits(out, rows, genes=panel, expected=expected)
        of_position = network.values(out, torch.full_like(tokens, MASK))
        of_genes = None if expected is None else expected.values  # noqa: PD011
        return likeliest_cell(Predicted(logits, of_position, of_genes, torch.zeros_like(tokens)))

    def all_predicted(network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor, row: int) -> Tensor:
        """Predict every position of a cell."""
        panel, length = genes.to(tokens.device), len(tokens)
        if mask_free == "stream":
            made_genes, made = from_stream(network, tokens, values, bounds)
            return torch.stack([panel[made_genes - N_SPECIAL].float(), made, torch.zeros_like(made)], dim=1)
        n_parts = min(N_PARTS, length)
        drawn = torch.randperm(length, generator=step_generator(seed, row, "reconstruct"))
        part = (drawn.argsort() % n_parts).to(tokens.device)
        numbers = torch.searchsorted(panel, tokens) + N_SPECIAL
        asked = denoiser(network, row, n_parts, None)
        made_genes, made = likeliest_cell(predict_in_parts(asked, numbers, values, part, by_cell=not by_rank))
        made_tokens = panel[made_genes - N_SPECIAL]
        if by_rank:
            for number in range(n_parts):
                hidden = part == number
                mixed = torch.where(hidden, made_tokens, tokens), torch.where(hidden, made, values)
                made = torch.where(hidden, values_at_ranks(*mixed, hidden, ~hidden, bounds, denominator), made)
        else:
            order = order_by_score(made_tokens, made, torch.zeros_like(part), denominator)
            made_tokens, made = made_tokens[order], made[order]
        return torch.stack([made_tokens.float(), made, torch.zeros_like(made)], dim=1)

    def fill(network: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, row: Tensor) -> Tensor:
        most = network.config.max_length
        tokens, values, bounds = tokens[:most], values[:most], cu_seqlens.clamp_max(most)
        if not mask_ratio:
            return all_predicted(network, tokens, values, bounds, int(row))
        panel = genes.to(tokens.device)
        generator = step_generator(seed, int(row), "reconstruct")
        number = min(len(tokens), max(1, round(mask_ratio * len(tokens))))
        drawn = torch.randperm(len(tokens), generator=generator)[:number]
        masked = torch.isin(torch.arange(len(tokens)), drawn).to(tokens.device)
        # Without ranks, masked genes stand behind the visible ones: as all are [MASK], in no order.
        order = torch.arange(len(tokens), device=tokens.device) if by_rank else masked.int().argsort(stable=True)
        masked_last = masked[order]
        made_genes, filled = sample(
            denoiser(network, int(row), 1, ~masked_last),
            (torch.searchsorted(panel, tokens[order]) + N_SPECIAL).masked_fill(masked_last, MASK),
            values[order],
            bounds,
            n_steps=n_steps,
            score_denominator=None if by_rank else F.pad(denominator[genes], (N_SPECIAL, 0)),
            by_cell=not by_rank,
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
