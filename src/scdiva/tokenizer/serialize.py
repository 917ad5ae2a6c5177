"""From counts to ranked gene tokens: the two functions that training and inference share.

The order of the user's columns, the number of cells read at once and the storage of the matrix change no bit of what
comes out.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from scdiva._constants import MAX_LENGTH, N_SPECIAL, TARGET_SUM

ENTROPY_FLOOR = 0.3
"""Least entropy, in nats, that a score is divided by: that of a gene found in 9% of cells.

Rarer genes are ranked as if they were that common. Without a floor one stray count of a gene seen in 0.01% of cells
(0.001 nats) outranks every marker: on 500 PBMCs, 38% of the first 16 tokens had an entropy below 0.1 nats with floors
of 0 and 0.1, 5% with 0.3. From 1 nat on ribosomal genes come back to the front."""

EPSILON = 1e-6
"""The eps of the paper's score (appendix, entropy-normalised serialisation)."""

_FIXED_BITS = 40


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
    if not (denominator > 0).all():
        raise ValueError(f"floor={floor} and eps={eps} leave scores divided by zero; one of them must be positive.")
    return denominator


def to_token_space(block: sp.csr_matrix, tokens: np.ndarray, n_tokens: int, kind: str = "counts") -> sp.csr_matrix:
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

    Returns
    -------
    v, float32 CSR (n_cells, n_tokens), indices sorted, every stored value positive.

    Raises
    ------
    ValueError
        If `kind` is unknown, or `tokens` does not fit the block or the token space.
    """
    if kind not in ("counts", "lognorm"):
        raise ValueError(f"kind must be 'counts' or 'lognorm', got {kind!r}.")
    tokens = np.asarray(tokens)
    if tokens.shape != (block.shape[1],):
        raise ValueError(f"{tokens.shape[0]} tokens for {block.shape[1]} columns.")
    if len(tokens) and (tokens.max() >= n_tokens or np.any((tokens >= 0) & (tokens < N_SPECIAL))):
        raise ValueError(
            f"gene tokens must lie in {N_SPECIAL} ... {n_tokens - 1}, "
            f"got {tokens[tokens >= 0].min()} to {tokens.max()}."
        )
    n_cells = block.shape[0]
    indptr = block.indptr.astype(np.int64)
    counts = block.data.astype(np.float64)
    if kind == "lognorm":
        counts = np.expm1(counts)
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
    row = np.repeat(np.arange(n_cells), np.diff(cells.indptr))
    # The shift cancels in the ratio.
    share = cells.data.astype(np.float64) / total[row].astype(np.float64)
    v = np.log1p(share * TARGET_SUM).astype(np.float32)
    out = sp.csr_matrix((v, cells.indices, cells.indptr), shape=(n_cells, n_tokens))
    out.eliminate_zeros()
    return out


def serialize(
    cells: sp.csr_matrix, denominator: np.ndarray, max_length: int = MAX_LENGTH
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
    ValueError
        If `max_length` is not positive or `denominator` does not fit the cells.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    if denominator.shape != (cells.shape[1],):
        raise ValueError(f"denominator has shape {denominator.shape}, the cells have {cells.shape[1]} tokens.")
    if denominator.dtype != np.float32:
        raise ValueError(f"denominator must be float32 (see score_denominator), got {denominator.dtype}.")
    if not cells.has_canonical_format or (len(cells.data) and cells.data.min() <= 0):
        cells = cells.copy()
        cells.sum_duplicates()
        cells.data[cells.data < 0] = 0
        cells.eliminate_zeros()
    indptr = cells.indptr.astype(np.int64)
    n_cells = cells.shape[0]
    score = cells.data / denominator[cells.indices]

    # Bits of a positive float32 sort like the number. Flipped, they sort descending; the position in the row, which
    # ascends with the token, breaks ties. So one sort of 64-bit keys is the whole ranking.
    position = np.arange(len(score), dtype=np.int64) - np.repeat(indptr[:-1], np.diff(indptr))
    key = (np.uint64(0xFFFFFFFF) - score.view(np.uint32).astype(np.uint64)) << np.uint64(32)
    key |= position.astype(np.uint64)
    length = np.minimum(np.diff(indptr), max_length)
    out_indptr = np.zeros(n_cells + 1, dtype=np.int64)
    np.cumsum(length, out=out_indptr[1:])
    kept = np.empty(out_indptr[-1], dtype=np.uint64)
    for i in range(n_cells):
        of_cell = key[indptr[i] : indptr[i + 1]]
        of_cell.sort()
        kept[out_indptr[i] : out_indptr[i + 1]] = of_cell[:max_length]
    at = (kept & np.uint64(0xFFFFFFFF)).astype(np.int64) + np.repeat(indptr[:-1], length)
    return out_indptr, cells.indices[at].astype(np.int32), cells.data[at]
