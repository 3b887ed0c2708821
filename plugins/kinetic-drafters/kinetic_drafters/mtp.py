"""Guesses of the model's own prediction block (multi-token prediction, MTP)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.interfaces import (
    BLOCK_TOKENS,
    Draft,
    Drafter,
    DrafterCapabilities,
    DraftTree,
    HeadRequest,
    RowBatch,
    SequenceRows,
    SequenceStep,
)

if TYPE_CHECKING:
    from kinetic_core.interfaces import Executable
    from kinetic_core.program import Program

F32 = npt.NDArray[np.float32]

SHARPNESS = 1.6
"""See `estimates`."""
CONTINUES = 0.75
"""How often the guess after a right one is right too, before it is worked out: 0.71 to 0.77 at the second and third."""


@attrs.frozen(eq=False)
class _Guess:
    """What the head said after one row of the prediction block.

    second: the second best token. lead: by how much the best one's score is above it. hidden: f32[d_model].
    """

    token: int
    second: int
    lead: float
    hidden: F32


@attrs.define(eq=False)
class _Sequence:
    """One sequence. Row p of the block is token p with the hidden state of position p - 1, and scores token p + 1.

    tokens:  all that were chosen, those of the prompt first.
    n_run:   positions that the model has run.
    n_ready: rows below it have their keys and values in the blocks, made from true tokens and hidden states. There is
             no row 0, which would have no hidden state.
    pending: chunks of the hidden states of positions n_ready - 1 … n_run - 1, f32[any, d_model], never written again.
    last:    f32[1, d_model], the hidden state of position n_run - 1, once the row after it was made ready.
    is_lost: hidden states are missing: the sequence did not start here.
    guesses: of the tokens after the last one, as far as they were worked out.
    wanted:  how deep a draft was asked for since the last step.
    asked:   and before the last step at which anybody was asked.
    """

    tokens: list[int]
    table: npt.NDArray[np.int32] = attrs.field(factory=lambda: np.empty(0, np.int32))
    n_run: int = 0
    n_ready: int = 1
    pending: list[F32] = attrs.field(factory=list)
    last: F32 | None = None
    is_lost: bool = False
    guesses: list[_Guess] = attrs.field(factory=list)
    wanted: int = 0
    asked: int = 0

    @property
    def room(self) -> int:
        """Guesses that can be worked out: the last token must wait to be run, and every row needs a place."""
        if self.is_lost or len(self.tokens) != self.n_run + 1:
            return 0
        return len(self.table) * BLOCK_TOKENS - self.n_run

    def restart(self) -> None:
        """Forget what was run."""
        self.n_run, self.n_ready, self.is_lost = 0, 1, False
        self.pending.clear()

    def take(self, n_rows: int) -> _Rows:
        """The next rows to be made ready, at most all that are pending."""
        hidden = np.concatenate(self.pending)
        # Copies, so that the rows taken do not stay in memory with those that are kept.
        self.pending = [hidden[n_rows:].copy()] if n_rows < len(hidden) else []
        self.last = hidden[-1:].copy()
        start = self.n_ready
        self.n_ready += n_rows
        return _Rows(self, start, self.tokens[start : start + n_rows], hidden[:n_rows])

    def guess_row(self) -> _Rows:
        """The row after the last guess: that guess with the block's own hidden state before it."""
        last = self.guesses[-1]
        return _Rows(self, self.n_run + len(self.guesses), [last.token], last.hidden[np.newaxis])


@attrs.frozen(eq=False)
class _Rows:
    """Rows of one sequence in a prediction step: tokens from position `start` on, hidden: f32[rows, d_model]."""

    sequence: _Sequence
    start: int
    tokens: Sequence[int]
    hidden: F32

    @property
    def asks(self) -> bool:
        """Is the token after these rows unknown?"""
        return self.start + len(self.tokens) > self.sequence.n_run


class MtpDrafter(Drafter):
    """Runs the prediction block on the model's hidden states, and ahead by feeding it its own guesses.

    A guess takes a run of the block and of its output layer, which is read whole: `propose` costs time of the model,
    about that of (1 block + output layer) of a step per depth. What costs no output layer is done in batches: a
    prompt's rows when a block of 256 positions is full, rows without a proposal at the next proposal.

    Sequences that were asked for guesses at the same steps share the runs: the first one's proposal works out the
    others' guesses too, which are then there when they are asked for. So its time is that of all of them together.

    Full KV blocks may be shared between sequences, so they are never written later: their rows are made ready as soon
    as the model filled them. Rows of guesses lie behind the last token and are written over once the tokens there are
    known. The draft is the chain of best guesses, with the second best first guess as a branch where it looks more
    likely than one more guess.
    """

    capabilities = DrafterCapabilities(branches=True, reads_hidden=True)

    def __init__(self) -> None:
        self._executable: Executable
        self._sequences: dict[int, _Sequence] = {}
        self._stepped: list[int] = []
        self._predicted_rows = 0
        self._predict_seconds = 0.0

    @classmethod
    def suits(cls, program: Program) -> bool:
        """Has the model a prediction block?"""
        return program.prediction is not None

    def attach(self, executable: Executable) -> None:
        """Keep the executable: its `hidden` is read and its `predict` called."""
        self._executable = executable

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """A sequence with this prompt, of which nothing has been run."""
        self._sequences[sequence_id] = _Sequence(list(token_ids))

    def forked(self, sequence_id: int, parent_id: int) -> None:
        """All that the parent has, pending hidden states too; but its next token and its last block may be others.

        It gets drafts from its own first step on, which says where its blocks are.
        """
        parent = self._sequences[parent_id]
        child = _Sequence(self._sequences[sequence_id].tokens)
        child.n_run, child.n_ready, child.is_lost = parent.n_run, parent.n_ready, parent.is_lost
        child.pending = list(parent.pending)
        if parent.n_ready > parent.n_run and parent.last is not None:
            child.n_ready, child.pending = parent.n_run, [parent.last]
        self._sequences[sequence_id] = child

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """The tokens follow."""
        self._sequences[sequence_id].tokens.extend(token_ids)

    def stepped(self, steps: Sequence[SequenceStep]) -> None:
        """Copy the hidden states; make the rows of blocks that are now full ready.

        A sequence that goes on where its rows did not end, other than at 0, gets no drafts. It came from a cache, and
        the block attends to all earlier positions of its own: their keys and values may lie in the shared blocks, but
        nothing says so (who filled them may have had no drafts, or left the last rows unmade when it ended, and a row
        that nobody wrote may hold a NaN), and the hidden state of the position before the first row is not known. Both
        are for the cache to keep with the prefix.
        """
        for step in steps:
            sequence = self._sequences[step.sequence_id]
            if step.start != sequence.n_run:
                sequence.restart()
                sequence.is_lost = step.start > 0
            sequence.n_run = step.start + len(step.rows)
            sequence.table = step.block_table
            sequence.guesses.clear()
            if not sequence.is_lost:
                sequence.pending.append(self._hidden(step.rows))
        self._stepped = [step.sequence_id for step in steps]
        if any(sequence.wanted for sequence in self._sequences.values()):
            for sequence in self._sequences.values():
                sequence.asked, sequence.wanted = sequence.wanted, 0
        for step in steps:
            self._finish_blocks(self._sequences[step.sequence_id])

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """The chain of best guesses and perhaps a branch; None where a hidden state or a place in a block is missing.

        Takes time of the model, as the class says.
        """
        sequence = self._sequences[sequence_id]
        depth_limit = min(max_tokens, sequence.room)
        if depth_limit < 1:
            return None
        sequence.wanted = max(sequence.wanted, depth_limit)
        tree: list[tuple[int, int, float]] = []  # token, parent, estimate
        chance, last, depth, second = 1.0, -1, 0, 0.0
        while len(tree) < max_tokens:
            if second and (second >= chance * CONTINUES or depth == depth_limit):
                tree.append((sequence.guesses[0].second, -1, second))
                second = 0.0
                continue
            if depth == depth_limit:
                break
            if len(sequence.guesses) == depth:
                self._guess(sequence)
            guess = sequence.guesses[depth]
            estimate, other = estimates(guess.lead)
            if depth == 0:
                second = other
            tree.append((guess.token, last, estimate))
            chance, last, depth = chance * estimate, len(tree) - 1, depth + 1
        tokens, parents, expected = zip(*tree, strict=True)
        return Draft(DraftTree(tokens, parents), expected)

    def end(self, sequence_id: int) -> None:
        """Forget the sequence."""
        del self._sequences[sequence_id]

    def statistics(self) -> dict[str, Any]:
        """Rows that the prediction block ran, seconds that this took, bytes of hidden states that wait to be run.

        May be called on any thread.
        """
        chunks = [chunk for sequence in list(self._sequences.values()) for chunk in list(sequence.pending)]
        pending = sum(chunk.nbytes for chunk in chunks)
        return {
            "predicted_rows": self._predicted_rows,
            "predict_seconds": self._predict_seconds,
            "pending_bytes": pending,
        }

    def _hidden(self, rows: Sequence[int]) -> F32:
        """f32[rows, d_model]: a copy of the last step's hidden states."""
        first = min(rows)
        return self._executable.hidden(first, max(rows) - first + 1)[np.array(rows) - first]

    def _finish_blocks(self, sequence: _Sequence) -> None:
        """Make the rows of full blocks ready, each sequence by itself: a fork shares its full blocks."""
        full = sequence.n_run // BLOCK_TOKENS * BLOCK_TOKENS
        while not sequence.is_lost and sequence.n_ready < full:
            self._predict([sequence.take(min(full - sequence.n_ready, self._executable.max_rows))])

    def _guess(self, sequence: _Sequence) -> None:
        """Work out one more guess of a sequence, and of those that will ask for one as deep.

        Only of the last step's sequences: another may have given its blocks back since. One that gave way after that
        step does no harm: nobody has put anything that is needed into its blocks yet.
        """
        depth = len(sequence.guesses) + 1
        members = [sequence]
        for number in self._stepped:
            other = self._sequences.get(number, sequence)
            if other is not sequence and len(other.guesses) == depth - 1 and min(other.asked, other.room) >= depth:
                members.append(other)
        if depth > 1:
            self._predict([member.guess_row() for member in members])
            return
        while rows := self._pending_rows(members):
            self._predict(rows)

    def _pending_rows(self, members: Sequence[_Sequence]) -> list[_Rows]:
        """Rows up to the last tokens that are not ready, as many as one run takes."""
        room = self._executable.max_rows
        rows: list[_Rows] = []
        for member in members:
            n_rows = min(room, member.n_run + 1 - member.n_ready)
            if n_rows:
                rows.append(member.take(n_rows))
                room -= n_rows
        return rows

    def _predict(self, parts: Sequence[_Rows]) -> None:
        """Run the block on these rows, with the output layer where the token after them is to be guessed."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[SequenceRows] = []
        heads: list[HeadRequest] = []
        for number, part in enumerate(parts):
            n_rows = len(part.tokens)
            # A prediction step touches no recurrent states: any slot does that exists and that no other part names.
            sequences.append(SequenceRows(len(tokens), part.start, n_rows, part.sequence.table, slot=number))
            tokens.extend(part.tokens)
            positions.extend(range(part.start, part.start + n_rows))
            if part.asks:
                heads.append(HeadRequest(len(tokens) - 1, top_k=2))
        batch = RowBatch(np.array(tokens, np.int32), np.array(positions, np.int32), tuple(sequences), heads)
        started = time.perf_counter()
        self._executable.predict(batch, np.concatenate([part.hidden for part in parts]))
        self._predict_seconds += time.perf_counter() - started
        self._predicted_rows += len(tokens)
        for output, part in enumerate(part for part in parts if part.asks):
            ids, scores = self._executable.candidates(output)
            hidden = self._executable.hidden(heads[output].row, 1)[0].copy()
            part.sequence.guesses.append(_Guess(int(ids[0]), int(ids[1]), float(scores[0] - scores[1]), hidden))


def estimates(lead: float) -> tuple[float, float]:
    """How likely the best and the second best guess are what follows, by the lead of the best one's score (0 or more).

    Softmax over the two and one stand-in for all others, which is given the second's weight. The lead counts
    `SHARPNESS` times: that the model's choice is the best guess is likelier than its share of the distribution. Both
    numbers were fitted to the model that the tests use, where they give 0.38, 0.63, 0.79, 0.97 for leads of 0.1, 0.75,
    1.25 and 2.5, seen were 0.39, 0.65, 0.80 and 0.97. The engine corrects them for the model at hand.
    """
    rest = math.exp(-SHARPNESS * lead)
    return 1.0 / (1.0 + 2.0 * rest), rest / (1.0 + 2.0 * rest)
