"""The loops of the block quantizers, compiled by numba: the search for each block's scale, and the numbers on its grid.

`LANES` blocks are worked on side by side, transposed, so that a vector register holds the same position of several
blocks: sums run in the order of a block's elements, in float32, and are the same bits on every machine. Importing this
module needs `fits_loader.load`, which tells numba where its cache lies.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LANES = 64
"""Blocks worked on at once: buffers of 64 x 32 floats stay in the first-level cache."""
_ZERO, _INFINITY = np.float32(0), np.float32(np.inf)


@njit(nogil=True, cache=True, error_model="numpy")
def fit_with_minimum(x, tops, levels, any_sign, scale, minimum):  # type: ignore[no-untyped-def]
    """Per block the scale s > 0 and minimum m with the smallest squared error of s q - m over q = 0 to `levels`.

    x: f32[blocks, size]. tops: f32[tries], the number that a block's largest element gets in each try; numbers fix s
    and m by least squares, and the try with the smallest error wins. any_sign: m may be negative; else it is 0 where
    it would be. scale, minimum: f32[blocks], filled.
    """
    blocks, size = x.shape
    count = np.float32(size)
    t, q = np.empty((size, LANES), np.float32), np.empty((size, LANES), np.float32)
    low, span, sum_x = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    sum_q, sum_qq, sum_qx = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    s, m, error = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    best_s, best_m, best = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    inverse = np.empty(LANES, np.float32)
    for first in range(0, blocks, LANES):
        for j in range(LANES):
            block = min(first + j, blocks - 1)
            for i in range(size):
                t[i, j] = x[block, i]
        for j in range(LANES):
            low[j] = t[0, j] if any_sign else min(t[0, j], _ZERO)
            span[j] = t[0, j]
            sum_x[j] = t[0, j]
        for i in range(1, size):
            for j in range(LANES):
                low[j] = min(low[j], t[i, j])
                span[j] = max(span[j], t[i, j])
                sum_x[j] = sum_x[j] + t[i, j]
        for j in range(LANES):
            span[j] = span[j] - low[j]
            best_s[j] = span[j] / levels
            best_m[j] = -low[j]
            best[j] = _INFINITY
        for top in tops:
            for j in range(LANES):
                inverse[j] = top / span[j] if span[j] != _ZERO else _ZERO
                sum_q[j] = sum_qq[j] = sum_qx[j] = error[j] = _ZERO
            for i in range(size):
                for j in range(LANES):
                    number = min(max(np.rint((t[i, j] - low[j]) * inverse[j]), _ZERO), levels)
                    q[i, j] = number
                    sum_q[j] = sum_q[j] + number
                    sum_qq[j] = sum_qq[j] + number * number
                    sum_qx[j] = sum_qx[j] + number * t[i, j]
            for j in range(LANES):
                determinant = count * sum_qq[j] - sum_q[j] * sum_q[j]
                s[j], m[j] = _ZERO, _ZERO
                if determinant > _ZERO:
                    s[j] = (count * sum_qx[j] - sum_x[j] * sum_q[j]) / determinant
                    m[j] = -((sum_qq[j] * sum_x[j] - sum_q[j] * sum_qx[j]) / determinant)
                    if m[j] < _ZERO and not any_sign:
                        s[j] = sum_qx[j] / sum_qq[j]
                        m[j] = _ZERO
            for i in range(size):
                for j in range(LANES):
                    off = s[j] * q[i, j] - m[j] - t[i, j]
                    error[j] = error[j] + off * off
            for j in range(LANES):
                if s[j] > _ZERO and error[j] < best[j]:
                    best_s[j], best_m[j], best[j] = s[j], m[j], error[j]
        for j in range(min(LANES, blocks - first)):
            scale[first + j] = best_s[j]
            minimum[first + j] = best_m[j]


@njit(nogil=True, cache=True, error_model="numpy")
def fit_signed(x, tops, lowest, highest, scale):  # type: ignore[no-untyped-def]
    """Per block the scale s with the smallest squared error of s q over q = `lowest` to `highest`.

    x: f32[blocks, size]. tops: f32[tries], the number, `lowest` or near it, that a block's largest element in magnitude
    (the first of several) gets in each try. scale: f32[blocks], filled; negative where that element is positive.
    """
    blocks, size = x.shape
    t = np.empty((size, LANES), np.float32)
    largest, inverse = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    sum_qq, sum_qx = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    best_s, best = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, blocks, LANES):
        for j in range(LANES):
            block = min(first + j, blocks - 1)
            for i in range(size):
                t[i, j] = x[block, i]
        for j in range(LANES):
            largest[j] = best_s[j] = best[j] = _ZERO
        for i in range(size):
            for j in range(LANES):
                largest[j] = t[i, j] if abs(t[i, j]) > abs(largest[j]) else largest[j]
        for top in tops:
            for j in range(LANES):
                inverse[j] = top / largest[j] if largest[j] != _ZERO else _ZERO
                sum_qq[j] = sum_qx[j] = _ZERO
            for i in range(size):
                for j in range(LANES):
                    number = min(max(np.rint(t[i, j] * inverse[j]), lowest), highest)
                    sum_qq[j] = sum_qq[j] + number * number
                    sum_qx[j] = sum_qx[j] + number * t[i, j]
            for j in range(LANES):
                if sum_qq[j] > _ZERO:
                    explained = sum_qx[j] * sum_qx[j] / sum_qq[j]
                    if explained > best[j]:
                        best_s[j], best[j] = sum_qx[j] / sum_qq[j], explained
        for j in range(min(LANES, blocks - first)):
            scale[first + j] = best_s[j]


@njit(nogil=True, cache=True, error_model="numpy")
def numbers(x, step, offset, lowest, highest, out):  # type: ignore[no-untyped-def]
    """out = (x + offset) / step to the nearest of `lowest` to `highest`, ties to even; 0 where a block's step is 0.

    x: f32[blocks, size]. step, offset: f32[blocks]. out: i8[blocks, size], filled.
    """
    blocks, size = x.shape
    for block in range(blocks):
        d, m = step[block], offset[block]
        for i in range(size):
            number = np.rint((x[block, i] + m) / d) if d != _ZERO else _ZERO
            out[block, i] = np.int8(np.int32(min(max(number, lowest), highest)))
