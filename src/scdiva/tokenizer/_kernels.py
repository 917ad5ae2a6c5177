"""Loops of `serialize.py`, `entropy.py` and `_validate.py`, compiled by numba on the first call.

Each kernel is bit-identical to a slow numpy reference in the tests: hence no fastmath, and log1p stays in numpy. Arrays
come from `serialize.plain`, so that few versions of a kernel are compiled. np.diff takes numba three seconds to compile
and is not used. Kernels release the GIL and start no threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numba
import numpy as np

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # the loops would take hours in the interpreter
    raise ImportError("NUMBA_DISABLE_JIT is set: unset it, genes are ranked by loops that numba compiles.")

_WIDEST = 11
"""Maximum bits per digit: three digits make 32 bits, and 3 × 2,048 counters fit the L1 cache."""
_INFINITY = np.float32(np.inf).view(np.uint32)
IMPOSSIBLE = -2
"""Result of :func:`check` for values that are impossible in an expression matrix."""
_JIT = partial(numba.njit, nogil=True, error_model="numpy")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on its first call, cached on disk if numba finds a writable folder."""
    try:
        kernel = _JIT(cache=True)(function)
    except RuntimeError:  # no such folder: a read-only install without a home
        return _JIT(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return kernel(*arguments)
        except OSError:  # the disk is full: the kernel is compiled but not cached
            return kernel(*arguments)

    return call


@_JIT
def _sort(bits, n, keys, ordered, counters):
    """Sort `bits[:n]`, ties by position; the lower half of `ordered[:n]` contains the positions.

    A radix sort with three digits, from the lowest one. The minimum is subtracted first, so that the digits cover only
    the range of the values.
    """
    lowest, highest = bits[0], bits[0]
    for i in range(1, n):
        lowest, highest = min(lowest, bits[i]), max(highest, bits[i])
    span, needed = highest - lowest, 0
    while needed < 32 and span >> np.uint32(needed):
        needed += 1
    width = max((needed + 2) // 3, 1)
    size, digit = 1 << width, np.uint64((1 << width) - 1)
    counters[:, :size] = 0
    for i in range(n):
        key = np.uint64(bits[i] - lowest) << np.uint64(32) | np.uint64(i)
        keys[i] = key
        for d in range(3):
            counters[d, key >> np.uint64(32 + d * width) & digit] += 1
    source, target = keys, ordered
    for d in range(3):
        start, shift, offsets = 0, np.uint64(32 + d * width), counters[d]
        for j in range(size):
            n_keys = offsets[j]
            offsets[j] = start
            start += n_keys
        for i in range(n):
            key = source[i]
            at = offsets[key >> shift & digit]
            offsets[key >> shift & digit] = at + 1
            target[at] = key
        source, target = target, source


@_JIT
def _longest(indptr):
    longest = 0
    for i in range(len(indptr) - 1):
        longest = max(longest, indptr[i + 1] - indptr[i])
    return longest


@compiled
def rank(indptr, indices, data, denominator, out_indptr, tokens, values):
    """Write the genes of each row by descending score; `out_indptr` determines how many of them are kept.

    Returns False at the first row whose tokens do not ascend or are out of range, or that has a value that is not
    positive and finite.
    """
    longest = _longest(indptr)
    score = np.empty(longest, np.float32)
    bits = score.view(np.uint32)
    keys, ordered = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    counters = np.empty((3, 1 << _WIDEST), np.uint32)
    for i in range(len(indptr) - 1):
        start, stop = indptr[i], indptr[i + 1]
        if start == stop:
            continue
        value, token = data[start:stop], indices[start:stop]
        # As unsigned integers, negative values, infinity and NaN are above all finite values. Each check has its own
        # loop, so that the compiler can vectorise it.
        raw, least, greatest, ascend = value.view(np.uint32), np.uint32(0xFFFFFFFF), np.uint32(0), True
        for j in range(stop - start):
            least = min(least, raw[j])
        for j in range(stop - start):
            greatest = max(greatest, raw[j])
        for j in range(1, stop - start):
            ascend &= token[j - 1] < token[j]
        inside = token[0] >= 0 and token[stop - start - 1] < len(denominator)
        if not ascend or not inside or least == 0 or greatest >= _INFINITY:
            return False
        for j in range(stop - start):
            score[j] = value[j] / denominator[token[j]]
        # The bits of positive float32 values sort like the values; inverted, they sort in descending order.
        for j in range(stop - start):
            bits[j] = ~bits[j]
        _sort(bits, stop - start, keys, ordered, counters)
        out = out_indptr[i]
        for j in range(out_indptr[i + 1] - out):
            at = ordered[j] & np.uint64(0xFFFFFFFF)
            tokens[out + j] = token[at]
            values[out + j] = value[at]
    return True


@compiled
def normalise(indptr, indices, counts, tokens, fixed_bits, target_sum, out_indptr, out_tokens, shares):
    """Sum each row's counts by token, divided by the row's total and multiplied by `target_sum`."""
    longest = _longest(indptr)
    bits, fixed = np.empty(longest, np.uint32), np.empty(longest, np.int64)
    keys, ordered = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    counters = np.empty((3, 1 << _WIDEST), np.uint32)
    out = 0
    out_indptr[0] = 0
    for i in range(len(indptr) - 1):
        largest = 0.0
        for j in range(indptr[i], indptr[i + 1]):
            largest = max(largest, np.float64(counts[j]))
        shift = fixed_bits - math.frexp(largest)[1]
        # A product with a power of two is exact, and much faster than ldexp, but the power must be a float64 itself.
        small = -1000 < shift < 1000
        scale = math.ldexp(1.0, shift) if small else 0.0
        total, n, ascending, last = 0, 0, True, -1
        for j in range(indptr[i], indptr[i + 1]):
            count = np.float64(counts[j])
            amount = np.int64(np.rint(count * scale if small else math.ldexp(count, shift)))
            total += amount
            token = tokens[indices[j]]
            if token >= 0:
                bits[n], fixed[n] = token, amount
                ascending &= token > last
                last = token
                n += 1
        if not ascending:
            _sort(bits, n, keys, ordered, counters)
        j = 0
        while j < n:
            at = j if ascending else np.int64(ordered[j] & np.uint64(0xFFFFFFFF))
            token, amount = bits[at], fixed[at]
            j += 1
            while not ascending and j < n and bits[ordered[j] & np.uint64(0xFFFFFFFF)] == token:
                amount += fixed[ordered[j] & np.uint64(0xFFFFFFFF)]
                j += 1
            if amount:
                out_tokens[out] = token
                shares[out] = np.float64(amount) / np.float64(total) * target_sum
                out += 1
        out_indptr[i + 1] = out


@compiled
def count(indices, data, is_measured, n_cells, per_width, highest, counts):
    """Count the values by gene and bin. There are `per_width` bins, a power of two, per unit of the value.

    Returns False without counting anything if a value is not in (0, highest], or a token is not measured or out of
    range.
    """
    n_tokens, bits = np.uint32(len(is_measured)), data.view(np.uint32)
    # As unsigned integers, the bits of positive floats ascend, followed by infinity and NaN, then negative values. Each
    # extreme has its own loop, so that the compiler can vectorise it.
    least, greatest, last = np.uint32(0xFFFFFFFF), np.uint32(0), np.uint32(0)
    for j in range(len(data)):
        least = min(least, bits[j])
    for j in range(len(data)):
        greatest = max(greatest, bits[j])
    for j in range(len(data)):
        last = max(last, np.uint32(indices[j]))
    if len(data) and (least == 0 or greatest > np.float32(highest).view(np.uint32) or last >= n_tokens):
        return False
    unmeasured = np.flatnonzero(~is_measured)
    before = np.empty(len(unmeasured), np.int64)
    for i in range(len(unmeasured)):
        before[i] = counts[unmeasured[i], 0]
    for j in range(len(data)):
        token = np.uint64(np.uint32(indices[j]))
        counts[token, np.uint64(np.int32(np.ceil(data[j] * per_width)))] += 1
        counts[token, np.uint64(0)] -= 1  # the cell is not a zero; all cells are added below
    for i in range(len(unmeasured)):
        if counts[unmeasured[i], 0] != before[i]:
            for j in range(len(data)):
                token = indices[j]
                counts[token, np.int64(np.ceil(data[j] * per_width))] -= 1
                counts[token, 0] += 1
            return False
    for i in range(n_tokens):
        if is_measured[i]:
            counts[i, 0] += n_cells
    return True


@_JIT
def _is_fraction(x):
    """Whether a value is not a positive integer, within the rounding error of counts computed from logarithms."""
    distance = abs(x - np.rint(x))
    return ((distance > 1e-3) & (distance > 1e-5 * x)) | (x < 0.5)


@compiled
def check(indptr, indices, data, is_known_gene, end, sums, fractions, known_per_cell):
    """Sum each gene's values and their squares; count each cell's values that are not integers, and its known genes.

    Returns the bits of the largest value, and the position of the first value that is not an integer: -1 if there is
    none, `IMPOSSIBLE` at the first cell with a value outside of [0, end).
    """
    bits, greatest, first = data.view(np.int32), np.int32(0), -1
    genes = indices.view(np.uint32)  # unsigned, so that numba need not check for negative indices
    for i in range(len(indptr) - 1):
        start, stop = indptr[i], indptr[i + 1]
        # each check has its own loop, so that the compiler can vectorise it
        possible, n, n_known = True, np.int32(0), np.int32(0)
        for j in range(start, stop):
            possible &= (data[j] >= 0) & (data[j] < end)
        if not possible:
            return greatest, IMPOSSIBLE
        for j in range(start, stop):
            greatest = max(greatest, bits[j])
        for j in range(start, stop):
            n += np.int32(_is_fraction(np.float64(data[j])))
        for j in range(start, stop):
            n_known += np.int32(is_known_gene[genes[j]])
        for j in range(start, stop):
            x = np.float64(data[j])
            sums[genes[j], 0] += x
            sums[genes[j], 1] += x * x
        if n and first < 0:
            first = start
            while not _is_fraction(np.float64(data[first])):
                first += 1
        fractions[i], known_per_cell[i] = n, n_known
    return greatest, first
