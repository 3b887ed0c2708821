"""The engine's side of drafting: asks the drafter for guesses that fit, and keeps its faults away from answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kinetic_core.engine.sequence import Sequence

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.drafter import Drafter, DraftTree

logger = logging.getLogger("kinetic.engine")


class Drafting:
    """A drafter, or none. A drafter that raises is turned off for good: guesses never change an answer, nor end it.

    drafted, accepted: tokens so far.
    """

    def __init__(self, drafter: Drafter | None, executable: Executable, vocab_size: int, context_length: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._context_length = context_length
        self.drafted = 0
        self.accepted = 0
        self.failed = False
        if drafter is not None:
            drafter.attach(executable)

    def propose(self, sequences: Iterable[Sequence], n_rows_free: int) -> dict[Sequence, DraftTree]:
        """A draft for each of these answering sequences that the drafter has one for; n_rows_free: in all."""
        trees: dict[Sequence, DraftTree] = {}
        if self._drafter is None:
            return trees
        for sequence in sequences:
            most = min(n_rows_free, self._room(sequence))
            if most < 1 or not sequence.is_drafted:
                continue
            try:
                draft = self._drafter.propose(sequence.number, most)
                tree = draft.tree if draft is not None and draft.tree.token_ids else None
                if tree is not None:
                    self._check(tree, most)
            except Exception:
                self._fail()
                return {}
            # A block for accepted tokens must be there before the step; nobody gives way for a guess.
            if tree is None or sequence.state is None or not sequence.state.reserve(sequence.n_run + 1 + _depth(tree)):
                continue
            trees[sequence] = tree
            n_rows_free -= len(tree.token_ids)
            self.drafted += len(tree.token_ids)
            sequence.active.drafted += len(tree.token_ids)
        return trees

    def _room(self, sequence: Sequence) -> int:
        """Most tokens that a draft of this sequence may be deep."""
        room = self._context_length - len(sequence.history.tokens)
        if sequence.active.request.max_tokens is not None:
            room = min(room, sequence.active.request.max_tokens - sequence.n_generated - 1)
        return room

    def _check(self, tree: DraftTree, most: int) -> None:
        if len(tree.token_ids) != len(tree.parents) or len(tree.token_ids) > most:
            raise ValueError(f"a draft of {len(tree.token_ids)} tokens, {len(tree.parents)} parents; at most {most}")
        for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if not 0 <= token < self._vocab_size or not -1 <= parent < node:
                raise ValueError(f"token {token} with parent {parent} at {node} of a draft")

    def chosen(self, sequence: Sequence, token: int) -> None:
        """A token became part of a sequence's answer."""
        if self._drafter is None:
            return
        try:
            if not sequence.is_drafted:
                sequence.is_drafted = True
                self._drafter.begin(sequence.number, sequence.history.tokens[:-1])
            self._drafter.committed(sequence.number, (token,))
        except Exception:
            self._fail()

    def kept(self, sequence: Sequence) -> None:
        """A drafted token was what the sampler chose."""
        self.accepted += 1
        sequence.active.accepted += 1

    def end(self, sequence: Sequence) -> None:
        """A sequence is done."""
        if self._drafter is None or not sequence.is_drafted:
            return
        sequence.is_drafted = False
        try:
            self._drafter.end(sequence.number)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        logger.exception("the drafter failed and is off from now on; answers are the same without it")
        self._drafter = None
        self.failed = True


def _depth(tree: DraftTree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
