"""Sources side by side in the engine: faults, forks, what they are told, given answers, the law of draws."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from typing import Any

import attrs
import numpy as np
import pytest
from conftest import MakeEngine
from drafters import (
    GREEDY,
    Continues,
    Reader,
    Source,
    Steady,
    plain_answer,
    run,
)
from executables import Gate

from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.errors import RequestError
from kinetic_core.interfaces import (
    Draft,
    DraftTree,
    SequenceRows,
)


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


@pytest.mark.parametrize(
    "n_draws", [10_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
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
