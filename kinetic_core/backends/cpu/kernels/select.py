"""The best tokens of a row of logits, and the search for NaN.

Order: score descending, then token id ascending; -0 equals +0. The vocabulary is cut into slices, one work item each;
a second kernel merges their sorted lists. A NaN anywhere sets the status word.

Arguments of `select_slices` (int64 words). An item is an output and a slice: item // slices is the output.

    0 logits, 1 stride in bytes   2 vocabulary   3 slice length   4 slices
    5 i64[outputs]: how many are wanted, 0 to MAX_TOP_K
    6 i64[outputs, slices, MAX_TOP_K] ids   7 f32[outputs, slices, MAX_TOP_K] scores   8 i64[outputs, slices] found
    9 status: i64, set to 1 when a logit is NaN

Arguments of `merge_slices`: 4 to 8 as above, 10 i32[outputs, MAX_TOP_K] ids, 11 f32[outputs, MAX_TOP_K] scores. An
item is an output.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import MAX_TOP_K
from kinetic_core.backends.cpu.simd import (
    eq,
    gt,
    hmax,
    hmin,
    load_f32,
    load_i64,
    load_vf,
    load_vf_partial,
    select,
    splat_f32,
    splat_i32,
    stack_bytes,
    store_f32,
    store_i32,
    store_i64,
    zero_i32,
)


@njit(error_model="numpy")
def _insert(ids, scores, found, wanted, token, score):
    """Put one token into the sorted list, behind equals, dropping the last of a full one; the list's new length."""
    at = found
    if found == wanted:
        at -= 1
    new_length = at + 1
    while at > 0 and load_f32(scores + 4 * (at - 1)) < score:
        store_f32(scores + 4 * at, load_f32(scores + 4 * (at - 1)))
        store_i64(ids + 8 * at, load_i64(ids + 8 * (at - 1)))
        at -= 1
    store_f32(scores + 4 * at, score)
    store_i64(ids + 8 * at, token)
    return new_length


@njit(error_model="numpy", forceinline=True)
def _any(mask):
    return hmax(select(mask, splat_i32(1), zero_i32())) > 0


@kernel("select_slices")
def select_slices(args, begin, end):
    """Each item: the best tokens of one slice, and the NaN search."""
    vocab, length, n_slices = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
    for item in range(begin, end):
        output = item // n_slices
        first = length * (item - output * n_slices)
        last = min(first + length, vocab)
        row = load_i64(args) + output * load_i64(args + 8)
        wanted = load_i64(load_i64(args + 40) + 8 * output)
        ids = load_i64(args + 48) + 8 * MAX_TOP_K * item
        scores = load_i64(args + 56) + 4 * MAX_TOP_K * item
        found = 0
        finite = splat_i32(1)
        for at in range(first, last, 16):
            here = min(16, last - at)
            v = load_vf(row + 4 * at) if here == 16 else load_vf_partial(row + 4 * at, here)
            finite = select(eq(v, v), finite, zero_i32())
            if wanted == 0:
                continue
            if found == wanted and not _any(gt(v, splat_f32(load_f32(scores + 4 * (wanted - 1))))):
                continue
            for lane in range(here):
                score = load_f32(row + 4 * (at + lane))
                if found < wanted or score > load_f32(scores + 4 * (wanted - 1)):
                    found = _insert(ids, scores, found, wanted, at + lane, score)
        store_i64(load_i64(args + 64) + 8 * item, found)
        if hmin(finite) == 0:
            store_i64(load_i64(args + 72), 1)


@kernel("merge_slices")
def merge_slices(args, begin, end):
    """Each item: the best tokens of all slices of one output; of equal scores the lower slice has the lower id."""
    n_slices = load_i64(args + 32)
    heads = stack_bytes(8192)
    for output in range(begin, end):
        wanted = load_i64(load_i64(args + 40) + 8 * output)
        counts = load_i64(args + 64) + 8 * n_slices * output
        ids = load_i64(args + 48) + 8 * MAX_TOP_K * n_slices * output
        scores = load_i64(args + 56) + 4 * MAX_TOP_K * n_slices * output
        out_ids = load_i64(args + 80) + 4 * MAX_TOP_K * output
        out_scores = load_i64(args + 88) + 4 * MAX_TOP_K * output
        for k in range(n_slices):
            store_i64(heads + 8 * k, 0)
        for rank in range(wanted):
            best = -1
            best_score = np.float32(0.0)
            for k in range(n_slices):
                head = load_i64(heads + 8 * k)
                if head < load_i64(counts + 8 * k):
                    score = load_f32(scores + 4 * (MAX_TOP_K * k + head))
                    if best < 0 or score > best_score:
                        best, best_score = k, score
            if best < 0:
                break
            head = load_i64(heads + 8 * best)
            store_i64(heads + 8 * best, head + 1)
            store_i32(out_ids + 4 * rank, load_i64(ids + 8 * (MAX_TOP_K * best + head)))
            store_f32(out_scores + 4 * rank, best_score)
