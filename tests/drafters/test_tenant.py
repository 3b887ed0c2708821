"""The index of a tenant's documents against a search by brute force; who leaves, and what memory it holds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import kinetic_drafters.tenant as tenant_module
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinetic_drafters.ngrams import LONGEST
from kinetic_drafters.places import BUCKET_BYTES, GROUP, WAYS
from kinetic_drafters.tenant import (
    DOCUMENT,
    ENOUGH,
    HELPFUL,
    INDEX_BYTES,
    LEAST_LOAD,
    MOST_LOAD,
    SIZES,
    SLOT_BYTES,
    Document,
    TenantIndex,
)

PLENTY = 1 << 30


def ints(tokens: Sequence[int]) -> array[int]:
    return array("i", tokens)


def add(index: TenantIndex, tokens: Sequence[int], owner: int = 0, limit_bytes: int = PLENTY) -> Document:
    document = index.open(ints([]), owner, owner)
    for start in range(0, len(tokens), 64):
        index.extend(document, ints(tokens[start : start + 64]), limit_bytes)
    return document


def random_tokens(seed: int, n: int, vocabulary: int = 49_152) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(n)]


def matched(tokens: Sequence[int], index: int, tail: Sequence[int]) -> int:
    length = 0
    while length < min(index + 1, len(tail), LONGEST) and tokens[index - length] == tail[-1 - length]:
        length += 1
    return length


def found_by_search(documents: Sequence[Sequence[int]], tail: Sequence[int], but: int) -> list[tuple[int, int, int]]:
    """[(length, document, index)]: what `find` promises while no bucket is full."""
    matches = [
        (length, number, index)
        for number, tokens in enumerate(documents)
        if number != but
        for index in range(len(tokens))
        if (length := matched(tokens, index, tail)) >= SIZES[0]
    ]
    found: list[tuple[int, int, int]] = []
    for size in reversed(SIZES):
        found = [match for match in matches if match[0] >= size]
        if len(found) >= ENOUGH:
            break
    return sorted(found, reverse=True)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """(documents, a text's end, whose document does not count), with stretches in common; few n-grams come often."""
    source = random.Random(draw(st.integers(0, 1 << 30)))
    stretches = [[source.randrange(30_000) for _ in range(source.randrange(1, 40))] for _ in range(6)]

    def text() -> list[int]:
        picked = source.sample(stretches, source.randrange(1, 4))
        return [token for stretch in picked for token in [*stretch, source.randrange(30_000)][source.randrange(2) :]]

    documents = [text() for _ in range(draw(st.integers(0, 4)))]
    tail = (text() + text())[: draw(st.integers(1, 90))]
    return documents, tail[-LONGEST:], draw(st.integers(0, 4))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(corpora())
def test_found_is_what_a_search_by_brute_force_finds(corpus: tuple[list[list[int]], list[int], int]) -> None:
    documents, tail, but = corpus
    index = TenantIndex()
    for owner, tokens in enumerate(documents):
        add(index, tokens, owner)
    found = [(length, document.owner, place) for length, document, place in index.find(ints(tail), but)]
    assert found == found_by_search(documents, tail, but)


def test_more_places_than_a_bucket_holds() -> None:
    phrase = random_tokens(1, 20)
    index = TenantIndex()
    documents = [add(index, [*phrase, number], number) for number in range(20)]
    found = index.find(ints(phrase))
    assert [document for _, document, _ in found] == documents[: -WAYS - 1 : -1]
    assert [length for length, _, _ in found] == [20] * WAYS


def test_of_too_many_places_those_of_helpful_documents_stay() -> None:
    phrase = random_tokens(1, 20)
    index = TenantIndex()
    helpful = [add(index, [*phrase, number], number) for number in range(3)]
    for document in helpful:
        index.helped(document, HELPFUL)
    others = [add(index, [*phrase, number], number) for number in range(10, 40)]
    found = [document for _, document, _ in index.find(ints(phrase))]
    assert found[-3:] == helpful[::-1] and found[:-3] == others[: -(WAYS - 3) - 1 : -1]


def test_a_hash_alone_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_module, "tail_hashes", lambda tail, sizes: [5 for size in sizes if size <= len(tail)])
    monkeypatch.setattr(
        tenant_module, "slice_hashes", lambda tokens, sizes: [np.full_like(tokens, 5) for size in sizes]
    )
    index = TenantIndex()
    first = add(index, random_tokens(2, 300))
    assert index.tables[0].look_up(5) and index.find(ints(random_tokens(3, 60))) == []
    assert index.known(ints(random_tokens(3, 100))) is None
    assert index.find(first.tokens[-LONGEST:]) == [(LONGEST, first, 299)]


def test_entries_of_documents_that_left_find_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_module, "MOST_SLOTS", 3)
    index = TenantIndex()
    texts = [random_tokens(seed, 200) for seed in range(6)]
    left = [add(index, tokens) for tokens in texts[:3]]
    while index.evict():
        pass
    assert not any(document.tokens for document in left)
    assert index.n_documents == index.n_indexed == index.n_unproven == 0 and index.evictions == 3
    kept = [add(index, tokens[:150]) for tokens in texts[3:]]
    assert sorted(document.slot for document in kept) == [0, 1, 2]
    for tokens in texts[:3]:
        for end in range(20, 200, 7):
            assert index.find(ints(tokens[end - 20 : end])) == []
    for document, tokens in zip(kept, texts[3:], strict=True):
        assert index.find(ints(tokens[30:90])) == [(60, document, 89)]
    add(index, texts[0])
    assert index.n_documents == 3 and kept[0].slot < 0 and index.evictions == 4


def test_known_is_the_longest_run_from_the_first_token_on() -> None:
    text = random_tokens(4, 500)
    index = TenantIndex()
    long, short = add(index, [7, *text[:300]]), add(index, text[100:180])
    last = add(index, text[400:440])
    assert index.known(ints(text[100:])) == (long, 200)
    assert index.known(ints([*text[100:170], *text[:200]])) in [(long, 70), (short, 70)]
    assert index.known(ints(text[:LONGEST])) == (long, LONGEST)
    assert index.known(ints(text[400:])) is None  # what is held of it is too short to be left out
    assert index.known(ints(text[400:430])) == (last, 30)  # unless it is all
    assert index.known(ints([*text[400:430], 1])) is None


def test_the_longest_of_no_use_leaves_first() -> None:
    index = TenantIndex()
    documents = [add(index, random_tokens(seed, 100)) for seed in range(4)]
    index.helped(documents[0], HELPFUL - 1)  # used, yet no more than by chance
    add(index, random_tokens(9, 100))
    index.helped(documents[2], 1)
    order: list[int] = []
    while index.evict():
        order += [number for number, d in enumerate(documents) if d.slot < 0 and number not in order]
    assert order == [1, 3, 0, 2]


def test_what_helped_stays_while_what_did_not_holds_more_than_half() -> None:
    index = TenantIndex()
    helpful = [add(index, random_tokens(seed, 100)) for seed in range(3)]
    for document in helpful:
        index.helped(document, HELPFUL)
    new = [add(index, random_tokens(seed, 100)) for seed in range(10, 14)]
    left: list[Document] = []
    while index.evict():
        left += [d for d in [*helpful, *new] if d.slot < 0 and d not in left]
    # 400 of 700, then 300 of 600 unproven, and so on: whoever holds more gives.
    assert left == [new[0], helpful[0], new[1], helpful[1], new[2], helpful[2], new[3]]


def test_a_flood_leaves_half_of_the_memory_alone() -> None:
    index = TenantIndex()
    limit = 400_000
    helpful = [add(index, random_tokens(seed, 1000), 0, limit) for seed in range(4)]
    for document in helpful:
        index.helped(document, 1000)
    for seed in range(100, 150):
        add(index, random_tokens(seed, 1000), 0, limit)
        assert index.held_bytes <= limit
    assert index.evictions > 25 and all(document.slot >= 0 for document in helpful)


@pytest.mark.parametrize("limit_bytes", [1 << 16, 1 << 19])
def test_the_limit_holds_after_every_addition(limit_bytes: int) -> None:
    source = random.Random(limit_bytes)
    index = TenantIndex()
    documents: list[Document] = []
    peak = 0
    for number in range(70):
        document = index.open(ints(random_tokens(number, source.randrange(LONGEST))), number, number)
        while document.slot >= 0 and len(document.tokens) < DOCUMENT and source.random() < 0.9:
            index.extend(
                document, ints(random_tokens(source.randrange(1 << 20), source.randrange(1, 300))), limit_bytes
            )
            assert index.held_bytes <= limit_bytes
            peak = max(peak, index.held_bytes)
        documents.append(document)
        if source.random() < 0.3:
            index.helped(source.choice(documents), source.randrange(60))
        held = [d for d in documents if d.slot >= 0]
        assert index.n_documents == len(held) and index.n_indexed == sum(d.n_indexed for d in held)
        assert index.n_unproven == sum(d.n_indexed for d in held if not d.is_helpful)
    assert index.evictions == len(documents) - len(held) > 0
    assert peak > 0.7 * limit_bytes


def test_the_limit_holds_for_small_documents() -> None:
    index = TenantIndex()
    for number in range(200):
        add(index, random_tokens(number, 5), 0, 1 << 16)
        assert index.held_bytes <= 1 << 16
    assert index.evictions > 50


def every_place(index: TenantIndex, documents: Sequence[Document]) -> float:
    """The share of places, one in seven, that are found by their last 30 tokens."""
    hits: list[Any] = [
        (document, end - 1) in [(d, place) for _, d, place in index.find(document.tokens[end - 30 : end])]
        for document in documents
        for end in range(30, len(document.tokens), 7)
    ]
    return sum(hits) / len(hits)


def test_all_is_found_while_the_tables_grow_and_shrink() -> None:
    index = TenantIndex()
    documents = [add(index, random_tokens(seed, 600)) for seed in range(60)]
    grown = [table.n_buckets for table in index.tables]
    assert min(grown) > 50 * GROUP
    assert every_place(index, documents) > 0.98 and every_place(index, documents[:5]) > 0.9
    for document in documents[:6]:
        index.helped(document, 1)
    while index.n_documents > 7:  # these and the last one
        index.evict()
    assert [table.n_buckets for table in index.tables] == [14 * GROUP, 14 * GROUP]
    assert all(document.slot >= 0 for document in documents[:6]) and every_place(index, documents[:6]) > 0.9


def test_tables_are_never_far_from_the_size_that_they_need() -> None:
    """They grow and shrink a little at a time: no addition has to lay out a large table anew."""
    index = TenantIndex()
    source = random.Random(5)
    sizes = []
    for seed in range(300):
        if seed < 120 or source.random() < 0.2:
            add(index, random_tokens(seed, source.randrange(1, 900)))
        else:
            index.evict()
        for table in index.tables:
            assert table.n_buckets == GROUP or LEAST_LOAD * (table.n_entries - GROUP * WAYS) <= index.n_indexed
            assert index.n_indexed <= MOST_LOAD * table.n_entries
            assert 0 <= table.held_bytes - table.n_buckets * BUCKET_BYTES <= table.held_bytes // 30
            sizes.append(table.n_buckets)
        assert (
            index.held_bytes
            == INDEX_BYTES
            + sum(table.held_bytes for table in index.tables)
            + sum(document.held_bytes for document in index._slots if document is not None)
            + len(index._slots) * SLOT_BYTES
        )
    assert max(sizes) > 100 * GROUP and sizes[-1] == GROUP


def test_what_is_kept_is_still_found_after_a_flood() -> None:
    index = TenantIndex()
    limit = 500_000
    helpful = [add(index, random_tokens(seed, 1000), 0, limit) for seed in range(4)]
    for document in helpful:
        index.helped(document, 1000)
    before = every_place(index, helpful)
    for seed in range(100, 160):
        add(index, random_tokens(seed, 1000), 0, limit)
    # Several times what the memory holds went by: entries of documents that left made room, not these.
    assert every_place(index, helpful) > before - 0.1 > 0.88


def test_a_document_takes_so_many_tokens() -> None:
    index = TenantIndex()
    document = index.open(ints([1, 2, 3]), 0, 0)
    assert index.extend(document, ints(random_tokens(1, DOCUMENT)), PLENTY) == DOCUMENT - 3
    index.append(document, ints([5]))
    assert len(document.tokens) == DOCUMENT and document.n_indexed == DOCUMENT - 3 and document.lead == 3


def test_what_helped_leaves_nothing_behind_when_it_leaves() -> None:
    """Every document helps before it leaves, so none ever comes up among those that never helped."""
    index = TenantIndex()
    for round_number in range(2000):
        document = add(index, random_tokens(round_number, 40), round_number)
        index.helped(document, HELPFUL)
        if index.n_documents > 8:
            assert index.evict()
        assert [len(leaving) for leaving in index._leaving] == [0, index.n_documents]


def test_what_has_left_is_no_longer_helped() -> None:
    index = TenantIndex()
    document, other = add(index, random_tokens(1, 40)), add(index, random_tokens(2, 40))
    index.evict()
    index.helped(document, 2 * HELPFUL)
    assert document.slot < 0 and index.n_unproven == index.n_indexed == 40
    assert index.evict() and other.slot < 0 and not index.evict()


def test_an_index_that_lost_all_holds_no_more_than_a_new_one() -> None:
    """However many documents it had: else it might never again hold as little as its share."""
    index = TenantIndex()
    for number in range(300):
        add(index, random_tokens(number, 8))
    assert len(index._slots) == 300
    while index.evict():
        pass
    assert index.held_bytes == TenantIndex().held_bytes and index.evictions == 300
    document = add(index, random_tokens(1, 100))
    assert index.find(ints(random_tokens(1, 100)[:50])) == [(50, document, 49)]


def test_known_compares_few_tokens_of_most_places() -> None:
    """The first tokens of a text may have followed each other in many places."""
    start, rest = random_tokens(1, 20), random_tokens(2, 200)
    index = TenantIndex()
    documents = [add(index, [*start, *rest[:n], number], number) for number, n in enumerate((100, 150, 150, 120))]
    assert index.known(ints([*start, *rest])) == (documents[2], 170)  # of the same length the latest
    for number in range(10, 20):
        add(index, [*start, number], number)
    assert index.known(ints([*start, *rest])) == (documents[2], 170)
    assert index.known(ints([*start[:15], 1, *rest])) is None
    assert index.known(ints(start)) is not None and index.known(ints(start[:7])) is None
