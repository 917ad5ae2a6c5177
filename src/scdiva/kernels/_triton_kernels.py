"""Triton kernels of attention with RoPE: FlashAttention-2 over packed cells (Dao 2023; Dao et al. 2022).

Properties of the four kernels:

- A program processes one tile of rows of one head of one cell; tiles of a pair (cell, head) are adjacent in the grid,
  so that they share keys and values in the L2 cache. Positions are rows of the cell. A program beyond the end of its
  cell returns at once.
- Rows are rotated as two tiles `(rows, D/2)` that hold the first and the second coordinate of each pair, without a
  shuffle or a second load. Each row is rotated once per pass: keys by :func:`rotate_kernel` before the forward kernel
  (saved for the backward pass), queries in the prologue of the forward kernel and again in that of :func:`dq_kernel`,
  which stores them for :func:`dkdv_kernel`.
- The forward kernel multiplies the halves of queries and keys in two products. The backward kernels multiply whole
  tiles: on Hopper, products with 32 columns read shared memory faster than it delivers.
- `Q̂` is the rotated query times `log2(e) / sqrt(D)`, so that the softmax requires only `exp2`. It is rounded to the
  dtype of the input in one place (:func:`_rotated_halves`), and so is the rotated key: the backward kernels use exactly
  the numbers of the forward kernel.
- Full tiles have no mask; a partial last tile is processed after the loop.
- Full-precision products (`PRECISION="ieee"`) run outside of the tensor cores, where a thread holds whole rows of both
  factors. Rows that the loop doesn't change would fill the registers if they were moved out of it, so this optimisation
  is disabled (Triton 3.6 moves them nevertheless, and registers spill; 3.9 does not).
- No atomics: two runs agree bit for bit.
- Numbers of tokens and tiles (`COUNTS`) are not specialised: by default Triton compiles again for multiples of 16 and
  for 1, which would interrupt a run for seconds at the first batch of each kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
COUNTS = ("n_tokens", "n_tiles")


@triton.jit
def _pair_of_program(Cu, n_tiles, n_heads, TILE: tl.constexpr):
    """Tile, head and cell that this program processes."""
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
def _rotated_halves(
    X, Cos, Sin, rows, inside, stride, factor, HALF: tl.constexpr, ROTATE: tl.constexpr
):  # fmt: skip
    """Rotate rows by their positions and multiply them by a factor; returns both halves."""
    half = tl.arange(0, HALF)
    at = rows[:, None] * stride + half[None, :]
    first = _load(X, at, inside, True)
    second = _load(X, at + HALF, inside, True)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if ROTATE:
        turn = rows[:, None] * HALF + half[None, :]
        cos, sin = _load(Cos, turn, inside, True), _load(Sin, turn, inside, True)
        first, second = first * cos - second * sin, second * cos + first * sin
    return (first * factor).to(dtype), (second * factor).to(dtype)


@triton.jit
def _store_halves(X, first, second, rows, inside, stride, HALF: tl.constexpr):
    at = rows[:, None] * stride + tl.arange(0, HALF)[None, :]
    dtype = X.dtype.element_ty
    tl.store(X + at, first.to(dtype), mask=inside[:, None])
    tl.store(X + at + HALF, second.to(dtype), mask=inside[:, None])


@triton.jit
def _store_rotated_back(
    X, Cos, Sin, x, rows, inside, stride, ROWS: tl.constexpr, HALF: tl.constexpr, ROTATE: tl.constexpr
):  # fmt: skip
    """Apply the inverse rotation to the gradient of rotated rows and store it."""
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    if ROTATE:
        turn = rows[:, None] * HALF + tl.arange(0, HALF)[None, :]
        cos, sin = _load(Cos, turn, inside, True), _load(Sin, turn, inside, True)
        first, second = first * cos + second * sin, second * cos - first * sin
    _store_halves(X, first, second, rows, inside, stride, HALF)


@triton.jit(do_not_specialize=COUNTS[1:])
def rotate_kernel(
    X, Y, Cos, Sin, Cu, x_token, x_head, y_token, y_head, n_tiles, n_heads, HALF: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write X, rotated, to Y."""
    head, start, length, first_row = _pair_of_program(Cu, n_tiles, n_heads, TILE)
    if first_row >= length:
        return
    rows = first_row + tl.arange(0, TILE)
    inside = rows < length
    X += start * x_token + head * x_head
    Y += start * y_token + head * y_head
    first, second = _rotated_halves(X, Cos, Sin, rows, inside, x_token, 1.0, HALF, True)
    _store_halves(Y, first, second, rows, inside, y_token, HALF)


@triton.jit
def _attend(
    acc, row_max, row_sum, q1, q2, K, V, first_key, length, k_token, v_token,
    HALF: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with one tile of keys."""
    keys = first_key + tl.arange(0, BLOCK_K)
    inside = keys < length
    key = keys[:, None] * k_token + tl.arange(0, HALF)[None, :]
    k1, k2 = _load(K, key, inside, MASKED), _load(K, key + HALF, inside, MASKED)
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
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries to rotated keys; `Lse` is the log2 of each softmax sum, `(heads, tokens)`."""
    head, start, length, first_row = _pair_of_program(Cu, n_tiles, n_heads, BLOCK_Q)
    if first_row >= length:
        return
    Q += start * q_token + head * q_head
    K += start * k_token + head * k_head
    V += start * v_token + head * v_head
    Out += start * out_token + head * out_head
    rows = first_row + tl.arange(0, BLOCK_Q)
    inside = rows < length
    q1, q2 = _rotated_halves(Q, Cos, Sin, rows, inside, q_token, factor, HALF, ROTATE)
    acc = tl.zeros([BLOCK_Q, 2 * HALF], tl.float32)
    row_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    full = (length // BLOCK_K) * BLOCK_K
    for first_key in tl.range(0, full, BLOCK_K, disable_licm=PRECISION == "ieee"):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q1, q2, K, V, first_key, length, k_token, v_token, HALF, BLOCK_K, False, PRECISION,
        )  # fmt: skip
    if full < length:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q1, q2, K, V, full, length, k_token, v_token, HALF, BLOCK_K, True, PRECISION,
        )  # fmt: skip
    lse = row_max + tl.log2(row_sum)
    acc = acc / row_sum[:, None]
    at = rows[:, None] * out_token + tl.arange(0, 2 * HALF)[None, :]
    tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=inside[:, None])
    tl.store(Lse + head.to(tl.int64) * n_tokens + start + rows, lse, mask=inside)


@triton.jit
def _dq_tile(
    dq, q, grad, lse, delta, K, V, first_key, length, k_token, v_token,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys = first_key + tl.arange(0, BLOCK_K)
    inside = keys < length
    column = tl.arange(0, WIDTH)
    k = _load(K, keys[:, None] * k_token + column[None, :], inside, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(scores - lse[:, None])
    if MASKED:
        p = tl.where(inside[None, :], p, 0.0)
    v = _load(V, keys[:, None] * v_token + column[None, :], inside, MASKED)
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    Q, K, V, Out, Grad, Lse, Sums, Rotated, Dq, Cos, Sin, Cu,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, grad_token, grad_head,
    rotated_token, rotated_head, dq_token, dq_head, n_tokens, n_tiles, n_heads, factor, scale,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries. `K` is rotated.

    Also writes what :func:`dkdv_kernel` reads: `Rotated`, the queries rotated and multiplied by the factor, and `Sums`,
    `(heads, tokens, 2)`, `Lse` and rowsum(out * grad) of each query.
    """
    head, start, length, first_row = _pair_of_program(Cu, n_tiles, n_heads, BLOCK_Q)
    if first_row >= length:
        return
    Q += start * q_token + head * q_head
    K += start * k_token + head * k_head
    V += start * v_token + head * v_head
    Out += start * out_token + head * out_head
    Grad += start * grad_token + head * grad_head
    Rotated += start * rotated_token + head * rotated_head
    Dq += start * dq_token + head * dq_head
    Lse += head.to(tl.int64) * n_tokens + start
    Sums += 2 * (head.to(tl.int64) * n_tokens + start)
    rows = first_row + tl.arange(0, BLOCK_Q)
    inside = rows < length
    first, second = _rotated_halves(Q, Cos, Sin, rows, inside, q_token, factor, HALF, ROTATE)
    _store_halves(Rotated, first, second, rows, inside, rotated_token, HALF)
    # read back what other threads of this program wrote: Hopper multiplies a loaded tile from shared memory, whereas
    # a computed one would be copied to registers again for every tile of keys
    tl.debug_barrier()
    column = tl.arange(0, 2 * HALF)
    q = _load(Rotated, rows[:, None] * rotated_token + column[None, :], inside, True)
    grad = _load(Grad, rows[:, None] * grad_token + column[None, :], inside, True)
    out = _load(Out, rows[:, None] * out_token + column[None, :], inside, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(Lse + rows, mask=inside, other=float("inf"))
    tl.store(Sums + rows * 2, lse, mask=inside)
    tl.store(Sums + rows * 2 + 1, delta, mask=inside)
    dq = tl.zeros([BLOCK_Q, 2 * HALF], tl.float32)
    full = (length // BLOCK_K) * BLOCK_K
    for first_key in tl.range(0, full, BLOCK_K, disable_licm=PRECISION == "ieee"):
        dq = _dq_tile(
            dq, q, grad, lse, delta, K, V, first_key, length, k_token, v_token, 2 * HALF, BLOCK_K, False, PRECISION
        )
    if full < length:
        dq = _dq_tile(dq, q, grad, lse, delta, K, V, full, length, k_token, v_token, 2 * HALF, BLOCK_K, True, PRECISION)
    _store_rotated_back(Dq, Cos, Sin, dq * scale, rows, inside, dq_token, BLOCK_Q, HALF, ROTATE)


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, Q, Grad, Sums, first_row, length, q_token, grad_token,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_Q)
    inside = rows < length
    column = tl.arange(0, WIDTH)
    q = _load(Q, rows[:, None] * q_token + column[None, :], inside, MASKED)
    grad = _load(Grad, rows[:, None] * grad_token + column[None, :], inside, MASKED)
    # pairs, because vectors would be loaded again by every thread
    lse, delta = tl.split(_load(Sums, rows[:, None] * 2 + tl.arange(0, 2)[None, :], inside, MASKED))
    if MASKED:  # the sum is infinite beyond the cell, so that the weight is 0
        lse = tl.where(inside, lse, float("inf"))
    # transposed, (keys, queries): the products below then take p and ds in the layout that they have
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.exp2(scores - lse[None, :])
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    Q, K, V, Grad, Sums, Dk, Dv, Cos, Sin, Cu,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dk_token, dk_head, dv_token, dv_head,
    n_tokens, n_tiles, n_heads,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and of their values. `Q` and `K` are rotated; `Sums` is written by the dq kernel."""
    head, start, length, first_key = _pair_of_program(Cu, n_tiles, n_heads, BLOCK_K)
    if first_key >= length:
        return
    Q += start * q_token + head * q_head
    K += start * k_token + head * k_head
    V += start * v_token + head * v_head
    Grad += start * grad_token + head * grad_head
    Dk += start * dk_token + head * dk_head
    Dv += start * dv_token + head * dv_head
    Sums += 2 * (head.to(tl.int64) * n_tokens + start)
    keys = first_key + tl.arange(0, BLOCK_K)
    inside = keys < length
    column = tl.arange(0, 2 * HALF)
    k = _load(K, keys[:, None] * k_token + column[None, :], inside, True)
    v = _load(V, keys[:, None] * v_token + column[None, :], inside, True)
    dk = tl.zeros([BLOCK_K, 2 * HALF], tl.float32)
    dv = tl.zeros([BLOCK_K, 2 * HALF], tl.float32)
    full = (length // BLOCK_Q) * BLOCK_Q
    for first_row in tl.range(0, full, BLOCK_Q, disable_licm=PRECISION == "ieee"):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, Q, Grad, Sums, first_row, length, q_token, grad_token, 2 * HALF, BLOCK_Q, False, PRECISION
        )
    if full < length:
        dk, dv = _dkdv_tile(
            dk, dv, k, v, Q, Grad, Sums, full, length, q_token, grad_token, 2 * HALF, BLOCK_Q, True, PRECISION
        )
    # Q̂ carries log2(e)/sqrt(D); times ln(2) leaves the 1/sqrt(D) of the gradient
    _store_rotated_back(Dk, Cos, Sin, dk * LN2, keys, inside, dk_token, BLOCK_K, HALF, ROTATE)
    at = keys[:, None] * dv_token + column[None, :]
    tl.store(Dv + at, dv.to(Dv.dtype.element_ty), mask=inside[:, None])
