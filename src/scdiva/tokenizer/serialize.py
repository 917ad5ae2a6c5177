"""From counts to ranked gene tokens: the two functions that training and inference share.

The order of the user's columns, the number of cells read at once and the storage of the matrix change no bit of what
comes out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_choices
from scdiva._constants import MAX_LENGTH, N_SPECIAL, TARGET_SUM

Backend = Literal["auto", "numba", "numpy"]
"""`"auto"` takes numba where it can be imported, and says once in the log why where it can't; `"numba"` takes it or
raises; `"numpy"` does without. All give the same bits."""
ENTROPY_FLOOR = 0.3
"""Least entropy, in nats, that a score is divided by: that of a gene found in 9% of cells.

Rarer genes are ranked as if they were that common. Without a floor one stray count of a gene seen in 0.01% of cells
(0.001 nats) outranks every marker: on 500 PBMCs, 38% of the first 16 tokens had an entropy below 0.1 nats with floors
of 0 and 0.1, 5% with 0.3. From 1 nat on ribosomal genes come back to the front."""

EPSILON = 1e-6
"""The eps of the paper's score (appendix, entropy-normalised serialisation)."""

_FIXED_BITS = 40

_AT_ONCE = 1 << 16
"""Values that the numpy code ranks at a time: what it holds of them then stays in a core's cache."""


def score_denominator(entropy: np.ndarray, floor: float = ENTROPY_FLOOR, eps: float = EPSILON) -> np.ndarray:
    r"""Denominator of the ranking score, :math:`\max(H_g, \mathrm{floor}) + \varepsilon`.

    The paper divides by :math:`H_g + \varepsilon` (appendix, entropy-normalised serialisation); `floor=0` is that.

    Parameters
    ----------
    entropy
        Entropy of each token in nats, (n_tokens,).
    floor
        Least entropy, in nats; see :data:`ENTROPY_FLOOR`.
    eps
        Added after the floor.

    Returns
    -------
    float32, (n_tokens,), finite and positive.

    Raises
    ------
    ValueError
        If an entropy is negative or not finite, or a denominator would not be positive.
    """
    entropy = np.asarray(entropy)
    bad = ~np.isfinite(entropy) | (entropy < 0)
    if bad.any():
        raise ValueError(
            f"{int(bad.sum())} of {len(entropy)} entropies are negative or not finite, first at token "
            f"{int(np.flatnonzero(bad)[0])}. Give genes that the corpus never saw the median (Vocabulary.entropy does)."
        )
    denominator = np.maximum(entropy.astype(np.float32), np.float32(floor)) + np.float32(eps)
    if not ((denominator > 0) & (denominator < np.inf)).all():
        raise ValueError(
            f"floor={floor} and eps={eps} leave scores divided by zero or by what is no finite number; both must be "
            "finite and one of them positive."
        )
    return denominator


def to_token_space(
    block: sp.csr_matrix, tokens: np.ndarray, n_tokens: int, kind: str = "counts", *, backend: Backend = "auto"
) -> sp.csr_matrix:
    """Normalise cells and move their genes from the user's columns to tokens.

    With c the count of a gene in a cell and C the cell's total over *all* columns, also those of unknown genes:
    v = log(1 + 1e4 c / C) (paper, section on data: library-size normalisation and log1p). Columns that share a token
    are summed on the count scale. Sums are taken in 64-bit fixed point, relative to the cell's largest count, so that
    they do not depend on the order of columns.

    Parameters
    ----------
    block
        Cells, (n_cells, n_vars), canonical CSR as :func:`scdiva.data.blocks.row_blocks` yields it; no value negative
        or not finite.
    tokens
        Token of each column, int (n_vars,); negative = unknown, dropped.
    n_tokens
        Size of the token space: genes and specials.
    kind
        ``"counts"``, or ``"lognorm"`` for log(1 + x) values, which are taken back to the count scale first.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``: who loops; the result is the same to the bit.

    Returns
    -------
    v, float32 CSR (n_cells, n_tokens), indices sorted, every stored value positive.

    Raises
    ------
    ImportError
        If `backend` is ``"numba"`` and numba can't be used.
    ValueError
        If `kind` or `backend` is unknown, `tokens` does not fit the block or the token space, or the block's indices
        point outside of it.
    """
    check_choices(kind=(kind, ("counts", "lognorm")))
    tokens = np.asarray(tokens)
    if tokens.shape != (block.shape[1],):
        raise ValueError(f"{tokens.shape[0]} tokens for {block.shape[1]} columns.")
    if len(tokens) and (tokens.max() >= n_tokens or np.any((tokens >= 0) & (tokens < N_SPECIAL))):
        raise ValueError(
            f"gene tokens must lie in {N_SPECIAL} ... {n_tokens - 1}, "
            f"got {tokens[tokens >= 0].min()} to {tokens.max()}."
        )
    if len(block.indices) and not 0 <= block.indices.min() <= block.indices.max() < len(tokens):
        raise ValueError(f"the block's indices run from {block.indices.min()} to {block.indices.max()}, it is damaged.")
    counts = block.data if kind == "counts" else np.expm1(block.data.astype(np.float64))
    compiled = kernels(backend)
    if compiled is None:
        return _to_token_space_numpy(counts, block, tokens, n_tokens)
    counts = plain(counts, np.float32 if counts.dtype == np.float32 else np.float64)
    indptr, found = np.empty(block.shape[0] + 1, np.int64), np.empty(len(counts), np.int32)
    shares = np.empty(len(counts))
    compiled.normalise(
        plain(block.indptr, np.int64), plain(block.indices, np.int32), counts, plain(tokens, np.int32),
        _FIXED_BITS, TARGET_SUM, indptr, found, shares,
    )  # fmt: skip
    if indptr[-1] < len(counts):  # not a view: the rest would stay in memory with it
        found, shares = found[: indptr[-1]].copy(), shares[: indptr[-1]]
    return _canonical(np.log1p(shares, out=shares).astype(np.float32), found, indptr, n_tokens)


def _to_token_space_numpy(counts: np.ndarray, block: sp.csr_matrix, tokens: np.ndarray, n_tokens: int) -> sp.csr_matrix:
    n_cells, indptr = block.shape[0], block.indptr.astype(np.int64)
    counts = counts.astype(np.float64)
    row = np.repeat(np.arange(n_cells), np.diff(indptr))

    # Fixed point: the cell's largest count gets 40 bits, so 2^22 genes can be added without overflow; integer addition
    # is associative, float addition is not. Counts below 2^40 are exact.
    largest = np.zeros(n_cells)
    filled = np.diff(indptr) > 0
    if filled.any():
        largest[filled] = np.maximum.reduceat(counts, indptr[:-1][filled])
    shift = _FIXED_BITS - np.frexp(largest)[1]
    fixed = np.rint(np.ldexp(counts, shift[row])).astype(np.int64)
    total = np.zeros(n_cells, dtype=np.int64)
    if filled.any():
        total[filled] = np.add.reduceat(fixed, indptr[:-1][filled])

    token = tokens[block.indices]
    known = token >= 0
    known_indptr = np.zeros(n_cells + 1, dtype=np.int64)
    np.cumsum(np.bincount(row[known], minlength=n_cells), out=known_indptr[1:])
    cells = sp.csr_matrix((fixed[known], token[known].astype(np.int32), known_indptr), shape=(n_cells, n_tokens))
    cells.sum_duplicates()
    cells.eliminate_zeros()
    row = np.repeat(np.arange(n_cells), np.diff(cells.indptr))
    # The shift cancels in the ratio.
    share = cells.data.astype(np.float64) / total[row].astype(np.float64)
    return _canonical(np.log1p(share * TARGET_SUM).astype(np.float32), cells.indices, cells.indptr, n_tokens)


def _canonical(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n_tokens: int) -> sp.csr_matrix:
    """CSR of sorted tokens; said so, lest scipy look at each again."""
    cells = sp.csr_matrix((data, indices, indptr), shape=(len(indptr) - 1, n_tokens))
    cells.has_canonical_format = True
    return cells


def serialize(
    cells: sp.csr_matrix, denominator: np.ndarray, max_length: int = MAX_LENGTH, *, backend: Backend = "auto"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Rank the genes of each cell by entropy-normalised expression.

    :math:`S_g = v_g / (H_g + \varepsilon)` (paper, appendix, entropy-normalised serialisation), in float32 by division:
    a product with the reciprocal would reorder near-ties. Descending score; equal scores by ascending token.

    Parameters
    ----------
    cells
        Expression in token space, (n_cells, n_tokens), from :func:`to_token_space`. Only values above 0 become tokens.
    denominator
        float32 (n_tokens,), from :func:`score_denominator`.
    max_length
        Genes kept per cell.
    backend
        ``"auto"`` sorts with numba, or with numpy where numba can't be imported; ``"numba"`` and ``"numpy"`` are taken
        at their word. The result is the same to the bit.

    Returns
    -------
    indptr
        int64 (n_cells + 1,): cell i holds positions ``indptr[i]`` to ``indptr[i + 1]``. Nothing is padded.
    tokens
        int32, in rank order.
    values
        float32, v of each token.

    Raises
    ------
    ImportError
        If `backend` is ``"numba"`` and numba can't be used.
    ValueError
        If `max_length` is not positive and whole, `denominator` does not fit the cells, the cells are not float32 or
        not finite, or there is no such `backend`.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    if max_length % 1:
        raise ValueError(f"max_length must be a whole number, got {max_length}.")
    if denominator.shape != (cells.shape[1],):
        raise ValueError(f"denominator has shape {denominator.shape}, the cells have {cells.shape[1]} tokens.")
    if denominator.dtype != np.float32:
        raise ValueError(f"denominator must be float32 (see score_denominator), got {denominator.dtype}.")
    if cells.dtype != np.float32:
        raise ValueError(f"cells must be float32 (see to_token_space), got {cells.dtype}.")
    compiled = kernels(backend)
    if compiled is not None and (found := _ranked(compiled.rank, cells, denominator, max_length)) is not None:
        return found
    found = _ranked(_rank_numpy if compiled is None else compiled.rank, _clean(cells), denominator, max_length)
    assert found is not None
    return found


def _clean(cells: sp.csr_matrix) -> sp.csr_matrix:
    """Return the cells with sorted tokens and positive values, themselves if they are so; refuse damaged ones."""
    if len(cells.data) and not np.isfinite(cells.data).all():
        raise ValueError(f"{int((~np.isfinite(cells.data)).sum())} values of the cells are not finite.")
    if len(cells.indices) and not 0 <= cells.indices.min() <= cells.indices.max() < cells.shape[1]:
        raise ValueError(
            f"the cells hold tokens {cells.indices.min()} to {cells.indices.max()}, outside of 0 ... "
            f"{cells.shape[1] - 1}: they are damaged."
        )
    arrays = (cells.data, cells.indices, cells.indptr)
    cells = sp.csr_matrix(arrays, shape=cells.shape)  # one that doesn't know that it is sorted
    if not cells.has_canonical_format or (len(cells.data) and cells.data.min() <= 0):
        cells = cells.copy()
        cells.sum_duplicates()
        cells.data[cells.data < 0] = 0
        cells.eliminate_zeros()
    return cells


def _ranked(
    rank: Callable[..., Any], cells: sp.csr_matrix, denominator: np.ndarray, max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    indptr = plain(cells.indptr, np.int64)
    out_indptr = np.zeros(len(indptr), dtype=np.int64)
    np.cumsum(np.minimum(np.diff(indptr), max_length), out=out_indptr[1:])
    tokens, values = np.empty(out_indptr[-1], dtype=np.int32), np.empty(out_indptr[-1], dtype=np.float32)
    done = rank(
        indptr, plain(cells.indices, np.int32), plain(cells.data, np.float32), plain(denominator, np.float32),
        out_indptr, tokens, values,
    )  # fmt: skip
    return (out_indptr, tokens, values) if done else None


def _rank_numpy(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, denominator: np.ndarray,
    out_indptr: np.ndarray, tokens: np.ndarray, values: np.ndarray,
) -> bool:  # fmt: skip
    """Write the genes of each row by falling score; `out_indptr` says how many of them are kept."""
    n_cells, start = len(indptr) - 1, 0
    while start < n_cells:
        stop = max(start + 1, int(np.searchsorted(indptr, indptr[start] + _AT_ONCE, "right")) - 1)
        lo, hi = indptr[start], indptr[stop]
        value, token = data[lo:hi], indices[lo:hi]
        score = value / denominator[token]
        # Bits of a positive float32 sort like the number. Flipped, they sort descending; the position, which ascends
        # with the token, breaks ties. So one sort of 64-bit keys is the whole ranking.
        key = (~score.view(np.uint32)).astype(np.uint64)
        key <<= np.uint64(32)
        key |= np.arange(hi - lo, dtype=np.uint64)
        bounds, length = (indptr[start : stop + 1] - lo).tolist(), np.diff(out_indptr[start : stop + 1]).tolist()
        kept = []
        for a, b, n in zip(bounds[:-1], bounds[1:], length, strict=True):
            key[a:b].sort()
            kept.append(key[a : a + n])
        at = (np.concatenate(kept) & np.uint64(0xFFFFFFFF)).astype(np.int64)
        tokens[out_indptr[start] : out_indptr[stop]] = token[at]
        values[out_indptr[start] : out_indptr[stop]] = value[at]
        start = stop
    return True


def kernels(backend: Backend = "auto") -> ModuleType | None:
    """Return the compiled loops, which the first call loads (and compiles, where no earlier process did).

    Parameters
    ----------
    backend
        See :data:`Backend`.

    Returns
    -------
    :mod:`scdiva.tokenizer._kernels`, or None where numpy does the work.

    Raises
    ------
    ImportError
        If `backend` is ``"numba"`` and numba can't be used.
    ValueError
        If there is no such backend.
    """
    check_choices(backend=(backend, get_args(Backend)))
    if backend == "numpy":
        return None
    found = _loaded()
    if isinstance(found, ModuleType):
        return found
    if backend == "numba":
        raise ImportError(
            f"backend='numba', but numba can't be used: {found}. Mend that, or pass backend='auto'."
        ) from found
    return None


@functools.cache  # also of a failure: an import that fails is slow, and is asked for with every block of rows
def _loaded() -> ModuleType | ImportError:
    try:
        from scdiva.tokenizer import _kernels
    except ImportError as error:
        logging.getLogger("scdiva").warning("genes are ranked by numpy, not by numba, which is slower: %s", error)
        return error
    return _kernels


def plain(array: Any, dtype: Any) -> np.ndarray:
    """Return an array as the kernels take it, of this type, contiguous and aligned; itself where it is so already."""
    return np.require(array, dtype, ["C", "A"])
