"""Drafts merged from several places, against a merger that takes one guess at a time."""

from __future__ import annotations

import random
from array import array

import pytest
from kinetic_drafters.continuation import ESCAPES, LEAST_REACHED, LENGTHS, WEIGHTS, Place, merged

from kinetic_core.interfaces import Draft, DraftTree


def places_of(*following: tuple[int, list[int]]) -> list[Place]:
    return [Place(length, array("i", tokens)) for length, tokens in following]


def one_at_a_time(places: list[Place], max_tokens: int) -> tuple[DraftTree, list[float]]:
    """The likeliest guess that is left, again and again; of equally likely ones the first that could be made."""
    tokens: list[int] = []
    parents: list[int] = []
    shares: list[float] = []
    left: list[tuple[float, int, int, float, list[Place]]] = []  # (probability, parent, depth, share, places)

    def offer(agreeing: list[Place], parent: int, depth: int, reached: float) -> None:
        going_on = [place for place in agreeing if depth < len(place.following)]
        weights = [WEIGHTS[min(place.length + depth, LENGTHS)] for place in going_on]
        for token in dict.fromkeys(place.following[depth] for place in going_on):
            group = [place for place in going_on if place.following[depth] == token]
            weight = sum(weights[going_on.index(place)] for place in group)
            escape = ESCAPES[min(max(place.length for place in going_on) + depth, LENGTHS)] / len(going_on)
            share = (1 - escape) * weight / sum(weights)
            if reached * share >= LEAST_REACHED:
                left.append((reached * share, parent, depth, share, group))

    offer(places, -1, 0, 1.0)
    while left and len(tokens) < max_tokens:
        chosen = max(left, key=lambda guess: guess[0])
        left.remove(chosen)
        reached, parent, depth, share, agreeing = chosen
        tokens.append(agreeing[0].following[depth])
        parents.append(parent)
        shares.append(share)
        offer(agreeing, len(tokens) - 1, depth + 1, reached)
    return DraftTree(tuple(tokens), tuple(parents)), shares


def random_places(source: random.Random) -> list[Place]:
    """Places, the longest first: some agree for a while, some all along, some end early."""
    common = [source.randrange(3) for _ in range(source.randrange(40))]
    places = []
    for _ in range(source.randrange(1, 5)):
        following = [*common[: source.randrange(41)], *[source.randrange(3) for _ in range(source.randrange(8))]]
        places.append(Place(source.choice([1, 2, 3, 8, 30, 63, 64, 90]), array("i", following)))
    return sorted(places, key=lambda place: -place.length)


def test_places_that_agree_or_disagree() -> None:
    source = random.Random(3)
    n_branching = n_deep = 0
    for _ in range(600):
        places, most = random_places(source), source.choice([1, 2, 8, 31])
        tree, shares = one_at_a_time(places, most)
        draft = merged(places, most)
        if draft is None:
            assert tree.token_ids == ()
            continue
        assert draft.tree == tree
        assert draft.expected == pytest.approx(shares, rel=1e-12)
        n_branching += len(set(tree.parents)) < len(tree.parents)
        n_deep += len(tree.parents) > 8 and tree.parents == tuple(range(-1, len(tree.parents) - 1))
    assert n_branching > 50 and n_deep > 30


def test_no_place_goes_on() -> None:
    assert merged([], 4) is None
    assert merged(places_of((5, []), (3, [])), 4) is None
    assert merged(places_of((5, []), (3, [9])), 4) == merged(places_of((3, [9])), 4)


def test_a_path_ends_where_it_is_hardly_reached() -> None:
    (place,) = places_of((1, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    draft = merged([place], 9)
    assert isinstance(draft, Draft)
    reached = 1.0
    for length, share in enumerate(draft.expected, 1):
        assert share == 1 - ESCAPES[length]
        reached *= share
    assert reached >= LEAST_REACHED > reached * (1 - ESCAPES[len(draft.expected) + 1])
    assert draft.tree == DraftTree.chain([1, 2, 3, 4, 5, 6, 7, 8, 9][: len(draft.expected)])
