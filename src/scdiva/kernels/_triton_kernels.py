"""Attention with RoPE inside, for Triton: FlashAttention-2 over packed cells (Dao 2023; Dao et al. 2022).

What the four kernels share:

- A program owns one tile of rows of one head of one cell; tiles of a pair (cell, head) are neighbours in the grid, so
  that they find each other's keys and values in the L2 cache. Positions are rows of the cell. A program beyond its
  cell's end leaves at once.
- A head is kept as two half-tiles `(rows, D/2)`, the two coordinates of each rotated pair. Rotating then needs neither
  a shuffle nor a second load, and `q k^T` is the sum of two products.
- `Q̂` is the rotated query times `log2(e) / sqrt(D)`, so that the softmax is a bare `exp2`. It is rounded to the dtype
  of the input in one place (:func:`_load_pair`), whichever kernel loads it, and so is the rotated key: the backward
  kernels see the very numbers that the forward saw.
- `READY` says that a tensor was rotated before (into scratch, by :func:`rotate_kernel`) and is loaded as it stands.
- Full tiles carry no mask; the last one is peeled off the loop.
- Full-precision products (`PRECISION="ieee"`) run outside of the tensor cores, where a thread holds whole rows of both
  factors. Moved out of the loop, the rows that the loop doesn't change would fill the registers; so nothing is moved
  (Triton 3.6 moves them all the same, and spills; 3.9 leaves them there).
- No atomics: two runs agree bit for bit.
- What counts tokens or tiles is compiled as any number (`COUNTS`): by default Triton compiles anew for numbers that 16
  divides, and for 1, so that a run would stop for seconds at the first batch of each kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
COUNTS = ("n_tokens", "n_tiles")


@triton.jit
def _pair_of_program(Cu, n_tiles, n_heads, TILE: tl.constexpr):
    """Which tile of which head of which cell this program owns."""
    program = tl.program_id(0)
    pair = program // n_tiles
    first_row = (program % n_tiles) * TILE
    cell = pair // n_heads
    start = tl.load(Cu + cell)
    length = tl.load(Cu + cell + 1) - start
    return pair % n_heads, start.to(tl.int64), length, first_row


@triton.jit
def _load(X, at, inside, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(X + at, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(X + at)
    return x


@triton.jit
def _load_pair(
    X, Cos, Sin, rows, inside, stride, factor,
    HALF: tl.constexpr, ROTATE: tl.constexpr, READY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both halves of some rows, rotated by their positions and multiplied by a factor (1 for keys)."""
    half = tl.arange(0, HALF)
    at = rows[:, None] * stride + half[None, :]
    first = _load(X, at, inside, MASKED)
    second = _load(X, at + HALF, inside, MASKED)
    if not READY:
        dtype = first.dtype
        first, second = first.to(tl.float32), second.to(tl.float32)
        if ROTATE:
            turn = rows[:, None] * HALF + half[None, :]
            cos, sin = _load(Cos, turn, inside, MASKED), _load(Sin, turn, inside, MASKED)
            first, second = first * cos - second * sin, second * cos + first * sin
        first, second = (first * factor).to(dtype), (second * factor).to(dtype)
    return first, second


@triton.jit
def _store_pair(
    X, Cos, Sin, first, second, rows, inside, stride, HALF: tl.constexpr, ROTATE: tl.constexpr
):  # fmt: skip
    """Turn the gradient of rotated rows back and store it."""
    half = tl.arange(0, HALF)
    if ROTATE:
        turn = rows[:, None] * HALF + half[None, :]
        cos = tl.load(Cos + turn, mask=inside[:, None], other=0.0)
        sin = tl.load(Sin + turn, mask=inside[:, None], other=0.0)
        first, second = first * cos + second * sin, second * cos - first * sin
    at = rows[:, None] * stride + half[None, :]
    dtype = X.dtype.element_ty
    tl.store(X + at, first.to(dtype), mask=inside[:, None])
    tl.store(X + at + HALF, second.to(dtype), mask=inside[:, None])


@triton.jit(do_not_specialize=COUNTS[1:])
def rotate_kernel(
    X, Y, Cos, Sin, Cu, x_token, x_head, y_token, y_head, n_tiles, n_heads, factor,
    HALF: tl.constexpr, ROTATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Y = X, rotated and multiplied by a factor."""
    head, start, length, first_row = _pair_of_program(Cu, n_tiles, n_heads, TILE)
    if first_row >= length:
        return
    rows = first_row + tl.arange(0, TILE)
    inside = rows < length
    X += start * x_token + head * x_head
    Y += start * y_token + head * y_head
    first, second = _load_pair(X, Cos, Sin, rows, inside, x_token, factor, HALF, ROTATE, False, True)
    half = tl.arange(0, HALF)
    at = rows[:, None] * y_token + half[None, :]
    tl.store(Y + at, first, mask=inside[:, None])
    tl.store(Y + at + HALF, second, mask=inside[:, None])


@triton.jit
def _attend(
    acc, row_max, row_sum, q1, q2, K, V, Cos, Sin, first_key, length, k_token, v_token,
    HALF: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, K_READY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax."""
    keys = first_key + tl.arange(0, BLOCK_K)
    inside = keys < length
    k1, k2 = _load_pair(K, Cos, Sin, keys, inside, k_token, 1.0, HALF, ROTATE, K_READY, MASKED)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(inside[None, :], scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(p, 1)
    value = keys[:, None] * v_token + tl.arange(0, 2 * HALF)[None, :]
    v = _load(V, value, inside, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    Q, K, V, Out, Lse, Cos, Sin, Cu,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, n_tokens, n_tiles, n_heads, factor,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, K_READY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries; `Lse` is the log2 of each row's softmax sum, `(heads, tokens)`."""
    head, start, length, first_row = _pair_of_program(Cu, n_tiles, n_heads, BLOCK_Q)
    if first_row >= length:
        return
    Q += start * q_token + head * q_head
    K += start * k_token + head * k_head
    V += start * v_token + head * v_head
    Out += start * out_token + head * out_head
    rows = first_row + tl.arange(0, BLOCK_Q)
    inside = rows < length
    q1, q2 = _load_pair(Q, Cos, Sin, rows, inside, q_token, factor, HALF, ROTATE, False, True)
    acc = tl.zeros([BLOCK_Q, 2 * HALF], tl.float32)
    row_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    full = (length // BLOCK_K) * BLOCK_K
    for first_key in tl.range(0, full, BLOCK_K, disable_licm=PRECISION == "ieee"):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q1, q2, K, V, Cos, Sin, first_key, length, k_token, v_token,
            HALF, BLOCK_K, ROTATE, K_READY, False, PRECISION,
        )  # fmt: skip
    if full < length:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q1, q2, K, V, Cos, Sin, full, length, k_token, v_token,
            HALF, BLOCK_K, ROTATE, K_READY, True, PRECISION,
        )  # fmt: skip
    lse = row_max + tl.log2(row_sum)
    acc = acc / row_sum[:, None]
    at = rows[:, None] * out_token + tl.arange(0, 2 * HALF)[None, :]
    tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=inside[:, None])
    tl.store(Lse + head.to(tl.int64) * n_tokens + start + rows, lse, mask=inside)


@triton.jit
def _dq_tile(
    dq1, dq2, q1, q2, grad, lse, delta, K, V, Cos, Sin, first_key, length, k_token, v_token,
    HALF: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, K_READY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys = first_key + tl.arange(0, BLOCK_K)
    inside = keys < length
    k1, k2 = _load_pair(K, Cos, Sin, keys, inside, k_token, 1.0, HALF, ROTATE, K_READY, MASKED)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
    p = tl.exp2(scores - lse[:, None])
    if MASKED:
        p = tl.where(inside[None, :], p, 0.0)
    v = _load(V, keys[:, None] * v_token + tl.arange(0, 2 * HALF)[None, :], inside, MASKED)
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k1.dtype)
    dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
    return dq1, dq2


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    Q, K, V, Out, Grad, Lse, Delta, Dq, Cos, Sin, Cu,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, grad_token, grad_head, dq_token, dq_head,
    n_tokens, n_tiles, n_heads, factor, scale,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, Q_READY: tl.constexpr,
    K_READY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries; leaves `Delta` = rowsum(out * grad), `(heads, tokens)`, to :func:`dkdv_kernel`."""
    head, start, length, first_row = _pair_of_program(Cu, n_tiles, n_heads, BLOCK_Q)
    if first_row >= length:
        return
    Q += start * q_token + head * q_head
    K += start * k_token + head * k_head
    V += start * v_token + head * v_head
    Out += start * out_token + head * out_head
    Grad += start * grad_token + head * grad_head
    Dq += start * dq_token + head * dq_head
    Lse += head.to(tl.int64) * n_tokens + start
    Delta += head.to(tl.int64) * n_tokens + start
    rows = first_row + tl.arange(0, BLOCK_Q)
    inside = rows < length
    q1, q2 = _load_pair(Q, Cos, Sin, rows, inside, q_token, factor, HALF, ROTATE, Q_READY, True)
    column = tl.arange(0, 2 * HALF)
    grad = _load(Grad, rows[:, None] * grad_token + column[None, :], inside, True)
    out = _load(Out, rows[:, None] * out_token + column[None, :], inside, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(Delta + rows, delta, mask=inside)
    lse = tl.load(Lse + rows, mask=inside, other=float("inf"))
    dq1 = tl.zeros([BLOCK_Q, HALF], tl.float32)
    dq2 = tl.zeros([BLOCK_Q, HALF], tl.float32)
    full = (length // BLOCK_K) * BLOCK_K
    for first_key in tl.range(0, full, BLOCK_K, disable_licm=PRECISION == "ieee"):
        dq1, dq2 = _dq_tile(
            dq1, dq2, q1, q2, grad, lse, delta, K, V, Cos, Sin, first_key, length, k_token, v_token,
            HALF, BLOCK_K, ROTATE, K_READY, False, PRECISION,
        )  # fmt: skip
    if full < length:
        dq1, dq2 = _dq_tile(
            dq1, dq2, q1, q2, grad, lse, delta, K, V, Cos, Sin, full, length, k_token, v_token,
            HALF, BLOCK_K, ROTATE, K_READY, True, PRECISION,
        )  # fmt: skip
    _store_pair(Dq, Cos, Sin, dq1 * scale, dq2 * scale, rows, inside, dq_token, HALF, ROTATE)


@triton.jit
def _dkdv_tile(
    dk1, dk2, dv, k1, k2, v, Q, Grad, Lse, Delta, Cos, Sin,
    first_row, length, q_token, grad_token, factor,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, ROTATE: tl.constexpr, Q_READY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_Q)
    inside = rows < length
    q1, q2 = _load_pair(Q, Cos, Sin, rows, inside, q_token, factor, HALF, ROTATE, Q_READY, MASKED)
    grad = _load(Grad, rows[:, None] * grad_token + tl.arange(0, 2 * HALF)[None, :], inside, MASKED)
    if MASKED:  # a row that isn't there: an infinite sum, hence no weight
        lse = tl.load(Lse + rows, mask=inside, other=float("inf"))
        delta = tl.load(Delta + rows, mask=inside, other=0.0)
    else:
        lse = tl.load(Lse + rows)
        delta = tl.load(Delta + rows)
    # transposed, (keys, queries), so that what is multiplied on from here on needs no other layout
    scores = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
    scores = tl.dot(k2, tl.trans(q2), scores, input_precision=PRECISION)
    p = tl.exp2(scores - lse[None, :])
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q1.dtype)
    dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    Q, K, V, Grad, Lse, Delta, Dk, Dv, Cos, Sin, Cu,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dk_token, dk_head, dv_token, dv_head,
    n_tokens, n_tiles, n_heads, factor,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, Q_READY: tl.constexpr,
    K_READY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and of their values."""
    head, start, length, first_key = _pair_of_program(Cu, n_tiles, n_heads, BLOCK_K)
    if first_key >= length:
        return
    Q += start * q_token + head * q_head
    K += start * k_token + head * k_head
    V += start * v_token + head * v_head
    Grad += start * grad_token + head * grad_head
    Dk += start * dk_token + head * dk_head
    Dv += start * dv_token + head * dv_head
    Lse += head.to(tl.int64) * n_tokens + start
    Delta += head.to(tl.int64) * n_tokens + start
    keys = first_key + tl.arange(0, BLOCK_K)
    inside = keys < length
    column = tl.arange(0, 2 * HALF)
    k1, k2 = _load_pair(K, Cos, Sin, keys, inside, k_token, 1.0, HALF, ROTATE, K_READY, True)
    v = _load(V, keys[:, None] * v_token + column[None, :], inside, True)
    dk1 = tl.zeros([BLOCK_K, HALF], tl.float32)
    dk2 = tl.zeros([BLOCK_K, HALF], tl.float32)
    dv = tl.zeros([BLOCK_K, 2 * HALF], tl.float32)
    full = (length // BLOCK_Q) * BLOCK_Q
    for first_row in tl.range(0, full, BLOCK_Q, disable_licm=PRECISION == "ieee"):
        dk1, dk2, dv = _dkdv_tile(
            dk1, dk2, dv, k1, k2, v, Q, Grad, Lse, Delta, Cos, Sin, first_row, length, q_token, grad_token,
            factor, HALF, BLOCK_Q, ROTATE, Q_READY, False, PRECISION,
        )  # fmt: skip
    if full < length:
        dk1, dk2, dv = _dkdv_tile(
            dk1, dk2, dv, k1, k2, v, Q, Grad, Lse, Delta, Cos, Sin, full, length, q_token, grad_token,
            factor, HALF, BLOCK_Q, ROTATE, Q_READY, True, PRECISION,
        )  # fmt: skip
    # Q̂ carries log2(e)/sqrt(D); times ln(2) leaves the 1/sqrt(D) of the gradient
    _store_pair(Dk, Cos, Sin, dk1 * LN2, dk2 * LN2, keys, inside, dk_token, HALF, ROTATE)
    at = keys[:, None] * dv_token + column[None, :]
    tl.store(Dv + at, dv.to(Dv.dtype.element_ty), mask=inside[:, None])
