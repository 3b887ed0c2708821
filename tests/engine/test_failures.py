"""Faults: of one request, of a step, of a plugin. Others go on, nothing stays behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from conftest import MakeEngine
from executables import Around, Gate

from kinetic_core.engine.engine import Engine
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.errors import BackendError, Cancelled, NumericalError
from kinetic_core.interfaces import (
    CacheCapabilities,
    Draft,
    Drafter,
    DrafterCapabilities,
    DraftTree,
    PrefixCache,
    RowBatch,
)

GREEDY = SamplingOptions(temperature=0.0, logprobs=1)
POISON = 299


def request_of(*tokens: int, max_tokens: int = 12) -> GenerationRequest:
    return GenerationRequest(tokens, GREEDY, max_tokens, ignore_end=True)


class Poisoned:
    """Fails every step in which the poison token has a row."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.n_failed = 0

    def wrap(self, inner: Any) -> Any:
        return Around(inner, self._before)

    def _before(self, batch: RowBatch) -> None:
        if POISON in batch.token_ids:
            self.n_failed += 1
            raise self._error


def test_a_nan_fails_only_the_request_to_blame(make_engine: MakeEngine) -> None:
    prompts = [(5, 6, 7), (1, POISON, 3), tuple(range(100)), (9,)]
    alone = [make_engine(hashed=True).submit(request_of(*prompt)).result()[0] for prompt in prompts]
    poisoned = Poisoned(NumericalError("a logit is NaN"))
    gate = Gate()
    engine = make_engine(hashed=True, wrap=lambda inner: gate.wrap(poisoned.wrap(inner)))
    first = engine.submit(request_of(*prompts[0]))
    gate.wait_for(1)  # the others come into one step with it
    generations = [first, *(engine.submit(request_of(*prompt)) for prompt in prompts[1:])]
    gate.open()
    for number, generation in enumerate(generations):
        if number == 1:
            with pytest.raises(NumericalError):
                generation.result()
        else:
            got = generation.result()[0]
            assert (got.token_ids, got.logprobs) == (alone[number].token_ids, alone[number].logprobs)
    assert poisoned.n_failed == 2
    assert engine.statistics()["failed"] == 1
    assert engine.submit(request_of(5, 6, 7)).result()[0].token_ids == alone[0].token_ids


def test_a_guess_that_breaks_a_step_breaks_one(make_engine: MakeEngine) -> None:
    """The drafter would propose the same again and again, and every time the whole prompt would run once more."""

    class GuessesPoison(BrokenDrafter):
        def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
            return Draft(DraftTree.chain((POISON,)), (0.9,))

    expected = make_engine(hashed=True).submit(request_of(5, 6, 7)).result()[0]
    poisoned = Poisoned(NumericalError("a logit is NaN"))
    engine = make_engine(hashed=True, wrap=poisoned.wrap, drafter=GuessesPoison(""))
    got = engine.submit(request_of(5, 6, 7)).result()[0]
    assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)
    assert poisoned.n_failed == 1
    assert not engine.statistics()["drafter_failed"]


def test_a_nan_among_scores_that_the_sampler_reads_fails_its_request(make_engine: MakeEngine) -> None:
    def wrap(inner: Any) -> Any:
        wrapped = Around(inner, lambda batch: None)
        wrapped.logits = lambda output: np.full(300, np.nan, np.float32)  # type: ignore[attr-defined]
        return wrapped

    engine = make_engine(hashed=True, wrap=wrap)
    candidates_only = SamplingOptions(temperature=0.0)
    good = engine.submit(GenerationRequest((1, 2), candidates_only, 5, ignore_end=True))
    bad = engine.submit(request_of(1, 2))
    with pytest.raises(NumericalError):
        bad.result()
    assert len(good.result()[0].token_ids) == 5


@pytest.mark.parametrize("error", [BackendError("a kernel failed"), RuntimeError("a fault"), MemoryError()])
def test_a_failed_step_fails_its_requests_and_the_engine_lives(make_engine: MakeEngine, error: Exception) -> None:
    poisoned = Poisoned(error)
    gate = Gate()
    engine = make_engine(hashed=True, max_sequences=2, n_slots=2, wrap=lambda inner: gate.wrap(poisoned.wrap(inner)))
    first = engine.submit(request_of(1, 2, 3))
    gate.wait_for(1)
    bad = engine.submit(request_of(1, POISON))
    waiting = engine.submit(request_of(4, 5))
    gate.open()
    for generation in (first, bad):
        with pytest.raises(BackendError):
            generation.result()
    assert len(waiting.result()[0].token_ids) == 12
    assert engine.failure is None


def test_chunks_before_a_failure_are_still_read(make_engine: MakeEngine) -> None:
    seen = []

    def fail_late(batch: RowBatch) -> None:
        seen.append(batch)
        if len(seen) == 4:
            raise BackendError("a kernel failed")

    engine = make_engine(wrap=lambda inner: Around(inner, fail_late))
    generation = engine.submit(GenerationRequest(tuple(b"\n"), GREEDY, 20))
    assert [next(generation).text for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(BackendError):
        next(generation)


class BrokenDrafter(Drafter):
    capabilities = DrafterCapabilities()

    def __init__(self, where: str) -> None:
        self._where = where

    def _maybe(self, here: str) -> None:
        if here == self._where:
            raise RuntimeError("a fault of the drafter")

    def begin(self, sequence_id: int, token_ids: Any, salt: str = "") -> None:
        self._maybe("begin")

    def committed(self, sequence_id: int, token_ids: Any) -> None:
        self._maybe("committed")

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        self._maybe("propose")
        return None

    def end(self, sequence_id: int) -> None:
        self._maybe("end")


class BrokenCache(PrefixCache):
    capabilities = CacheCapabilities()

    def __init__(self, where: str) -> None:
        self._where = where

    def _maybe(self, here: str) -> None:
        if here == self._where:
            raise RuntimeError("a fault of the cache")

    def find(self, token_ids: Any, salt: str = "") -> None:
        self._maybe("find")

    def store(self, token_ids: Any, blocks: Any, slot: int, salt: str = "") -> None:
        self._maybe("store")

    def wanted_snapshots(self, token_ids: Any, start: int) -> tuple[int, ...]:
        self._maybe("wanted_snapshots")
        return (2,)

    def clear(self) -> None:
        self._maybe("clear")


@pytest.mark.parametrize("where", ["begin", "committed", "propose", "end"])
def test_a_broken_drafter_is_turned_off(make_engine: MakeEngine, where: str) -> None:
    engine = make_engine(drafter=BrokenDrafter(where))
    for _ in range(2):
        assert engine.submit(GenerationRequest(tuple(b"\n"), GREEDY, 5)).result()[0].text == "abcde"
    assert engine.statistics()["drafter_failed"]


@pytest.mark.parametrize("where", ["find", "store", "wanted_snapshots"])
def test_a_broken_cache_is_turned_off(make_engine: MakeEngine, where: str) -> None:
    engine = make_engine(cache=BrokenCache(where))
    for _ in range(2):
        assert engine.submit(GenerationRequest(tuple(b"xyz\n"), GREEDY, 5)).result()[0].text == "abcde"
    assert engine.statistics()["cache_failed"]


def test_logits_of_an_engine_that_closes_meanwhile_say_so(make_engine: MakeEngine) -> None:
    engine: Engine | None = None

    def close_first(batch: RowBatch) -> None:
        assert engine is not None
        threading.Thread(target=engine.close).start()
        while engine.failure is None:
            time.sleep(0.001)

    engine = make_engine(hashed=True, wrap=lambda inner: Around(inner, close_first))
    with pytest.raises(Cancelled):
        engine.logits((1,) * 300)
