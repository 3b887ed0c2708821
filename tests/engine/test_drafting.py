"""The policy at work in the engine: unguessable text, sources side by side, forks, given answers, the law of draws."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import numpy as np
import pytest
from conftest import MakeEngine
from executables import Gate, HashModel

from kinetic_core.engine.acceptance import PATIENCE
from kinetic_core.engine.draft_policy import NextStep, best_rows
from kinetic_core.engine.draft_source import (
    IN_VAIN_SHARE,
    LONGEST_MODEL_PAUSE,
    LONGEST_PAUSE,
    MOST_PAUSE,
    MOST_UNTOLD,
)
from kinetic_core.engine.draft_source import Source as KnownSource
from kinetic_core.engine.engine import Engine
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.engine.step_costs import StepCosts, prior
from kinetic_core.errors import RequestError
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


@pytest.fixture
def by_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps cost what the prior says, whatever this machine does meanwhile."""
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, n_rows: 0.01 * prior(n_rows))


def plain_answer(make_engine: MakeEngine, n_tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> tuple[int, ...]:
    engine = make_engine(hashed=True)
    return engine.submit(GenerationRequest(prompt, GREEDY, n_tokens, ignore_end=True)).result()[0].token_ids


def run(engine: Engine, n_tokens: int, **others: Any) -> Any:
    (completion,) = engine.submit(GenerationRequest((1, 2, 3), GREEDY, n_tokens, ignore_end=True, **others)).result()
    return completion


@pytest.mark.usefixtures("by_prior")
def test_d7_guesses_that_miss_are_soon_not_run_any_more(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 400)
    wrong = Source([(token + 1) % 250 for token in answer], estimate=0.9)
    engine = make_engine(hashed=True, drafter={"wrong": wrong}, draft_policy="measured")
    assert run(engine, 400).token_ids == answer
    statistics = engine.statistics()
    assert 0 < statistics["drafted"] <= 40  # of 400 tokens; and it was asked ever more seldom
    assert statistics["accepted"] == 0
    assert wrong.asked() < 100


@pytest.mark.usefixtures("by_prior")
def test_guesses_that_come_true_are_run_to_the_length_that_pays(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 200)
    right = Source(answer, length=31)
    engine = make_engine(hashed=True, drafter={"right": right}, draft_policy="measured")
    completion = run(engine, 200)
    assert completion.token_ids == answer
    assert completion.timings.accepted == completion.timings.drafted > 100
    assert completion.timings.steps < 80
    statistics = engine.statistics()["drafters"]["right"]
    assert statistics["accepted"] == statistics["drafted"] == completion.timings.drafted


@pytest.mark.usefixtures("by_prior")
def test_a_source_that_becomes_right_is_noticed(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 300)
    late = Source([(token + 1) % 250 for token in answer[:150]] + list(answer[150:]), length=4)
    engine = make_engine(hashed=True, drafter={"late": late}, draft_policy="measured")
    completion = run(engine, 300)
    assert completion.token_ids == answer
    assert completion.timings.accepted > 80


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


@pytest.mark.usefixtures("by_prior")
def test_tokens_are_told_together_while_nobody_asks(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 300)
    wrong = Counting(answer, [(token + 1) % 250 for token in answer])
    engine = make_engine(hashed=True, drafter={"wrong": wrong}, draft_policy="measured")
    assert run(engine, 300).token_ids == answer
    assert sum(wrong.sizes) == 300 and len(wrong.sizes) <= wrong.asked() + 300 // MOST_UNTOLD + 1
    assert 1 < max(wrong.sizes) <= MOST_UNTOLD and wrong.asked() < 150
    assert not engine.statistics()["drafter_failed"]


def test_the_dearer_asking_is_the_longer_a_source_is_left_alone() -> None:
    costs, source = StepCosts(), KnownSource("source", Source([]), 250)
    step = NextStep(4, 31, costs)
    source.ask_s = 0.001
    assert source.longest_pause(step) == LONGEST_PAUSE  # nothing is known yet
    costs.measured(4, 0.01)
    for ask_s, longest in ((0.0, LONGEST_PAUSE), (0.0001, int(4 * 0.0001 / (IN_VAIN_SHARE * 0.01))), (0.1, MOST_PAUSE)):
        source.ask_s = ask_s
        assert source.longest_pause(step) == longest
    assert LONGEST_PAUSE < int(4 * 0.0001 / (IN_VAIN_SHARE * 0.01)) < MOST_PAUSE


@pytest.mark.usefixtures("by_prior")
def test_a_source_that_was_in_vain_for_many_is_not_tried_at_length_for_the_next(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 12)
    nothing = Source([])
    engine = make_engine(hashed=True, drafter={"nothing": nothing}, draft_policy="measured")
    asked = []
    for _ in range(20):
        before = nothing.asked()
        assert run(engine, 12).token_ids == answer
        asked.append(nothing.asked() - before)
    assert asked[1] >= PATIENCE + 2 > asked[-1] >= 2


class Timed(Source):
    """Looks its guess up by a clock of its own."""

    def __init__(self, answer: Sequence[int], ask_s: float) -> None:
        super().__init__(answer, length=1, estimate=0.9)
        self.ask_s, self.now = ask_s, 0.0

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        self.now += self.ask_s
        return super().propose(sequence_id, max_tokens)


def by_clock(monkeypatch: pytest.MonkeyPatch, timed: Timed | Together) -> None:
    """The time that drafting takes is what this drafter's clock says."""
    clock = SimpleNamespace(perf_counter=lambda: timed.now)
    for module in ("drafting", "draft_source"):
        monkeypatch.setattr(f"kinetic_core.engine.{module}.time", clock)


@pytest.mark.parametrize(
    ("ask_s", "choosing_s", "pays"), [(0.006, 0.0, True), (0.012, 0.0, False), (0.0, 0.012, False), (0.0, 0.006, True)]
)
def test_a_guess_has_to_save_the_time_that_it_takes(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, ask_s: float, choosing_s: float, pays: bool
) -> None:
    """Each saves a step of 10 ms and comes true; two rows cost no more than one."""
    answer = plain_answer(make_engine, 300)
    timed = Timed(answer, ask_s)
    by_clock(monkeypatch, timed)
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, _n_rows: 0.01)

    def choose(*arguments: Any) -> Any:
        timed.now += choosing_s
        return best_rows(*arguments)

    monkeypatch.setattr("kinetic_core.engine.drafting.best_rows", choose)
    engine = make_engine(hashed=True, drafter={"timed": timed}, draft_policy="measured")
    completion = run(engine, 300)
    assert completion.token_ids == answer
    if pays:
        assert completion.timings.steps < 170
    else:  # it takes a while to know what takes how long
        assert completion.timings.steps > 230 and timed.asked() < 70


@pytest.mark.usefixtures("by_prior")
def test_a_useless_guess_of_the_model_is_tried_ever_more_seldom(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 600)
    wrong = Reader([(token + 1) % 250 for token in answer])
    engine = make_engine(hashed=True, drafter={"wrong": wrong}, draft_policy="measured")
    assert run(engine, 600).token_ids == answer
    assert 5 <= wrong.asked() <= 10 + 600 // LONGEST_MODEL_PAUSE


@pytest.mark.usefixtures("by_prior")
def test_others_go_on_where_the_model_guess_ends(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 60)
    first, rest = Reader(answer, length=2, estimate=0.9), Continues(answer)
    engine = make_engine(hashed=True, drafter={"rest": rest, "first": first}, draft_policy="measured")
    completion = run(engine, 60)
    assert completion.token_ids == answer
    assert engine.statistics()["drafters"]["rest"]["accepted"] > 10
    after = [entry for entry in rest.told if entry[0] == "after"]
    assert after and all(guessed == answer[answer.index(guessed[0]) :][: len(guessed)] for _, guessed, _ in after[:1])


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


@pytest.fixture
def by_together(monkeypatch: pytest.MonkeyPatch) -> Callable[[Together], dict[str, Drafter]]:
    """Steps cost 10 ms whatever their rows, guesses what the drafter's clock says."""
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, _n_rows: 0.01)

    def drafters(together: Together) -> dict[str, Drafter]:
        by_clock(monkeypatch, together)
        return {"together": together}

    return drafters


@pytest.mark.parametrize("n_requests", [1, 3])
def test_a_run_for_several_sequences_is_no_one_sequence_s(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]], n_requests: int
) -> None:
    answer = plain_answer(make_engine, 120)
    together = Together(answer, 0.004, length=2)
    gate = Gate()
    engine = make_engine(
        hashed=True, drafter=by_together(together), draft_policy="measured", wrap=gate.wrap, max_outputs=64
    )
    request = GenerationRequest((1, 2, 3), GREEDY, 120, ignore_end=True)
    running = [engine.submit(request) for _ in range(n_requests)]
    gate.open()
    completions = [generation.result()[0] for generation in running]
    assert {completion.token_ids for completion in completions} == {answer}
    figures = engine.statistics()["drafters"]["together"]
    assert figures["run_s"] == pytest.approx(0.004)  # two runs for all, not two for the first and none for the others
    assert figures["seconds"] == pytest.approx(together.now)
    accepted = [completion.timings.accepted for completion in completions]
    assert min(accepted) > 70 and max(accepted) - min(accepted) <= 6
    assert together.n_rounds <= together.n_steps
    assert figures["proposed"] >= figures["drafted"] == sum(c.timings.drafted for c in completions)
    assert figures["asked"] == together.asked()


def test_what_no_sequence_is_served_by_is_not_tried_for_each(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]]
) -> None:
    """Guesses are right, and cost more than they save; requests come and go all the time."""
    answer = plain_answer(make_engine, 60)
    together = Together(answer, 0.012, length=4)
    engine = make_engine(hashed=True, drafter=by_together(together), draft_policy="measured", max_outputs=64)
    running = [
        engine.submit(GenerationRequest((1, 2, 3), GREEDY, 20 + number % 41, ignore_end=True)) for number in range(80)
    ]
    for generation in running:
        (completion,) = generation.result()
        assert completion.token_ids == answer[: len(completion.token_ids)]
    n_steps = engine.statistics()["steps"]
    assert n_steps > 350
    assert 3 <= together.n_rounds <= 10 + n_steps // LONGEST_MODEL_PAUSE


@pytest.mark.parametrize(("run_s", "policy"), [(0.012, "measured"), (0.004, "measured"), (0.012, "always")])
def test_a_model_source_that_paid_for_none_of_the_last_is_not_told_of_each(
    make_engine: MakeEngine,
    by_together: Callable[[Together], dict[str, Drafter]],
    run_s: float,
    policy: Literal["measured", "always"],
) -> None:
    """It runs their prompts. From two in vain on it is kept from 1, 3, 7, 15, 15, … of them."""
    answer = plain_answer(make_engine, 20)
    together = Together(answer, run_s, length=2)
    engine = make_engine(hashed=True, drafter=by_together(together), draft_policy=policy, max_outputs=64)
    known = []
    for _ in range(50):
        n_before = len(together.told)
        assert run(engine, 20).token_ids == answer
        told = [what for what, *_ in together.told[n_before:]]
        assert told.count("begin") == (1 if told else 0)
        known.append(bool(told))
    tried = [number for number, is_known in enumerate(known) if is_known]
    if policy == "measured" and run_s > 0.01:
        assert tried == [0, 1, 2, 4, 8, 16, 32, 48]  # with the first nobody knew yet what a run takes
    else:
        assert tried == list(range(50))


def test_choices_follow_the_first_in_what_a_model_source_is_told(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]]
) -> None:
    answer = plain_answer(make_engine, 20)
    together = Together(answer, 0.012, length=2)
    engine = make_engine(hashed=True, drafter=by_together(together), draft_policy="measured", max_outputs=64)
    request = GenerationRequest((1, 2, 3), GREEDY, 20, n=3, ignore_end=True)
    known = []
    for _ in range(12):
        n_before = len(together.told)
        assert {completion.token_ids for completion in engine.submit(request).result()} == {answer}
        told = [what for what, *_ in together.told[n_before:]]
        known.append((told.count("begin"), told.count("forked")))
    assert set(known) == {(3, 2), (0, 0)}


def test_sequences_for_which_it_does_not_pay_are_left_out(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]]
) -> None:
    answer = plain_answer(make_engine, 400)

    class RightForOne(Together):
        def guesses(self, sequence_id: int, most: int) -> list[int]:
            right = super().guesses(sequence_id, most)
            return right if sequence_id == 0 else [(token + 1) % 250 for token in right]

    together = RightForOne(answer, 0.003, length=3)
    gate = Gate()
    engine = make_engine(
        hashed=True, drafter=by_together(together), draft_policy="measured", wrap=gate.wrap, max_outputs=64
    )
    request = GenerationRequest((1, 2, 3), GREEDY, 400, ignore_end=True)
    running = [engine.submit(request) for _ in range(2)]
    gate.open()
    served, other = [generation.result()[0] for generation in running]
    assert served.timings.accepted > 250
    assert other.timings.accepted == 0 and other.timings.drafted < 40
    asked = [sum(entry[:2] == ("propose", number) for entry in together.told) for number in (0, 1)]
    assert asked[0] > 90 and asked[1] < 30


def test_where_others_guess_as_well_it_is_asked_ever_more_seldom(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]]
) -> None:
    answer = plain_answer(make_engine, 400)

    class SureOfOne(Source):
        def guesses(self, sequence_id: int, most: int) -> list[int]:
            return super().guesses(sequence_id, most) if sequence_id == 1 else []

    together = Together(answer, 0.0005, length=3)
    gate = Gate()
    drafters = by_together(together) | {"sure": SureOfOne(answer, length=8, estimate=1.0)}
    engine = make_engine(hashed=True, drafter=drafters, draft_policy="measured", wrap=gate.wrap, max_outputs=64)
    request = GenerationRequest((1, 2, 3), GREEDY, 400, ignore_end=True)
    running = [engine.submit(request) for _ in range(2)]
    gate.open()
    assert all(generation.result()[0].timings.accepted > 250 for generation in running)
    asked = [sum(entry[:2] == ("propose", number) for entry in together.told) for number in (0, 1)]
    assert asked[0] > 90 and 3 <= asked[1] < 20


def test_a_trial_does_not_make_rows_cheap(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a guess that takes five steps' time a row's looks like nothing; but the next steps have none."""
    answer = plain_answer(make_engine, 200)
    together = Together(answer, 0.05, length=1, estimate=0.3)
    drafters = by_together(together)
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, n_rows: 0.01 * n_rows)
    engine = make_engine(hashed=True, drafter=drafters, draft_policy="measured")
    assert run(engine, 200).timings.drafted == 0
    assert together.n_rounds >= 5


def test_rows_are_cheap_where_every_step_makes_guesses(
    make_engine: MakeEngine, by_together: Callable[[Together], dict[str, Drafter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess that comes true half the time is not worth half a step, but the step is 0.8 steps longer anyway."""
    answer = plain_answer(make_engine, 300)

    class LessSureAtTimes(Together):
        def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
            draft = super().propose(sequence_id, max_tokens)
            number = self.asked()
            if draft is None or number % 6:
                return draft
            (right,) = draft.tree.token_ids
            return Draft(DraftTree.chain([right if number % 12 else (right + 1) % 250]), (0.45,))

    together = LessSureAtTimes(answer, 0.003, length=1, estimate=0.97)
    drafters = by_together(together)
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, n_rows: 0.005 + 0.005 * n_rows)
    engine = make_engine(hashed=True, drafter=drafters, draft_policy="measured")
    completion = run(engine, 300)
    assert together.asked() > 140
    assert completion.timings.drafted >= together.asked() - 4


def test_a_model_source_that_fails_is_asked_for_nobody_else(make_engine: MakeEngine) -> None:
    class Fails(Reader):
        def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
            self.told.append(("propose", sequence_id, max_tokens))
            raise RuntimeError("a fault of the drafter")

    answer, fails, gate = plain_answer(make_engine, 20), Fails(), Gate()
    engine = make_engine(hashed=True, drafter={"fails": fails}, wrap=gate.wrap)
    running = [engine.submit(GenerationRequest((1, 2, 3), GREEDY, 20, ignore_end=True)) for _ in range(3)]
    gate.open()
    assert [generation.result()[0].token_ids for generation in running] == [answer] * 3
    assert fails.asked() == 1 and engine.statistics()["drafter_failed"]


def test_sources_that_agree_are_one_row_and_one_that_fails_takes_nobody_along(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 40)

    class Fails(Source):
        def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
            if len(self.tokens[sequence_id]) > 10:
                raise RuntimeError("a fault of the drafter")
            return super().propose(sequence_id, max_tokens)

    gate = Gate()
    gate.open()
    drafters = {"a": Source(answer, length=3), "b": Source(answer, length=5), "c": Fails(answer, length=2)}
    engine = make_engine(hashed=True, drafter=drafters, wrap=gate.wrap)
    completion = run(engine, 40)
    assert completion.token_ids == answer
    assert max(batch.n_rows for batch in gate.batches[1:]) == 6  # one row and five guesses, not ten
    statistics = engine.statistics()
    assert statistics["drafter_failed"]
    assert [name for name, figures in statistics["drafters"].items() if figures["failed"]] == ["c"]
    assert statistics["accepted"] == statistics["drafted"] == statistics["drafters"]["b"]["accepted"]


def test_readers_see_every_committed_row_once_and_in_order(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 30)
    reader = Reader(answer, length=3)
    engine = make_engine(hashed=True, drafter={"reader": reader})
    assert run(engine, 30).token_ids == answer
    stepped = [entry[2:] for entry in reader.told if entry[0] == "stepped"]
    at = 0
    for start, rows, n_blocks in stepped:
        assert start == at and n_blocks * 256 >= start + len(rows)
        at += len(rows)
    assert at >= 3 + 30 - 5  # the step that ends the answer is not told
    assert [rows for _, rows, _ in stepped[:2]] == [(0, 1, 2), (0, 1, 2, 3)]


def test_choices_of_a_request_are_forks_for_the_drafters(make_engine: MakeEngine) -> None:
    reader = Reader()
    engine = make_engine(hashed=True, drafter={"reader": reader})
    request = GenerationRequest((1, 2, 3), SamplingOptions(seed=1), 6, n=3, ignore_end=True, salt="mine")
    engine.submit(request).result()
    begun = [entry[1:] for entry in reader.told if entry[0] == "begin"]
    assert len(begun) == 3 and {salt for _, salt in begun} == {"mine"}
    parent = begun[0][0]
    assert [entry[1:] for entry in reader.told if entry[0] == "forked"] == [
        (begun[1][0], parent),
        (begun[2][0], parent),
    ]
    steps = [entry for entry in reader.told if entry[0] == "stepped"]
    for sequence, _ in begun[1:]:
        assert next(entry for entry in steps if entry[1] == sequence)[2] == 3  # goes on where the prompt ended


def test_forks_are_told_at_once_to_who_reads_no_states(make_engine: MakeEngine) -> None:
    source, reader = Source(), Reader()
    engine = make_engine(hashed=True, drafter={"source": source, "reader": reader})
    engine.submit(GenerationRequest((1, 2, 3), GREEDY, 1, n=3, ignore_end=True)).result()
    (_, parent, _), *rest = source.told
    assert [entry[0] for entry in rest] == ["begin", "forked"] * 2  # though every choice ends with its first token
    assert all(
        begun[1] == forked[1] and forked[2] == parent for begun, forked in zip(rest[::2], rest[1::2], strict=True)
    )
    assert not any(entry[0] == "forked" for entry in reader.told) and not engine.statistics()["drafter_failed"]


def test_a_choice_that_ends_at_once_leaves_the_others_no_parent(make_engine: MakeEngine) -> None:
    first = plain_answer(make_engine, 1)[0]
    reader = Reader()
    engine = make_engine(hashed=True, drafter={"reader": reader})
    text = engine.tokenizer.decode([first])
    request = GenerationRequest((1, 2, 3), SamplingOptions(temperature=2.0, seed=3), 6, n=3, stop=(text or "x",))
    assert len(engine.submit(request).result()) == 3
    ends = GenerationRequest((1, 2, 3), GREEDY, 1, n=2, ignore_end=True)
    assert len(engine.submit(ends).result()) == 2
    assert not engine.statistics()["drafter_failed"]


def test_choices_start_from_the_prompt_without_guesses(make_engine: MakeEngine) -> None:
    """A prompt whose last part is one row looks like an answering sequence; its choices must not fork from guesses."""
    prompt = tuple(range(1, 258))
    answer = (
        make_engine(hashed=True).submit(GenerationRequest(prompt, GREEDY, 8, ignore_end=True)).result()[0].token_ids
    )
    gate = Gate()
    gate.open()
    reader = Reader(answer, length=3)
    engine = make_engine(hashed=True, drafter={"reader": reader}, wrap=gate.wrap)
    choices = engine.submit(GenerationRequest(prompt, GREEDY, 8, n=2, ignore_end=True)).result()
    assert [choice.token_ids for choice in choices] == [answer, answer]
    assert [batch.n_rows for batch in gate.batches[:2]] == [256, 1]
    child = next(entry[1] for entry in reader.told if entry[0] == "forked")
    assert next(entry for entry in reader.told if entry[0] == "stepped" and entry[1] == child)[2] == len(prompt)


@pytest.mark.parametrize(
    "draft",
    [
        [1, 2],
        Draft(DraftTree((None,), (-1,)), (0.5,)),  # type: ignore[arg-type]
        Draft(DraftTree(("x",), (-1,)), (0.5,)),  # type: ignore[arg-type]
        Draft(DraftTree((1, 2), (-1, 0.0)), (0.5, 0.5)),  # type: ignore[arg-type]
        Draft(DraftTree((1, 2), (-1, 1)), (0.5, 0.5)),
        Draft(DraftTree((1,), (-1,)), (float("nan"),)),
        Draft(DraftTree((1,), (-1,)), ()),
        Draft(DraftTree((10**9,), (-1,)), (0.5,)),
    ],
)
def test_what_is_no_draft_turns_its_source_off_and_harms_nobody(make_engine: MakeEngine, draft: Any) -> None:
    answer = plain_answer(make_engine, 20)

    class Wrong(Source):
        def propose(self, sequence_id: int, max_tokens: int) -> Any:
            return draft

        def statistics(self) -> dict[str, Any]:
            raise RuntimeError("no figures")

    engine = make_engine(hashed=True, drafter={"wrong": Wrong(), "right": Source(answer)})
    completion = run(engine, 20)
    assert completion.token_ids == answer and completion.timings.accepted > 5
    statistics = engine.statistics()
    assert statistics["drafter_failed"]
    assert {name: figures["failed"] for name, figures in statistics["drafters"].items()} == {
        "wrong": True,
        "right": False,
    }


def test_arrays_are_as_good_as_tuples(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 20)

    class Arrays(Source):
        def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
            tokens = np.array(self.guesses(sequence_id, max_tokens))
            return Draft(DraftTree(tokens, np.arange(-1, len(tokens) - 1)), np.full(len(tokens), 0.5))  # type: ignore[arg-type]

    engine = make_engine(hashed=True, drafter={"arrays": Arrays(answer)})
    assert run(engine, 20).token_ids == answer
    assert not engine.statistics()["drafter_failed"]


def test_requests_may_ask_for_no_drafts(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 12)
    source = Source(answer)
    engine = make_engine(hashed=True, drafter={"source": source})
    assert run(engine, 12, draft=False).token_ids == answer
    assert source.told == []
    engine.submit(GenerationRequest((1, 2, 3), GREEDY, 0)).result()
    assert source.told == []


def test_a_given_answer_is_what_comes_out(make_engine: MakeEngine) -> None:
    given = (9, 8, 7, 9, 8, 7, 6, 5)
    source = Source(given, length=3)
    engine = make_engine(hashed=True, drafter={"source": source})
    (completion,) = engine.submit(GenerationRequest((1, 2), GREEDY, forced_ids=given, ignore_end=True)).result()
    assert (completion.token_ids, completion.finish_reason) == (given, "length")
    assert completion.timings.accepted > 3
    with pytest.raises(RequestError, match="max_tokens"):
        engine.submit(GenerationRequest((1, 2), GREEDY, 9, forced_ids=given))
    with pytest.raises(RequestError, match="token 1 of forced_ids"):
        engine.submit(GenerationRequest((1, 2), GREEDY, forced_ids=(1, 10**9)))
    with pytest.raises(RequestError, match="salt"):
        engine.submit(GenerationRequest((1, 2), GREEDY, 1, salt=b"x"))  # type: ignore[arg-type]


@pytest.mark.parametrize("n_draws", [10_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_d4_drafted_draws_follow_the_law(make_engine: MakeEngine, n_draws: int) -> None:
    """A drafter that always guesses the least likely token changes neither the draws nor their law."""
    probabilities = {7: 0.5, 3: 0.3, 20: 0.15, 11: 0.05}
    scores = np.full(300, -50.0, np.float32)
    scores[list(probabilities)] = np.log(list(probabilities.values()))

    def steady(inner: Any) -> Any:
        model = Steady(12, 8, 300)
        model.scores = scores
        return model

    class PrefersTheLast(Source):
        def guesses(self, sequence_id: int, most: int) -> list[int]:
            return [11, 11][:most]

    answers: dict[bool, list[int]] = {}
    sampling = SamplingOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    accepted = 0
    for drafted in (False, True):
        drafters = {"last": PrefersTheLast()} if drafted else {}
        engine = make_engine(hashed=True, drafter=drafters, wrap=steady)
        tokens: list[int] = []
        for seed in range(n_draws // 1000):
            request = GenerationRequest((1,), attrs.evolve(sampling, seed=seed), 1000, ignore_end=True)
            (completion,) = engine.submit(request).result()
            tokens += completion.token_ids
        accepted = engine.statistics()["accepted"]
        answers[drafted] = tokens
    assert answers[True] == answers[False]
    assert 0.03 * n_draws < accepted < 0.07 * n_draws
    expected = np.array(list(probabilities.values())) * n_draws
    counts = np.array([answers[True].count(token) for token in probabilities])
    assert counts.sum() == n_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.27  # 3 degrees of freedom, 0.1 %


def test_figures_are_counters_that_another_thread_may_read(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 300)

    class Proud(Reader):
        def statistics(self) -> dict[str, Any]:
            return {"drafted": -1, "held_bytes": 5}

    class NoFigures(Source):
        def statistics(self) -> Any:
            return 7

    drafters = {"proud": Proud(answer, length=9), "none": NoFigures()}
    engine = make_engine(hashed=True, drafter=drafters)
    read: list[dict[str, Any]] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def reads() -> None:
        try:
            while not done.is_set():
                read.append(engine.statistics())
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=reads)
    thread.start()
    try:
        for n_tokens in (300, 200, 100):
            run(engine, n_tokens)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    read.append(engine.statistics())
    assert not errors and len(read) > 20
    for figures in read[:: len(read) // 20] + read[-1:]:
        assert json.loads(json.dumps(figures)) == figures, "keys are words, values are numbers"
        for name in drafters:
            assert set(figures["drafters"][name]) >= {
                "asked", "proposed", "drafted", "accepted", "seconds", "failed"
            }  # fmt: skip
    totals = ("drafted", "accepted", "guessing_s", "wasted_s", "steps", "prompt_rows", "answer_rows", "requests")
    own = ("asked", "proposed", "drafted", "accepted", "seconds")
    for before, after in itertools.pairwise(read):
        assert all(before[name] <= after[name] for name in totals)
        assert all(count <= after["steps_by_rows"][n] for n, count in before["steps_by_rows"].items())
        for name in drafters:
            assert all(before["drafters"][name][key] <= after["drafters"][name][key] for key in own)
    last = read[-1]["drafters"]["proud"]
    assert last["proposed"] >= last["drafted"] == last["accepted"] > 400 and last["held_bytes"] == 5
    assert last["run_s"] > 0 and "run_s" not in read[-1]["drafters"]["none"]


def test_rows_name_what_is_committed() -> None:
    part = SequenceRows(4, 10, 2, np.zeros(1, np.int32), 0, draft_parents=(1, 2, 2))
    assert part.committed_rows() == (4, 5)
    assert part.committed_rows([0, 2]) == (4, 5, 6, 8)
