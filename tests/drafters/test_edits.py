"""Replacements that are made again."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from kinetic_drafters.context import ContextDrafter
from kinetic_drafters.edits import LONGEST, MOST, SHARES, Edit, Edits
from test_retelling import Texts, likeliest


def ints(tokens: Sequence[int]) -> array[int]:
    return array("i", tokens)


def test_a_replacement_is_found_where_its_old_tokens_stand() -> None:
    edits = Edits()
    edits.learn([5, 6], [7])
    assert edits.at(ints([1, 5, 6, 2]), 1) == Edit((5, 6), (7,), SHARES[0])
    assert edits.at(ints([1, 5, 6, 2]), 0) is None
    assert edits.at(ints([1, 5]), 1) is None  # cut off
    assert edits.at(ints([5, 9]), 0) is None
    assert edits.at(ints([5]), 1) is None and edits.at(ints([5]), 7) is None
    assert edits.touches(ints([1, 5])) and not edits.touches(ints([1, 6])) and not edits.touches(ints([]))


def test_the_longest_that_fits() -> None:
    edits = Edits()
    edits.learn([5], [1])
    edits.learn([5, 6, 7], [2])
    edits.learn([5, 6], [3])
    assert edits.at(ints([5, 6, 7]), 0) == Edit((5, 6, 7), (2,), SHARES[0])
    assert edits.at(ints([5, 6, 8]), 0) == Edit((5, 6), (3,), SHARES[0])
    edits.forget((5, 6))
    assert edits.at(ints([5, 6, 8]), 0) == Edit((5,), (1,), SHARES[0])


def test_the_more_often_the_likelier_and_the_last_one_counts() -> None:
    edits = Edits()
    for share in (*SHARES, SHARES[-1]):
        edits.learn([5], [1])
        assert edits.at(ints([5]), 0) == Edit((5,), (1,), share)
    edits.learn([5], [2])
    assert edits.at(ints([5]), 0) == Edit((5,), (2,), SHARES[0])


def test_no_insertions_no_deletions_nothing_long() -> None:
    edits = Edits()
    edits.learn([], [1])
    edits.learn([5], [])
    edits.learn([5], [5])
    edits.learn([5] * (LONGEST + 1), [1])
    edits.learn([5], [1] * (LONGEST + 1))
    assert not edits.touches(ints([5])) and edits.held_bytes == 0
    edits.learn([5] * LONGEST, [1] * LONGEST)
    assert edits.touches(ints([5])) and edits.held_bytes > 0


def test_what_was_kept_is_forgotten() -> None:
    edits = Edits()
    edits.learn([5, 6], [7])
    edits.learn([8], [9])
    edits.kept(ints([1, 5, 1, 6]), 4)
    edits.kept(ints([5, 6, 1]), 1)  # was kept before the replacement was learned
    assert edits.touches(ints([5]))
    edits.kept(ints([1, 5, 6]), 1)
    assert not edits.touches(ints([5])) and edits.touches(ints([8]))
    edits.forget((1, 2, 3))  # never learned


def test_one_that_was_made_twice_is_forgotten_at_once() -> None:
    edits = Edits()
    for _ in range(2):
        edits.learn([5, 6], [7])
    edits.forget((5, 6))
    assert edits.at(ints([5, 6]), 0) is None and not edits.touches(ints([5])) and len(edits) == 0
    edits.learn([5, 6], [8])
    assert edits.at(ints([5, 6]), 0) == Edit((5, 6), (8,), SHARES[0])


def test_the_longest_is_forgotten_when_the_last_of_its_tokens_was_kept() -> None:
    old = list(range(LONGEST))
    edits = Edits()
    edits.learn(old, [99])
    edits.kept(ints([*old, 50]), 1)  # had been kept before
    assert len(edits) == 1
    edits.kept(ints([50, *old[:-1]]), LONGEST)  # not all of them
    assert len(edits) == 1
    edits.kept(ints([50, *old]), 1)
    assert len(edits) == 0


def test_the_oldest_leave() -> None:
    edits = Edits()
    for token in range(MOST):
        edits.learn([token], [token + 1])
    edits.learn([0], [7])  # made again: now the last
    edits.learn([MOST], [0])
    assert not edits.touches(ints([1]))
    assert all(edits.touches(ints([token])) for token in (0, 2, MOST))
    assert edits.held_bytes == MOST * 400


def random_text(n: int, source: random.Random) -> list[int]:
    return [source.randrange(300) for _ in range(n)]


def drafted(prompt: Sequence[int], answers: Sequence[Sequence[int]], most: int = 31) -> list[int]:
    """The likeliest path after these pieces of an answer, each proposed for before the next comes."""
    drafter = ContextDrafter()
    drafter.read_texts(Texts())
    drafter.begin(1, prompt)
    for piece in answers:
        for token in piece:
            drafter.committed(1, [token])
            drafter.propose(1, 4)
    return likeliest(drafter.propose(1, most))


OLD, NEW = [280, 281], [282]


def parts() -> list[list[int]]:
    source = random.Random(8)
    return [random_text(12, source) for _ in range(5)]


def with_each(between: Sequence[int]) -> list[int]:
    text: list[int] = []
    for part in parts():
        text += [*part, *between]
    return text


def test_a_replacement_that_was_made_is_made_again_and_the_text_goes_on_behind_it() -> None:
    a, b, c, d, _ = parts()
    prompt = with_each(OLD)
    assert drafted(prompt, [a])[: len(OLD)] == OLD  # not seen yet
    guess = drafted(prompt, [a, NEW, b[:6]])
    assert guess[:19] == [*b[6:], *NEW, *c]
    twice = drafted(prompt, [a, NEW, b, NEW, c, NEW, d[:2]])  # now it is likely, and looked for farther on
    assert twice[:23] == [*d[2:], *NEW, *parts()[4]]
    assert drafted(prompt, [a, NEW, b])[:13] == [*NEW, *c]


def test_where_it_was_not_made_again_the_old_tokens_are_guessed() -> None:
    a, b, c, *_ = parts()
    assert drafted(with_each(OLD), [a, NEW, b, OLD, c])[: len(OLD)] == OLD


def test_the_old_tokens_stay_in_the_draft() -> None:
    a, b, *_ = parts()
    drafter = ContextDrafter()
    drafter.read_texts(Texts())
    drafter.begin(1, with_each(OLD))
    for token in [*a, *NEW, *b]:
        drafter.committed(1, [token])
        drafter.propose(1, 4)
    draft = drafter.propose(1, 31)
    assert draft is not None
    roots = {
        token: share
        for token, parent, share in zip(draft.tree.token_ids, draft.tree.parents, draft.expected, strict=True)
        if parent < 0
    }
    assert roots[NEW[0]] == SHARES[0] and roots[OLD[0]] <= 1 - SHARES[0] + 1e-9
