"""Open cells (scan the matrix, match the genes) and read them by blocks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._checks import check_choices, check_least, warn
from scdiva._constants import MAX_LENGTH, N_SPECIAL, TARGET_SUM, UNKNOWN
from scdiva._files import as_path, is_path
from scdiva._settings import logger, progress_bar
from scdiva._validate import EQUAL_TOTALS, Input, Scan, one_count
from scdiva.data.backed import StoredNames
from scdiva.data.genes import (
    DEFAULT_INPUT,
    ERROR_SHARE,
    WARNING_SHARE,
    InputOptions,
    Matched,
    about_two_species,
    is_read_as_mouse,
    judge_genes,
    match_columns,
    other_species,
    protein_columns,
)
from scdiva.data.matrix import BLOCK_ROWS, OpenMatrix, open_matrix, read_ranges, row_blocks, row_readable
from scdiva.data.soma import SomaCells
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, on_count_scale, score_denominator, serialize, to_token_space
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary, with_human_genes

if TYPE_CHECKING:
    from anndata import AnnData

KEPT_BYTES = 1 << 27
"""Largest matrix, as CSR, that is kept in memory once it is scanned: 128 MiB are 8,000 cells of 2,000 genes."""
ENOUGH_ENTROPY = 0.65
"""Share of the entropy of the vocabulary's genes below which there is a warning. Above it, embeddings from the measured
genes have a mean cosine of at least 0.95 to embeddings from all genes."""
MEAN_COSINE = {0.01: 0.3, 0.03: 0.4, 0.07: 0.5, 0.14: 0.65, 0.25: 0.75, 0.33: 0.8, 0.44: 0.88, 0.55: 0.92, 0.65: 0.95}
"""Mean cosine between embeddings from a part of the genes and from all genes, by the share of entropy."""
Ragged = tuple[np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n serialised cells."""


class Model(Protocol):
    """A model that reads cells, such as :class:`scdiva.models.ScDiVa`."""

    vocabulary: Vocabulary
    config: Any
    """Configuration with `input_length` (genes per cell) and `entropy_floor`."""


def open_cells(
    data: AnnData | SomaCells | str | Path,
    vocabulary: Model | Vocabulary | str | Path = "human",
    reading: InputOptions = DEFAULT_INPUT,
    *,
    max_length: int | None = None,
    entropy_floor: float | None = None,
    ranked: bool = True,
    block_rows: int = BLOCK_ROWS,
    scanned: Scan | None = None,
    embeds: bool = True,
    all_genes: bool = False,
    keep: bool = True,
    **fields: Any,
) -> CellSource:
    """Open cells: scan their matrix and match their genes, once per call.

    Parameters
    ----------
    data
        AnnData object; path or URL of an ``.h5ad`` or ``.zarr`` file; or cells of a SOMA experiment
        (:func:`open_soma`). Files and SOMA experiments are read by blocks of rows.
    vocabulary
        A loaded model, which also sets `max_length` and `entropy_floor`; or what
        :func:`scdiva.tokenizer.vocabulary.load_vocabulary` accepts.
    reading
        Options of the input.
    max_length
        Maximum number of genes per cell. None: the model's, or 1,200.
    entropy_floor
        See :func:`scdiva.tokenizer.serialize.score_denominator`. None: the model's, or 0.3.
    ranked
        Whether cells will be ranked, which requires entropies in the vocabulary.
    block_rows
        Rows per block.
    scanned
        Result of an earlier scan of the same cells with the same options. None: scan them.
    embeds
        Whether to warn if the data have few of the model's genes.
    all_genes
        Whether to read all genes of each cell, including human genes that are not in the model's vocabulary. Their
        tokens follow those of the model, which ignores them (:func:`scdiva.models.inference.run_cells`).
    keep
        Whether to keep a small matrix (:data:`KEPT_BYTES`) of a file, of dask chunks or a dense one in memory as CSR,
        so that it is read once.
    **fields
        Fields of `reading` to replace.

    Returns
    -------
    The checked cells.

    Raises
    ------
    KeyError, ValueError
        If the layer or column does not exist, values are impossible, too few genes or counts are known, the species is
        wrong, cells have no known gene, or the vocabulary has no entropies. The message states the remedy.

    Warns
    -----
    UserWarning
        If part of the counts or cells have unknown genes, or the data have few of the model's genes.

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
    model_genes = genes
    if all_genes:
        genes = with_human_genes(genes)
        max_length = genes.n_genes
    if max_length is None:
        max_length = MAX_LENGTH if model is None else model.config.input_length
    if entropy_floor is None:
        entropy_floor = ENTROPY_FLOOR if model is None else model.config.entropy_floor
    check_least(max_length=(max_length, 1))
    # first, as the vocabulary may have no entropies
    denominator = score_denominator(genes.entropy, entropy_floor) if ranked else None
    opened = open_matrix(data, layer=reading.layer, use_raw=reading.use_raw)
    try:
        matched = match_columns(opened.var, genes, reading)
        matrix = row_readable(opened.matrix)
        cached: list[sp.csr_matrix] = []
        blocks = row_blocks(matrix, block_rows)
        if keep and not sp.issparse(matrix):
            blocks = _keeping(blocks, cached)
        scan = scanned or opened.scan(blocks, reading.input, matched.tokens >= 0)
        if cached:
            matrix = sp.vstack(cached, format="csr")
        other = other_species(*matched, genes, reading)
        counts, dropped = scan.counts_per_gene, None
        if reading.duplicates == "sum":
            matched, dropped = without_proteins(matched, counts, scan.n_obs, other)
        if dropped is not None:
            counts, other = np.where(dropped, 0, counts), other & ~dropped
        two_species = ""
        if scanned is None and counts[other].any():
            reads_mouse = is_read_as_mouse(matched.how, reading)
            blocks = row_blocks(matrix, block_rows)
            two_species = about_two_species(blocks, other, matched.names, reads_mouse, opened.obs_names, reading)
        report = judge_genes(
            matched, genes, counts, reading, two_species=two_species, obs_names=opened.obs_names, n_obs=scan.n_obs
        )
    except BaseException:
        opened.close()
        raise
    if report["share_counts"] >= WARNING_SHARE and not two_species:
        _warn_of_foreign_cells(scan, opened)
    path = as_path(data) if is_path(data) else None
    tokens = matched.tokens
    if getattr(path, "study", ""):  # one gene table for all studies of a SOMA experiment
        tokens = np.where(scan.counts_per_gene > 0, tokens, -1)
    source = CellSource(
        genes, tokens, report, scan, max_length, block_rows, denominator, reading, path, opened, matrix,
        name="" if path is None else path.stem, dropped=dropped,
    )  # fmt: skip
    if dropped is not None and scanned is None:  # the scan counted them as genes
        source.scan = replace(scan, known_per_cell=source.count_known())
    if scanned is None:
        logger.info(
            "%s: %d cells × %d genes, %s; the model knows genes with %.0f%% of the counts",
            opened.where, scan.n_obs, len(tokens), "counts" if scan.kind == "counts" else "log-normalised",
            100 * report["share_counts"],
        )  # fmt: skip
    if reading.empty == "error":
        _refuse_empty(source)
    if model is not None and embeds and scanned is None:
        _warn_of_few_genes(source, data, model_genes)
    return source


def _keeping(
    blocks: Iterator[tuple[int, sp.csr_matrix]], cached: list[sp.csr_matrix]
) -> Iterator[tuple[int, sp.csr_matrix]]:
    """Yield blocks and keep them in a list; empty it once they exceed `KEPT_BYTES`."""
    n_bytes = 0
    for start, block in blocks:
        n_bytes += block.data.nbytes + block.indices.nbytes
        if n_bytes <= KEPT_BYTES:
            cached.append(block)
        else:
            cached.clear()
        yield start, block


def share_of_entropy(source: CellSource, vocabulary: Vocabulary) -> float:
    """Share of the entropy of the model's genes, `vocabulary`, that the data measure."""
    entropy, measured = vocabulary.entropy, source.measured_tokens
    of_measured = entropy[measured[measured < len(entropy)]].sum(dtype=np.float64)
    return float(of_measured / max(entropy.sum(dtype=np.float64), 1e-12))


def _warn_of_few_genes(source: CellSource, data: Any, vocabulary: Vocabulary) -> None:
    """Warn if the data lack many genes of the model, weighted by entropy, and mention `data.raw` if it has more."""
    share, measured = share_of_entropy(source, vocabulary), source.measured_tokens
    measured = measured[measured < vocabulary.n_genes + N_SPECIAL]
    if share >= ENOUGH_ENTROPY:
        return
    raw, more = None if source.reading.use_raw else getattr(data, "raw", None), 0
    if raw is not None:
        more = int((vocabulary.match(list(raw.var_names), source.reading.species).tokens >= 0).sum())
    mend = "Pass the object as it was before genes were selected, as by sc.pp.highly_variable_genes(subset=True)"
    if more > len(measured):
        mend = f"Pass use_raw=True: adata.raw has {more:,} of them"
    left = np.interp(share, list(MEAN_COSINE), list(MEAN_COSINE.values()))
    warn(
        f"the data have {len(measured):,} of the {vocabulary.n_genes:,} genes that the model knows, "
        f"{share:.0%} of them by entropy: embeddings from so few have a mean cosine of about {left:.1f} to those of "
        f"the same cells with all genes (0.95 at {ENOUGH_ENTROPY:.0%}). {mend}. If no more were measured, compare only "
        "cells with these genes."
    )


def without_proteins(
    matched: Matched, counts: np.ndarray, n_obs: int, other: np.ndarray
) -> tuple[Matched, np.ndarray | None]:
    """Mark columns of antibody counts as unknown, with a warning.

    Parameters
    ----------
    matched
        The matched genes.
    counts
        Counts of each column over all cells.
    n_obs
        Number of cells.
    other
        Mask of the genes of another species.

    Returns
    -------
    The genes, and a mask of the antibody columns (None: no such column).
    """
    proteins = protein_columns(*matched, counts, n_obs, other)
    if not proteins.any():
        return matched, None
    names = [matched.names[at] for at in np.flatnonzero(proteins)]
    first = names[int(np.argmax(counts[proteins]))]
    drop = f"names = {names[:50]!r}; adata = adata[:, ~adata.var_names.isin(names)].copy()"
    more = "" if len(names) <= 50 else f" (and {len(names) - 50} more)"
    warn(
        f"{len(names)} columns hold the counts of antibodies by their names and counts, not RNA, such as {first!r} "
        f"with {counts[proteins].max() / n_obs:,.0f} counts a cell: they are not read, and not added to the gene of "
        f"that name. Leave them out: {drop}{more}. If they are genes, pass a column of their Ensembl ids: "
        "sd.pp.match_genes(adata, gene_ids=...)."
    )
    return matched._replace(tokens=np.where(proteins, UNKNOWN, matched.tokens).astype(np.int32)), proteins


def _warn_of_foreign_cells(scan: Scan, opened: OpenMatrix) -> None:
    """Warn of cells whose genes are mostly unknown in data whose genes are mostly known, such as mouse cells."""
    rows = np.flatnonzero((scan.genes_per_cell >= 20) & (scan.known_per_cell < ERROR_SHARE * scan.genes_per_cell))
    if len(rows):
        first = ", ".join(repr(str(opened.obs_names[row])) for row in rows[:5])
        warn(
            f"in {len(rows)} of {scan.n_obs} cells (first: {first}) less than half of the genes found are known: "
            "cells of another species? Their results use only the known genes; leave such cells out."
        )


def warn_left_out(name: str, n_left_out: int, n_obs: int, min_genes: int) -> None:
    """Warn that `n_left_out` of `n_obs` cells of a study have fewer than `min_genes` known genes."""
    if n_left_out:
        genes = "any gene" if min_genes == 1 else f"{min_genes} genes"
        warn(f"{name}: {n_left_out} of {n_obs} cells are left out: they lack {genes} of the vocabulary.")


def _refuse_empty(source: CellSource) -> None:
    """Raise an error that names the cells without any known gene, and the call that removes them."""
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
        f"{len(rows)} of {source.n_obs} cells have {what} (first: {first}). Remove them: {mend}; with "
        "empty='nan', tl.embed, tl.embed_file and tl.grn keep them, without a result."
    )


@dataclass
class CellSource:
    """Opened cells of one AnnData object or file, from :func:`scdiva.data.open_cells`.

    In memory are the scan, the tokens, and the matrix if it is small.

    Attributes
    ----------
    vocabulary
        The genes.
    tokens
        int32 (n_vars,), token of each column; -1: unknown.
    report
        Report of :func:`scdiva.data.genes.judge_genes`.
    scan
        Result of :func:`scdiva._validate.scan`.
    denominator
        float32 (n_tokens,), denominator of the ranking score. None: cells can't be ranked.
    max_length
        Maximum number of genes per cell.
    block_rows
        Rows per block.
    reading
        Options of the input.
    columns
        Columns to read, ascending; None: all. See :func:`restricted`.
    dropped
        bool (columns of the matrix,), columns without RNA: neither read nor part of a cell's total. None: none.
    name
        Name of the study; by default the file name without suffix.
    """

    vocabulary: Vocabulary
    tokens: np.ndarray
    report: dict[str, Any]
    scan: Scan
    max_length: int
    block_rows: int
    denominator: np.ndarray | None
    reading: InputOptions = DEFAULT_INPUT
    path: Path | None = None
    _opened: OpenMatrix | None = field(default=None, repr=False)
    _matrix: Any = field(default=None, repr=False)
    name: str = ""
    columns: np.ndarray | None = None
    dropped: np.ndarray | None = None

    @property
    def n_obs(self) -> int:
        """Number of cells, including cells without a known gene."""
        return self.scan.n_obs

    @property
    def n_tokens(self) -> int:
        """Size of the token space: genes and special tokens."""
        return self.vocabulary.n_genes + N_SPECIAL

    @property
    def kind(self) -> Literal["counts", "lognorm"]:
        """Unit of the matrix."""
        return self.scan.kind

    @property
    def obs_names(self) -> pd.Index | StoredNames:
        """Names of the cells, by row number."""
        return self._open().obs_names

    @property
    def var(self) -> pd.DataFrame:
        """Annotation of the columns of the opened matrix, which may be `adata.raw.X`."""
        return self._open().var

    @property
    def lengths(self) -> np.ndarray:
        """Number of expressed known columns of each cell, int32 (n_obs,)."""
        return self.scan.known_per_cell

    @property
    def measured_tokens(self) -> np.ndarray:
        """Tokens of the columns of this study, ascending."""
        return np.unique(self.tokens[self.tokens >= 0])

    def _open(self) -> OpenMatrix:
        if self._opened is None:
            assert self.path is not None  # only files are closed
            self._opened = open_matrix(self.path, self.reading.layer, self.reading.use_raw)
        if self._matrix is None:
            self._matrix = row_readable(self._opened.matrix)
        return self._opened

    def close(self) -> None:
        """Close the file, if any. Reading opens it again; a matrix in memory is kept."""
        if self.path is not None and self._opened is not None:
            self._opened.close()
            self._opened, self._matrix = None, self._matrix if sp.issparse(self._matrix) else None

    def expression(self, start: int, stop: int) -> sp.csr_matrix:
        """Read cells `start` to `stop` as log-normalised expression in token space.

        Returns
        -------
        float32 CSR (stop - start, n_tokens), see :func:`scdiva.tokenizer.serialize.to_token_space`.
        """
        return self._expression([(start, stop)])

    def _expression(self, ranges: Sequence[tuple[int, int]]) -> sp.csr_matrix:
        self._open()
        block = self._of_rna(read_ranges(self._matrix, ranges))
        block = block if self.columns is None else block[:, self.columns]
        return to_token_space(block, self.tokens, self.n_tokens, self.kind)

    def _of_rna(self, block: sp.csr_matrix) -> sp.csr_matrix:
        """Remove the columns without RNA from a block, in place."""
        if self.dropped is not None:
            block.data[self.dropped[block.indices]] = 0
            block.eliminate_zeros()
        return block

    def count_known(self) -> np.ndarray:
        """Number of expressed known columns of each cell, int32 (n_obs,), counted from the matrix."""
        self._open()
        columns = np.flatnonzero(self.tokens >= 0) if self.columns is None else self.columns[self.tokens >= 0]
        blocks = (self._of_rna(block) for _, block in row_blocks(self._matrix, self.block_rows))
        # every stored value of a canonical block is above zero
        return np.concatenate([block[:, columns].getnnz(axis=1) for block in blocks]).astype(np.int32)

    def value_of_one_count(self, values: np.ndarray, indptr: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
        """Value of one count in each of some cells, before the logarithm.

        Parameters
        ----------
        values, indptr
            Log-normalised expression of these cells.
        rows
            Their row numbers.

        Returns
        -------
        float64 `(n_cells,)`: each cell's smallest value, if the others are multiples of it. Otherwise, for integers,
        10,000 divided by the cell's total. None if values are not integers or all totals are equal, as in TPM.
        """
        unit = one_count(values, indptr)
        if unit is not None or self.kind == "lognorm" or not self.scan.integer:
            return unit
        self._open()
        blocks = (self._of_rna(block) for _, block in row_blocks(self._matrix, self.block_rows))
        totals = np.concatenate([np.asarray(block.sum(axis=1, dtype=np.float64)).ravel() for block in blocks])[rows]
        return None if totals.std() < EQUAL_TOTALS * totals.mean() else np.asarray(TARGET_SUM / totals)

    def log_normalised(self) -> sp.csr_matrix:
        """Read all genes of all cells, known or not, as log1p of counts per ten thousand.

        Returns
        -------
        float64 CSR (n_obs, n_vars), columns as in :attr:`var`. A cell without counts is a row of zeros.
        """
        self._open()
        return to_log([self._of_rna(block) for _, block in row_blocks(self._matrix, self.block_rows)], self.kind)

    def expression_blocks(self, desc: str = "reading") -> Iterator[tuple[int, sp.csr_matrix]]:
        """Read cells in order, `block_rows` at a time, with a progress bar.

        Parameters
        ----------
        desc
            Label of the progress bar.

        Yields
        ------
        First row of the block, and its expression (see :meth:`expression`).
        """
        with progress_bar(desc=desc, unit="cell", total=self.n_obs) as bar:
            for start in range(0, self.n_obs, self.block_rows):
                stop = min(start + self.block_rows, self.n_obs)
                yield start, self.expression(start, stop)
                bar.update(stop - start)

    def read(self, start: int, stop: int) -> Ragged:
        """Read cells `start` to `stop`, ranked.

        Returns
        -------
        indptr, tokens and values, see :func:`scdiva.tokenizer.serialize.serialize`.
        """
        return self.read_ranges([(start, stop)])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Ragged:
        """Read and rank ranges of cells, joined in order; see :meth:`read`."""
        if self.denominator is None:
            raise ValueError("this source was opened to be counted, not ranked; use open_cells.")
        return serialize(self._expression(ranges), self.denominator, self.max_length)

    def windows(
        self, n_cells: int, start: int = 0, stop: int | None = None, *, on_read: Callable[[int], Any] | None = None
    ) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Read cells in order, many at a time; memory does not grow with their number.

        Parameters
        ----------
        n_cells
            Minimum number of cells per window, rounded up to whole blocks; the last window may be smaller.
        start, stop
            Range of rows. None: to the last row.
        on_read
            Called after each block with the number of its rows.

        Yields
        ------
        Row numbers, int64 (n,), and indptr, tokens and values of these cells. Cells without a known gene are skipped.
        """
        stop = self.n_obs if stop is None else stop
        check_least(n_cells=(n_cells, 1))
        step = -(-n_cells // self.block_rows) * self.block_rows
        for first in range(start, stop, step):
            last = min(first + step, stop)
            parts = []
            for lo in range(first, last, self.block_rows):
                hi = min(lo + self.block_rows, last)
                parts.append(self.read(lo, hi))
                if on_read is not None:
                    on_read(hi - lo)
            lengths = np.concatenate([np.diff(indptr) for indptr, _, _ in parts])
            filled = np.flatnonzero(lengths)
            if len(filled):
                # an empty cell has an entry in indptr only
                indptr = np.concatenate([[0], np.cumsum(lengths[filled], dtype=np.int64)])
                tokens, values = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
                yield first + filled, (indptr, tokens, values)


def restricted(source: CellSource, tokens: np.ndarray) -> CellSource:
    """Restrict cells to some genes, as if the data had no other columns; cells are normalised to these genes.

    Parameters
    ----------
    source
        Cells with all columns.
    tokens
        Tokens of the genes to keep.

    Returns
    -------
    The same cells, some possibly without genes; `source` itself if all columns are kept.
    """
    mask = np.isin(source.tokens, tokens)
    if mask.all():
        return source
    columns = np.flatnonzero(mask)
    cut = replace(source, tokens=source.tokens[columns], columns=columns)
    cut.scan = replace(source.scan, known_per_cell=cut.count_known())
    return cut


def log_normalised(
    adata: AnnData, *, layer: str | None = None, use_raw: bool = False, input: Input = "auto"
) -> tuple[sp.csr_matrix, pd.DataFrame]:
    """Read all genes of a matrix, known or not, as log1p of counts per ten thousand.

    Parameters
    ----------
    adata
        Cells × genes.
    layer, use_raw, input
        As for :func:`scdiva.tl.embed`. Log-normalised expression may have any total per cell.

    Returns
    -------
    float64 CSR `(n_obs, n_vars)`, and `var` of its columns. A cell without counts is a row of zeros.

    Raises
    ------
    KeyError, ValueError
        If there is no such layer, or the matrix is not valid for :func:`scdiva.tl.embed`.
    """
    check_choices(input=(input, get_args(Input)))
    with open_matrix(adata, layer=layer, use_raw=use_raw) as opened:
        blocks = list(row_blocks(opened.matrix))
        scan = opened.scan(blocks, input)
        var = opened.var
    return to_log([block for _, block in blocks], scan.kind), var


def counts_as_log(
    adata: AnnData, columns: np.ndarray, *, layer: str | None = None, use_raw: bool = False
) -> np.ndarray | None:
    """Read some columns of a count matrix as log1p of counts per ten thousand, in one pass over its rows.

    Parameters
    ----------
    adata
        Cells × genes.
    columns
        Numbers of the columns.
    layer, use_raw
        As for :func:`scdiva.tl.embed`.

    Returns
    -------
    float64 `(n_obs, n_columns)`; None if the matrix does not hold counts, that is, integers of at least 0 that are
    neither ranks nor only 0 and 1.
    """
    values, totals = [], []

    def collect(matrix: Any) -> Iterator[tuple[int, sp.csr_matrix]]:
        for start, block in row_blocks(matrix):
            if (block.data % 1).any():
                raise ValueError("not counts")
            values.append(block[:, columns].toarray())
            totals.append(np.asarray(block.sum(axis=1, dtype=np.float64)))
            yield start, block

    with open_matrix(adata, layer=layer, use_raw=use_raw) as opened, contextlib.suppress(ValueError):
        opened.scan(collect(opened.matrix))
        total = np.concatenate(totals)
        return np.log1p(np.concatenate(values) * (TARGET_SUM / np.where(total > 0, total, 1.0)))
    return None


def to_log(blocks: Sequence[sp.csr_matrix], kind: str) -> sp.csr_matrix:
    """Join row blocks as log1p of counts per ten thousand, with a cell's total over all columns."""
    values = sp.vstack(blocks, format="csr").astype(np.float64)
    values.data = on_count_scale(values.data, kind)
    total = np.asarray(values.sum(axis=1)).ravel()
    values = sp.csr_matrix(sp.diags_array(TARGET_SUM / np.where(total > 0, total, 1.0)) @ values)
    values.data = np.log1p(values.data)
    return values


def has_gene_below(indptr: np.ndarray, tokens: np.ndarray, n_tokens: int) -> np.ndarray:
    """Test whether each cell has a token below `n_tokens`, bool `(n_cells,)`. Empty cells are not allowed."""
    has_gene: np.ndarray = np.logical_or.reduceat(tokens < n_tokens, indptr[:-1])
    return has_gene


def take_cells(ragged: Ragged, rows: np.ndarray, max_length: int | None = None) -> Ragged:
    """Take some serialised cells, in the order of `rows`, each cut to its first `max_length` genes.

    Parameters
    ----------
    ragged
        indptr, tokens and values of all cells.
    rows
        Cell numbers.
    max_length
        Maximum number of genes per cell. None: all.

    Returns
    -------
    indptr (from 0), tokens and values.
    """
    indptr, tokens, values = ragged
    lengths = np.minimum(np.diff(indptr)[rows], len(tokens) if max_length is None else max_length)
    starts = indptr[:-1][rows]
    # slices are several times faster than gathering positions; the empty slice is for no cells
    spans = [slice(0), *map(slice, starts.tolist(), (starts + lengths).tolist())]
    out = np.concatenate([[0], lengths], dtype=np.int64).cumsum()
    return out, np.concatenate([tokens[s] for s in spans]), np.concatenate([values[s] for s in spans])
