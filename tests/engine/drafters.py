"""Drafters that know what follows, or another token, and keep what they were told; some have a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import MakeEngine
from executables import HashModel

from kinetic_core.engine.engine import Engine
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.interfaces import (
    Draft,
    Drafter,
    DrafterCapabilities,
    DraftTree,
    RowBatch,
    SequenceRows,
    SequenceStep,
)

GREEDY = SamplingOptions(temperature=0.0)


class Steady(HashModel):
    """Every row has the same scores, given by token."""

    scores: np.ndarray

    def run(self, batch: RowBatch) -> None:
        self._heads = tuple(batch.heads)
        self._rows = [self.scores] * len(self._heads)

    def commit(self, part: SequenceRows, accepted: Sequence[int]) -> None:
        """There is no state."""


class Source(Drafter):
    """Knows what will follow, or another token; keeps what it was told."""

    capabilities = DrafterCapabilities(branches=True)

    def __init__(self, answer: Sequence[int] = (), length: int = 4, estimate: float = 0.5) -> None:
        self.answer, self.length, self.estimate = list(answer), length, estimate
        self.told: list[tuple[Any, ...]] = []
        self.tokens: dict[int, list[int]] = {}
        self.n_prompt: dict[int, int] = {}

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        self.told.append(("begin", sequence_id, salt))
        self.tokens[sequence_id] = []

    def forked(self, sequence_id: int, parent_id: int) -> None:
        assert {sequence_id, parent_id} <= set(self.tokens)
        self.told.append(("forked", sequence_id, parent_id))

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.tokens[sequence_id].extend(token_ids)

    def guesses(self, sequence_id: int, most: int) -> list[int]:
        done = len(self.tokens[sequence_id])
        return self.answer[done : done + min(self.length, most)]

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        self.told.append(("propose", sequence_id, max_tokens))
        tokens = self.guesses(sequence_id, max_tokens)
        return Draft(DraftTree.chain(tokens), (self.estimate,) * len(tokens)) if tokens else None

    def end(self, sequence_id: int) -> None:
        del self.tokens[sequence_id]

    def asked(self) -> int:
        return sum(what == "propose" for what, *_ in self.told)


class Reader(Source):
    """Takes a part of the model's time for a guess, as a prediction block does."""

    capabilities = DrafterCapabilities(reads_hidden=True)

    def stepped(self, steps: Sequence[SequenceStep]) -> None:
        for step in steps:
            self.told.append(("stepped", step.sequence_id, step.start, step.rows, len(step.block_table)))


class Continues(Source):
    """Guesses nothing by itself, and goes on from others' guesses."""

    capabilities = DrafterCapabilities(continues_guesses=True)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        return None

    def propose_after(self, sequence_id: int, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        self.told.append(("after", tuple(guessed), max_tokens))
        done = len(self.tokens[sequence_id]) + len(guessed)
        tokens = self.answer[done : done + max_tokens]
        return Draft(DraftTree.chain(tokens), (0.9,) * len(tokens)) if tokens else None


def plain_answer(make_engine: MakeEngine, n_tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> tuple[int, ...]:
    engine = make_engine(hashed=True)
    return engine.submit(GenerationRequest(prompt, GREEDY, n_tokens, ignore_end=True)).result()[0].token_ids


def run(engine: Engine, n_tokens: int, **others: Any) -> Any:
    (completion,) = engine.submit(GenerationRequest((1, 2, 3), GREEDY, n_tokens, ignore_end=True, **others)).result()
    return completion


class Counting(Source):
    """Keeps how many tokens it was told at a time, and asks that it knows all of them when it is asked."""

    def __init__(self, answer: Sequence[int], guess: Sequence[int]) -> None:
        super().__init__(guess, estimate=0.9)
        self.whole, self.sizes = list(answer), list[int]()

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        super().committed(sequence_id, token_ids)
        self.sizes.append(len(token_ids))

    def end(self, sequence_id: int) -> None:
        assert self.tokens[sequence_id] == self.whole
        super().end(sequence_id)


class Timed(Source):
    """Looks its guess up by a clock of its own."""

    def __init__(self, answer: Sequence[int], ask_s: float) -> None:
        super().__init__(answer, length=1, estimate=0.9)
        self.ask_s, self.now = ask_s, 0.0

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        self.now += self.ask_s
        return super().propose(sequence_id, max_tokens)


class Together(Reader):
    """Works out the guesses of all sequences when the first of a step is asked, by a clock of its own."""

    def __init__(self, answer: Sequence[int], run_s: float, **others: Any) -> None:
        super().__init__(answer, **others)
        self.run_s, self.now, self.n_rounds, self.n_steps = run_s, 0.0, 0, 0
        self._depth = 0

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        draft = super().propose(sequence_id, max_tokens)
        depth = 0 if draft is None else len(draft.tree.token_ids)
        self.n_rounds += self._depth == 0 < depth
        self.now += self.run_s * max(0, depth - self._depth)
        self._depth = max(self._depth, depth)
        return draft

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        super().committed(sequence_id, token_ids)
        self.now += 1e-6

    def stepped(self, steps: Sequence[SequenceStep]) -> None:
        super().stepped(steps)
        self._depth = 0
        self.n_steps += 1
        self.now += 1e-6


def by_clock(monkeypatch: pytest.MonkeyPatch, timed: Timed | Together) -> None:
    """The time that drafting takes is what this drafter's clock says."""
    clock = SimpleNamespace(perf_counter=lambda: timed.now)
    for module in ("drafting", "draft_source"):
        monkeypatch.setattr(f"kinetic_core.engine.{module}.time", clock)
