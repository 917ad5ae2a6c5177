"""Checks of expression values in one pass: invalid values, counts or log-normalised values, rank codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_choices, warn
from scdiva._settings import progress_bar

Input = Literal["auto", "counts", "lognorm"]

LOG_SHARE = 0.5
"""Share of non-integer values above which a matrix of small values is taken as log-normalised. Counts corrected for
ambient RNA or multiple mapping still have many integers."""
MAX_COUNT = 2**31 - 1
"""Values of this size or larger are taken as overflows or codes of missing values."""
MAX_LOGNORM = 15.0
"""Maximum of log-normalised values: log(1 + 1e6), a cell with one gene at a million counts, is 13.8."""
_SAMPLE = 200_000
"""Number of values, of the first cells with non-integer values, from which the scale is determined."""
_MIN_WHOLE = 20
"""Minimum number of expressed genes for which a cell with integer values is taken as a cell of counts."""
_MIN_BINARY = 10_000
"""Number of values from which a matrix of zeros and ones is not taken as counts."""
_FIRST_CELLS = 100
"""Number of cells that are checked for ranks."""
_FITS, _MAY_FIT = 0.9, 0.8
"""Shares of values that are multiples of one count: a scale fits above the first, and may fit above the second."""
_TOLERANCE = 0.05
EQUAL_TOTALS = 1e-3
"""Coefficient of variation of the cells' totals below which they are taken as equal, as in normalised data."""
_MIN_VALUES = 100
_MIN_CELLS = 10
_ZERO = "Find out where they come from; if they stand for missing counts, set them to zero: "
_COUNTS = "Pass the counts, or their log1p, with layer=... or use_raw=True"
_IMPOSSIBLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "NaN values": np.isnan,
    "infinite values": np.isinf,
    "negative values": lambda x: x < 0,
    f"values of {MAX_COUNT:,} or more": lambda x: x >= MAX_COUNT,
}
"""Invalid values, by their name in messages."""


@dataclass(frozen=True)
class Scan:
    """Result of :func:`scan`.

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
        int32 (n_obs,), genes above zero among the `known` ones; without `known`, the same array.
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
    """Names by row number: a list, an index, or a reader of a file."""

    def __getitem__(self, row: int, /) -> Any:
        """Name of a row."""
        ...


def scan(
    blocks: Iterable[tuple[int, sp.csr_matrix]],
    n_vars: int,
    *,
    input: Input = "auto",
    is_known_gene: np.ndarray | None = None,
    obs_names: Names | None = None,
    var_names: Sequence[str] | None = None,
    where: str = "the matrix",
) -> Scan:
    """Check a matrix in one pass and determine whether it holds counts or log-normalised values.

    With ``input="auto"``, integers are counts. Values of which more than half are not integers and none exceeds 15 are
    log-normalised, unless the first cells are counts scaled per cell (:func:`find_scale`). Other
    non-integers are counts, such as corrected counts and TPM, with a warning.

    Parameters
    ----------
    blocks
        First row and canonical CSR block, as :func:`scdiva.data.matrix.row_blocks` yields them.
    n_vars
        Number of genes.
    input
        Unit of the matrix; other values are an error.
    is_known_gene
        bool (n_vars,), genes of interest; their number is counted for each cell.
    obs_names, var_names
        Names for the messages; row and column numbers otherwise.
    where
        Name of the matrix in messages.

    Returns
    -------
    The result. Memory beyond a block is 8 bytes per cell.

    Raises
    ------
    ValueError
        If there are no cells or genes; if values are NaN, infinite, negative, 2³¹ - 1 or more, or not of the kind that
        `input` states; if genes are scaled to unit variance; if values are ranks within each cell, or all 0 or 1; or if
        some cells hold counts and others log-normalised values.

    Warns
    -----
    UserWarning
        If values are read as counts although they are not integers, or as log-normalised although their exponentials
        are not normalised counts.
    """
    check_choices(input=(input, get_args(Input)))
    totals = _Totals(n_vars, obs_names, var_names)
    total = len(obs_names) if isinstance(obs_names, Sized) else None
    with progress_bar(desc="checking", unit="cell", total=total) as bar:
        for start, block in blocks:
            totals.add(start, block, is_known_gene)
            bar.update(block.shape[0])
    if not totals.n_obs or not n_vars:
        raise ValueError(f"{where} is empty: {totals.n_obs} cells × {n_vars} genes.")
    kind = _decide(totals, input, where)
    counts = totals.sum if kind == "counts" else totals.sum_expm1
    genes_per_cell = np.concatenate(totals.genes_per_cell)
    known_per_cell = genes_per_cell if is_known_gene is None else np.concatenate(totals.known_per_cell)
    return Scan(kind, totals.fraction.count == 0, totals.max, counts, genes_per_cell, known_per_cell)


@dataclass
class _Occurrences:
    """Number of occurrences, and the place of the first one."""

    count: int = 0
    first: str = ""


class _Totals:
    """Sums and counts over the blocks of a matrix."""

    def __init__(self, n_vars: int, obs_names: Names | None, var_names: Sequence[str] | None) -> None:
        self.n_vars, self.obs_names, self.var_names = n_vars, obs_names, var_names
        self.n_values, self.max = 0, 0.0
        self.genes_per_cell: list[np.ndarray] = []
        self.known_per_cell: list[np.ndarray] = []
        self.sum, self.sum_squares, self.sum_expm1 = np.zeros((3, n_vars))  # of each gene
        self.impossible = {name: _Occurrences() for name in _IMPOSSIBLE}
        self.fraction = _Occurrences()  # values that are not integer
        self.fractional, self.integral = _Occurrences(), _Occurrences()  # cells with, and without, such values
        self.first: list[np.ndarray] = []  # values of the first cells of enough genes
        self.sample: list[np.ndarray] = []  # values of the first fractional cells, cell by cell
        self.n_sampled = 0

    @property
    def n_obs(self) -> int:
        return sum(len(part) for part in self.genes_per_cell)

    def add(self, start: int, block: sp.csr_matrix, is_known_gene: np.ndarray | None) -> None:
        from scdiva.tokenizer import _kernels
        from scdiva.tokenizer.serialize import plain

        n_cells, per_cell = block.shape[0], np.diff(block.indptr).astype(np.int32)
        sums = np.zeros((self.n_vars, 2))
        n_fractions, n_known = np.empty((2, n_cells), np.int32)
        largest, first_fraction = _kernels.check(
            plain(block.indptr, np.int64),
            plain(block.indices, np.int32),
            plain(block.data, np.float32),
            np.ones(self.n_vars, bool) if is_known_gene is None else plain(is_known_gene, bool),
            np.float32(MAX_COUNT),
            sums,
            n_fractions,
            n_known,
        )
        self.genes_per_cell.append(per_cell)
        self.known_per_cell.append(n_known)
        if first_fraction == _kernels.IMPOSSIBLE:
            values = block.data.astype(np.float64)
            for name, is_impossible in _IMPOSSIBLE.items():
                mask = is_impossible(values)
                self._count_values(self.impossible[name], int(mask.sum()), int(mask.argmax()), start, block)
        if any(of.count for of in self.impossible.values()) or not len(block.data):
            return  # scan raises an error, which only needs their number
        self.n_values += len(block.data)
        self._count_values(self.fraction, int(n_fractions.sum(dtype=np.int64)), first_fraction, start, block)
        self.max = max(self.max, float(np.int32(largest).view(np.float32)))
        self.sum += sums[:, 0]
        self.sum_squares += sums[:, 1]
        for i in np.flatnonzero(per_cell >= _MIN_WHOLE)[: _FIRST_CELLS - len(self.first)].tolist():
            self.first.append(_row(block, i))
        if self.max <= MAX_LOGNORM:
            counts = np.expm1(block.data.astype(np.float64))
            self.sum_expm1 += np.bincount(block.indices, weights=counts, minlength=self.n_vars)
        fractional = n_fractions > 0
        self._count_cells(self.fractional, np.flatnonzero(fractional) + start)
        self._count_cells(self.integral, np.flatnonzero(~fractional & (per_cell >= _MIN_WHOLE)) + start)
        for i in np.flatnonzero(fractional).tolist():
            if self.n_sampled >= _SAMPLE:
                break
            self.sample.append(_row(block, i))
            self.n_sampled += len(self.sample[-1])

    def _count_cells(self, of: _Occurrences, rows: np.ndarray) -> None:
        if len(rows) and not of.count:
            of.first = f"row {rows[0]}" if self.obs_names is None else repr(str(self.obs_names[int(rows[0])]))
        of.count += len(rows)

    def _count_values(self, of: _Occurrences, n: int, first: int, start: int, block: sp.csr_matrix) -> None:
        if n and not of.count:
            i, j = start + int(np.searchsorted(block.indptr, first, "right")) - 1, int(block.indices[first])
            cell = f"row {i}" if self.obs_names is None else f"cell {self.obs_names[i]!r}"
            gene = f"column {j}" if self.var_names is None else f"gene {self.var_names[j]!r}"
            of.first = f"first {block.data[first]:g} at {cell}, {gene}"
        of.count += n

    def scale(self) -> str | None:
        """Scale of the cells with non-integer values."""
        if not self.sample:
            return None
        indptr = np.concatenate([[0], np.cumsum([len(cell) for cell in self.sample])])
        return find_scale(np.concatenate(self.sample), indptr)

    def unit_variance_share(self) -> float:
        """Share of genes with variance 1 over cells, among those with any variance."""
        variance = (self.sum_squares - self.sum**2 / self.n_obs) / max(self.n_obs - 1, 1)
        varying = variance > 1e-6
        return float(np.mean(np.abs(variance[varying] - 1) < 0.02)) if varying.any() else 0.0


def _row(block: sp.csr_matrix, i: int) -> np.ndarray:
    """Values of a row, float64."""
    return np.asarray(block.data[block.indptr[i] : block.indptr[i + 1]], dtype=np.float64)


def _decide(totals: _Totals, input: Input, where: str) -> Literal["counts", "lognorm"]:
    """Kind of a matrix; an error if it is neither."""
    for name, of in totals.impossible.items():
        if of.count:
            raise ValueError(f"{where} holds {of.count} {name} ({of.first}). {_remedy(name, where)}")
    share = totals.fraction.count / max(totals.n_values, 1)
    values = (
        f"{totals.fraction.count} of {totals.n_values} values ({100 * share:.3g}%) are not integers "
        f"({totals.fraction.first}), the largest value is {totals.max:g}"
    )
    if share > LOG_SHARE and totals.n_obs >= 10 and totals.unit_variance_share() > 0.9:
        raise ValueError(f"{where} is scaled: its genes have variance 1 ({values}). {_COUNTS}.")
    scale = totals.scale() if input != "counts" else None
    if scale == "log1p" and totals.integral.count:
        raise ValueError(
            f"{where} mixes scales: {totals.integral.count} cells hold counts (first: {totals.integral.first}), "
            f"{totals.fractional.count} cells hold log-normalised values (first: {totals.fractional.first}). Bring the "
            "datasets to one scale before they are joined, or here: "
            "logs = np.array([(x % 1).any() for x in adata.X.toarray()]); adata.X[logs] = np.expm1(adata.X[logs])."
        )
    log_like = share > LOG_SHARE and totals.max <= MAX_LOGNORM
    if input == "counts":
        if totals.fraction.count:
            kind = "looks log-normalised, not like counts" if log_like else "holds values that are not integers"
            remedy = "input='lognorm'" if log_like else "input='auto' to read corrected counts or TPM"
            raise ValueError(
                f"{where} {kind}: {values}. Pass {remedy}, or the raw counts with layer=... or use_raw=True."
            )
        return "counts"
    if input == "auto" and are_ranks(totals.first):
        raise ValueError(
            f"{where} holds ranks of genes within each cell (largest: {totals.max:g}), not counts. {_COUNTS}; if these "
            "are the counts, pass input='counts'."
        )
    if input == "auto" and totals.max == 1 and totals.n_values >= _MIN_BINARY and not totals.fraction.count:
        raise ValueError(
            f"{where} is binary: all of its {totals.n_values} values above 0 are 1. {_COUNTS}; if these are the "
            "counts, pass input='counts'."
        )
    if input == "lognorm":
        if totals.max > MAX_LOGNORM:
            raise ValueError(
                f"{where} holds values up to {totals.max:g}, too large for a logarithm (at most {MAX_LOGNORM:g}). "
                "Pass input='counts', or input='auto'."
            )
        if totals.n_values and not totals.fraction.count:
            raise ValueError(f"{where} holds integers only: counts, not log-normalised values. Pass input='counts'.")
        if scale == "linear":
            raise ValueError(f"{where} holds normalised counts without a logarithm ({values}). Pass input='auto'.")
        return "lognorm"
    if not totals.fraction.count:
        return "counts"
    if not log_like or scale == "linear":
        warn(f"{where} is read as counts, although {values}. Corrected counts and TPM look like this. {_COUNTS}.")
        return "counts"
    if scale == "neither":
        warn(
            f"{where} is read as log1p of normalised counts, but its exponentials are not normalised counts "
            f"({values}). Logarithms to another base, square roots and scaled, imputed or corrected values look like "
            f"this. {_COUNTS}."
        )
    return "lognorm"


def _remedy(invalid: str, where: str) -> str:
    """Call that corrects invalid values."""
    if invalid == "negative values":
        return f"Is the matrix scaled, centred or regressed? {_COUNTS}."
    if invalid.startswith("values of"):
        return f"{_ZERO}{with_matrix(where, f'{{0}}[{{0}} >= {MAX_COUNT}] = 0')}."
    zero = f"{_ZERO}{with_matrix(where, '{0} = np.nan_to_num({0}, posinf=0, neginf=0)')} (for sparse X, adata.X.data)."
    if invalid != "NaN values":
        return zero
    shared = with_matrix(where, "adata = adata[:, ~np.isnan({0}).any(axis=0)].copy()")
    return (
        f"If genes were not measured in every dataset (ad.concat(join='outer')), keep the shared genes: {shared} (for "
        f"sparse X, adata.X.toarray()). {zero}"
    )


def with_matrix(where: str, change: str) -> str:
    """Call that changes a matrix.

    Parameters
    ----------
    where
        Name of the matrix in messages: `adata.X`, `adata.raw.X`, or `X of` a file.
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


# --- scale of values --------------------------------------------------------------------------------------------------
def find_scale(values: np.ndarray, indptr: np.ndarray) -> Literal["log1p", "linear", "neither"] | None:
    """Distinguish log-normalised expression from counts that were scaled per cell.

    On the right scale, the values of a cell are multiples of its smallest value, which is one count, or all cells have
    the same total. Multiples remain if genes are selected after normalisation; equal totals remain in corrected counts
    and TPM.

    Parameters
    ----------
    values
        float64, the values above zero of some cells, cell after cell.
    indptr
        Cell i holds ``values[indptr[i]:indptr[i + 1]]``; no cell is empty.

    Returns
    -------
    ``"log1p"`` or ``"linear"``; ``"neither"`` if there are enough values and neither scale fits, as for logarithms to
    another base, square roots and scaled values; None if there are too few values or the scale is unclear.
    """
    if not len(values):
        return None
    counts = np.expm1(values) if values.max() <= MAX_LOGNORM else None
    log_spread = np.inf if counts is None else _spread_of_totals(counts, indptr)
    if _spread_of_totals(values, indptr) < min(EQUAL_TOTALS, log_spread / 10):
        return "linear"
    if log_spread < EQUAL_TOTALS:
        return "log1p"
    logs, n_logs = (0.0, 0) if counts is None else _multiples(counts, indptr)
    linear, n_linear = _multiples(values, indptr)
    logs, linear = (logs if n_logs >= _MIN_VALUES else 0.0), (linear if n_linear >= _MIN_VALUES else 0.0)
    if max(logs, linear) > _MAY_FIT:
        return None if max(logs, linear) <= _FITS else "log1p" if logs >= linear else "linear"
    return "neither" if max(n_logs, n_linear) >= _MIN_VALUES and logs < 0.5 else None


def are_ranks(cells: Sequence[np.ndarray]) -> bool:
    """Whether the values of every cell are ranks within the cell, from 1 to n or as fractions of n.

    Parameters
    ----------
    cells
        The values above zero of each of some cells. At least ten cells with two different values are required.

    Returns
    -------
    True for ranks with any method for ties (minimum, maximum, mean); dense ranks must reach 20 in the median cell,
    because a cell of counts rarely has every integer up to its maximum.
    """
    cells = [cell for cell in cells if (cell != cell[0]).any()]
    if len(cells) < _MIN_CELLS:
        return False
    kinds = np.ones(4, dtype=bool)
    largest = []
    for cell in cells:
        ranks, n = np.unique(cell, return_counts=True)
        if ranks[-1] <= 1:  # fractions
            ranks = ranks * len(cell)
        last = np.cumsum(n)
        first, order = last - n + 1, np.arange(1, len(ranks) + 1)
        kinds &= [np.allclose(ranks, expected, rtol=1e-4) for expected in (first, last, (first + last) / 2, order)]
        largest.append(ranks[-1])
        if not kinds.any():
            return False
    return bool(kinds[:3].any() or np.median(largest) >= 20)


def one_count(values: np.ndarray, indptr: np.ndarray) -> np.ndarray | None:
    """Value of one count in each cell of log-normalised expression, before the logarithm.

    Parameters
    ----------
    values, indptr
        As for :func:`find_scale`; log-normalised expression.

    Returns
    -------
    float64 `(n_cells,)`, each cell's smallest value; None if the other values are not multiples of it, as in TPM.
    """
    undone = np.expm1(values.astype(np.float64))
    share, n = _multiples(undone, indptr)
    return None if n >= _MIN_VALUES and share < _MAY_FIT else np.minimum.reduceat(undone, indptr[:-1])


def _multiples(undone: np.ndarray, indptr: np.ndarray) -> tuple[float, int]:
    """Share of values, 1.5 to 50 times their cell's smallest one, that are multiples of it; and their number."""
    ratio = undone / np.repeat(np.minimum.reduceat(undone, indptr[:-1]), np.diff(indptr))
    ratio = ratio[(ratio > 1.5) & (ratio < 50)]
    near = np.abs(ratio - np.rint(ratio)) < _TOLERANCE
    return (float(near.mean()), len(ratio)) if len(ratio) else (0.0, 0)


def _spread_of_totals(undone: np.ndarray, indptr: np.ndarray) -> float:
    """Coefficient of variation of the cells' totals; infinite for fewer than ten cells."""
    if len(indptr) <= _MIN_CELLS:
        return np.inf
    totals = np.add.reduceat(undone, indptr[:-1])
    return float(totals.std() / totals.mean())
