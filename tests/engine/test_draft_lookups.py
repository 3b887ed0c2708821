"""The policy at work with sources that look things up: which guesses are run, and when a source is left alone."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MakeEngine
from drafters import (
    Counting,
    Source,
    Timed,
    by_clock,
    plain_answer,
    run,
)

from kinetic_core.engine.acceptance import PATIENCE
from kinetic_core.engine.draft_policy import NextStep, best_rows
from kinetic_core.engine.draft_source import (
    FIRST_PAUSE,
    HARDLY_EVER,
    IN_VAIN_SHARE,
    LONGEST_PAUSE,
    MOST_PAUSE,
    MOST_UNTOLD,
)
from kinetic_core.engine.draft_source import Source as KnownSource
from kinetic_core.engine.step_costs import StepCosts


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
    for _ in range(14):
        before = nothing.asked()
        assert run(engine, 12).token_ids == answer
        asked.append(nothing.asked() - before)
    assert asked[1] >= PATIENCE + 2 > asked[-1] >= 2


@pytest.mark.usefixtures("by_prior")
def test_what_was_hardly_ever_of_use_begins_with_a_pause_until_it_is(make_engine: MakeEngine) -> None:
    answer = plain_answer(make_engine, 40)
    source = Source([])
    engine = make_engine(hashed=True, drafter={"source": source}, draft_policy="measured")
    while engine._drafting._lookups[0].useful >= HARDLY_EVER:
        assert run(engine, 40).token_ids == answer
    before = source.asked()
    assert run(engine, FIRST_PAUSE).token_ids == answer[:FIRST_PAUSE] and source.asked() == before
    assert run(engine, 40).token_ids == answer and 1 <= source.asked() - before <= 3
    source.answer = list(answer)  # now it has what follows
    assert run(engine, 40).timings.accepted > 5
    before = source.asked()
    assert run(engine, 10).token_ids == answer[:10] and source.asked() > before


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
