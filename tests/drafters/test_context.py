"""What the context makes one guess."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Sequence

import pytest
from kinetic_drafters.alignment import WINDOW, WORTH_KEEPING, Alignment
from kinetic_drafters.context import ContextDrafter
from kinetic_drafters.continuation import LEAST_REACHED

from kinetic_core.interfaces import Draft


def after(tokens: Sequence[int], max_tokens: int = 8) -> Draft | None:
    """What a fresh drafter proposes after these tokens."""
    drafter = ContextDrafter()
    drafter.begin(1, tokens)
    return drafter.propose(1, max_tokens)


def paths(draft: Draft) -> list[list[int]]:
    """The tokens of every path from the root to a leaf, in the order of the leaves."""
    tree = draft.tree
    leaves = [node for node in range(len(tree.parents)) if node not in tree.parents]
    found = []
    for node in leaves:
        path = []
        while node >= 0:
            path.append(tree.token_ids[node])
            node = tree.parents[node]
        found.append(path[::-1])
    return found


def random_tokens(seed: int, n: int, vocabulary: int = 49_152) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(n)]


def test_what_followed_the_longest_match() -> None:
    draft = after([1, 2, 3, 4, 5, 6, 90, 3, 4, 70, 71, 1, 2, 3, 4])
    assert draft is not None
    short, deep = paths(draft)
    assert draft.tree.token_ids[0] == 5 and deep[:3] == [5, 6, 90]  # 1 2 3 4 beats the later 3 4
    assert short[0] == 70


def test_of_equal_matches_the_last() -> None:
    draft = after([1, 2, 3, 50, 51, 9, 1, 2, 3, 60, 61, 8, 1, 2, 3], 1)
    assert draft is not None and draft.tree.token_ids == (60,)


def test_the_likely_path_is_deep_and_another_short() -> None:
    long, other = list(range(100, 130)), list(range(200, 230))
    draft = after([1, 2, *long, 1, 2, *long, 1, 2, *other, 1, 2, *long, 1, 2], 10)
    assert draft is not None and len(draft.tree.token_ids) == 10
    deep, short = sorted(paths(draft), key=len, reverse=True)
    assert deep == long[: len(deep)] and short == other[: len(short)] and len(deep) > 2 * len(short)


def test_a_loop_goes_on() -> None:
    draft = after([5, *[1, 2, 3] * 4], 8)
    assert draft is not None and draft.tree.token_ids == (1, 2, 3, 1, 2, 3, 1, 2)


def test_a_loop_that_was_seen_once_goes_on_and_on() -> None:
    draft = after([9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 8)
    assert draft is not None and draft.tree.token_ids == (1, 2, 3, 4, 5, 1, 2, 3)
    drafter = ContextDrafter()
    drafter.begin(1, [1, 2, 1])
    draft = drafter.propose_after(1, [2], 4)  # the guess is part of the loop
    assert draft is not None and draft.tree.token_ids == (1, 2, 1, 2)


def test_a_path_ends_where_it_is_unlikely_to_be_right() -> None:
    text = random_tokens(12, 100)
    weak, strong = after([*text, 9, *text[20:22]], 31), after([*text, 9, *text[:60]], 31)
    assert weak is not None and strong is not None
    assert 4 <= len(weak.tree.token_ids) < 16 <= len(strong.tree.token_ids)
    for draft in (weak, strong):
        reached = 1.0
        for share in draft.expected:
            reached *= share
        assert reached >= LEAST_REACHED


def test_texts_meet_again_where_more_tokens_agree() -> None:
    text = array("i", [*range(100, 120), 1, 50, 2, 51, 1, 52, 3, 53, 1, 54])
    sequence = array("i", [*range(100, 120)])
    ahead: Alignment[None] = Alignment(None, text, 19, 20, 20)
    assert ahead.follow(sequence) == 0 and ahead.met_again(sequence, len(text)) is None  # it did not part
    sequence.extend([7, 1])
    assert ahead.follow(sequence) == 0
    assert ahead.met_again(sequence, len(text)) == (20, 1)
    assert ahead.met_again(array("i", [*sequence[:-2], 51, 1]), len(text)) == (24, 2)
    assert ahead.met_again(array("i", [*sequence[:-2], 53, 1]), 28) == (
        20,
        1,
    )  # what lies behind the end does not count
    assert ahead.met_again(array("i", [*sequence, *[7] * WINDOW, 1]), len(text)) is None
    assert Alignment(None, text, 19, WORTH_KEEPING - 1, 20).met_again(sequence, len(text)) is None


def test_text_that_cannot_be_guessed_has_drafts_where_a_token_comes_again() -> None:
    tokens = random_tokens(3, 3000)
    drafter = ContextDrafter()
    drafter.begin(1, tokens[:1000])
    seen = set(tokens[:1000])
    for token in tokens[1000:]:
        drafter.committed(1, (token,))
        assert (drafter.propose(1, 8) is not None) == (
            token in seen
        )  # what followed it before is all there is to guess
        seen.add(token)


def test_rows_of_a_table_are_copied_in_order() -> None:
    template = list(range(500, 512))
    values = random_tokens(4, 40)
    table = [token for value in values for token in (*template, value)]
    drafter = ContextDrafter()
    drafter.begin(1, [*table, *random_tokens(5, 30), *table[:39]])
    right = 0
    for token in table[39:]:
        draft = drafter.propose(1, 1)
        right += draft is not None and draft.tree.token_ids[0] == token
        drafter.committed(1, (token,))
    assert right == len(table) - 39  # the last rows with these 12 tokens say nothing of the value


def test_a_text_goes_on_right_after_an_edit() -> None:
    text = random_tokens(6, 400)
    edits = {position: random_tokens(position, position % 3 + 1, 1000) for position in range(60, 400, 40)}
    drafter = ContextDrafter()
    drafter.begin(1, [*text, 1, 2, 3])
    met = 0
    for position, token in enumerate(text):
        for new in edits.get(position, [token]):
            drafter.committed(1, (new,))
            draft = drafter.propose(1, 4)
        if position - 1 in edits:  # one token was as before
            met += draft is not None and draft.tree.token_ids == tuple(text[position + 1 : position + 5])
    assert met == len(edits)


def test_guesses_are_continued_and_not_kept() -> None:
    tokens = [*random_tokens(7, 60, 5), *random_tokens(8, 200, 300)]
    for seed in range(40):
        drafter, other = ContextDrafter(), ContextDrafter()
        start = random.Random(seed).randrange(70, 230)
        guessed = tokens[start : start + 3]
        for each in (drafter, other):
            each.begin(1, tokens[:-20] + tokens[start - 3 : start])
        expected = after([*tokens[:-20], *tokens[start - 3 : start], *guessed], 6)
        if seed % 2:
            drafter.propose(1, 6)  # so that there is a place to run alongside
            other.propose(1, 6)
        continued = drafter.propose_after(1, guessed, 6)
        if not seed % 2:
            assert continued == expected
        assert continued is not None and continued.tree.token_ids[0] == tokens[start + 3]
        assert drafter.propose(1, 6) == other.propose(1, 6)


def test_proposals_do_not_depend_on_the_pieces() -> None:
    tokens = random_tokens(9, 700, 12)
    whole = after(tokens)
    for seed in range(5):
        source = random.Random(seed)
        drafter = ContextDrafter()
        drafter.begin(1, tokens[:100])
        at = 100
        while at < len(tokens):
            n = source.randrange(1, 60)
            drafter.committed(1, tokens[at : at + n])
            at += n
        assert drafter.propose(1, 8) == whole == after(tokens)


def test_estimates_grow_with_the_match_and_with_agreement() -> None:
    text = random_tokens(10, 60)
    firsts = []
    for length in (2, 3, 5, 9, 20, 50):
        draft = after([*text, 9, *text[50 - length : 50]], 3)
        assert draft is not None and draft.tree.token_ids == tuple(text[50:53])
        assert list(draft.expected) == sorted(draft.expected)  # a token guessed right is a longer match
        firsts.append(draft.expected[0])
    assert firsts == sorted(set(firsts))
    once, twice = after([1, 2, 3, 4, 9, 1, 2], 1), after([1, 2, 3, 4, 9, 1, 2, 3, 8, 1, 2], 1)
    assert once is not None and twice is not None and twice.expected[0] > once.expected[0]


def test_estimates_are_shares() -> None:
    tokens = random_tokens(11, 2000, 8)
    drafter = ContextDrafter()
    drafter.begin(1, tokens[:1000])
    for token in tokens[1000:]:
        drafter.committed(1, (token,))
        draft = drafter.propose(1, 12)
        assert draft is not None
        reached: list[float] = []
        children: dict[int, float] = {}
        for parent, share in zip(draft.tree.parents, draft.expected, strict=True):
            reached.append(share * (reached[parent] if parent >= 0 else 1))
            children[parent] = children.get(parent, 0) + share
        assert reached == sorted(reached, reverse=True) and reached[-1] >= LEAST_REACHED
        assert max(children.values()) <= 1


def test_a_prompt_is_indexed_when_a_draft_is_asked_for() -> None:
    drafter = ContextDrafter()
    drafter.begin(1, [1, 2, 3] * 100)
    assert drafter.statistics()["tokens_indexed"] == 0
    drafter.propose(1, 1)
    assert drafter.statistics()["tokens_indexed"] == 300
    drafter.begin(2, [1, 2])
    assert drafter.statistics()["documents"] == 2
    drafter.end(1)
    drafter.end(2)
    assert drafter.statistics() == {"memory_bytes": 0, "tokens_indexed": 0, "documents": 0, "evictions": 0}


def test_wrong_use() -> None:
    drafter = ContextDrafter()
    drafter.begin(1, [1, 2])
    with pytest.raises(ValueError, match="a sequence began twice in the drafter context: got 1; end the first"):
        drafter.begin(1, [1])
    for call in (
        lambda: drafter.committed(2, (1,)),
        lambda: drafter.propose(2, 1),
        lambda: drafter.propose_after(2, (1,), 1),
        lambda: drafter.end(2),
    ):
        with pytest.raises(ValueError, match="no such sequence in the drafter context: got 2, expected one that began"):
            call()
    with pytest.raises(ValueError, match="max_tokens in the drafter context: got 0, expected at least 1"):
        drafter.propose(1, 0)
    with pytest.raises(ValueError, match="max_tokens"):
        drafter.propose_after(1, (1,), 0)


def test_no_compiler_is_imported() -> None:
    code = (
        "import sys, kinetic_drafters.plugin, kinetic_drafters.context, kinetic_drafters.requests;"
        "print(sorted({'numba', 'llvmlite'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
