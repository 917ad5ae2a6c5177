"""One full pass over an expression matrix that says what it holds, or what is wrong with it and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_choices, warn
from scdiva._progress import progress_bar
from scdiva._scale import MAX_EXPONENT, MENDS, SCALED_LOG, are_ranks, find_scale, unlike_counts

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

    @property
    def n_vars(self) -> int:
        """Number of genes."""
        return len(self.counts_per_gene)


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
    genes_per_cell = np.concatenate(seen.genes_per_cell) if seen.genes_per_cell else np.zeros(0, np.int32)
    known_per_cell = (
        np.concatenate(seen.known_per_cell) if known is not None and seen.known_per_cell else genes_per_cell
    )
    if not len(genes_per_cell) or not n_vars:
        raise ValueError(f"{where} is empty: {len(genes_per_cell)} cells × {n_vars} genes.")
    seen.refuse_impossible(where)
    kind = _decide(seen, input, where)
    counts = seen.sum if kind == "counts" else seen.sum_expm1
    return Scan(kind, seen.n_fraction == 0, seen.max, counts, genes_per_cell, known_per_cell)


@dataclass
class _Finding:
    """How often something was met, and where first."""

    count: int = 0
    first: str = ""


@dataclass
class _Seen:
    """Running totals of a scan."""

    n_vars: int
    obs_names: Names | None
    var_names: Sequence[str] | None
    n_values: int = 0
    n_fraction: int = 0
    max: float = 0.0
    genes_per_cell: list[np.ndarray] = field(default_factory=list)
    known_per_cell: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sum = np.zeros(self.n_vars)
        self.sum_squares = np.zeros(self.n_vars)
        self.sum_expm1 = np.zeros(self.n_vars)
        self.nan, self.inf, self.negative, self.fraction = _Finding(), _Finding(), _Finding(), _Finding()
        self.huge = _Finding()
        self.fractional, self.whole = _Finding(), _Finding()  # cells with, and without, values that are not integer
        self.detected, self.small = np.zeros(self.n_vars), np.zeros(3)  # cells of each gene; values 1, 2 and 3
        self.first: list[np.ndarray] = []  # values of the first cells of enough genes
        self.sample: list[np.ndarray] = []  # values of the first fractional cells, cell by cell
        self.n_sampled = 0

    def add(self, start: int, block: sp.csr_matrix, known: np.ndarray | None) -> None:
        if block.shape[1] != self.n_vars:
            raise ValueError(f"the block at row {start} has {block.shape[1]} columns, expected {self.n_vars}.")
        per_cell = np.diff(block.indptr)
        self.genes_per_cell.append(per_cell.astype(np.int32))
        row = np.repeat(np.arange(block.shape[0]), per_cell)
        if known is not None:
            self.known_per_cell.append(
                np.bincount(row, weights=known[block.indices], minlength=block.shape[0]).astype(np.int32)
            )
        x = block.data.astype(np.float64)
        self._find(self.nan, np.isnan(x), start, block, row)
        self._find(self.inf, np.isinf(x), start, block, row)
        self._find(self.negative, x < 0, start, block, row)
        self._find(self.huge, (x >= MAX_COUNT) & np.isfinite(x), start, block, row)
        if self.nan.count or self.inf.count or self.negative.count or self.huge.count or not len(x):
            return  # the call will fail: only go on counting how much is wrong
        self.n_values += len(x)
        # Counts recovered from float32 logarithms miss an integer by rounding only.
        fraction = np.abs(x - np.rint(x)) > np.maximum(1e-3, 1e-5 * x)
        fraction |= x < 0.5  # rounds to no count at all
        self._find(self.fraction, fraction, start, block, row)
        self.n_fraction = self.fraction.count
        self.max = max(self.max, float(x.max()))
        genes = block.indices
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

    def _find(self, what: _Finding, hit: np.ndarray, start: int, block: sp.csr_matrix, row: np.ndarray) -> None:
        n = int(np.count_nonzero(hit))
        if n and not what.count:
            at = int(np.argmax(hit))
            i, j = start + int(row[at]), int(block.indices[at])
            cell = f"cell {self.obs_names[i]!r}" if self.obs_names is not None else f"row {i}"
            gene = f"gene {self.var_names[j]!r}" if self.var_names is not None else f"column {j}"
            what.first = f"first {block.data[at]:g} at {cell}, {gene}"
        what.count += n

    def refuse_impossible(self, where: str) -> None:
        if self.nan.count or self.inf.count:
            which = " and ".join(
                f"{found.count} {name} values ({found.first})"
                for found, name in ((self.nan, "NaN"), (self.inf, "infinite"))
                if found.count
            )
            raise ValueError(
                f"{where} holds {which}. Find out where they come from; if they stand for missing counts, "
                "set them to zero: adata.X = np.nan_to_num(adata.X, posinf=0, neginf=0) (for sparse X, adata.X.data)."
            )
        if self.negative.count:
            raise ValueError(
                f"{where} holds {self.negative.count} negative values ({self.negative.first}): a scaled, centred or "
                "regressed matrix? Pass the counts, or their log1p, with layer=... or use_raw=True."
            )
        if self.huge.count:
            raise ValueError(
                f"{where} holds {self.huge.count} values of {MAX_COUNT:,} or more ({self.huge.first}): no counts, but "
                "what stands for missing values, or an overflow. Find out where they come from; if they stand for "
                f"missing counts, set them to zero: adata.X[adata.X >= {MAX_COUNT}] = 0."
            )

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

    def unit_variance_share(self, n_obs: int) -> float:
        """Share of the genes with any variance whose variance over cells is 1."""
        variance = (self.sum_squares - self.sum**2 / n_obs) / max(n_obs - 1, 1)
        varying = variance > 1e-6
        return float(np.mean(np.abs(variance[varying] - 1) < 0.02)) if varying.any() else 0.0


def _decide(seen: _Seen, input: Input, where: str) -> Literal["counts", "lognorm"]:
    share = seen.n_fraction / max(seen.n_values, 1)
    n_obs = sum(len(part) for part in seen.genes_per_cell)
    found = (
        f"{seen.n_fraction} of {seen.n_values} values ({100 * share:.3g}%) are not integer ({seen.fraction.first}), "
        f"the largest value is {seen.max:g}"
    )
    log_like = share > LOG_SHARE and seen.max <= MAX_LOGNORM
    if share > LOG_SHARE and n_obs >= 10 and seen.unit_variance_share(n_obs) > 0.9:
        raise ValueError(
            f"{where} is scaled: its genes have variance 1 ({found}). Pass the counts, or their log1p, with layer=... "
            "or use_raw=True."
        )
    scale = seen.scale() if seen.n_fraction and input != "counts" else None
    if scale not in (None, "linear", "unlike counts") and seen.whole.count:
        raise ValueError(
            f"{where} mixes scales: {seen.whole.count} cells hold integer counts (first: {seen.whole.first}), "
            f"{seen.fractional.count} hold values on the scale {scale!r} (first: {seen.fractional.first}). Were data "
            "sets joined? Bring their cells to one scale first, for instance with "
            "fractional = np.array([(x % 1).any() for x in adata.X.toarray()]); "
            "adata.X[fractional] = np.expm1(adata.X[fractional]) for log1p."
        )
    if input == "counts":
        if log_like:
            raise ValueError(
                f"{where} looks log-normalised, not like counts: {found}. Pass input='lognorm', or the counts with "
                "layer=... or use_raw=True. If these are corrected counts, round them: adata.X = np.rint(adata.X)."
            )
        if seen.n_fraction:
            raise ValueError(
                f"{where} holds no integer counts: {found}. Pass input='auto' to take corrected counts or TPM as they "
                "are, or the raw counts with layer=... or use_raw=True."
            )
        return "counts"
    if input == "lognorm":
        _refuse_other_scale(scale, where)
        if seen.max > MAX_LOGNORM:
            raise ValueError(
                f"{where} holds values up to {seen.max:g}, too large for a logarithm (at most {MAX_LOGNORM:g}). "
                "Pass input='counts', or input='auto'."
            )
        if seen.n_values and not seen.n_fraction:
            raise ValueError(f"{where} holds integers only: counts, not log-normalised values. Pass input='counts'.")
        if scale == "linear":
            raise ValueError(f"{where} holds normalised values, no logarithms ({found}). Pass input='auto'.")
        return "lognorm"
    if are_ranks(seen.first):
        raise ValueError(
            f"{where} holds ranks of genes within each cell, the largest {seen.max:g}, no counts: how much more of one "
            "gene there is than of another is lost. Pass the counts with layer=... or use_raw=True; if these are "
            "counts, pass input='counts'."
        )
    if not seen.n_fraction:
        if seen.max == 1 and seen.n_values >= _MIN_BINARY:
            raise ValueError(
                f"{where} is binary: its {seen.n_values} values above zero are all 1. Pass the counts with layer=... "
                "or use_raw=True; if these are the counts, pass input='counts'."
            )
        why = unlike_counts(n_obs, seen.sum, seen.sum_squares, seen.detected, seen.small)
        if why is not None and seen.max <= MAX_EXPONENT:
            raise ValueError(
                f"{where} holds integers of at most {seen.max:g}, but no counts: {why}. Rounded logarithms, bins and "
                "clipped counts are like this. Pass the counts with layer=... or use_raw=True; if these are the "
                "counts, pass input='counts'."
            )
        if seen.vary_too_little():
            warn(
                f"{where} is taken as counts, but within most cells values differ less than counts do: the largest is "
                f"less than {_TOP_OVER_MEAN} times their mean, and hardly any is 1. Bins, ranks and rounded logarithms "
                "are like this; if it holds something else than counts, pass those with layer=... or use_raw=True.",
            )
        return "counts"
    _refuse_other_scale(scale, where)
    if log_like and scale != "linear":
        if scale == "unlike counts":
            warn(
                f"{where} is taken as log(1 + x), but its exponentials are not those of counts, nor have cells one "
                f"total ({found}). Imputed, corrected or scaled values look like this, and results may be wrong: "
                "better pass the counts with layer=... or use_raw=True.",
            )
        return "lognorm"
    warn(
        f"{where} is taken as counts although {found}. Corrected counts, TPM and counts recovered from logarithms look "
        "like this; if it holds something else, pass the counts with layer=... or use_raw=True.",
    )
    return "counts"


def _refuse_other_scale(scale: str | None, where: str) -> None:
    if scale == SCALED_LOG:
        raise ValueError(
            f"{where} holds logarithms that were scaled in each cell by a factor of its own, to one total (PFlog), one "
            "length or one maximum: that can't be undone. Pass the counts, or their log1p, with layer=... or "
            "use_raw=True."
        )
    if scale not in MENDS:
        return
    what = "logarithms to base " + scale[3:] if scale in ("log2", "log10") else f"values on the scale {scale!r}"
    raise ValueError(
        f"{where} holds {what}: undone so, cells have one total or their values are multiples of one count. scdiva "
        f"reads counts and natural logarithms, log(1 + x): {MENDS[scale]} makes them so."
    )
