"""How well masked genes are predicted: by share of masked genes, and by study."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.diffusion import Corrupted, cell_of_token

MASK_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of hidden genes at which validation looks; each cell has one of them, always the same."""
MOST_SCORED = 32
"""Hidden genes of a cell whose identity is scored, in expectation: the others tell much the same, and each is dear."""
TABLE = "validation.csv"
"""Name of the table, beside `metrics.csv`."""
_ROWS = 1024
"""Logits held at once."""


class HiddenScores(NamedTuple):
    """A group of cells' scores.

    Attributes
    ----------
    n_cells
        Cells.
    perplexity
        exp of the mean cross-entropy of hidden genes: among how many genes the network hesitates. All genes
        equally likely give the number of genes.
    accuracy
        Share of hidden genes that the network takes for the likeliest.
    value_error
        Root of the mean squared error of hidden values, in log-normalised units.
    """

    n_cells: int
    perplexity: float
    accuracy: float
    value_error: float


def ratios_of(first: int, n_cells: int) -> Tensor:
    """Share of hidden genes of each cell of a batch: they take turns, so that each study has all.

    Parameters
    ----------
    first
        Number of the batch's first cell among the validation cells.
    n_cells
        Cells of the batch.

    Returns
    -------
    float32 `(n_cells,)`.
    """
    turn = torch.arange(first, first + n_cells) % len(MASK_RATIOS)
    return torch.tensor(MASK_RATIOS)[turn]


def score_cells(
    logits_of: Callable[[Tensor], Tensor],
    predicted_values: Tensor,
    batch: CellBatch,
    corrupted: Corrupted,
    scored: Tensor,
) -> np.ndarray:
    """Sum up what the network says of each cell's hidden genes.

    Parameters
    ----------
    logits_of
        Gives the logits `(N, n_genes)` of positions, int64 `(N,)`.
    predicted_values
        `(T,)`.
    batch
        The complete cells.
    corrupted
        What the network saw of them.
    scored
        bool `(T,)`, positions whose identity is looked at, where it is hidden.

    Returns
    -------
    float64 `(n_cells, 5)`: scored genes, their cross-entropy in nats, how many of them were the likeliest; hidden
    values, and their squared error.
    """
    cells = cell_of_token(batch.cu_seqlens, batch.tokens.numel())
    asked = corrupted.masked & scored
    rows = asked.nonzero().squeeze(1)
    nll, right = [], []
    for some in rows.split(_ROWS):
        genes = batch.tokens[some] - N_SPECIAL
        logits = logits_of(some).float()
        nll.append(torch.nn.functional.cross_entropy(logits, genes, reduction="none"))
        right.append(logits.argmax(1) == genes)
    each = torch.zeros(batch.n_cells, 5, dtype=torch.float64)
    if nll:
        of_scored = [torch.ones(len(rows)), torch.cat(nll).cpu(), torch.cat(right).cpu()]
        each[:, :3].index_add_(0, cells[rows].cpu(), torch.stack([column.double() for column in of_scored], 1))
    error = (predicted_values.float() - batch.values.float()).square()[corrupted.masked].cpu().double()
    each[:, 3:].index_add_(0, cells[corrupted.masked].cpu(), torch.stack([torch.ones_like(error), error], 1))
    return each.numpy()


def scores_of(each: np.ndarray) -> HiddenScores:
    """Join the sums of some cells.

    Parameters
    ----------
    each
        `(n_cells, 5)`, from :func:`score_cells`.

    Returns
    -------
    Their scores; NaN where nothing was hidden.
    """
    n, nll, right, n_values, error = each.sum(axis=0)
    mean, accuracy = (nll / n, right / n) if n else (math.nan, math.nan)
    root = math.sqrt(error / n_values) if n_values else math.nan
    return HiddenScores(len(each), math.exp(min(mean, 700.0)), accuracy, root)


def by_ratio(each: np.ndarray) -> list[tuple[float, HiddenScores]]:
    """Score the cells of each share of hidden genes.

    Parameters
    ----------
    each
        `(n_cells, 5)` of all validation cells in order, from :func:`score_cells`.

    Returns
    -------
    The shares, ascending, that some cell has, with the scores.
    """
    n = len(MASK_RATIOS)
    return [(ratio, scores_of(each[i::n])) for i, ratio in enumerate(MASK_RATIOS) if len(each[i::n])]


def write_table(file: Path, step: int, each: np.ndarray, names: Sequence[str], study: np.ndarray | None) -> None:
    """Add the scores of one validation to a table, as lines of step, study, mask_ratio and scores.

    Parameters
    ----------
    file
        A CSV file; made if need be.
    step
        Optimiser step.
    each
        `(n_cells, 5)` of all validation cells in order, from :func:`score_cells`.
    names, study
        Names of the studies, and the number of each cell's, int `(n_cells,)`; None if that is not known.
    """
    lines = [(step, "", "", *scores_of(each)), *((step, "", ratio, *scores) for ratio, scores in by_ratio(each))]
    if study is not None:
        lines += [(step, name, "", *scores_of(each[study == i])) for i, name in enumerate(names)]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = not file.exists()
    with file.open("a", newline="") as out:
        writer = csv.writer(out)
        if new:
            writer.writerow(["step", "study", "mask_ratio", *HiddenScores._fields])
        writer.writerows(lines)
