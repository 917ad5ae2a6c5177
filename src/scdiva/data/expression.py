"""An expression matrix whole, log-normalised, with the columns that the user has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from scdiva._constants import TARGET_SUM
from scdiva._validate import Input, scan
from scdiva.data.blocks import open_matrix, row_blocks

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


def log_normalised(
    adata: AnnData, *, layer: str | None = None, use_raw: bool = False, input: Input = "auto"
) -> tuple[sp.csr_matrix, pd.DataFrame]:
    """Read a matrix whole, as log1p of counts per ten thousand; genes that no vocabulary holds are kept.

    Parameters
    ----------
    adata
        Cells × genes.
    layer, use_raw, input
        What to read, as for :func:`scdiva.tl.embed`. What is log-normalised already is taken as it is.

    Returns
    -------
    float64 CSR `(n_obs, n_vars)`, and `var` of its columns. A cell without counts is a row of zeros.

    Raises
    ------
    KeyError, ValueError
        If there is no such layer, or the matrix is refused as by :func:`scdiva.tl.embed`.
    """
    with open_matrix(adata, layer=layer, use_raw=use_raw) as opened:
        blocks = list(row_blocks(opened.matrix))
        found = scan(
            blocks,
            opened.shape[1],
            input=input,
            obs_names=opened.obs_names,
            var_names=opened.var.index,
            where=opened.where,
        )
        var = opened.var
    values = sp.vstack([block for _, block in blocks], format="csr").astype(np.float64)
    if found.kind == "counts":
        total = np.asarray(values.sum(axis=1)).ravel()
        values = sp.csr_matrix(sp.diags_array(TARGET_SUM / np.where(total > 0, total, 1.0)) @ values)
        values.data = np.log1p(values.data)
    return values, var
