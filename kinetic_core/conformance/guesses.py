"""The reference drafters: always right, always wrong, branching, and trees of random shape.

Each knows a whole text, prompt and answer. One that knows more than the answer runs past its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities, DraftTree

Guess = Callable[[Sequence[int], int], DraftTree | None]
"""(the sequence's tokens, most tokens of a draft) -> a draft."""

DEEPER, RIGHT, KNOWN = 0.6, 0.7, 0.5
"""Chances of a random tree: a guess follows the deepest right one; is right where one can be; is a token of the text
where it is wrong, which penalties name more often than any token."""


class Guesser(Drafter):
    """Drafts what a function makes of the sequence's tokens. reached: the most tokens that any guess made of one."""

    capabilities = DrafterCapabilities(branches=True)

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._tokens: dict[int, list[int]] = {}
        self.reached = 0

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Remember the tokens."""
        self._tokens[sequence_id] = list(token_ids)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Remember these too."""
        self._tokens[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """The function's guess."""
        tokens = self._tokens[sequence_id]
        tree = self._guess(tokens, max_tokens)
        if tree is None:
            return None
        self.reached = max(self.reached, len(tokens) + max(depths(tree)))
        return Draft(tree, (0.5,) * len(tree.token_ids))

    def end(self, sequence_id: int) -> None:
        """Forget."""
        del self._tokens[sequence_id]


def depths(tree: DraftTree) -> list[int]:
    """Per guess how many there are up to it, itself included."""
    found: list[int] = []
    for parent in tree.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def right(whole: Sequence[int], length: int) -> Guess:
    """Always right, up to `length` guesses in a row."""

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = whole[len(tokens) : len(tokens) + min(length, most)]
        return DraftTree.chain(rest) if rest else None

    return guess


def wrong(whole: Sequence[int], vocab: int) -> Guess:
    """Always wrong: another token than the text's, four deep."""

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = whole[len(tokens) : len(tokens) + min(4, most)]
        return DraftTree.chain([(token + 1) % vocab for token in rest]) if rest else None

    return guess


def branching(whole: Sequence[int], vocab: int) -> Guess:
    """A tree whose right branch is not its first.

    The branches before it hold the token that follows the right one: where penalties took a row of another branch for
    one of its own, they would name the very token that is to be chosen.
    """

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = whole[len(tokens) : len(tokens) + 3]
        if len(rest) < 3 or most < 5:
            return None
        a, b, c = rest
        beside_a, beside_b = (c if c != token else (token + 1) % vocab for token in (a, b))
        return DraftTree((beside_a, a, c, beside_b, b), (-1, -1, 0, 1, 1))

    return guess


def random_tree(whole: Sequence[int], vocab: int, seed: int = 0) -> Guess:
    """A tree of random size, shape and depth, up to the most allowed, of right and wrong guesses."""

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = whole[len(tokens) : len(tokens) + most]
        if not rest:
            return None
        rng = np.random.default_rng([seed, len(tokens)])
        token_ids: list[int] = []
        parents: list[int] = []
        n_right = {-1: 0}  # node -> how many right guesses lead to it; -1 where one is wrong
        for node in range(int(rng.integers(1, most + 1))):
            deepest = max(n_right, key=lambda at: n_right[at])
            parent = deepest if rng.random() < DEEPER else int(rng.integers(-1, node))
            known = n_right[parent]
            next_token = rest[known] if 0 <= known < len(rest) else -1
            if next_token >= 0 and rng.random() < RIGHT:
                token = next_token
            else:
                token = int(rng.choice(whole) if rng.random() < KNOWN else rng.integers(vocab))
            token_ids.append(token)
            parents.append(parent)
            n_right[node] = known + 1 if token == next_token else -1
        return DraftTree(tuple(token_ids), tuple(parents))

    return guess
