"""Steps of sequences with a drafter, done as the engine does them but in the open: greedy, in blocks that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kinetic_core.interfaces import (
    Draft,
    Drafter,
    DraftTree,
    Executable,
    HeadRequest,
    RowBatch,
    SequenceRows,
    SequenceStep,
)
from kinetic_core.interfaces.batch import BLOCK_TOKENS

NO_DRAFT = DraftTree((), ())


@attrs.define(eq=False)
class Driven:
    """One sequence.

    tokens:  all that were chosen; the model has run the first `n_run`.
    blocks:  its KV blocks, all from the start. slot: its recurrent states; -1 where there are none.
    drafts:  (tokens it had, tokens asked for, the draft or None) of every proposal.
    n_drafted, n_accepted: guesses that were run; those that came true.
    """

    number: int
    tokens: list[int]
    blocks: tuple[int, ...]
    slot: int
    n_run: int = 0
    drafts: list[tuple[int, int, Draft | None]] = attrs.field(factory=list)
    n_drafted: int = 0
    n_accepted: int = 0


Look = Callable[[int, Draft], None]
"""Called with (tokens asked for, draft) of every draft, before it is run; raises where it is not to be run."""


class Driver:
    """An executable and a drafter, without an engine. prompt_rows: most rows of a sequence's prompt in one step."""

    def __init__(
        self, executable: Executable, drafter: Drafter, look: Look | None = None, prompt_rows: int = BLOCK_TOKENS
    ) -> None:
        self._look = look
        self._executable = executable
        self._drafter = drafter
        self._prompt_rows = prompt_rows
        drafter.attach(executable)

    def begin(
        self, number: int, prompt: Sequence[int], *, blocks: Sequence[int] = (0, 1), slot: int = 0, salt: str = ""
    ) -> Driven:
        """A sequence whose slot is cleared here."""
        if slot >= 0:
            self._executable.clear_slot(slot)
        self._drafter.begin(number, prompt, salt)
        return Driven(number, list(prompt), tuple(blocks), slot)

    def end(self, sequence: Driven) -> None:
        """A sequence is done."""
        self._drafter.end(sequence.number)

    def step(self, *sequences: Driven, most: int = 4) -> None:
        """One step of these sequences: the next rows of a prompt, or the last token and a draft of `most` at most.

        0: nothing is asked for.
        """
        parts = self._parts(sequences, most)
        self._executable.run(self._batch(parts))
        steps = []
        output = 0
        for sequence, rows, tree in parts:
            sequence.n_run += rows.n_committed
            accepted: list[int] = []
            if sequence.n_run == len(sequence.tokens):
                accepted = self._verify(sequence, rows, tree, output)
                output += 1 + len(tree.token_ids)
            offsets = [*range(rows.n_committed), *accepted]
            committed = tuple(rows.first_row + offset for offset in offsets)
            steps.append(SequenceStep(sequence.number, rows.start, committed, rows.block_table))
        if self._drafter.capabilities.reads_hidden:
            self._drafter.stepped(steps)

    def _parts(self, sequences: Sequence[Driven], most: int) -> list[tuple[Driven, SequenceRows, DraftTree]]:
        parts = []
        first = 0
        for sequence in sequences:
            pending = len(sequence.tokens) - sequence.n_run
            table = np.array(sequence.blocks, np.int32)
            tree = NO_DRAFT
            if pending == 1 and sequence.n_run and most:
                draft = self._drafter.propose(sequence.number, most)
                sequence.drafts.append((len(sequence.tokens), most, draft))
                if draft is not None and draft.tree.token_ids:
                    if self._look is not None:
                        self._look(most, draft)
                    tree = draft.tree
            n_rows = min(pending, self._prompt_rows, BLOCK_TOKENS - sequence.n_run % BLOCK_TOKENS)
            parents = tuple(n_rows + parent for parent in tree.parents)
            rows = SequenceRows(first, sequence.n_run, n_rows, table, sequence.slot, parents)
            parts.append((sequence, rows, tree))
            first += rows.n_rows
        return parts

    @staticmethod
    def _batch(parts: Sequence[tuple[Driven, SequenceRows, DraftTree]]) -> RowBatch:
        tokens: list[int] = []
        positions: list[int] = []
        heads: list[HeadRequest] = []
        for sequence, rows, tree in parts:
            end = rows.start + rows.n_committed
            own = list(range(rows.start, end))
            for parent in rows.draft_parents:
                own.append(own[parent] + 1)
            tokens += [*sequence.tokens[rows.start : end], *tree.token_ids]
            positions += own
            if end == len(sequence.tokens):
                heads += [
                    HeadRequest(row, top_k=1) for row in range(len(tokens) - len(tree.token_ids) - 1, len(tokens))
                ]
        ids, at = np.array(tokens, np.int32), np.array(positions, np.int32)
        return RowBatch(ids, at, tuple(rows for _, rows, _ in parts), tuple(heads))

    def _verify(self, sequence: Driven, rows: SequenceRows, tree: DraftTree, output: int) -> list[int]:
        """Choose tokens along the draft as far as it is right; the offsets of its rows that are now committed."""
        node = -1
        accepted: list[int] = []
        chosen = [int(self._executable.candidates(output)[0][0])]
        while True:
            children = (
                i for i, parent in enumerate(tree.parents) if parent == node and tree.token_ids[i] == chosen[-1]
            )
            node = next(children, -1)
            if node < 0:
                break
            accepted.append(rows.n_committed + node)
            chosen.append(int(self._executable.candidates(output + 1 + node)[0][0]))
        if accepted:
            self._executable.commit(rows, accepted)
        sequence.tokens += chosen
        sequence.n_run += len(accepted)
        sequence.n_drafted += len(tree.token_ids)
        sequence.n_accepted += len(accepted)
        self._drafter.committed(sequence.number, chosen)
        return accepted
