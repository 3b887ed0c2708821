"""What followed several places that look like the end of a text, merged into one draft."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush

import attrs
import numpy as np

from kinetic_core.interfaces import Draft, DraftTree

LENGTHS = 64
_LENGTHS_MEASURED = [1, 2, 3, 4, 5, 6, 8, 16, 32, 64]
_ESCAPES_MEASURED = [0.66, 0.60, 0.55, 0.46, 0.40, 0.28, 0.17, 0.14, 0.11, 0.08]
ESCAPES: tuple[float, ...] = tuple(np.interp(range(LENGTHS + 1), _LENGTHS_MEASURED, _ESCAPES_MEASURED).tolist())
"""By matched tokens: the share of next tokens that were none of those that had followed one such place before.

Measured on code, prose and answers of a small model. With n places that agree it is an n-th.
"""
WEIGHTS = tuple(float(length * length) for length in range(LENGTHS + 1))
LEAST_REACHED = 0.05
"""A token that is reached with a lower estimated probability is left out: hardly any step is that cheap per row."""


@attrs.frozen
class Place:
    """A place whose last `length` tokens are those that the text ends with, and the tokens that followed it there."""

    length: int
    following: array[int]


def merged(places: Sequence[Place], max_tokens: int) -> Draft | None:
    """The draft of at most `max_tokens` tokens that these places, best first, agree or disagree on; None: nothing.

    Tokens are taken in the order of the estimated probability that they are reached, so the likeliest path grows deep
    and others stay short.
    """
    places = [place for place in places if place.following]
    if not places:
        return None
    if all(place.following == places[0].following for place in places):
        return _chain(places[0], len(places), max_tokens)
    tokens: list[int] = []
    parents: list[int] = []
    expected: list[float] = []
    heap: list[tuple[float, int, int, int, float, list[Place]]] = []
    order = _push(heap, places, -1, 0, 1.0, 0)
    while heap and len(tokens) < max_tokens:
        reached, _, parent, depth, share, agreeing = heappop(heap)
        node = len(tokens)
        tokens.append(agreeing[0].following[depth])
        parents.append(parent)
        expected.append(share)
        order = _push(heap, agreeing, node, depth + 1, -reached, order)
    return Draft(DraftTree(tuple(tokens), tuple(parents)), tuple(expected))


def _chain(place: Place, n_places: int, max_tokens: int) -> Draft:
    expected: list[float] = []
    reached = 1.0
    for length in range(place.length, place.length + min(max_tokens, len(place.following))):
        share = 1 - ESCAPES[min(length, LENGTHS)] / n_places
        reached *= share
        if reached < LEAST_REACHED:
            break
        expected.append(share)
    return Draft(DraftTree.chain(place.following[: len(expected)]), tuple(expected))


def _push(
    heap: list[tuple[float, int, int, int, float, list[Place]]],
    places: list[Place],
    parent: int,
    depth: int,
    reached: float,
    order: int,
) -> int:
    """Puts what these places continue with at a depth on the heap; returns the next free number of an entry."""
    if len(places) == 1:
        (place,) = places
        share = 1 - ESCAPES[min(place.length + depth, LENGTHS)]
        if depth < len(place.following) and reached * share >= LEAST_REACHED:
            heappush(heap, (-reached * share, order, parent, depth, share, places))
            order += 1
        return order
    groups: dict[int, list[Place]] = {}
    total = 0.0
    longest = 0
    n_places = 0
    for place in places:
        if depth < len(place.following):
            length = min(place.length + depth, LENGTHS)
            total += WEIGHTS[length]
            n_places += 1
            longest = max(longest, length)
            groups.setdefault(place.following[depth], []).append(place)
    for group in groups.values():
        weight = sum(WEIGHTS[min(place.length + depth, LENGTHS)] for place in group)
        share = (1 - ESCAPES[longest] / n_places) * weight / total
        if reached * share >= LEAST_REACHED:
            heappush(heap, (-reached * share, order, parent, depth, share, group))
            order += 1
    return order
