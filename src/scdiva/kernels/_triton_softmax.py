"""Softmax cross-entropy of rows of logits and its gradient, in place, for Triton. Imported only when chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS, WARPS = 1024, 32
"""Loads of 16 bytes in a tile, one for each thread, and warps of a program.

Two programs run on a multiprocessor. Their rows (84 kB each for 41,818 genes in bfloat16) remain in its cache until
the second pass. With fewer warps, more programs would run at a time than the L2 cache has room for rows.
"""
INTERPRETED_GROUPS = 16
"""Size of a tile in the interpreter, where short rows should have several tiles."""

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)


def softmax_minus_one(logits: Tensor, targets: Tensor, nll: Tensor, n_genes: int, *, keep: bool) -> None:
    """Write the cross-entropies of `logits` to `nll`; with `keep`, turn the logits into softmax − onehot, in place.

    Parameters
    ----------
    logits
        Contiguous `(N, n_columns)` in bfloat16, float16 or float32. Loads are 16 bytes wide if `n_columns` is a
        multiple of 16.
    targets
        `(N,)`, columns below `n_genes`. Not checked.
    nll
        Contiguous float32 `(N,)`.
    n_genes
        Number of columns in the softmax. Values of the columns beyond are ignored; their gradient is 0.
    """
    if not (logits.is_contiguous() and nll.is_contiguous()):
        raise ValueError("softmax_minus_one requires contiguous logits and nll: it writes to them in place.")
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        softmax_kernel[(logits.shape[0],)](
            logits, targets.contiguous(), nll, n_genes, logits.shape[1],
            KEEP=keep, GROUPS=GROUPS if logits.is_cuda else INTERPRETED_GROUPS, WIDE=16 // logits.element_size(),
            num_warps=WARPS, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=("n_genes",), do_not_specialize_on_alignment=("Targets", "Nll"))
def softmax_kernel(
    Logits, Targets, Nll, n_genes, n_columns, KEEP: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One row of logits, in two passes: the sum of exponentials, then the gradient.

    A tile has rows of `WIDE` columns, the 16 bytes that one thread loads at once, each with a maximum and a sum of its
    own, so that the loop has no communication between threads and little more than one exponential for each logit.
    Loads are masked by `n_columns`, because `n_genes` is not a multiple of `WIDE` and would split them. Columns are
    compared with `n_genes` and the target only in tiles that contain them.
    """
    row = tl.program_id(0).to(tl.int64)
    Logits += row * n_columns
    target = tl.load(Targets + row).to(tl.int32)
    picked = tl.load(Logits + target).to(tl.float32)
    columns = tl.arange(0, GROUPS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    tile: tl.constexpr = GROUPS * WIDE
    # The target is not in the sums: the gradient at it, -(sum of the others) / (sum of all), is then exact where its
    # probability is near 1. Maxima begin at its logit, or at a finite number, so that no -inf is subtracted from -inf.
    top = tl.maximum(tl.full([GROUPS], LOWEST, tl.float32), picked)
    total = tl.zeros([GROUPS], tl.float32)
    for first in tl.range(0, n_columns, tile):
        at = first + columns
        x = tl.load(Logits + at, mask=at < n_columns, other=0.0).to(tl.float32)
        if (first + tile > n_genes) | ((first <= target) & (target < first + tile)):
            x = tl.where((at < n_genes) & (at != target), x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp2((top - higher) * LOG2E) + tl.sum(tl.exp2((x - higher[:, None]) * LOG2E), 1)
        top = higher
    highest = tl.max(top, 0)
    sum_others = tl.sum(total * tl.exp2((top - highest) * LOG2E), 0)
    sum_all = sum_others + tl.exp2((picked - highest) * LOG2E)
    tl.store(Nll + row, highest - picked + tl.log(sum_all))
    if KEEP:
        # every thread has read `picked`, on which `highest` depends, before any overwrites it
        log2_sum = tl.log2(sum_all)
        for first in tl.range(0, n_columns, tile):
            at = first + columns
            x = tl.load(Logits + at, mask=at < n_columns, other=0.0).to(tl.float32)
            p = tl.exp2((x - highest) * LOG2E - log2_sum)
            if (first + tile > n_genes) | ((first <= target) & (target < first + tile)):
                p = tl.where(at < n_genes, p, 0.0)
                p = tl.where(at == target, -sum_others / sum_all, p)
            tl.store(Logits + at, p.to(Logits.dtype.element_ty), mask=at < n_columns)
