"""Texts that run alongside each other, against a search by brute force."""

from __future__ import annotations

import random
from array import array

import pytest
from kinetic_drafters.alignment import WINDOW, WORTH_KEEPING, Alignment


def ints(tokens: list[int]) -> array[int]:
    return array("i", tokens)


def alike(text: list[int], tokens: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    while count < min(len(text), len(tokens)) and text[count] == tokens[count]:
        count += 1
    return count


def met_again(text: list[int], tokens: list[int], position: int, at: int, end: int) -> tuple[int, int] | None:
    """What `Alignment.met_again` promises: of all places after the parting the one with the longest run."""
    runs: dict[int, int] = {}
    for place in range(position + 1, min(position + 1 + WINDOW, end)):
        lengths = [n for n in range(1, len(tokens) - at + 1) if place - n >= position]
        fitting = [n for n in lengths if text[place - n + 1 : place + 1] == tokens[len(tokens) - n :]]
        if fitting:
            runs[place] = max(fitting)
    best = max(runs, key=lambda place: (runs[place], -place), default=None)
    return None if best is None else (best, runs[best])


def test_it_follows_as_far_as_the_tokens_are_the_same() -> None:
    """Tokens come one at a time or several, and the text may end, or part, among them."""
    source = random.Random(1)
    seen = set()
    for _ in range(1000):
        text = [source.randrange(2) for _ in range(source.randrange(1, 9))]
        position = source.randrange(len(text))
        tokens = [7, 8, *[source.randrange(2) for _ in range(source.randrange(6))]]
        ahead: Alignment[str] = Alignment("source", ints(text), position, 5, 2)
        count = alike(text[position + 1 :], tokens[2:])
        assert ahead.follow(ints(tokens)) == count
        assert (ahead.position, ahead.length, ahead.at) == (position + count, 5 + count, 2 + count)
        seen.add((count, len(tokens) - 2 - count > 0))
    assert {(0, False), (0, True), (1, True), (2, True), (2, False)} <= seen


def test_they_meet_again_where_the_most_tokens_agree() -> None:
    source = random.Random(2)
    n_met = n_long = 0
    for _ in range(1200):
        kinds = source.choice([2, 3, 6])
        text = [source.randrange(kinds) for _ in range(source.randrange(2, 40))]
        position = source.randrange(len(text))
        at = source.randrange(1, 4)
        tokens = [source.randrange(kinds) for _ in range(at + source.randrange(1, 9))]
        end = source.randrange(len(text) + 1)
        expected = met_again(text, tokens, position, at, end)
        assert Alignment(None, ints(text), position, WORTH_KEEPING, at).met_again(ints(tokens), end) == expected
        n_met += expected is not None
        n_long += expected is not None and expected[1] > 2
    assert n_met > 300 and n_long > 30


@pytest.mark.parametrize(("apart", "meets"), [(0, False), (1, True), (WINDOW, True), (WINDOW + 1, False)])
def test_so_many_tokens_apart_they_still_meet(apart: int, meets: bool) -> None:
    text, tokens = [*range(100, 110), 109, 2], [*range(100, 110), *[7] * (apart - 1), 2][: 10 + apart]
    met = Alignment(None, ints(text), 9, 10, 10).met_again(ints(tokens), len(text))
    assert met == ((11, 1) if meets else None)


@pytest.mark.parametrize(("place", "meets"), [(WINDOW, True), (WINDOW + 1, False)])
def test_so_many_tokens_of_the_text_are_looked_at(place: int, meets: bool) -> None:
    text = [1] * 100
    text[place] = 2
    met = Alignment(None, ints(text), 0, 10, 1).met_again(ints([1, 2]), len(text))
    assert met == ((place, 1) if meets else None)
