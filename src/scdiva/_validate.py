"""One pass over an expression matrix, which finds its scale and reports invalid values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_choices, warn
from scdiva._scale import MAX_LOGNORM, are_ranks, find_scale
from scdiva._settings import progress_bar

Input = Literal["auto", "counts", "lognorm"]

LOG_SHARE = 0.5
"""Share of non-integer values above which a matrix of small values is taken as log-normalised. Counts corrected for
ambient RNA or multiple mapping still have many integers."""
MAX_COUNT = 2**31 - 1
"""Values from here on are overflows or codes of missing values: the sum of a gene over 100,000 cells is smaller."""
_SAMPLE = 200_000
"""Values, of the first cells with non-integer values, from which the scale is found."""
_MIN_WHOLE = 20
"""Minimum number of genes of a cell of integers that counts as a cell of counts."""
_FIRST_CELLS = 100
"""Number of cells that are checked for ranks."""
_ZERO = "Find out where they come from; if they stand for missing counts, set them to zero: "
_COUNTS = "Pass the counts, or their log1p, with layer=... or use_raw=True"
_IMPOSSIBLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "NaN values": np.isnan,
    "infinite values": np.isinf,
    "negative values": lambda x: x < 0,
    f"values of {MAX_COUNT:,} or more": lambda x: x >= MAX_COUNT,
}
"""Invalid values, and how they are found."""


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

    With ``input="auto"``, integers are counts. Values of which more than half are not integers and none exceeds 15 are
    log-normalised, unless the first cells are counts scaled per cell (:func:`scdiva._scale.find_scale`). Other
    non-integers are counts, such as corrected counts and TPM, with a warning.

    Parameters
    ----------
    blocks
        First row and canonical CSR block, as :func:`scdiva.data.matrix.row_blocks` yields them.
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
        If there are no cells or genes; if values are NaN, infinite, negative, 2³¹ - 1 or more, or not of the kind that
        `input` states; if genes are scaled to unit variance; if values are ranks within each cell; or if some cells
        hold counts and others log-normalised values.

    Warns
    -----
    UserWarning
        If values are read as counts although they are not integers, or as log-normalised although their exponentials
        are not normalised counts.
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
        self.sum, self.sum_squares, self.sum_expm1 = np.zeros((3, n_vars))  # of each gene
        self.impossible = {what: _Finding() for what in _IMPOSSIBLE}
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
        for i in np.flatnonzero(per_cell >= _MIN_WHOLE)[: _FIRST_CELLS - len(self.first)]:
            self.first.append(x[block.indptr[i] : block.indptr[i + 1]])
        if self.max <= MAX_LOGNORM:
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

    def scale(self) -> str | None:
        """Scale of the fractional cells."""
        if not self.sample:
            return None
        indptr = np.concatenate([[0], np.cumsum([len(cell) for cell in self.sample])])
        return find_scale(np.concatenate(self.sample), indptr)

    def unit_variance_share(self) -> float:
        """Share of the genes with any variance whose variance over cells is 1."""
        variance = (self.sum_squares - self.sum**2 / self.n_obs) / max(self.n_obs - 1, 1)
        varying = variance > 1e-6
        return float(np.mean(np.abs(variance[varying] - 1) < 0.02)) if varying.any() else 0.0


def _decide(seen: _Seen, input: Input, where: str) -> Literal["counts", "lognorm"]:
    """Return the kind of a matrix, or raise an error if it holds neither kind."""
    for what, found in seen.impossible.items():
        if found.count:
            raise ValueError(f"{where} holds {found.count} {what} ({found.first}). {_remedy(what, where)}")
    share = seen.fraction.count / max(seen.n_values, 1)
    said = (
        f"{seen.fraction.count} of {seen.n_values} values ({100 * share:.3g}%) are not integers "
        f"({seen.fraction.first}), the largest value is {seen.max:g}"
    )
    if share > LOG_SHARE and seen.n_obs >= 10 and seen.unit_variance_share() > 0.9:
        raise ValueError(f"{where} is scaled: its genes have variance 1 ({said}). {_COUNTS}.")
    scale = seen.scale() if input != "counts" else None
    if scale == "log1p" and seen.whole.count:
        raise ValueError(
            f"{where} mixes scales: {seen.whole.count} cells hold counts (first: {seen.whole.first}), "
            f"{seen.fractional.count} cells hold log-normalised values (first: {seen.fractional.first}). Bring the "
            "datasets to one scale before they are joined, or here: "
            "logs = np.array([(x % 1).any() for x in adata.X.toarray()]); adata.X[logs] = np.expm1(adata.X[logs])."
        )
    log_like = share > LOG_SHARE and seen.max <= MAX_LOGNORM
    if input == "counts":
        if seen.fraction.count:
            kind = "looks log-normalised, not like counts" if log_like else "holds values that are not integers"
            mend = "input='lognorm'" if log_like else "input='auto' to read corrected counts or TPM"
            raise ValueError(f"{where} {kind}: {said}. Pass {mend}, or the raw counts with layer=... or use_raw=True.")
        return "counts"
    if input == "auto" and are_ranks(seen.first):
        raise ValueError(
            f"{where} holds ranks of genes within each cell (largest: {seen.max:g}), not counts. {_COUNTS}; if these "
            "are the counts, pass input='counts'."
        )
    if input == "lognorm":
        if seen.max > MAX_LOGNORM:
            raise ValueError(
                f"{where} holds values up to {seen.max:g}, too large for a logarithm (at most {MAX_LOGNORM:g}). "
                "Pass input='counts', or input='auto'."
            )
        if seen.n_values and not seen.fraction.count:
            raise ValueError(f"{where} holds integers only: counts, not log-normalised values. Pass input='counts'.")
        if scale == "linear":
            raise ValueError(f"{where} holds normalised counts without a logarithm ({said}). Pass input='auto'.")
        return "lognorm"
    if not seen.fraction.count:
        return "counts"
    if not log_like or scale == "linear":
        warn(f"{where} is read as counts, although {said}. Corrected counts and TPM look like this. {_COUNTS}.")
        return "counts"
    if scale == "neither":
        warn(
            f"{where} is read as log1p of normalised counts, but its exponentials are not normalised counts ({said}). "
            "Logarithms to another base, square roots and scaled, imputed or corrected values look like this. "
            f"{_COUNTS}."
        )
    return "lognorm"


def _remedy(what: str, where: str) -> str:
    """Call that corrects invalid values."""
    if what == "negative values":
        return f"Is the matrix scaled, centred or regressed? {_COUNTS}."
    if what.startswith("values of"):
        return f"{_ZERO}{with_matrix(where, f'{{0}}[{{0}} >= {MAX_COUNT}] = 0')}."
    zero = f"{_ZERO}{with_matrix(where, '{0} = np.nan_to_num({0}, posinf=0, neginf=0)')} (for sparse X, adata.X.data)."
    if what != "NaN values":
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
