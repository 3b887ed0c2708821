"""A small cache behind the cache interface: warm equals cold to the bit, and running requests come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from conftest import MakeEngine, TinyModel

from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.errors import CapacityError
from kinetic_core.interfaces import CacheCapabilities, CachedPrefix, PrefixCache

GREEDY = SamplingOptions(temperature=0.0, logprobs=2)


class Keeper(PrefixCache):
    """Keeps whole states, blocks by reference and slots by copy; gives up the oldest when asked to."""

    capabilities = CacheCapabilities(shares_blocks=True)

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self.entries: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        self.n_given_back = 0

    def attach(self, executable: Any, blocks: Any, slots: Any) -> None:
        self._executable, self._blocks, self._slots = executable, blocks, slots
        blocks.add_reclaimer(lambda count: self._give_back(lambda: blocks.n_free, count))
        slots.add_reclaimer(lambda count: self._give_back(lambda: slots.n_slots - slots.n_used, count))

    def _give_back(self, n_free: Callable[[], int], count: int) -> None:
        wanted = n_free() + count
        while self.entries and n_free() < wanted:
            self._drop_oldest()
            self.n_given_back += 1

    def _drop_oldest(self) -> None:
        blocks, slot = self.entries.pop(next(iter(self.entries)))
        self._blocks.release(blocks)
        self._slots.release(slot)

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        tokens = tuple(token_ids)
        found = max((key for key in self.entries if tokens[: len(key)] == key), key=len, default=None)
        if found is None:
            return None
        blocks, slot = self.entries[found]
        self._blocks.share(blocks)
        return CachedPrefix(len(found), blocks, slot, "live")

    def store(self, token_ids: Sequence[int], blocks: Sequence[int], slot: int, salt: str = "") -> None:
        tokens = tuple(token_ids)
        if tokens in self.entries:
            return
        try:
            own = self._slots.allocate()
        except CapacityError:
            return
        if own >= 0:
            self._executable.copy_slot(slot, own)
        self._blocks.share(blocks)
        self.entries[tokens] = (tuple(blocks), own)

    def wanted_snapshots(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        if not self._every:
            return ()
        return [position for position in range(self._every, len(token_ids), self._every) if position > start]

    def clear(self) -> None:
        while self.entries:
            self._drop_oldest()


def request_of(*tokens: int, max_tokens: int = 10, **options: Any) -> GenerationRequest:
    return GenerationRequest(tokens, GREEDY, max_tokens, ignore_end=True, **options)


def what(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize("hashed", [False, True])
def test_w1_w2_a_second_turn_starts_from_the_first(make_engine: MakeEngine, hashed: bool) -> None:
    keeper = Keeper()
    warm = make_engine(random=True, hashed=hashed, cache=keeper, n_slots=16)
    cold = make_engine(random=True, hashed=hashed)
    prompt = tuple(np.random.default_rng(0).integers(0, 256, 300).tolist())
    first = warm.submit(request_of(*prompt)).result()[0]
    assert first.usage.cached_tokens == 0
    for tail in ((65, 63), (66, 63)):
        second = request_of(*prompt, *first.token_ids[:-1], *tail)
        got, expected = warm.submit(second).result()[0], cold.submit(second).result()[0]
        assert what(got) == what(expected)
        assert got.usage.cached_tokens == 309, "everything that went through the model"
    keeper.clear()


@pytest.mark.parametrize("hashed", [False, True])
def test_w4_snapshots_inside_a_prompt(make_engine: MakeEngine, hashed: bool) -> None:
    keeper = Keeper(every=100)
    warm = make_engine(random=True, hashed=hashed, cache=keeper, n_slots=24)
    cold = make_engine(random=True, hashed=hashed)
    prefix = tuple(np.random.default_rng(1).integers(0, 256, 320).tolist())
    warm.submit(request_of(*prefix, 1, 2, 3)).result()
    for tail, reused in (((9,), 300), ((9, 8, 7), 300), ((4,) * 65, 300)):
        request = request_of(*prefix, *tail)
        got = warm.submit(request).result()[0]
        assert what(got) == what(cold.submit(request).result()[0])
        assert got.usage.cached_tokens == reused
    cut = request_of(*prefix[:250], 77)
    got = warm.submit(cut).result()[0]
    assert (what(got), got.usage.cached_tokens) == (what(cold.submit(cut).result()[0]), 200)
    keeper.clear()


def test_w3_a_resend_runs_at_least_its_last_token(make_engine: MakeEngine) -> None:
    keeper = Keeper(every=10)
    engine = make_engine(hashed=True, cache=keeper, n_slots=16)
    answers = [engine.submit(request_of(*range(31))).result()[0] for _ in range(3)]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 30, 30]
    assert len({what(answer) for answer in answers}) == 1
    keeper.clear()


def test_w10_echo_reuses_nothing(make_engine: MakeEngine) -> None:
    keeper = Keeper(every=10)
    engine = make_engine(hashed=True, cache=keeper, n_slots=16)
    request = request_of(*range(50), echo_logprobs=True)
    cold = engine.submit(request).result()[0]
    again = engine.submit(request).result()[0]
    assert again.usage.cached_tokens == 0
    assert (again.prompt_logprobs, what(again)) == (cold.prompt_logprobs, what(cold))
    assert cold.prompt_logprobs is not None and len(cold.prompt_logprobs) == 50
    keeper.clear()


def test_running_requests_take_blocks_back_from_the_cache(make_engine: MakeEngine) -> None:
    keeper = Keeper(every=64)
    sizes = {"n_blocks": 6, "context_length": 768, "n_slots": 6, "max_sequences": 3}
    engine = make_engine(hashed=True, cache=keeper, **sizes)
    cold = make_engine(hashed=True)
    rng = np.random.default_rng(2)
    requests = [request_of(*rng.integers(0, 256, n).tolist(), max_tokens=30) for n in (500, 300, 700, 20, 650, 90)]
    requests += [attrs.evolve(request, prompt_ids=(*request.prompt_ids[:-5], 1)) for request in requests]
    generations = [engine.submit(request) for request in requests]
    for request, generation in zip(requests, generations, strict=True):
        assert what(generation.result()[0]) == what(cold.submit(request).result()[0])
    assert keeper.n_given_back > 0
    keeper.clear()
    assert engine.statistics()["blocks_used"] == 0


def test_a_cache_on_a_program_without_states(predictable: TinyModel) -> None:
    keeper = Keeper(every=50)
    engine = predictable.engine(hashed=True, cache=keeper, has_states=False)
    first = engine.submit(request_of(*range(120))).result()[0]
    second = engine.submit(request_of(*range(120))).result()[0]
    assert (what(second), second.usage.cached_tokens) == (what(first), 100)
    keeper.clear()
    engine.close()
    assert engine.statistics()["blocks_used"] == 0
