"""`tl.corrected_expression`: expression predicted from an integrated state, as if all cells came from one batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._checks import check_arguments, or_nearest, refuse_absent
from scdiva._docs import with_shared_docs
from scdiva._labels import read_labels
from scdiva._settings import progress_bar
from scdiva.data.genes import check_unique, column_tokens, input_options, or_in_raw
from scdiva.data.results import check_key, check_writable, write
from scdiva.models.inference import model_name, open_cells_for_model, resolve_run_config

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.models import ScDiVa

RIDGE = 0.1
"""Penalty of the regression, as a share of the mean variance of a coordinate."""
LEAST_VARIANCE = 0.1
"""Least variance around a prediction, as a share of the gene's mean variance around predictions."""
GENES = 256
"""Genes that are predicted together."""


@check_arguments
@with_shared_docs
def corrected_expression(
    adata: AnnData,
    batch_key: str,
    genes: Sequence[str] | str,
    *,
    transform_batch: Hashable | None = None,
    use_rep: str = C.OBSM_INTEGRATED,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    key_added: str = C.CORRECTED,
    copy: bool = False,
) -> AnnData | None:
    r"""Predict genes of each cell from its integrated state, as if it came from one batch.

    Ridge regression within batches. With integrated states :math:`s_i` and expression :math:`x_i`, each around the mean
    of its batch, :math:`W = (S^\top S + \lambda I)^{-1} S^\top X`. A cell is predicted at the mean of batch b,
    :math:`\bar x_b + (s_i - \bar s_b) W`, or 0 where that is negative. The squared residuals are regressed in the same
    way and give the standard deviation.

    Use it for plots and rankings. The values of different cells are not independent measurements, so tests between
    groups of cells give p-values that are far too small.

    Parameters
    ----------
    adata
        Cells × genes with integrated states, see :func:`integrate`; these may include later cells, embedded by the
        model that it returned.
    batch_key
        Column of `adata.obs` with the batch of each cell.
    genes
        Names in `adata.var_names` (with `use_raw` those of `adata.raw`), of genes that the model knows.
    transform_batch
        The batch, a value of that column, in which all cells are predicted; None: at the mean over the cells of all
        batches.
    use_rep
        Key of `adata.obsm` with the states. Batch effects that remain in the states remain in the prediction.
    model
        Model whose genes are read, as for :func:`integrate`; it is not run.
    %(reading)s
    key_added
        Key to write.
    %(copy)s

    Returns
    -------
    `None`, or the copy if `copy=True`. `adata.obsm[key_added]` is written, a table of float32 `(n_obs, len(genes))` in
    log1p of counts per ten thousand, NaN for a cell without a state; `adata.obsm[key_added + "_sd"]`, the standard
    deviation of an observed value around the predicted one, NaN where every batch that is averaged over has one cell;
    and `adata.uns["scdiva"][key_added]`, the parameters of the call.

    Raises
    ------
    KeyError
        If a column, layer, state or gene does not exist, the model does not know a gene, or no cell is of the batch.
    ValueError
        If names repeat or are not valid h5ad and zarr keys, the batch of a cell is missing, fewer than 20 cells or
        none of the batch have a state, or the matrix is not valid for :func:`embed`.
    TypeError
        If `adata` is not an AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(80, 100)
    >>> model = sd.tl.integrate(adata, "batch", steps=20)
    >>> sd.tl.corrected_expression(adata, "batch", adata.var_names[:2], transform_batch="batch 2")
    >>> adata.obsm["scdiva_corrected"].shape, adata.obsm["scdiva_corrected_sd"].shape
    ((80, 2), (80, 2))
    """
    keys = [key_added, f"{key_added}_{C.SD}"]
    check_writable(adata, copy=copy, call="tl.corrected_expression", entry=key_added, obsm=keys)
    if use_rep not in adata.obsm:
        near = or_nearest(use_rep, adata.obsm)
        raise KeyError(f"adata.obsm has no {use_rep!r}{near}: call sd.tl.integrate(adata, {batch_key!r}) first.")
    genes = [genes] if isinstance(genes, str) else list(dict.fromkeys(genes))
    for name in genes:
        check_key(name, "a gene that is to be a column of a table")
    states = np.asarray(adata.obsm[use_rep], dtype=np.float64)
    names, batch = np.unique(read_labels(adata, batch_key, where="adata", kind="batch"), return_inverse=True)
    into = [] if transform_batch is None else [str(transform_batch)]
    refuse_absent(into, list(names), f"batches are not in adata.obs[{batch_key!r}]")
    reading = input_options(adata, layer, use_raw, input, "nan")
    var = reading.var(adata)
    check_unique(var.index)

    from scdiva.data.batch import read_cells
    from scdiva.models.pretrained import load_for

    pretrained = load_for(model, "cpu")
    tokens = pd.Series(column_tokens(var, pretrained.vocabulary, reading), index=var.index)
    matched = tokens.index[tokens != C.UNKNOWN]
    hint = next((or_in_raw(adata, name, use_raw) for name in genes if name not in matched), "")
    refuse_absent(genes, matched, "genes are not in adata.var_names, or the model does not know them", hint)
    _, source, parameters = open_cells_for_model(pretrained, adata, resolve_run_config(None, "cpu", None), reading)
    cells, rows = read_cells(source, batch, all_genes=True, trains=False)
    finite = np.isfinite(states[rows]).all(axis=1)
    cells, rows = cells.subset(np.flatnonzero(finite)), rows[finite]
    around = np.isin(names, into or names)[batch[rows]]
    if not around.any():
        raise ValueError(f"no cell of batch {transform_batch!r} has a state in adata.obsm[{use_rep!r}].")
    columns = tokens[genes].to_numpy()
    expression = cells.matrix(max(cells.tokens.max(), columns.max(initial=0)) + 1)[:, columns]
    tables = {}
    for key, values in zip(keys, predict_within(states[rows], expression, batch[rows], around), strict=True):
        all_rows = np.full((adata.n_obs, len(genes)), np.nan, dtype=np.float32)
        all_rows[rows] = values
        tables[key] = pd.DataFrame(all_rows, index=adata.obs_names, columns=genes)
    notes = parameters | {
        "model": model_name(model), "batch_key": batch_key, "transform_batch": "".join(into), "use_rep": use_rep
    }  # fmt: skip
    return write(adata, "tl.corrected_expression", key_added, notes, copy=copy, obsm=tables)


def predict_within(
    states: np.ndarray, expression: sp.csr_matrix, batch: np.ndarray, around: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Regress expression, and the squared residuals, on states within batches.

    Parameters
    ----------
    states
        `(n, dim)`.
    expression
        Log-normalised, `(n, n_genes)`.
    batch
        Number of each cell's batch.
    around
        bool `(n,)`, cells at whose mean expression all are predicted.

    Returns
    -------
    Prediction and standard deviation of an observed value around it, float32 `(n, n_genes)` each.
    """
    from scdiva.data.batch import means_by

    n_batches = int(batch.max()) + 1
    within = states - means_by(states, batch, n_batches)[batch]
    gram = within.T @ within
    penalty = max(RIDGE * float(np.trace(gram)) / len(gram), 1e-12)
    # expression need not be centred, as the states are centred within batches
    slopes = np.linalg.solve(gram + penalty * np.eye(len(gram)), within.T)
    # a batch of one cell has no residual
    has_residual = around & (np.bincount(batch, minlength=n_batches) > 1)[batch]
    centred, columns = states - states[around].mean(axis=0), expression.tocsc()
    mean, spread = np.empty((2, *expression.shape), dtype=np.float32)
    for start in progress_bar(range(0, expression.shape[1], GENES), desc="predicting", unit="part of the genes"):
        block = slice(start, start + GENES)
        x = columns[:, block].toarray().astype(np.float64)
        residual = np.square(x - np.maximum(means_by(x, batch, n_batches)[batch] + within @ (slopes @ x), 0))
        variance = residual[has_residual].mean(axis=0) if has_residual.any() else np.full(x.shape[1], np.nan)
        mean[:, block] = np.maximum(x[around].mean(axis=0) + centred @ (slopes @ x), 0)
        spread[:, block] = np.sqrt(np.maximum(variance + centred @ (slopes @ residual), LEAST_VARIANCE * variance))
    return mean, spread
