"""Load: everything answered equals what it is alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import attrs
import openai
import pytest

import kinetic_core
from tests.server.soak import make_requests, soak
from tests.server.support import NAME, Running, tiny_model


def _soak(running: Running, count: int, seed: int) -> None:
    requests = make_requests(count, seed)
    asyncio.run(soak(running, requests, clients=12))
    running.wait_idle()  # no sequence, block or slot is held
    statistics = running.model.engine.statistics()
    answered = [asked for asked in requests if asked.answer is not None]
    left = [asked for asked in requests if asked.answer is None]
    assert all(asked.leaves_after_s is not None for asked in left)
    assert statistics["cancelled"] >= 1  # some leave before the engine hears of them
    assert statistics["failed"] == 0
    assert len(left) >= len(requests[::3]) // 2  # a fast machine may answer some of them before they leave

    async def alone() -> None:
        for asked in answered:
            again = attrs.evolve(asked, leaves_after_s=None, answer=None)
            await soak(running, [again], clients=1)
            assert again.answer == asked.answer

    asyncio.run(alone())
    running.wait_idle()


def test_soak_of_sixty(make_server):
    _soak(make_server(tiny_model(max_sequences=4)), 60, seed=1)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_soak_on_the_cpu_backend(make_server, count: int):
    with kinetic_core.load(NAME, backend="cpu", threads=2, ctx=1024, parallel=4) as model:
        _soak(make_server(model), count, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_soak_of_two_hundred(make_server, seed: int):
    # A small pool: sequences have to give way to each other.
    _soak(make_server(tiny_model(max_sequences=6, n_blocks=8)), 200, seed)


def test_eight_streams_at_once_equal_their_solo_runs(client: openai.OpenAI):
    def ask(number: int) -> list:
        stream = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Stream " + "x" * 17 * number}], seed=number,
            max_tokens=20, temperature=1.3, logprobs=True, top_logprobs=2, stream=True,
        )  # fmt: skip
        return [
            [
                choice.delta.content,
                [entry.model_dump() for entry in choice.logprobs.content] if choice.logprobs else None,
            ]
            for chunk in stream
            for choice in chunk.choices
        ]

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    assert len({json.dumps(answer) for answer in alone}) == 8
