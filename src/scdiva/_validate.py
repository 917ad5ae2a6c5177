"""One full pass over an expression matrix that says what it holds, or what is wrong with it and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_choices, warn
from scdiva._scale import MAX_EXPONENT, REMEDIES, SCALED_LOG, are_ranks, find_scale, unlike_counts
from scdiva._settings import progress_bar

Input = Literal["auto", "counts", "lognorm"]

MAX_LOGNORM = 15.0
"""Largest value taken as a logarithm: log(1 + 1e6), the whole of a cell in one gene at a million counts, is 13.8."""
LOG_SHARE = 0.5
"""Share of non-integer values above which a matrix of small values is taken as log-normalised. Log-normalised values
are never integers but by accident; in counts corrected for ambient RNA or multiple mapping many still are."""
MAX_COUNT = 2**31 - 1
"""From here on a value is no count, but what stands for a missing one or comes of an overflow: not even the sum of one
gene over a hundred thousand cells is as large."""
_SAMPLE = 200_000
"""Values, of the first cells that hold any but integers, from which their scale is found."""
_MIN_WHOLE = 20
"""Genes from which on a cell of integers is one of counts for sure."""
_MIN_MANY, _TOP_OVER_MEAN, _ONES = 200, 4, 0.05
"""Within a cell of so many genes the largest count is at least so many times their mean, or they are weak genes, and
then more than this share of counts are 1. In the median cell of 40 data sets the largest is 7 to 165 times the mean."""
_FIRST_CELLS = 100
"""Cells, of at least so many genes, whose values are looked at one by one."""
_MIN_BINARY = 1000
"""Values above zero that are all 1 in a binarised matrix, and hardly ever in one of counts."""
_ZERO = "Find out where they come from; if they stand for missing counts, set them to zero: "
_OTHERS = "Pass the counts, or their log1p, with layer=... or use_raw=True."
_COUNTS = "Pass the counts with layer=... or use_raw=True; if these are the counts, pass input='counts'."
_IMPOSSIBLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "NaN values": np.isnan,
    "infinite values": np.isinf,
    "negative values": lambda x: x < 0,
    f"values of {MAX_COUNT:,} or more": lambda x: x >= MAX_COUNT,
}
"""What no matrix may hold, and how it is found."""
_MOST_PATTERNS = 1000
"""Sets of genes that are NaN in a cell, up to so many of which are told apart."""


@dataclass(frozen=True)
class Scan:
    """What :func:`scan` found.

    Attributes
    ----------
    kind
        ``"counts"`` or ``"lognorm"``.
    integer
        Whether every value is an integer, up to rounding.
    max
        Largest value.
    counts_per_gene
        float64 (n_vars,), sums on the count scale: of the values, or of exp(x) - 1 for log-normalised ones.
    genes_per_cell
        int32 (n_obs,), genes above zero.
    known_per_cell
        int32 (n_obs,), genes above zero among the `known` ones; the same array if `known` was not given.
    """

    kind: Literal["counts", "lognorm"]
    integer: bool
    max: float
    counts_per_gene: np.ndarray
    genes_per_cell: np.ndarray
    known_per_cell: np.ndarray

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        return len(self.genes_per_cell)


class Names(Protocol):
    """Names by number: a list, an index, or what reads them from a file one by one."""

    def __getitem__(self, row: int, /) -> Any:
        """Return the name of a row."""
        ...


def scan(
    blocks: Iterable[tuple[int, sp.csr_matrix]],
    n_vars: int,
    *,
    input: Input = "auto",
    known: np.ndarray | None = None,
    obs_names: Names | None = None,
    var_names: Sequence[str] | None = None,
    where: str = "the matrix",
) -> Scan:
    """Read a matrix once, block by block, and decide whether it holds counts or log-normalised values.

    Under ``input="auto"`` integers are counts; values of which more than half are not integer and none exceeds 15 are
    log(1 + x) values, unless the first cells show another scale (:func:`scdiva._scale.find_scale`); other non-integers
    are counts (corrected or recovered ones), with a warning.

    Parameters
    ----------
    blocks
        First row and canonical CSR block, as :func:`scdiva.data.blocks.row_blocks` yields them.
    n_vars
        Number of genes.
    input
        What the matrix is said to hold; anything else in it is an error.
    known
        bool (n_vars,), genes of interest; their number is counted for each cell.
    obs_names, var_names
        Names for the messages; row and column numbers otherwise.
    where
        What messages call the matrix.

    Returns
    -------
    The findings. Memory beyond a block is 8 bytes a cell.

    Raises
    ------
    ValueError
        If there are no cells or genes, or values that are NaN, infinite, negative, 2³¹ - 1 or more, not of the kind
        that `input` says, scaled to unit variance, binarised, logarithms to base 2 or 10, square roots, or logarithms
        of logarithms; or if some cells hold counts and others logarithms.

    Warns
    -----
    UserWarning
        If the values are taken as counts although they are not integers, or as logarithms although their exponentials
        look neither like counts nor like normalised ones.
    """
    check_choices(input=(input, get_args(Input)))
    seen = _Seen(n_vars, obs_names, var_names)
    total = len(obs_names) if isinstance(obs_names, Sized) else None
    with progress_bar(desc="checking", unit="cell", total=total) as bar:
        for start, block in blocks:
            seen.add(start, block, known)
            bar.update(block.shape[0])
    if not seen.n_obs or not n_vars:
        raise ValueError(f"{where} is empty: {seen.n_obs} cells × {n_vars} genes.")
    kind = _decide(seen, input, where)
    counts = seen.sum if kind == "counts" else seen.sum_expm1
    genes_per_cell = np.concatenate(seen.genes_per_cell)
    known_per_cell = genes_per_cell if known is None else np.concatenate(seen.known_per_cell)
    return Scan(kind, seen.fraction.count == 0, seen.max, counts, genes_per_cell, known_per_cell)


@dataclass
class _Finding:
    """How often something was met, and where first."""

    count: int = 0
    first: str = ""


class _Seen:
    """Running totals of a scan."""

    def __init__(self, n_vars: int, obs_names: Names | None, var_names: Sequence[str] | None) -> None:
        self.n_vars, self.obs_names, self.var_names = n_vars, obs_names, var_names
        self.n_values, self.max = 0, 0.0
        self.genes_per_cell: list[np.ndarray] = []
        self.known_per_cell: list[np.ndarray] = []
        # of each gene; `detected` are the cells
        self.sum, self.sum_squares, self.sum_expm1, self.detected = np.zeros((4, n_vars))
        self.small = np.zeros(3)  # values 1, 2 and 3
        self.impossible = {what: _Finding() for what in _IMPOSSIBLE}
        self.nan_genes: set[int] = set()
        self.nan_patterns: set[bytes] = set()  # sets of genes that are NaN in a cell
        self.nan_cells = 0
        self.fraction = _Finding()  # values that are not integer
        self.fractional, self.whole = _Finding(), _Finding()  # cells with, and without, such values
        self.first: list[np.ndarray] = []  # values of the first cells of enough genes
        self.sample: list[np.ndarray] = []  # values of the first fractional cells, cell by cell
        self.n_sampled = 0

    @property
    def n_obs(self) -> int:
        return sum(len(part) for part in self.genes_per_cell)

    def add(self, start: int, block: sp.csr_matrix, known: np.ndarray | None) -> None:
        if block.shape[1] != self.n_vars:
            raise ValueError(f"the block at row {start} has {block.shape[1]} columns, expected {self.n_vars}.")
        per_cell, genes = np.diff(block.indptr), block.indices
        self.genes_per_cell.append(per_cell.astype(np.int32))
        row = np.repeat(np.arange(block.shape[0]), per_cell)
        if known is not None:
            of_known = np.bincount(row, weights=known[genes], minlength=block.shape[0])
            self.known_per_cell.append(of_known.astype(np.int32))
        x = block.data.astype(np.float64)
        for what, holds in _IMPOSSIBLE.items():
            self._find(self.impossible[what], holds(x), start, block, row)
        if self.impossible["NaN values"].count:
            self._note_nan(block, row)
        if any(found.count for found in self.impossible.values()) or not len(x):
            return  # the call will fail: only go on counting how much is wrong
        self.n_values += len(x)
        # Counts recovered from float32 logarithms miss an integer by rounding only.
        fraction = np.abs(x - np.rint(x)) > np.maximum(1e-3, 1e-5 * x)
        fraction |= x < 0.5  # rounds to no count at all
        self._find(self.fraction, fraction, start, block, row)
        self.max = max(self.max, float(x.max()))
        self.sum += np.bincount(genes, weights=x, minlength=self.n_vars)
        self.sum_squares += np.bincount(genes, weights=x * x, minlength=self.n_vars)
        self.detected += np.bincount(genes, minlength=self.n_vars)
        self.small += [np.count_nonzero(x == value) for value in (1, 2, 3)]
        for i in np.flatnonzero(per_cell >= _MIN_WHOLE)[: _FIRST_CELLS - len(self.first)]:
            self.first.append(x[block.indptr[i] : block.indptr[i + 1]])
        if self.max <= MAX_EXPONENT:
            self.sum_expm1 += np.bincount(genes, weights=np.expm1(x), minlength=self.n_vars)
        fractional = np.bincount(row, weights=fraction, minlength=block.shape[0]) > 0
        self._note(self.fractional, np.flatnonzero(fractional) + start)
        self._note(self.whole, np.flatnonzero(~fractional & (per_cell >= _MIN_WHOLE)) + start)
        for i in np.flatnonzero(fractional):
            if self.n_sampled >= _SAMPLE:
                break
            self.sample.append(x[block.indptr[i] : block.indptr[i + 1]])
            self.n_sampled += len(self.sample[-1])

    def _note(self, what: _Finding, rows: np.ndarray) -> None:
        if len(rows) and not what.count:
            what.first = repr(str(self.obs_names[int(rows[0])])) if self.obs_names is not None else f"row {rows[0]}"
        what.count += len(rows)

    def _note_nan(self, block: sp.csr_matrix, row: np.ndarray) -> None:
        at = np.flatnonzero(np.isnan(block.data))
        self.nan_genes.update(np.unique(block.indices[at]).tolist())
        rows, first = np.unique(row[at], return_index=True)
        self.nan_cells += len(rows)
        if len(self.nan_patterns) < _MOST_PATTERNS:
            self.nan_patterns.update(genes.tobytes() for genes in np.split(block.indices[at], first[1:]))

    def _find(self, what: _Finding, hit: np.ndarray, start: int, block: sp.csr_matrix, row: np.ndarray) -> None:
        n = int(np.count_nonzero(hit))
        if n and not what.count:
            at = int(np.argmax(hit))
            i, j = start + int(row[at]), int(block.indices[at])
            cell = f"cell {self.obs_names[i]!r}" if self.obs_names is not None else f"row {i}"
            gene = f"gene {self.var_names[j]!r}" if self.var_names is not None else f"column {j}"
            what.first = f"first {block.data[at]:g} at {cell}, {gene}"
        what.count += n

    def scale(self) -> str | None:
        """Scale of the fractional cells."""
        if not self.sample:
            return None
        indptr = np.concatenate([[0], np.cumsum([len(cell) for cell in self.sample])])
        return find_scale(np.concatenate(self.sample), indptr)

    def vary_too_little(self) -> bool:
        """Whether values within cells of many genes differ too little for counts."""
        many = [cell for cell in self.first if len(cell) >= _MIN_MANY]
        even = np.array([cell.max() < _TOP_OVER_MEAN * cell.mean() and (cell == 1).mean() < _ONES for cell in many])
        return len(many) >= 10 and float(even.mean()) > 0.5

    def unit_variance_share(self) -> float:
        """Share of the genes with any variance whose variance over cells is 1."""
        variance = (self.sum_squares - self.sum**2 / self.n_obs) / max(self.n_obs - 1, 1)
        varying = variance > 1e-6
        return float(np.mean(np.abs(variance[varying] - 1) < 0.02)) if varying.any() else 0.0


def _decide(seen: _Seen, input: Input, where: str) -> Literal["counts", "lognorm"]:
    """Tell the kind, or refuse the matrix."""
    for what, found in seen.impossible.items():
        if found.count:
            raise ValueError(f"{where} holds {found.count} {what} ({found.first}). {_remedy(what, seen, where)}")
    share = seen.fraction.count / max(seen.n_values, 1)
    said = (
        f"{seen.fraction.count} of {seen.n_values} values ({100 * share:.3g}%) are not integer "
        f"({seen.fraction.first}), the largest value is {seen.max:g}"
    )
    if share > LOG_SHARE and seen.n_obs >= 10 and seen.unit_variance_share() > 0.9:
        raise ValueError(f"{where} is scaled: its genes have variance 1 ({said}). {_OTHERS}")
    scale = seen.scale() if seen.fraction.count and input != "counts" else None
    if scale not in (None, "linear", "unlike counts") and seen.whole.count:
        raise ValueError(
            f"{where} mixes scales: {seen.whole.count} cells hold integer counts (first: {seen.whole.first}), "
            f"{seen.fractional.count} hold values on the scale {scale!r} (first: {seen.fractional.first}). Were data "
            "sets joined? Bring their cells to one scale first, for instance with "
            "fractional = np.array([(x % 1).any() for x in adata.X.toarray()]); "
            "adata.X[fractional] = np.expm1(adata.X[fractional]) for log1p."
        )
    log_like = share > LOG_SHARE and seen.max <= MAX_LOGNORM
    if input == "counts":
        if seen.fraction.count:
            kind = "looks log-normalised, not like counts" if log_like else "holds no integer counts"
            mend = "input='lognorm'" if log_like else "input='auto' to take corrected counts or TPM as they are"
            raise ValueError(f"{where} {kind}: {said}. Pass {mend}, or the raw counts with layer=... or use_raw=True.")
        return "counts"
    if input == "auto":
        if are_ranks(seen.first):
            raise ValueError(
                f"{where} holds ranks of genes within each cell, the largest {seen.max:g}, no counts: how much more of "
                f"one gene there is than of another is lost. {_COUNTS}"
            )
        if not seen.fraction.count:
            _check_integers(seen, where)
            return "counts"
    _refuse_other_scale(scale, where)
    if input == "lognorm":
        if seen.max > MAX_LOGNORM:
            raise ValueError(
                f"{where} holds values up to {seen.max:g}, too large for a logarithm (at most {MAX_LOGNORM:g}). "
                "Pass input='counts', or input='auto'."
            )
        if seen.n_values and not seen.fraction.count:
            raise ValueError(f"{where} holds integers only: counts, not log-normalised values. Pass input='counts'.")
        if scale == "linear":
            raise ValueError(f"{where} holds normalised values, no logarithms ({said}). Pass input='auto'.")
        return "lognorm"
    if not log_like or scale == "linear":
        warn(
            f"{where} is taken as counts although {said}. Corrected counts, TPM and counts recovered from logarithms "
            "look like this; if it holds something else, pass the counts with layer=... or use_raw=True."
        )
        return "counts"
    if scale == "unlike counts":
        warn(
            f"{where} is taken as log(1 + x), but its exponentials are not those of counts, nor have cells one "
            f"total ({said}). Imputed, corrected or scaled values look like this, and results may be wrong: "
            "better pass the counts with layer=... or use_raw=True."
        )
    return "lognorm"


def _remedy(what: str, seen: _Seen, where: str) -> str:
    """Say what to do about values that no matrix may hold."""
    if what == "negative values":
        return f"A scaled, centred or regressed matrix? {_OTHERS}"
    if what.startswith("values of"):
        return f"{_ZERO}{with_matrix(where, f'{{0}}[{{0}} >= {MAX_COUNT}] = 0')}."
    n_patterns = len(seen.nan_patterns)
    if what == "NaN values" and n_patterns < _MOST_PATTERNS and seen.nan_cells >= max(10, 5 * n_patterns):
        whole = with_matrix(where, "adata = adata[:, ~np.isnan({0}).any(axis=0)].copy()")
        return (
            f"{len(seen.nan_genes)} genes are NaN in the same cells, {seen.nan_cells} of {seen.n_obs}, as genes that a "
            f"data set did not measure are after ad.concat(join='outer'). Keep the genes that all cells share: {whole} "
            "(for sparse X, adata.X.toarray()), or ad.concat(..., join='inner')."
        )
    return f"{_ZERO}{with_matrix(where, '{0} = np.nan_to_num({0}, posinf=0, neginf=0)')} (for sparse X, adata.X.data)."


def with_matrix(where: str, change: str) -> str:
    """Give the call that changes a matrix.

    Parameters
    ----------
    where
        What messages call the matrix: `adata.X`, `adata.raw.X`, or `X of` a file.
    change
        The call, with `{0}` for the matrix.
    """
    if where == "adata.raw.X":
        return "adata = adata.raw.to_adata(); " + change.format("adata.X")
    if where.startswith("adata."):
        return change.format(where)
    matrix, _, file = where.rpartition(" of ")
    if matrix not in ("X", "raw.X") and not matrix.startswith("layers["):  # of a SOMA experiment
        return f"with the cells in memory, {change.format('adata.X')}"
    reader, writer = ("read_zarr", "write_zarr") if file.endswith(".zarr") else ("read_h5ad", "write_h5ad")
    changed = with_matrix(f"adata.{matrix}", change)
    return f"adata = anndata.{reader}({file!r}); {changed}; adata.{writer}({file!r})"


def _check_integers(seen: _Seen, where: str) -> None:
    """Refuse integers that are no counts, and warn of those that may be none."""
    if seen.max == 1 and seen.n_values >= _MIN_BINARY:
        raise ValueError(f"{where} is binary: its {seen.n_values} values above zero are all 1. {_COUNTS}")
    why = unlike_counts(seen.n_obs, seen.sum, seen.sum_squares, seen.detected, seen.small)
    if why is not None and seen.max <= MAX_EXPONENT:
        raise ValueError(
            f"{where} holds integers of at most {seen.max:g}, but no counts: {why}. Rounded logarithms, bins and "
            f"clipped counts are like this. {_COUNTS}"
        )
    if seen.vary_too_little():
        warn(
            f"{where} is taken as counts, but within most cells values differ less than counts do: the largest is "
            f"less than {_TOP_OVER_MEAN} times their mean, and hardly any is 1. Bins, ranks and rounded logarithms "
            "are like this; if it holds something else than counts, pass those with layer=... or use_raw=True."
        )


def _refuse_other_scale(scale: str | None, where: str) -> None:
    if scale == SCALED_LOG:
        raise ValueError(
            f"{where} holds logarithms that were scaled in each cell by a factor of its own, to one total (PFlog), one "
            f"length or one maximum: that can't be undone. {_OTHERS}"
        )
    if scale in REMEDIES:
        what = "logarithms to base " + scale[3:] if scale in ("log2", "log10") else f"values on the scale {scale!r}"
        raise ValueError(
            f"{where} holds {what}: undone so, cells have one total or their values are multiples of one count. scdiva "
            f"reads counts and natural logarithms, log(1 + x): {REMEDIES[scale]} makes them so."
        )
