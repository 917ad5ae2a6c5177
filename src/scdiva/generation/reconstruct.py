"""Reconstruction of masked genes and values of cells (`tl.reconstruct`)."""

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
from scdiva._settings import logger
from scdiva.data.genes import columns_of, input_options
from scdiva.data.results import check_writable, write
from scdiva.models.inference import model_name, open_cells_for_model, resolve_run_config, row_numbers, run_cells

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa
    from scdiva.models.queries import Context

ENDINGS = ("", *(f"_{name}" for name in (C.RANK, C.TRUE, C.TRUE_RANK, C.MASKED)))
"""Suffixes of the layers that are written."""
HELD_TOKENS = 65_536
"""Maximum number of tokens whose results wait to be written."""


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
    the unmasked cell, identity and value read from the hidden state of each position. Visible positions
    are not part of the loss of a masked diffusion model, so these predictions are poor. A copy of the input would score
    0, 1 and 1 (L-Dist, BLEU, Spearman) by construction; neither reading copies.

    Parameters
    ----------
    %(cells)s
    %(model)s
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
        Seed, or a generator, of the masks. None: `scdiva.settings.seed`. A cell's result depends on the seed and its
        row and, with a query head, on the context cells, not on the number of threads.
    %(device)s
    key_added
        Name of the result. With several reconstructions, the names end in `_1`, `_2` and so on.
    %(copy)s

    Returns
    -------
    None, or the copy. The results are, as CSR with the columns of `adata`, float32 or int32:

    - `layers[key_added]`: log-normalised values of the reconstructed cells; `..._rank`, ranks of their genes, from 1.
    - `layers[key_added + "_true"]`, `..._true_rank`: the same for the input cells; `..._masked`, bool: masked genes
      (none with `mask_ratio=0`).
    - `uns["scdiva"][key_added]`: the parameters, and `scores`, the means over cells of
      :func:`scdiva.metrics.reconstruction_scores`. `l_dist`, `bleu` and `value_spearman` are those of the paper's
      table 1. `masked_recall` is the share of masked genes that were recovered, `marginal_recall` the same for
      predicting the genes most frequent in the other cells. Scores that compare rank by rank are NaN without
      `use_ranks`. With `mask_ratio=0`, the scores of the predicted positions are named `visible_...`.

    Only the first genes of each cell, up to the model's `max_length`, are used. Only genes that `adata` measures are
    predicted.

    Raises
    ------
    ValueError
        If an argument is out of range, `use_ranks=False` is given for a model that predicts through its transformer
        alone, `mask_free="stream"` without ranks, a cell has no known gene, or the matrix is not valid for
        :func:`embed`.
    TypeError
        If `adata` is not an AnnData object.

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
        written = [f"{key}{ending}" for ending in ENDINGS]
        check_writable(adata, copy=copy, call="tl.reconstruct", entry=key, layers=written)
    check_choices(mask_free=(mask_free, ("folds", "stream")))
    run_config = resolve_run_config(None, device, precision)
    reading = input_options(adata, layer, use_raw, input)

    import torch

    from scdiva.generation.reconstruction import Reconstruction
    from scdiva.models.pretrained import load_for
    from scdiva.tokenizer.serialize import score_denominator

    seed = seed_of(rng)
    loaded = load_for(model, run_config.device)
    by_rank = loaded.config.by_transformer if use_ranks is None else bool(use_ranks)
    _check_order(loaded, by_rank, mask_free if any(not ratio for ratio, _ in plans) else None)
    _, source, parameters = open_cells_for_model(loaded, adata, run_config, reading, empty="error")
    parameters |= {"model": model_name(model), "use_ranks": by_rank, "seed": str(seed)}
    genes = source.measured_tokens.astype(np.int64)
    denominator = torch.from_numpy(score_denominator(loaded.vocabulary.entropy, loaded.config.entropy_floor))
    context, context_numbers = (None, {}) if by_rank else _context(loaded, source, genes, seed)
    column, max_length = columns_of(source.tokens, source.scan.counts_per_gene), loaded.config.max_length
    results = []
    for key, (ratio, steps) in zip(keys, plans, strict=True):
        read_out = Reconstruction(
            torch.from_numpy(genes), denominator, ratio, steps, by_rank, mask_free, seed, context, context_numbers
        )
        cells: list[Any] = [None] * source.n_obs
        for rows, (indptr, tokens, values), batches in run_cells(
            loaded,
            source,
            run_config._replace(what=read_out, batch_size=1),
            held_tokens=HELD_TOKENS,
            beside=row_numbers,
        ):
            for (cell,), output in batches:
                true = slice(indptr[cell], min(indptr[cell + 1], indptr[cell] + max_length))
                cells[rows[cell]] = (tokens[true], values[true], output)
        scores = _scores(cells, source.n_tokens, by_rank)
        notes = {"mask_ratio": ratio, "n_steps": steps, "scores": scores} | ({} if ratio else {"mask_free": mask_free})
        results.append((key, _layers(cells, column, adata.shape, key), parameters | notes))
        name, recall = ("masked", "masked_recall") if ratio else ("all", "visible_recall")
        logger.info("reconstructed %d cells: recall of %s genes %.3f", adata.n_obs, name, scores[recall])
    result = adata.copy() if copy else adata
    for key, layers, notes in results:
        write(result, "tl.reconstruct", key, notes, layers=layers)
    return result if copy else None


def _plans(mask_ratio: float | Sequence[float], n_steps: int | Sequence[int]) -> list[tuple[float, int]]:
    """Pairs of mask ratio and number of steps."""
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


def _check_order(model: ScDiVa, by_rank: bool, mask_free: str | None) -> None:
    """Raise ValueError for an order of genes on which the model was not trained."""
    c = model.config
    if not by_rank and c.by_transformer:
        raise ValueError(
            f"The model (state_head={c.state_head}, anchor={c.anchor!r}) predicts through its transformer, which was "
            "trained with masked genes at their ranks only: leave out use_ranks=False."
        )
    if mask_free == "stream" and not by_rank:
        raise ValueError('mask_free="stream" reads the transformer, which runs with ranks only: pass use_ranks=True.')


def _context(model: ScDiVa, source: CellSource, genes: np.ndarray, seed: int) -> tuple[Context | None, dict[int, int]]:
    """Context cells of the query head, and the number of each among them by its row.

    None without a query head, or if there are fewer cells than it was trained with.
    """
    from scdiva._rng import step_seed
    from scdiva.data.batch import InMemoryCells
    from scdiva.data.cells import take_cells
    from scdiva.generation.state_head import CONTEXT, MIN_CONTEXT, context_of, on_cpu, states_of

    if model.query_head is None or source.n_obs <= MIN_CONTEXT:
        return None, {}
    rows = sorted(np.random.default_rng(step_seed(seed, 0, "around")).permutation(source.n_obs)[:CONTEXT].tolist())
    ragged = source.read_ranges([(row, row + 1) for row in rows])
    ragged = take_cells(ragged, np.arange(len(rows)), model.config.max_length)
    cells = InMemoryCells(*ragged, np.zeros(len(rows), dtype=np.int64), genes, 1)
    with on_cpu(model):
        context = context_of(model, cells, states_of(model, cells), genes)
    return context, {row: number for number, row in enumerate(rows)}


def _layers(cells: list[Any], column: np.ndarray, shape: tuple[int, int], key: str) -> dict[str, sp.csr_matrix]:
    """Layers with the values and ranks of the reconstructed and of the input cells, and their masked genes."""
    lengths = np.array([len(tokens) for tokens, _, _ in cells])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    tokens, values, output = (np.concatenate(part) for part in zip(*cells, strict=True))
    rank = (np.arange(len(tokens)) - np.repeat(indptr[:-1], lengths) + 1).astype(np.int32)
    true, predicted = column[tokens], column[output[:, 0].astype(np.int64)]

    def matrix(data: np.ndarray, columns: np.ndarray) -> sp.csr_matrix:
        # a copy, because sorting works in place and several matrices share their columns
        laid = sp.csr_matrix((data, columns, indptr), shape=shape, copy=True)
        laid.sort_indices()
        return laid

    masked = matrix(output[:, 2] > 0, true)
    masked.eliminate_zeros()
    layers = (
        matrix(output[:, 1].astype(np.float32), predicted),
        matrix(rank, predicted),
        matrix(values.astype(np.float32), true),
        matrix(rank, true),
        masked,
    )
    return {f"{key}{ending}": layer for ending, layer in zip(ENDINGS, layers, strict=True)}


def _scores(cells: list[Any], n_tokens: int, by_rank: bool) -> dict[str, float]:
    """Mean scores over cells; NaN if no cell has one."""
    import pandas as pd

    from scdiva.metrics import marginal_recall, reconstruction_scores

    n_expressing = np.bincount(np.concatenate([tokens for tokens, _, _ in cells]), minlength=n_tokens)
    rows = []
    for tokens, values, output in cells:
        masked, predicted_tokens = output[:, 2] > 0, output[:, 0].astype(np.int64)
        row = reconstruction_scores(tokens, predicted_tokens, values, output[:, 1], masked)._asdict()
        if not by_rank:
            row.update({name: np.nan for name in row if name.startswith(("masked_", "visible_"))})
            for name, part in (("masked_recall", masked), ("visible_recall", ~masked)):
                row[name] = float(np.isin(tokens[part], predicted_tokens).mean()) if part.any() else np.nan
        frequency = n_expressing - np.bincount(tokens, minlength=n_tokens)
        row["marginal_recall"] = marginal_recall(tokens[masked], tokens[~masked], frequency) if masked.any() else np.nan
        rows.append(row)
    return dict(pd.DataFrame(rows, dtype=float).mean().to_dict())
