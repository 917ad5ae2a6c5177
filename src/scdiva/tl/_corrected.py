"""Corrected expression: genes predicted from integrated states, without batch effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from scdiva._constants import UNKNOWN
from scdiva.data.genes import column_tokens

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.data.reading import Reading
    from scdiva.tokenizer import Vocabulary
    from scdiva.train.adaptation import AdaptationCells

RIDGE = 0.01
"""Penalty of the regression, as a share of the mean variance of a coordinate."""


def gene_columns(
    adata: AnnData, corrected: bool | Sequence[str], vocabulary: Vocabulary, reading: Reading
) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the columns of adata for which corrected expression is asked, and their tokens.

    Parameters
    ----------
    adata
        Whose `var` counts.
    corrected
        True for all genes that the vocabulary holds, or names of `adata.var_names`; columns of one name count as one.
    vocabulary
        Of the model.
    reading
        What is read.

    Returns
    -------
    Column numbers and tokens, of the same length; None if nothing is asked for.

    Raises
    ------
    KeyError
        If a gene is not there, or the model does not know it.
    ValueError
        If the list of names is empty.
    """
    if corrected is False:
        return None
    tokens = column_tokens(adata.var, vocabulary, reading)
    if corrected is True:
        columns = np.flatnonzero(tokens != UNKNOWN)
        return columns, tokens[columns]
    asked = [corrected] if isinstance(corrected, str) else list(corrected)
    if not asked:
        raise ValueError(
            "corrected names no gene; corrected=False writes none, corrected=True all that the model knows."
        )
    present = set(adata.var_names)
    if absent := [name for name in asked if name not in present]:
        raise KeyError(f"{len(absent)} of {len(asked)} genes are not in adata.var_names, the first is {absent[0]!r}.")
    columns = np.flatnonzero(adata.var_names.isin(asked))
    if foreign := list(adata.var_names[columns[tokens[columns] == UNKNOWN]]):
        raise KeyError(
            f"The model does not know {len(foreign)} of {len(asked)} genes, the first is {foreign[0]!r}; "
            "corrected=True takes all that it knows."
        )
    return columns, tokens[columns]


def corrected_expression(
    states: np.ndarray, cells: AdaptationCells, rows: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, float]:
    r"""Predict genes from integrated states, at the mean over all cells of every batch.

    Ridge regression within batches: with states S and expression X, each around the mean of its batch,
    :math:`W = (S^\top S + \lambda I)^{-1} S^\top X`; the prediction is :math:`\bar X + (S - \bar S) W`, 0 where that is
    below.

    Parameters
    ----------
    states
        `(n_obs, dim)`; rows of cells without a known gene are NaN, and so is their prediction.
    cells, rows
        The cells, and the row of `states` that each has.
    tokens
        Genes, `(n,)`.

    Returns
    -------
    float32 `(n_obs, n)`, and the share of the cells' values of these genes that were measured as 0.
    """
    n_tokens = int(max(cells.tokens.max(initial=0), tokens.max(initial=0))) + 1
    matrix = sp.csr_matrix((cells.values.copy(), cells.tokens.copy(), cells.indptr), shape=(cells.n_cells, n_tokens))
    genes, column = np.unique(tokens, return_inverse=True)
    measured = matrix.tocsc()[:, genes]
    fitted = states[rows].astype(np.float64)
    sums = np.zeros((cells.n_batches, fitted.shape[1]))
    np.add.at(sums, cells.batch, fitted)
    size = np.bincount(cells.batch, minlength=cells.n_batches)
    within = fitted - (sums / np.maximum(size, 1)[:, None])[cells.batch]
    gram = within.T @ within
    penalty = max(RIDGE * float(np.trace(gram)) / len(gram), 1e-12)
    # states are centred within batches, which centres what they are multiplied with
    weight = np.linalg.solve(gram + penalty * np.eye(len(gram)), (measured.T @ within).T)
    mean = np.asarray(measured.mean(axis=0)).ravel()
    predicted = (mean + (states - fitted.mean(axis=0)) @ weight).astype(np.float32)
    zeros = 1 - measured[:, column].nnz / max(1, cells.n_cells * len(tokens))
    return np.maximum(predicted, 0)[:, column], float(zeros)
