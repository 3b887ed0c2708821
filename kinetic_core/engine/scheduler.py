"""Which rows go into the next step: everybody who answers, and a bounded part of the prompts, in turn.

Rules:
- The order of submission is the order of seniority. A sequence is admitted when the KV blocks of its tokens are free
  besides what the admitted ones still need for theirs; the queue is served in order, so nobody starves.
- Blocks are taken as a sequence grows. When none is left, the youngest sequence gives way: it returns its state, waits,
  and later runs its tokens again (the same bits, rule 1). The oldest never gives way, and the pool holds at least one
  full context, so there is always progress.
- A prompt batch never crosses the 256-grid. While anybody else answers or waits it shrinks so that a step stays under
  `STEP_S`, by the speeds measured so far, and prompts take turns.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from kinetic_core.engine.sequence import Sequence
from kinetic_core.errors import CapacityError
from kinetic_core.interfaces.batch import BLOCK_TOKENS
from kinetic_core.state import SequenceState
from kinetic_core.state.sequence import blocks_for

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.state import BlockPool, SlotPool

STEP_S = 0.2
PLANNED_S = 0.8 * STEP_S
"""What a step is planned to take: the rest is for what the measured speeds do not foresee."""

MIN_PROMPT_ROWS = 8
"""Prompt rows of a step beside others at the least, and while no speed has been measured."""
UNIT_ROWS = 4
"""Prompt rows are planned in fours, the lowest tile of the linear kernels: a part of one costs as much as all of it."""


class Pace:
    """Measured speeds, and how many prompt rows a step may have by them.

    prompt_row_s: of a prompt's row; a draft's row beside prompts takes as long. answer_step_s: of a step of answers
    alone, without drafts. draft_rows: that the last step had, and the next is taken to have.
    """

    def __init__(self) -> None:
        self.prompt_row_s: float | None = None
        self.answer_step_s: float | None = None
        self.draft_rows = 0

    def measured(self, n_prompt_rows: int, n_answering: int, n_draft_rows: int, seconds: float) -> None:
        """A step took so long. A slower one counts at once, a faster one by half: neighbours come and go."""
        self.draft_rows = n_draft_rows
        if n_prompt_rows == 0 and n_draft_rows == 0:
            self.answer_step_s = _slower(self.answer_step_s, seconds)
        elif n_prompt_rows >= MIN_PROMPT_ROWS:
            answering = min(self.answer_step_s or 0.0, seconds / 2) if n_answering else 0.0
            row_s = (seconds - answering) / (n_prompt_rows + n_draft_rows)
            self.prompt_row_s = _slower(self.prompt_row_s, row_s)

    def prompt_rows(self, *, crowded: bool, answering: bool) -> int:
        """Most prompt rows of the next step; crowded: somebody else answers or waits."""
        if not crowded:
            return BLOCK_TOKENS
        if self.prompt_row_s is None:
            return MIN_PROMPT_ROWS
        left, drafts = PLANNED_S, 0
        if answering:
            left, drafts = PLANNED_S - (self.answer_step_s or 0.0), self.draft_rows
        rows = (int(left / max(self.prompt_row_s, 1e-9)) - drafts) // UNIT_ROWS * UNIT_ROWS
        return max(MIN_PROMPT_ROWS, min(BLOCK_TOKENS, rows))


def _slower(old: float | None, new: float) -> float:
    return new if old is None or new > old else (old + new) / 2


class Scheduler:
    """The sequences that wait and those that run.

    max_sequences: sequences that may run at the same time.
    max_rows, max_outputs: of one step; max_outputs is at least max_sequences.
    stuck: sequences for which no slot or no KV block was found although nothing else runs; the engine fails them.
    """

    def __init__(
        self,
        executable: Executable,
        blocks: BlockPool,
        slots: SlotPool,
        *,
        max_sequences: int,
        max_rows: int,
        max_outputs: int,
    ) -> None:
        self._executable = executable
        self._blocks = blocks
        self._slots = slots
        self._max_sequences = max_sequences
        self._max_rows = max_rows
        self._max_outputs = max_outputs
        self._last_prompt = (-1, -1)
        self.pace = Pace()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stuck: list[Sequence] = []
        self.n_gave_way = 0

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait, in the order of seniority."""
        bisect.insort(self.waiting, sequence, key=lambda other: other.order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its state; one that is not here is ignored."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.state is not None:
            sequence.state.release()
            sequence.state = None

    def give_way(self, sequence: Sequence) -> None:
        """Take a running sequence's state away and let it wait."""
        self.remove(sequence)
        self.enqueue(sequence)
        self.n_gave_way += 1

    def adopt(self, sequence: Sequence, parent: SequenceState) -> None:
        """A new choice of a running sequence: starts from a fork of its state where there is room, else waits."""
        if len(self.running) < self._max_sequences:
            try:
                sequence.state = parent.fork()
            except CapacityError:
                pass  # no room now: it waits and runs the prompt itself
            else:
                self.running.append(sequence)
                return
        self.enqueue(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to the running ones while there is room; returns them, their states empty."""
        admitted = []
        if self.waiting and not self.running and not self._slots.make_room():
            self.stuck.append(self.waiting[0])  # only if a cache keeps every slot
        while self.waiting and len(self.running) < self._max_sequences and self._slots.make_room():
            sequence = self.waiting[0]
            promised = sum(self._blocks_missing(other) for other in self.running)
            needed = promised + blocks_for(len(sequence.history.tokens))
            # Alone, a sequence is admitted whatever is free: a cache then has to give its blocks back.
            if self.running and (needed > self._blocks.n_blocks or not self._blocks.make_room(needed)):
                break
            self.waiting.pop(0)
            sequence.state = SequenceState(self._executable, self._blocks, self._slots)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    @staticmethod
    def _blocks_missing(sequence: Sequence) -> int:
        held = len(sequence.state.block_ids) if sequence.state is not None else 0
        return max(0, blocks_for(len(sequence.history.tokens)) - held)

    def plan(self) -> dict[Sequence, int]:
        """How many rows each sequence has in the next step, every row with a KV block. Empty: nothing to do."""
        alone = next((sequence for sequence in self.running if sequence.runs_alone), None)
        running = [alone] if alone is not None else sorted(self.running, key=lambda sequence: sequence.order)
        rows = {sequence: 1 for sequence in running if sequence.n_pending == 1}
        prompts = [sequence for sequence in running if sequence.n_pending > 1]
        if prompts:
            self._plan_prompts(rows, prompts)
        for sequence, n_rows in list(rows.items()):
            if sequence in rows and not self._reserve(sequence, n_rows, rows):
                rows.pop(sequence, None)
        return rows

    def _plan_prompts(self, rows: dict[Sequence, int], prompts: list[Sequence]) -> None:
        crowded = len(self.running) + len(self.waiting) > 1
        budget = min(self.pace.prompt_rows(crowded=crowded, answering=bool(rows)), self._max_rows - len(rows))
        outputs = self._max_outputs - len(rows) - len(prompts)
        turn = bisect.bisect_right(prompts, self._last_prompt, key=lambda sequence: sequence.order)
        for sequence in prompts[turn:] + prompts[:turn]:
            if budget < 1:
                break
            n_rows = min(budget, sequence.n_pending, BLOCK_TOKENS - sequence.n_run % BLOCK_TOKENS)
            n_wanted = sum(sequence.wants_row(sequence.n_run + row) for row in range(n_rows))
            if n_wanted:
                n_rows = min(n_rows, outputs + 1)
                outputs -= n_rows - 1
            rows[sequence] = n_rows
            budget -= n_rows
            self._last_prompt = sequence.order

    def _reserve(self, sequence: Sequence, n_rows: int, rows: dict[Sequence, int]) -> bool:
        """Take the blocks for a sequence's rows; younger sequences give way, or else the sequence itself."""
        state = sequence.state
        assert state is not None
        while not state.reserve(state.n_tokens + n_rows):
            youngest = max(self.running, key=lambda other: other.order)
            if youngest is sequence and len(self.running) == 1:
                self.stuck.append(sequence)  # only if a cache keeps its blocks: the pool holds one whole context
                return False
            self.give_way(youngest)
            rows.pop(youngest, None)
            if youngest is sequence:
                return False
        return True
