"""The policy at work with sources that run a part of the model: what their time is worth, for how many sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from conftest import MakeEngine
from drafters import (
    GREEDY,
    Reader,
    Source,
    Together,
    by_clock,
    plain_answer,
    run,
)
from executables import Gate

from kinetic_core.engine.draft_source import (
    LONGEST_MODEL_PAUSE,
)
from kinetic_core.engine.request import GenerationRequest
from kinetic_core.engine.step_costs import StepCosts
from kinetic_core.interfaces import (
    Draft,
    Drafter,
    DraftTree,
)


@pytest.fixture
def by_together(monkeypatch: pytest.MonkeyPatch) -> Callable[[Together], dict[str, Drafter]]:
    """Steps cost 10 ms whatever their rows, guesses what the drafter's clock says."""
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, _n_rows: 0.01)

    def drafters(together: Together) -> dict[str, Drafter]:
        by_clock(monkeypatch, together)
        return {"together": together}

    return drafters


@pytest.mark.usefixtures("by_prior")
def test_a_useless_guess_of_the_model_is_tried_ever_more_seldom(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 600)
    wrong = Reader([(token + 1) % 250 for token in answer])
    engine = make_engine(hashed=True, drafter={"wrong": wrong}, draft_policy="measured")
    assert run(engine, 600).token_ids == answer
    assert 5 <= wrong.asked() <= 10 + 600 // LONGEST_MODEL_PAUSE


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
