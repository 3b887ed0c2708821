"""Everything at once, at random: small pools, a cache, a drafter, cancellations. Answers equal their solo runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conftest import MakeEngine, TinyModel
from test_reuse import Keeper

from kinetic_core.engine.engine import Engine
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities, DraftTree


class LastSeen(Drafter):
    """Guesses that what followed the last token before follows it again, and something else beside."""

    capabilities = DrafterCapabilities(branches=True)

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def begin(self, sequence_id: int, token_ids: Any, salt: str = "") -> None:
        self._tokens[sequence_id] = list(token_ids)

    def committed(self, sequence_id: int, token_ids: Any) -> None:
        self._tokens[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        tokens = self._tokens[sequence_id]
        if max_tokens < 2 or tokens[-1] not in tokens[:-1]:
            return None
        again = tokens[tokens.index(tokens[-1]) + 1]
        return Draft(DraftTree((again, again ^ 1), (-1, -1)), (0.5, 0.1))

    def end(self, sequence_id: int) -> None:
        del self._tokens[sequence_id]


def random_request(rng: random.Random) -> GenerationRequest:
    sampling = SamplingOptions(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 5, 40]),
        repeat_penalty=rng.choice([1.0, 1.1, 0.9]),
        seed=rng.randrange(1000),
        logprobs=rng.choice([None, 0, 2]),
    )
    length = rng.choice([1, 2, 30, 255, 256, 257, 400])
    return GenerationRequest(
        prompt_ids=tuple(rng.randrange(8) for _ in range(length)),
        sampling=sampling,
        max_tokens=rng.choice([0, 1, 5, 30, None]),
        stop=rng.choice([(), (), ("\x03",), ("ab", "\x01\x02")]),
        n=rng.choice([1, 1, 1, 2, 3]),
        ignore_end=rng.random() < 0.5,
        echo_logprobs=rng.random() < 0.2,
    )


def what(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.logprobs,
        completion.prompt_logprobs,
        completion.usage.completion_tokens,
    )


def run_alone(model: TinyModel, requests: list[GenerationRequest]) -> list[list[Completion]]:
    engine = model.engine(hashed=True, context_length=460)
    answers = [engine.submit(request).result() for request in requests]
    engine.close()
    return answers


@pytest.mark.parametrize("seed", range(8))
def test_stress(make_engine: MakeEngine, random_model: TinyModel, seed: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(12)]
    alone = run_alone(random_model, requests)
    n_slots = rng.choice([1, 3, 8])
    keeper = Keeper(every=rng.choice([0, 50])) if rng.random() < 0.5 else None
    engine: Engine = make_engine(
        hashed=True,
        context_length=460,
        n_blocks=rng.choice([2, 3, 9]),
        n_slots=n_slots + rng.choice([0, 3]),
        max_sequences=n_slots,
        max_rows=rng.choice([16, 64, 288]),
        max_outputs=rng.choice([8, 32]),
        cache=keeper,
        drafter=LastSeen() if rng.random() < 0.6 else None,
    )
    generations = [engine.submit(request) for request in requests]
    cancelled = [generation for generation in generations if rng.random() < 0.25]
    for generation in cancelled:
        for _ in range(rng.randrange(3)):
            next(generation, None)
        generation.cancel()
    for number, generation in enumerate(generations):
        if generation in cancelled:
            list(generation)
            continue
        assert [what(c) for c in generation.result()] == [what(c) for c in alone[number]], requests[number]
    assert not engine.statistics()["drafter_failed"]
    if keeper is not None:
        assert not engine.statistics()["cache_failed"]
        keeper.clear()
