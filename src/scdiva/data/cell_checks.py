"""What is said of cells that hold no known gene, or few, and of data that lack most genes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scdiva.data.genes import ERROR_SHARE

if TYPE_CHECKING:
    from scdiva._validate import Scan
    from scdiva.data.blocks import OpenMatrix
    from scdiva.data.cells import CellSource

ENOUGH_ENTROPY = 0.65
"""Share of the entropy of the vocabulary's genes from which on measured genes are enough: from there on the embeddings
of cells cut to them have a mean cosine of 0.95 or more to those from all genes (benchmarks/few_genes.py)."""
COSINE_LEFT = {0.01: 0.3, 0.03: 0.4, 0.07: 0.5, 0.14: 0.65, 0.25: 0.75, 0.33: 0.8, 0.44: 0.88, 0.55: 0.92, 0.65: 0.95}
"""Mean cosine that is left at a share of entropy, from there."""
_PACKAGE = str(Path(__file__).parents[1])


def warn_of_few_genes(source: CellSource, data: Any) -> None:
    """Warn of data with so few of the model's genes that embeddings are not those of the whole cells.

    Genes of high entropy, which are expressed in many cells and vary, count for more; of the numbers known before
    anything is run, their share tells best what is left of an embedding.

    Parameters
    ----------
    source
        Checked cells.
    data
        What they were opened from: an AnnData object, whose `raw` may hold more genes, or a path.
    """
    entropy, measured = source.vocabulary.entropy, source.measured_tokens
    share = float(entropy[measured].sum(dtype=np.float64) / max(entropy.sum(dtype=np.float64), 1e-12))
    if share >= ENOUGH_ENTROPY:
        return
    raw, more = None if source.reading.use_raw else getattr(data, "raw", None), 0
    if raw is not None:
        more = int((source.vocabulary.match(list(raw.var_names), source.reading.species).tokens >= 0).sum())
    mend = "Pass the object as it was before genes were selected, as by sc.pp.highly_variable_genes(subset=True)"
    if more > len(measured):
        mend = f"Pass use_raw=True: adata.raw has {more:,} of them"
    left = np.interp(share, list(COSINE_LEFT), list(COSINE_LEFT.values()))
    warnings.warn(
        f"the data have {len(measured):,} of the {source.vocabulary.n_genes:,} genes that the model knows, "
        f"{share:.0%} of them by entropy: embeddings from so few have a mean cosine of about {left:.1f} to those of "
        f"the same cells with all genes (0.95 at {ENOUGH_ENTROPY:.0%}). {mend}. If no more were measured, compare only "
        "cells with these genes.",
        UserWarning,
        stacklevel=_users_line(),
    )


def _users_line() -> int:
    """Give the stack level of the line that called the package, for the caller: Python shows a text there once."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


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
    of = "adata.raw" if source.reading.use_raw else "adata"
    at = "X" if source.reading.layer is None else f"layers[{source.reading.layer!r}]"
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
