"""The one opening of cells: their matrix scanned and their genes matched, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import scipy.sparse as sp

from scdiva._checks import warn
from scdiva._constants import MAX_LENGTH
from scdiva._validate import Input, Scan, scan
from scdiva.data.blocks import BLOCK_ROWS, KeptRows, OpenMatrix, open_matrix, row_blocks, row_readable
from scdiva.data.genes import ERROR_SHARE, WARNING_SHARE, judge_genes, match_columns
from scdiva.data.reading import AS_IT_IS, Reading
from scdiva.data.source import CellSource, to_log
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

KEPT_BYTES = 1 << 27
"""Largest matrix, as CSR, that is kept in memory once it is scanned: 128 MiB are 8,000 cells of 2,000 genes."""
ENOUGH_ENTROPY = 0.65
"""Share of the entropy of the vocabulary's genes from which on measured genes are enough: from there on the embeddings
of cells cut to them have a mean cosine of 0.95 or more to those from all genes (benchmarks/few_genes.py)."""
COSINE_LEFT = {0.01: 0.3, 0.03: 0.4, 0.07: 0.5, 0.14: 0.65, 0.25: 0.75, 0.33: 0.8, 0.44: 0.88, 0.55: 0.92, 0.65: 0.95}
"""Mean cosine that is left at a share of entropy, from there."""


class Model(Protocol):
    """What a model says of the cells that it reads; :class:`scdiva.models.ScDiVa` is one."""

    vocabulary: Vocabulary
    config: Any
    """With `input_length`, genes read of a cell, and `entropy_floor`."""


def open_cells(
    data: AnnData | str | Path,
    vocabulary: Model | Vocabulary | str | Path = "human",
    reading: Reading = AS_IT_IS,
    *,
    max_length: int | None = None,
    entropy_floor: float | None = None,
    ranked: bool = True,
    block_rows: int = BLOCK_ROWS,
    scanned: Scan | None = None,
    embeds: bool = True,
    keep: bool = True,
    **fields: Any,
) -> CellSource:
    """Open cells for everything that a call does with them: scan their matrix and match their genes, once.

    Parameters
    ----------
    data
        Annotated data, or the path of an ``.h5ad`` or ``.zarr`` file, which is read by row blocks.
    vocabulary
        A loaded model, by which cells are then read, and which warns if they have few of its genes; or what
        :func:`scdiva.tokenizer.vocabulary.load_vocabulary` takes.
    reading
        What is read, see `fields`.
    max_length
        Genes kept per cell; None: those that the model reads, else 1,200.
    entropy_floor
        See :func:`scdiva.tokenizer.serialize.score_denominator`; None: the model's, else 0.3.
    ranked
        False opens cells whose expression is read and which are never ranked; the vocabulary may then be without
        entropies.
    block_rows
        Rows read at once.
    scanned
        What an earlier pass over these very cells found, with the same arguments; None passes over them.
    embeds
        Whether results rest on what the model makes of the cells, so that few genes are warned of.
    keep
        Whether a small matrix (:data:`KEPT_BYTES`) that can't be read in memory as it lies (of a file, in dask's
        chunks, dense) is kept as CSR, so that what is read later costs no second pass.
    **fields
        Fields of `reading`, in place of its own: `layer`, `use_raw`, `input`, `gene_ids`, `species` and `duplicates`
        as in :func:`scdiva.tl.embed`; and `empty`, what to do with cells that have no known gene: ``"error"``, or
        ``"nan"`` to leave them out of what is read (the caller fills their rows with NaN).

    Returns
    -------
    The checked cells.

    Raises
    ------
    KeyError, ValueError
        With the call to make instead: no such layer or column, impossible values, too few genes or counts known,
        another species, cells without a known gene, a vocabulary without entropies.

    Warns
    -----
    UserWarning
        If part of the counts or of the cells is of unknown genes, or few of the model's genes are there.

    Examples
    --------
    >>> import scdiva as sd
    >>> from scdiva.data import open_cells
    >>> cells = open_cells(sd.datasets.toy(60, 100))
    >>> [len(rows) for rows, _ in cells.windows(40)]
    [60]
    """
    reading = replace(reading, **fields)
    model = None if isinstance(vocabulary, Vocabulary | str | Path) else vocabulary
    genes = load_vocabulary(vocabulary) if isinstance(vocabulary, Vocabulary | str | Path) else vocabulary.vocabulary
    if max_length is None:
        max_length = MAX_LENGTH if model is None else model.config.input_length
    if entropy_floor is None:
        entropy_floor = ENTROPY_FLOOR if model is None else model.config.entropy_floor
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    # before any reading: it may say that there are no entropies
    denominator = score_denominator(genes.entropy, entropy_floor) if ranked else None
    opened = open_matrix(data, layer=reading.layer, use_raw=reading.use_raw)
    try:
        matched = match_columns(opened.var, genes, reading)
        matrix = row_readable(opened.matrix)
        blocks = _Blocks(matrix, block_rows, keep and not sp.issparse(matrix))
        found = scanned or scan(
            blocks,
            opened.shape[1],
            input=reading.input,
            known=matched.tokens >= 0,
            obs_names=opened.obs_names,
            var_names=opened.var.index,
            where=opened.where,
        )
        report = judge_genes(matched, genes, found.counts_per_gene, reading)
    except BaseException:
        opened.close()
        raise
    if report["share_counts"] >= WARNING_SHARE:
        warn_of_foreign(found, opened)
    source = CellSource(
        genes,
        matched.tokens,
        report,
        found,
        max_length,
        block_rows,
        denominator,
        reading,
        Path(data) if isinstance(data, str | Path) else None,
        opened,
        blocks.matrix(),
        name=Path(data).stem if isinstance(data, str | Path) else "",
    )
    if reading.empty == "error":
        refuse_empty(source)
    if model is not None and embeds and scanned is None:
        warn_of_few_genes(source, data)
    return source


class _Blocks:
    """The row blocks of a matrix for the scan, kept if they are to be and are not too large."""

    def __init__(self, matrix: Any, block_rows: int, keep: bool) -> None:
        self._matrix, self._block_rows = matrix, block_rows
        self._kept: list[sp.csr_matrix] | None = [] if keep else None

    def __iter__(self) -> Iterator[tuple[int, sp.csr_matrix]]:
        n_bytes = 0
        for start, block in row_blocks(self._matrix, self._block_rows):
            if self._kept is not None:
                n_bytes += block.data.nbytes + block.indices.nbytes
                self._kept.append(block)
                if n_bytes > KEPT_BYTES:
                    self._kept = None
            yield start, block

    def matrix(self) -> Any:
        """Give what is to be read from now on: what was kept of the matrix, or the matrix itself."""
        return KeptRows(self._kept) if self._kept else self._matrix


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
    warn(
        f"the data have {len(measured):,} of the {source.vocabulary.n_genes:,} genes that the model knows, "
        f"{share:.0%} of them by entropy: embeddings from so few have a mean cosine of about {left:.1f} to those of "
        f"the same cells with all genes (0.95 at {ENOUGH_ENTROPY:.0%}). {mend}. If no more were measured, compare only "
        "cells with these genes."
    )


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
        warn(
            f"in {len(rows)} of {found.n_obs} cells (first: {first}) less than half of the genes found are known: "
            "cells of another species? Results for them rest on the rest; leave such cells out."
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
    return to_log([block for _, block in blocks], found.kind), var
