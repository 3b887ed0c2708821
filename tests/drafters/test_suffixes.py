"""The index of one text against a search by brute force, and what it may take."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinetic_drafters.ngrams import BASE, LONGEST, bucket_of, buckets_of, slice_hashes, tail_hashes
from kinetic_drafters.suffixes import ENOUGH, PLACES, SIZES, SuffixIndex


def matched(tokens: list[int], position: int, whole: list[int]) -> int:
    """How many tokens up to tokens[position] are those that `whole` ends with."""
    length = 0
    while length < min(position + 1, len(whole), LONGEST) and tokens[position - length] == whole[-1 - length]:
        length += 1
    return length


def places_of(tokens: list[int], guessed: list[int]) -> dict[int, int]:
    """What `SuffixIndex.places` promises, place by place."""
    whole = tokens + guessed
    lengths = {p: matched(tokens, p, whole) for p in range(len(tokens) if guessed else len(tokens) - 1)}
    found: dict[int, int] = {}
    for size in reversed(SIZES):
        found |= {p: lengths[p] for p in [p for p in reversed(lengths) if lengths[p] >= size][:PLACES]}
        if len(found) >= ENOUGH:
            break
    return found


def indexed(tokens: list[int], cuts: list[int]) -> SuffixIndex:
    """An index that got the tokens in pieces."""
    index = SuffixIndex(tokens[: cuts[0]])
    for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        index.update()
        index.pending.extend(tokens[start:end])
    index.update()
    return index


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(tokens, where they are cut into pieces, guesses): tokens of few kinds, with stretches that come again."""
    kinds = draw(st.sampled_from([2, 3, 5, 50]))
    token = st.integers(0, kinds - 1).map(lambda kind: kind * 977)
    tokens = draw(st.lists(token, min_size=1, max_size=120))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(tokens) - 1))
        tokens = tokens + tokens[start : start + draw(st.integers(1, 100))]
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), min_size=1, max_size=6)))
    return tokens, cuts, draw(st.lists(token, max_size=10))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(texts())
@example(([7], [0], []))
@example(([7] * 30, [0, 1, 2, 29], [7]))
@example(([1, 2] * 200, [9, 20], []))
def test_places_are_those_of_a_search_by_brute_force(text: tuple[list[int], list[int], list[int]]) -> None:
    tokens, cuts, guessed = text
    index = indexed(tokens, cuts)
    for guess in ([], guessed):
        expected = places_of(tokens, guess)
        assert index.places(guess) == expected
        longest = max((matched(tokens, p, tokens + guess) for p in range(len(tokens) - (not guess))), default=0)
        assert max(expected.values(), default=0) >= min(longest, SIZES[-1]) or longest < SIZES[0]


def test_one_token_at_a_time_gives_the_index_of_all_at_once() -> None:
    source = random.Random(1)
    tokens = [source.randrange(6) for _ in range(900)]
    whole = indexed(tokens, [257, 900])
    single = indexed(tokens, list(range(1, 900)))
    assert single.bits == whole.bits == 10  # both grew when there were more tokens than buckets
    assert single.heads == whole.heads and single.links == whole.links and single.rolling == whole.rolling


@pytest.mark.parametrize("n", [0, 10, 257, 1025, 5000, 33_000])
def test_memory_is_at_most_what_the_docstring_says(n: int) -> None:
    source = random.Random(n)
    index = SuffixIndex([source.randrange(49_152) for _ in range(n)])
    index.update()
    assert 4 * n < index.held_bytes <= 96 * n + 8000


def test_hashes_are_the_polynomial() -> None:
    source = random.Random(2)
    tokens = array("i", [source.randrange(1 << 31) for _ in range(40)])
    sizes = (3, 6, 12)
    slices = slice_hashes(np.array(tokens, dtype=np.uint32), sizes)
    for end in range(1, 41):
        tails = tail_hashes(tokens[:end], sizes)
        assert len(tails) == sum(size <= end for size in sizes)
        for size, value, values in zip(sizes, tails, slices, strict=False):
            last = tokens[end - size : end]
            assert value == sum(t * BASE ** (size - 1 - i) for i, t in enumerate(last)) % 2**32 == values[end - 1]
            assert bucket_of(value, 11) == buckets_of(values, 11)[end - 1] < 2048
