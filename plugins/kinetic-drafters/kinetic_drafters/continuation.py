"""What followed several places that look like the end of a text, merged into one draft."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

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


class Place(NamedTuple):
    """A place whose last `length` tokens are those that the text ends with, and the tokens that followed it there."""

    length: int
    following: array[int]


def merged(places: Sequence[Place], max_tokens: int) -> Draft | None:
    """The draft of at most `max_tokens` tokens that these places agree or disagree on; None: nothing.

    places: the longest first. Tokens are taken in the order of the estimated probability that they are reached, so the
    likeliest path grows deep and others stay short.
    """
    agreeing = [place for place in places if place.following]
    if not agreeing:
        return None
    if all(place.following == agreeing[0].following for place in agreeing):
        return _chain(agreeing, max_tokens)
    tokens: list[int] = []
    parents: list[int] = []
    expected: list[float] = []
    # (-probability, how many came before, parent, depth, estimate, places) of guesses that were not taken yet.
    heap: list[tuple[float, int, int, int, float, list[Place]]] = []
    node, depth, reached, n_pushed = -1, 0, 1.0, 0
    while len(tokens) < max_tokens:
        branches = _branches(agreeing, depth)
        if len(branches) == 1 and not heap:  # nothing else may be likelier: many at once
            ((_, agreeing),) = branches
            n_alike = min(_alike(agreeing, depth), max_tokens - len(tokens))
            shares, reached = _shares(agreeing, depth, n_alike, reached)
            n_taken = len(shares)
            if n_taken:
                parents.append(node)
                parents.extend(range(len(tokens), len(tokens) + n_taken - 1))
                tokens.extend(agreeing[0].following[depth : depth + n_taken])
                expected.extend(shares)
                node = len(tokens) - 1
                depth += n_taken
            if n_taken < n_alike:
                break
            continue
        for share, group in branches:
            if reached * share >= LEAST_REACHED:
                heappush(heap, (-reached * share, n_pushed, node, depth, share, group))
                n_pushed += 1
        if not heap:
            break
        unlikely, _, parent, depth, share, agreeing = heappop(heap)
        node = len(tokens)
        tokens.append(agreeing[0].following[depth])
        parents.append(parent)
        expected.append(share)
        reached = -unlikely
        depth += 1
    return Draft(DraftTree(tuple(tokens), tuple(parents)), tuple(expected))


def _chain(agreeing: list[Place], max_tokens: int) -> Draft:
    following = agreeing[0].following[:max_tokens]
    shares, _ = _shares(agreeing, 0, len(following), 1.0)
    return Draft(DraftTree.chain(following[: len(shares)]), tuple(shares))


def _shares(agreeing: list[Place], depth: int, n_tokens: int, reached: float) -> tuple[list[float], float]:
    """(estimates of the next tokens, while they are likely to be reached; how likely the last is).

    These places agree on all of them; reached: how likely the one before is.
    """
    length, n_places = agreeing[0].length + depth, len(agreeing)
    escapes = ESCAPES[length : length + n_tokens]
    if len(escapes) < n_tokens:
        escapes += ESCAPES[LENGTHS:] * (n_tokens - len(escapes))
    shares: list[float] = []
    for escape in escapes:
        share = 1 - escape / n_places
        if reached * share < LEAST_REACHED:
            break
        reached *= share
        shares.append(share)
    return shares, reached


def _alike(agreeing: list[Place], depth: int) -> int:
    """How many tokens from a depth on, where these places agree, they all continue with: half as many or more."""
    following = agreeing[0].following
    if len(agreeing) == 1:
        return len(following) - depth
    n_tokens = min([len(place.following) for place in agreeing]) - depth
    while n_tokens > 1:
        wanted = following[depth : depth + n_tokens]
        if all(place.following[depth : depth + n_tokens] == wanted for place in agreeing):
            break
        n_tokens //= 2
    return n_tokens


def _branches(places: list[Place], depth: int) -> list[tuple[float, list[Place]]]:
    """[(estimate, places)]: the tokens that these places continue with at a depth, as the places that agree on one."""
    if len(places) == 1:
        length, following = places[0]
        return [(1 - ESCAPES[min(length + depth, LENGTHS)], places)] if depth < len(following) else []
    groups: dict[int, list[Place]] = {}
    weights: dict[int, float] = {}  # their sums are exact: integers
    longest = n_places = 0
    for place in places:
        length, following = place
        if depth < len(following):
            length = min(length + depth, LENGTHS)
            longest = longest or length
            n_places += 1
            token = following[depth]
            groups.setdefault(token, []).append(place)
            weights[token] = weights.get(token, 0.0) + WEIGHTS[length]
    total = sum(weights.values())
    return [
        ((1 - ESCAPES[longest] / n_places) * weight / total, group)
        for weight, group in zip(weights.values(), groups.values(), strict=True)
    ]
