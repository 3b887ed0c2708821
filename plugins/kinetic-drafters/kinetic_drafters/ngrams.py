"""n-grams of tokens as numbers: one polynomial hash, of the last tokens of a text or of a whole slice at once.

The hash of tokens t[0] … t[n-1] is the sum of t[i] * BASE**(n-1-i) modulo 2**32. It only finds places: whoever finds
one compares the tokens themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

BASE = 0x01000193
MASK = 0xFFFFFFFF
SCATTER = 0x9E3779B1
"""Multiplies a hash before its upper bits choose a bucket: the lower bits of a polynomial depend on few tokens."""
LONGEST = 64
"""Tokens that a match is followed back when places are compared with each other."""
POWERS = tuple(pow(BASE, exponent, 1 << 32) for exponent in range(LONGEST))


def tail_hashes(tail: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The hashes of the last n tokens for those n of `sizes`, ascending, that `tail` is long enough for."""
    backwards = tail[::-1]
    hashes, total, start = [], 0, 0
    for size in sizes:
        if size > len(backwards):
            break
        total += sum(map(mul, backwards[start:size], POWERS[start:size]))
        hashes.append(total & MASK)
        start = size
    return hashes


def slice_hashes(tokens: npt.NDArray[np.uint32], sizes: Sequence[int]) -> list[npt.NDArray[np.uint32]]:
    """For each n of `sizes`, each twice the one before: u32[tokens], the hash of the n tokens that end there.

    The first n - 1 values of a result mean nothing.
    """
    first = sizes[0]
    hashes = np.zeros_like(tokens)
    for offset in range(min(first, len(tokens))):
        hashes[offset:] += tokens[: len(tokens) - offset] * np.uint32(POWERS[offset])
    results = [hashes]
    for size in sizes[:-1]:
        longer = results[-1].copy()
        longer[size:] += results[-1][:-size] * np.uint32(POWERS[size])
        results.append(longer)
    return results


def bucket_of(value: int, bits: int) -> int:
    """The upper `bits` of a hash, scattered."""
    return ((value * SCATTER) & MASK) >> (32 - bits)


def buckets_of(hashes: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """As `bucket_of`, of each hash."""
    return (hashes * np.uint32(SCATTER)) >> np.uint32(32 - bits)


def view(tokens: array[int], start: int = 0) -> npt.NDArray[np.uint32]:
    """A view of an array of type "i" from `start` on; the array must not change its length while the view lives."""
    return np.frombuffer(tokens, dtype=np.uint32)[start:]


def match_length(text: array[int], position: int, tail: array[int], known: int) -> int:
    """How many tokens up to and including text[position] are those that `tail` ends with; `known` of them are."""
    most = min(len(tail), position + 1)
    if text[position + 1 - most : position + 1] == tail[len(tail) - most :]:
        return most
    length = known
    while text[position - length] == tail[-1 - length]:
        length += 1
    return length
