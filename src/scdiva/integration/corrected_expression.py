"""`tl.corrected_expression`: genes predicted from an integrated state, as if each cell came from one batch."""

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
from scdiva._running import open_cells_for_model, resolve_run_config
from scdiva._settings import progress_bar
from scdiva.data.genes import check_unique, column_tokens, or_in_raw
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_key, check_writable, write

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.models import ScDiVa

RIDGE = 0.1
"""Penalty of the regression, as a share of the mean variance of a coordinate."""
LEAST_VARIANCE = 0.1
"""Least variance around a prediction, as a share of the gene's mean variance around predictions."""
GENES = 256
"""Genes that are predicted together."""
LACK = "genes are not in adata.var_names, or the model does not know them"


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
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    key_added: str = C.CORRECTED,
) -> None:
    r"""Predict genes of each cell from its integrated state, as if it came from one batch.

    Ridge regression within batches. With integrated states :math:`s_i` and expression :math:`x_i`, each around the mean
    of its batch, :math:`W = (S^\top S + \lambda I)^{-1} S^\top X`. A cell is predicted at the mean of batch b,
    :math:`\bar x_b + (s_i - \bar s_b) W`, or 0 where that is below: what a cell of its state would show there. The
    squares of what the prediction misses are regressed in the same way, and give its standard deviation.

    Draw and rank with it. It is a regression, its values are no independent measurements, and a test between groups of
    cells would be far too sure.

    Parameters
    ----------
    adata
        Cells × genes with integrated states, see :func:`integrate`; later cells, embedded by the model that it
        returned, may stand among them.
    batch_key
        Column of `adata.obs` with the batch of each cell.
    genes
        Names in `adata.var_names` (with `use_raw` those of `adata.raw`), of genes that the model knows.
    transform_batch
        The batch, a value of that column, that all cells are predicted in; None predicts them at the mean over all
        cells of every batch.
    use_rep
        Key of `adata.obsm` with the states. Of states that still tell batches apart, so does what is predicted.
    model
        Whose genes are read, as for :func:`integrate`; it is not run.
    %(reading)s
    key_added
        Key to write.

    Returns
    -------
    None. `adata.obsm[key_added]` is written, a table of float32 `(n_obs, len(genes))` in log1p of counts per ten
    thousand, NaN for a cell without a state; `adata.obsm[key_added + "_sd"]`, the standard deviation of an observed
    value around the predicted one, NaN where every batch that is averaged over has one cell; and
    `adata.uns["scdiva"][key_added]`, what was asked for.

    Raises
    ------
    KeyError
        If a column, layer, state or gene does not exist, the model does not know a gene, or no cell is of the batch.
    ValueError
        If names repeat or can't be columns of a file, the batch of a cell is missing, fewer than 20 cells or
        none of the batch have a state, or the matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.

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
    check_writable(adata, call="tl.corrected_expression", entry=key_added, obsm=keys)
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
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, "nan")
    var = reading.var(adata)
    check_unique(var.index)

    from scdiva.data.memory import read_cells
    from scdiva.models.pretrained import load_for

    tokens = pd.Series(column_tokens(var, load_for(model, "cpu").vocabulary, reading), index=var.index)
    known = tokens.index[tokens != C.UNKNOWN]
    hint = next((or_in_raw(adata, name, use_raw) for name in genes if name not in known), "")
    refuse_absent(genes, known, LACK, hint)
    _, source, parameters = open_cells_for_model(model, adata, resolve_run_config(None, "cpu", None), reading)
    cells, rows = read_cells(source, batch, whole=True, trains=False)
    usable = np.isfinite(states[rows]).all(axis=1)
    cells, rows = cells.subset(np.flatnonzero(usable)), rows[usable]
    around = np.isin(names, into or names)[batch[rows]]
    if not around.any():
        raise ValueError(f"no cell of batch {transform_batch!r} has a state in adata.obsm[{use_rep!r}].")
    asked = tokens[genes].to_numpy()
    measured = cells.matrix(max(cells.tokens.max(), asked.max(initial=0)) + 1)[:, asked]
    found = predict_within(states[rows], measured, batch[rows], around)
    tables = {}
    for key, values in zip(keys, found, strict=True):
        of_all = np.full((adata.n_obs, len(genes)), np.nan, dtype=np.float32)
        of_all[rows] = values
        tables[key] = pd.DataFrame(of_all, index=adata.obs_names, columns=genes)
    notes = parameters | {"batch_key": batch_key, "transform_batch": "".join(into), "use_rep": use_rep}
    write(adata, "tl.corrected_expression", key_added, notes, obsm=tables)


def predict_within(
    states: np.ndarray, measured: sp.csr_matrix, batch: np.ndarray, around: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Regress expression, and the squares of what that misses, on states within batches.

    Parameters
    ----------
    states
        `(n, dim)`.
    measured
        Expression `(n, n_genes)`.
    batch
        Number of each cell's batch.
    around
        bool `(n,)`, the cells at whose mean all are predicted.

    Returns
    -------
    Prediction and standard deviation of an observed value around it, float32 `(n, n_genes)` each.
    """
    from scdiva.data.memory import means_by

    n_batches = int(batch.max()) + 1
    within = states - means_by(states, batch, n_batches)[batch]
    gram = within.T @ within
    penalty = max(RIDGE * float(np.trace(gram)) / len(gram), 1e-12)
    # states are centred within batches, which centres what they are multiplied with
    slopes = np.linalg.solve(gram + penalty * np.eye(len(gram)), within.T)
    # the mean of a batch of one cell is that cell: what it misses is not known
    spread_known = around & (np.bincount(batch, minlength=n_batches) > 1)[batch]
    beyond, columns = states - states[around].mean(axis=0), measured.tocsc()
    mean, spread = np.empty((2, *measured.shape), dtype=np.float32)
    for start in progress_bar(range(0, measured.shape[1], GENES), desc="predicting", unit="part of the genes"):
        some = slice(start, start + GENES)
        x = columns[:, some].toarray().astype(np.float64)
        missed = np.square(x - np.maximum(means_by(x, batch, n_batches)[batch] + within @ (slopes @ x), 0))
        of_gene = missed[spread_known].mean(axis=0) if spread_known.any() else np.full(x.shape[1], np.nan)
        mean[:, some] = np.maximum(x[around].mean(axis=0) + beyond @ (slopes @ x), 0)
        spread[:, some] = np.sqrt(np.maximum(of_gene + beyond @ (slopes @ missed), LEAST_VARIANCE * of_gene))
    return mean, spread
