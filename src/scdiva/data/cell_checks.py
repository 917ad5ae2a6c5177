"""What is said of cells that hold no known gene, or few."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from scdiva.data.genes import ERROR_SHARE

if TYPE_CHECKING:
    from scdiva._validate import Scan
    from scdiva.data.blocks import OpenMatrix
    from scdiva.data.cells import CellSource


def warn_of_foreign(found: Scan, opened: OpenMatrix) -> None:
    """Warn of cells whose genes are mostly unknown among others whose genes are known, as mouse cells are.

    Parameters
    ----------
    found, opened
        What the scan found, and the matrix that was scanned.
    """
    rows = np.flatnonzero((found.genes_per_cell >= 20) & (found.known_per_cell < ERROR_SHARE * found.genes_per_cell))
    if len(rows):
        first = ", ".join(repr(str(opened.obs_names[row])) for row in rows[:5])
        warnings.warn(
            f"in {len(rows)} of {found.n_obs} cells (first: {first}) less than half of the genes found are known: "
            "cells of another species? Results for them rest on the rest; leave such cells out.",
            UserWarning,
            stacklevel=4,
        )


def refuse_empty(source: CellSource) -> None:
    """Raise an error that names the cells without any known gene, and the call that removes them.

    Parameters
    ----------
    source
        Checked cells.

    Raises
    ------
    ValueError
        If there are such cells.
    """
    rows = np.flatnonzero(source.lengths == 0)
    if not len(rows):
        return
    of = "adata.raw" if source.use_raw else "adata"
    at = "X" if source.layer is None else f"layers[{source.layer!r}]"
    if (source.scan.genes_per_cell[rows] == 0).all():
        what = "no counts at all"
        mend = f"adata = adata[np.asarray({of}.{at}.sum(axis=1)).ravel() > 0].copy()"
    else:
        what = "no count of any gene that the vocabulary holds"
        mend = (
            "after scdiva.tl.embed(adata, empty='nan'), "
            "adata = adata[~np.isnan(adata.obsm['X_scdiva']).any(axis=1)].copy()"
        )
    first = ", ".join(repr(str(name)) for name in (source.obs_names[row] for row in rows[:5]))
    raise ValueError(
        f"{len(rows)} of {source.n_obs} cells have {what} (first: {first}). Remove them: {mend}. Calls with an "
        "argument empty keep them, without a result, with empty='nan'."
    )
