"""Conversion of counts to ranked gene tokens, for training and inference.

The bits of the result depend neither on the order of columns, nor on the block size, nor on the storage of the matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_choices
from scdiva._constants import MAX_LENGTH, N_SPECIAL, TARGET_SUM

ENTROPY_FLOOR = 0.3
"""Minimum entropy, in nats, in the denominator of the score: the entropy of a gene in 9% of cells.

Rarer genes are ranked as if they were that common. Without a floor, a single count of a gene seen in 0.01% of cells
(0.001 nats) outranks every marker: on 500 PBMCs, 38% of the first 16 tokens had an entropy below 0.1 nats with floors
of 0 and 0.1, 5% with 0.3. With a floor of 1 nat or more, ribosomal genes are ranked first again."""

EPSILON = 1e-6
"""The eps of the paper's score (appendix, entropy-normalised serialisation)."""

_FIXED_BITS = 40
"""Bits of a cell's largest count in fixed point: 2^22 genes can be added without overflow, and integer addition is
associative where float addition is not. Counts below 2^40 are exact."""


def score_denominator(entropy: np.ndarray, floor: float = ENTROPY_FLOOR, eps: float = EPSILON) -> np.ndarray:
    r"""Denominator of the ranking score, :math:`\max(H_g, \mathrm{floor}) + \varepsilon`.

    The paper divides by :math:`H_g + \varepsilon` (appendix, entropy-normalised serialisation); this corresponds to
    `floor=0`.

    Parameters
    ----------
    entropy
        Entropy of each token in nats, (n_tokens,).
    floor
        Minimum entropy, in nats; see :data:`ENTROPY_FLOOR`.
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
            f"{int(np.flatnonzero(bad)[0])}. Use the median for genes that the corpus lacks (Vocabulary.entropy does)."
        )
    denominator = np.maximum(entropy.astype(np.float32), np.float32(floor)) + np.float32(eps)
    if not ((denominator > 0) & (denominator < np.inf)).all():
        raise ValueError(
            f"floor={floor} and eps={eps} give scores that are not finite; both must be "
            "finite and one of them positive."
        )
    return denominator


def to_token_space(block: sp.csr_matrix, tokens: np.ndarray, n_tokens: int, kind: str = "counts") -> sp.csr_matrix:
    """Normalise cells and move their genes from the user's columns to tokens.

    With c the count of a gene in a cell and C the cell's total over *all* columns, including unknown genes:
    v = log(1 + 1e4 c / C) (paper, section on data: library-size normalisation and log1p). Columns that share a token
    are summed on the count scale. Sums are taken in 64-bit fixed point, relative to the cell's largest count, so that
    they do not depend on the order of columns.

    Parameters
    ----------
    block
        Cells, (n_cells, n_vars), canonical CSR as :func:`scdiva.data.matrix.row_blocks` yields it; no value negative
        or not finite.
    tokens
        Token of each column, int (n_vars,); negative = unknown, dropped.
    n_tokens
        Size of the token space: genes and specials.
    kind
        ``"counts"``, or ``"lognorm"`` for log(1 + x) values, which are first converted to the count scale.

    Returns
    -------
    v, float32 CSR (n_cells, n_tokens), indices sorted, every stored value positive.

    Raises
    ------
    ValueError
        If `kind` is unknown, `tokens` does not fit the block or the token space, or the block's indices point outside
        of it.
    """
    from scdiva.tokenizer import _kernels

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
    counts = on_count_scale(block.data, kind)
    counts = plain(counts, np.float32 if counts.dtype == np.float32 else np.float64)
    indptr, value_tokens = np.empty(block.shape[0] + 1, np.int64), np.empty(len(counts), np.int32)
    shares = np.empty(len(counts))
    columns, tokens = plain(block.indices, np.int32), plain(tokens, np.int32)
    rows = plain(block.indptr, np.int64)
    _kernels.normalise(rows, columns, counts, tokens, _FIXED_BITS, TARGET_SUM, indptr, value_tokens, shares)
    if indptr[-1] < len(counts):  # a view would keep the rest in memory
        value_tokens, shares = value_tokens[: indptr[-1]].copy(), shares[: indptr[-1]]
    values = np.log1p(shares, out=shares).astype(np.float32)
    cells = sp.csr_matrix((values, value_tokens, indptr), shape=(block.shape[0], n_tokens))
    cells.has_canonical_format = True  # so that scipy does not check again
    return cells


def on_count_scale(values: np.ndarray, kind: str) -> np.ndarray:
    """Undo the logarithm of log-normalised expression, before cells are normalised.

    Parameters
    ----------
    values
        Expression.
    kind
        ``"counts"``, or ``"lognorm"`` for log(1 + x), x being counts scaled per cell to any total.

    Returns
    -------
    Counts as they are, or x in float64.

    Raises
    ------
    ValueError
        If `kind` is unknown.
    """
    check_choices(kind=(kind, ("counts", "lognorm")))
    return values if kind == "counts" else np.expm1(values.astype(np.float64))


def serialize(
    cells: sp.csr_matrix, denominator: np.ndarray, max_length: int = MAX_LENGTH
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Rank the genes of each cell by entropy-normalised expression.

    :math:`S_g = v_g / (H_g + \varepsilon)` (paper, appendix, entropy-normalised serialisation), in float32 by division:
    a product with the reciprocal would reorder near-ties. Descending score; equal scores by ascending token.

    Parameters
    ----------
    cells
        Expression in token space, (n_cells, n_tokens), from :func:`to_token_space`.
    denominator
        float32 (n_tokens,), from :func:`score_denominator`.
    max_length
        Maximum number of genes per cell.

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
        If `max_length` is not positive and whole, `denominator` does not fit the cells, or the cells are not what
        :func:`to_token_space` returns.
    """
    from scdiva.tokenizer import _kernels

    if max_length < 1 or max_length % 1:
        raise ValueError(f"max_length must be a whole number from 1 on, got {max_length}.")
    if denominator.shape != (cells.shape[1],):
        raise ValueError(f"denominator has shape {denominator.shape}, the cells have {cells.shape[1]} tokens.")
    for name, array, maker in (("denominator", denominator, "score_denominator"), ("cells", cells, "to_token_space")):
        if array.dtype != np.float32:
            raise ValueError(f"{name} must be float32 (see {maker}), got {array.dtype}.")
    indptr = plain(cells.indptr, np.int64)
    out_indptr = np.zeros(len(indptr), dtype=np.int64)
    np.cumsum(np.minimum(np.diff(indptr), max_length), out=out_indptr[1:])
    tokens, values = np.empty(out_indptr[-1], dtype=np.int32), np.empty(out_indptr[-1], dtype=np.float32)
    columns, data = plain(cells.indices, np.int32), plain(cells.data, np.float32)
    if not _kernels.rank(indptr, columns, data, plain(denominator, np.float32), out_indptr, tokens, values):
        raise ValueError(
            f"the cells are damaged: tokens must ascend within 0 ... {cells.shape[1] - 1} and values be positive and "
            "finite in each row, as to_token_space returns them."
        )
    return out_indptr, tokens, values


def plain(array: Any, dtype: Any) -> np.ndarray:
    """Contiguous, aligned array of a dtype for the kernels; the array itself if it is."""
    return np.require(array, dtype, ["C", "A"])
