"""Tidy tables of what scdiva wrote into AnnData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._constants import LAYER_RANK

if TYPE_CHECKING:
    from anndata import AnnData


def serialized_df(
    adata: AnnData, *, key: str = LAYER_RANK, cells: Sequence[str] | str | None = None, max_rank: int | None = None
) -> pd.DataFrame:
    """List the ranked genes of cells, one row per cell and gene.

    Parameters
    ----------
    adata
        Data that :func:`scdiva.pp.entropy_serialize` ranked.
    key
        The layer it wrote.
    cells
        Names of the cells, in the order wanted; None takes all.
    max_rank
        Last rank listed; None lists all.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1) and `gene` (var name), by cell and rank.

    Raises
    ------
    KeyError
        If there is no such layer or cell.
    """
    if key not in adata.layers:
        raise KeyError(f"adata has no layer {key!r}: call scdiva.pp.entropy_serialize(adata) first.")
    names = adata.obs_names
    if cells is None:
        rows = np.arange(adata.n_obs)
    else:
        wanted = [cells] if isinstance(cells, str) else list(cells)
        missing = [cell for cell in wanted if cell not in names]
        if missing:
            raise KeyError(f"{len(missing)} of {len(wanted)} cells are not in adata (first: {missing[0]!r}).")
        if not names.is_unique:
            raise KeyError("adata.obs_names repeat names: call adata.obs_names_make_unique() first.")
        rows = names.get_indexer(wanted)
    ranks = sp.csr_matrix(adata.layers[key])[rows]
    frame = pd.DataFrame(
        {
            "cell": np.asarray(names)[np.repeat(rows, np.diff(ranks.indptr))],
            "rank": ranks.data,
            "gene": np.asarray(adata.var_names)[ranks.indices],
        }
    )
    place = np.repeat(np.arange(len(rows)), np.diff(ranks.indptr))
    frame = frame.iloc[np.lexsort((ranks.data, place))]
    if max_rank is not None:
        frame = frame[frame["rank"] <= max_rank]
    return frame.reset_index(drop=True)
