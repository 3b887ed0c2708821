"""Many requests at once: the same bits as alone, bounded memory, bounded steps, cancelled at any moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from conftest import MakeEngine, TinyModel
from executables import Gate, Timed

from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.generation import Generation
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.engine.scheduler import Pace
from kinetic_core.errors import CapacityError
from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities, DraftTree

GREEDY = SamplingOptions(temperature=0.0)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(0, 256, length).tolist())


def mixed_requests() -> list[GenerationRequest]:
    """Eight requests of different lengths and kinds, all with log-probabilities."""
    kinds = (
        SamplingOptions(temperature=0.0, logprobs=2),
        SamplingOptions(seed=1, logprobs=2),
        SamplingOptions(seed=2, top_k=0, min_p=0.0, repeat_penalty=1.2, logprobs=2),
        SamplingOptions(seed=3, presence_penalty=1.0, logit_bias={9: 2.0}, logprobs=2),
    )
    lengths = (1, 7, 63, 64, 65, 100, 257, 300)
    return [
        GenerationRequest(prompt_of(length), kinds[number % 4], 8 + 3 * number, ignore_end=True)
        for number, length in enumerate(lengths)
    ]


def same(a: Completion, b: Completion) -> bool:
    """Equal tokens, text and every bit of the log-probabilities."""
    return (a.token_ids, a.text, a.finish_reason, a.logprobs) == (b.token_ids, b.text, b.finish_reason, b.logprobs)


@pytest.fixture(scope="module")
def solo(random_model: TinyModel) -> list[Completion]:
    """Each of the mixed requests alone on an engine."""
    engine = random_model.engine(hashed=True)
    answers = [engine.submit(request).result()[0] for request in mixed_requests()]
    engine.close()
    return answers


def test_eight_at_once_equal_each_alone_on_a_hybrid(make_engine: MakeEngine) -> None:
    requests = [attrs.evolve(request, prompt_ids=request.prompt_ids[-70:]) for request in mixed_requests()]
    engine = make_engine(random=True)
    alone = [engine.submit(request).result()[0] for request in requests]
    for generation, expected in zip([engine.submit(request) for request in requests], alone, strict=True):
        assert same(generation.result()[0], expected)


def test_eight_at_once_equal_each_alone(make_engine: MakeEngine, solo: list[Completion]) -> None:
    engine = make_engine(hashed=True)
    generations = [engine.submit(request) for request in mixed_requests()]
    for generation, alone in zip(generations, solo, strict=True):
        assert same(generation.result()[0], alone)


@pytest.mark.parametrize("max_rows", [9, 33, 65])
def test_every_split_of_the_prompts_gives_the_same_bits(
    make_engine: MakeEngine, solo: list[Completion], max_rows: int
) -> None:
    engine = make_engine(hashed=True, max_rows=max_rows)
    generations = [engine.submit(request) for request in mixed_requests()]
    for generation, alone in zip(generations, solo, strict=True):
        assert same(generation.result()[0], alone)


def test_sequences_that_give_way_come_back_with_the_same_bits(make_engine: MakeEngine, solo: list[Completion]) -> None:
    # Two blocks hold one context. All but the oldest must give way again and again.
    engine = make_engine(hashed=True, n_blocks=2, context_length=512)
    requests = [attrs.evolve(request, max_tokens=40) for request in mixed_requests()]
    requests[4:6] = [attrs.evolve(requests[4], prompt_ids=prompt_of(240)), attrs.evolve(requests[5], n=3)]
    small = [generation.result() for generation in [engine.submit(request) for request in requests]]
    assert engine.statistics()["gave_way"] > 0
    roomy = make_engine(hashed=True)
    for request, answers in zip(requests, small, strict=True):
        for got, expected in zip(answers, roomy.submit(request).result(), strict=True):
            assert same(got, expected)
    assert roomy.statistics()["gave_way"] == 0


def test_the_oldest_never_gives_way(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(hashed=True, wrap=gate.wrap, n_blocks=2, context_length=512)
    generations = [
        engine.submit(GenerationRequest(prompt_of(240, seed), GREEDY, 60, ignore_end=True)) for seed in range(2)
    ]
    gate.wait_for(1)
    gate.open()
    for generation in generations:
        generation.result()
    assert engine.statistics()["gave_way"] == 1
    firsts = [prompt_of(240, seed)[0] for seed in range(2)]
    begins = [int(b.token_ids[p.first_row]) for b in gate.batches for p in b.sequences if p.start == 0]
    assert [begins.count(first) for first in firsts] == [1, 2]


def test_cancelled_at_random_moments_nothing_stays_and_others_are_unaffected(
    make_engine: MakeEngine, solo: list[Completion]
) -> None:
    engine = make_engine(hashed=True, n_blocks=8, max_sequences=4, n_slots=4)
    rng = random.Random(5)
    requests = mixed_requests()
    running: list[tuple[int, Generation]] = []
    for _ in range(40):
        number = rng.randrange(8)
        running.append((number, engine.submit(attrs.evolve(requests[number], n=rng.choice([1, 1, 2])))))
    victims = [generation for _, generation in running if rng.random() < 0.5]

    def cancel_some() -> None:
        for generation in rng.sample(victims, len(victims)):
            time.sleep(rng.random() * 0.05)
            generation.cancel()
            generation.cancel()

    canceller = threading.Thread(target=cancel_some)
    canceller.start()
    n_whole = 0
    for number, generation in running:
        completions = generation.result()
        if completions[0].finish_reason != "cancelled":
            assert same(completions[0], solo[number])
            n_whole += 1
    canceller.join()
    assert n_whole >= 40 - len(victims)
    assert engine.statistics()["cancelled"] > 0
    statistics = engine.statistics()
    assert (statistics["running_sequences"], statistics["waiting_sequences"], statistics["blocks_used"]) == (0, 0, 0)


def test_s4_cancelled_during_a_long_prompt_work_stops_within_one_batch(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(hashed=True, wrap=gate.wrap)
    generation = engine.submit(GenerationRequest(prompt_of(1500), GREEDY))
    gate.wait_for(1)
    gate.let_pass()
    gate.wait_for(2)
    generation.cancel()
    gate.open()
    assert [chunk.finish_reason for chunk in generation] == ["cancelled"]
    assert len(gate.batches) == 2
    assert len(engine.submit(GenerationRequest((1,), GREEDY, 3, ignore_end=True)).result()[0].token_ids) == 3


def test_s4_cancelled_while_queued_it_never_runs(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(wrap=gate.wrap, max_sequences=1, n_slots=1)
    first = engine.submit(GenerationRequest(tuple(b"hello\n"), GREEDY, 3))
    gate.wait_for(1)
    queued = engine.submit(GenerationRequest(prompt_of(100), GREEDY, 3))
    queued.cancel()
    gate.open()
    assert first.result()[0].text == "abc"
    completion = queued.result()[0]
    assert (completion.finish_reason, completion.text, completion.token_ids) == ("cancelled", "", ())
    assert all(len(batch.token_ids) <= 6 for batch in gate.batches)


def test_leaving_the_block_cancels(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine.submit(GenerationRequest(tuple(b"\n"), GREEDY, 1900, ignore_end=True)) as generation:
        assert next(generation).text == "a"
    assert generation.cancelled
    assert list(generation)[-1].finish_reason == "cancelled"
    generation.cancel()


def test_a_full_queue_is_refused_and_drains(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(wrap=gate.wrap, max_sequences=2, n_slots=2, max_waiting=3)
    request = GenerationRequest(tuple(b"\n"), GREEDY, 4)
    accepted = [engine.submit(request) for _ in range(5)]
    with pytest.raises(CapacityError, match="too many requests wait"):
        engine.submit(request)
    gate.open()
    assert [generation.result()[0].text for generation in accepted] == ["abcd"] * 5
    assert engine.submit(request).result()[0].text == "abcd"


def test_requests_wait_for_blocks_in_order(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(hashed=True, wrap=gate.wrap, n_blocks=3, context_length=768)
    first = engine.submit(GenerationRequest(prompt_of(600), GREEDY, 2, ignore_end=True))  # takes all three blocks
    second = engine.submit(GenerationRequest(prompt_of(300), GREEDY, 2, ignore_end=True))
    third = engine.submit(GenerationRequest(prompt_of(10), GREEDY, 2, ignore_end=True))
    gate.wait_for(1)
    gate.open()
    for generation in (first, second, third):
        assert len(generation.result()[0].token_ids) == 2
    owners = [[len(part.block_table) for part in batch.sequences] for batch in gate.batches]
    assert max(sum(blocks) for blocks in owners) <= 3
    starts = [part.start for batch in gate.batches for part in batch.sequences]
    assert starts.count(0) == 3, "nobody had to start over"
    assert engine.statistics()["gave_way"] == 0


def test_choices_share_full_blocks(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(hashed=True, wrap=gate.wrap)
    generation = engine.submit(GenerationRequest(prompt_of(300), GREEDY, 3, n=4, ignore_end=True))
    gate.let_pass(2)  # the prompt: 256 rows and 44
    gate.wait_for(3)
    tables = [part.block_table.tolist() for part in gate.batches[2].sequences]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 4
    assert len({part.slot for part in gate.batches[2].sequences}) == 4
    assert engine.statistics()["blocks_used"] == 5
    gate.open()
    assert len({completion.token_ids for completion in generation.result()}) == 1


def timed_engine(model: TinyModel, seconds: Any, **sizes: Any) -> tuple[Engine, Timed]:
    executables: list[Timed] = []

    def wrap(inner: Any) -> Any:
        executables.append(Timed(inner, seconds))
        return executables[0]

    return model.engine(wrap, hashed=True, **sizes), executables[0]


def prompt_rows(timed: Timed) -> list[list[tuple[int, int]]]:
    """Per step the (start, rows) of every sequence with more than one row."""
    return [[(p.start, p.n_rows) for p in batch.sequences if p.n_rows > 1] for batch in timed.batches]


def test_a_lone_prompt_runs_in_whole_grid_steps(predictable: TinyModel) -> None:
    engine, timed = timed_engine(predictable, lambda rows: 0.0)
    engine.submit(GenerationRequest(prompt_of(700), GREEDY, 1)).result()
    engine.close()
    assert prompt_rows(timed) == [[(0, 256)], [(256, 256)], [(512, 188)]]


def test_while_others_answer_steps_stay_short_and_end_on_the_grid(predictable: TinyModel) -> None:
    engine, timed = timed_engine(predictable, lambda rows: 0.0015 * rows)  # 133 rows are 200 ms
    talker = engine.submit(GenerationRequest((1,), GREEDY, 60, ignore_end=True))
    next(talker)
    engine.submit(GenerationRequest(prompt_of(1000), GREEDY, 1)).result()
    answered = len(timed.batches)
    talker.cancel()
    engine.close()
    steps = [rows for rows in prompt_rows(timed) if rows]
    assert all(len(rows) == 1 for rows in steps)
    for [(start, n_rows)] in steps:
        assert start // 256 == (start + n_rows - 1) // 256, "crosses the grid"
    sizes = [n_rows for [(_, n_rows)] in steps]
    assert sum(sizes) == 1000
    assert max(sizes) <= 128
    assert max(sizes) >= 96, "faster than need be is slower than can be"
    in_between = [batch for batch in timed.batches[:answered] if any(p.n_rows > 1 for p in batch.sequences)]
    assert all(any(p.n_rows == 1 for p in batch.sequences) for batch in in_between), "the answer went on in every step"


def test_a_slow_model_keeps_8_rows(predictable: TinyModel) -> None:
    engine, timed = timed_engine(predictable, lambda rows: 0.02 * rows if rows > 1 else 0.0)
    talker = engine.submit(GenerationRequest((1,), GREEDY, 60, ignore_end=True))
    next(talker)
    engine.submit(GenerationRequest(prompt_of(48), GREEDY, 1)).result()
    talker.cancel()
    engine.close()
    assert [n_rows for rows in prompt_rows(timed) for _, n_rows in rows] == [8, 8, 8, 8, 8, 8]


def test_prompts_take_turns(predictable: TinyModel) -> None:
    engine, timed = timed_engine(predictable, lambda rows: 0.0005 * rows)
    long_one = engine.submit(GenerationRequest(prompt_of(2000), GREEDY, 1))
    time.sleep(0.05)
    short = [engine.submit(GenerationRequest(prompt_of(length), GREEDY, 1)) for length in (60, 50, 40)]
    for generation in short:
        generation.result()
    assert not long_one.ended, "short prompts do not wait for a long one"
    long_one.result()
    engine.close()
    assert max(batch.n_rows for batch in timed.batches) <= 256 + 4
    together = [rows for rows in prompt_rows(timed) if len(rows) > 1]
    assert together, "short prompts share a step"


def test_pace() -> None:
    pace = Pace()
    assert pace.prompt_rows(crowded=False, answering=False) == 256
    assert pace.prompt_rows(crowded=True, answering=True) == 8
    pace.measured(0, 4, 0, 0.04)
    pace.measured(256, 0, 0, 0.256)
    assert pace.prompt_rows(crowded=True, answering=True) == 120  # (160 - 40) ms at 1 ms a row
    assert pace.prompt_rows(crowded=True, answering=False) == 160
    pace.measured(7, 1, 0, 5.0)  # a few rows tell nothing about a prompt's speed
    assert pace.prompt_rows(crowded=True, answering=False) == 160
    measured_by_eight = Pace()
    measured_by_eight.measured(8, 0, 0, 8 * 0.012)
    assert measured_by_eight.prompt_rows(crowded=True, answering=False) == 12  # 13 by the speed, planned in fours
    pace.measured(64, 0, 0, 64 * 0.002)
    assert pace.prompt_rows(crowded=True, answering=False) == 80, "a slower step counts at once"
    pace.measured(64, 0, 0, 64 * 0.001)
    assert pace.prompt_rows(crowded=True, answering=False) == 104, "a faster one by half"
    for _ in range(20):
        pace.measured(64, 4, 0, 64 * 0.0003 + 0.04)
    assert pace.prompt_rows(crowded=True, answering=True) == 256
    assert pace.prompt_rows(crowded=False, answering=False) == 256


def test_pace_beside_drafts() -> None:
    """Neither do the rows of drafts make prompts look slow, nor their absence make them look fast."""
    pace = Pace()
    pace.measured(0, 4, 20, 0.1)
    pace.measured(0, 4, 0, 0.04)  # what answers take without drafts
    pace.measured(0, 4, 20, 0.1)
    pace.measured(100, 4, 0, 0.14)
    assert pace.prompt_rows(crowded=True, answering=True) == 120  # (160 - 40) ms at 1 ms a row
    for n_drafts in (20, 0, 30):
        pace.measured(100, 4, n_drafts, 0.14 + 0.001 * n_drafts)
        assert pace.prompt_row_s == pytest.approx(0.001)
        rows = pace.prompt_rows(crowded=True, answering=True)
        assert rows + n_drafts <= 120 < rows + n_drafts + 4 + 1  # the next step's drafts have their place
    assert pace.prompt_rows(crowded=True, answering=False) == 160


def test_steps_of_prompts_and_drafts_stay_short(predictable: TinyModel) -> None:
    """Every answer drafts; a step's time by its rows is still what is planned for it."""

    class Sevens(Drafter):
        capabilities = DrafterCapabilities()

        def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
            pass

        def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
            pass

        def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
            tokens = (7,) * min(12, max_tokens)
            return Draft(DraftTree.chain(tokens), (0.9,) * len(tokens))

        def end(self, sequence_id: int) -> None:
            pass

    engine, timed = timed_engine(predictable, lambda rows: 0.0015 * rows, drafter=Sevens(), max_outputs=64)
    talkers = [engine.submit(GenerationRequest((1,), GREEDY, 500, ignore_end=True)) for _ in range(3)]
    for talker in talkers:
        next(talker)
    engine.submit(GenerationRequest(prompt_of(700), GREEDY, 1)).result()
    for talker in talkers:
        talker.cancel()
    engine.close()
    assert not engine.statistics()["drafter_failed"]
    steps = [batch for batch in timed.batches if any(part.n_committed > 1 for part in batch.sequences)]
    drafted = [sum(len(part.draft_parents) for part in batch.sequences) for batch in steps]
    sizes = [batch.n_rows for batch in steps]
    assert min(drafted[:-1]) == 36, drafted
    row_s = engine._scheduler.pace.prompt_row_s
    assert row_s is not None and row_s < 0.002, "draft rows took no prompt's time"
    assert max(sizes) <= 133, sizes  # 200 ms
    assert max(sizes) >= 96, sizes


def test_sizes_that_could_deadlock_are_refused() -> None:
    sizes: dict[str, Any] = {"n_slots": 4, "max_rows": 64, "max_outputs": 32, "has_states": True, "max_sequences": 4}
    EngineOptions(context_length=512, n_blocks=2, **sizes)
    with pytest.raises(CapacityError, match="less than one context"):
        EngineOptions(context_length=513, n_blocks=2, **sizes)
    for change in ({"n_slots": 3}, {"max_outputs": 3}, {"max_rows": 4}):
        with pytest.raises(ValueError, match="max_"):
            EngineOptions(context_length=512, n_blocks=2, **{**sizes, **change})
