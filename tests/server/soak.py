"""Many requests of all kinds at once, some of whose clients leave at random moments."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import attrs
import httpx

from tests.server.support import WAIT_S, Running

ROUTES = ("/v1/chat/completions", "/v1/completions")


@attrs.define
class Asked:
    """One request and what came of it. answer: the choices' texts and logprobs; None when the client left."""

    route: str
    body: dict[str, Any]
    leaves_after_s: float | None
    answer: list[Any] | None = None


def make_requests(count: int, seed: int) -> list[Asked]:
    """Requests of both routes, streamed and whole, of one and several choices; every third client leaves."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        route = rng.choice(ROUTES)
        body: dict[str, Any] = {
            "seed": rng.randrange(2**53),
            "temperature": rng.choice([0, 0.8, 1.5]),
            "max_tokens": rng.randrange(1, 16),
            "stream": rng.random() < 0.6,
            "n": rng.choice([1, 1, 1, 2, 3]),
            "stop": rng.choice([None, "e", ["th", "\n"]]),
        }
        text = "".join(rng.choices("abcdefgh \n\N{GRINNING FACE}", k=rng.choice([1, 8, 60])))
        if route == ROUTES[0]:
            body |= {
                "messages": [{"role": "user", "content": text}],
                "logprobs": True,
                "top_logprobs": rng.randrange(4),
            }
        else:
            body |= {"prompt": text, "logprobs": rng.randrange(4), "echo": rng.random() < 0.3}
        leaves = number % 3 == 0
        if leaves:  # from an answer that would go on for long
            body |= {"max_tokens": 900, "stop": None, "logit_bias": {"257": -100, "259": -100}}
        requests.append(Asked(route, body, rng.uniform(0, 0.5) if leaves else None))
    return requests


async def soak(running: Running, requests: list[Asked], clients: int) -> None:
    """Send the requests, `clients` at a time, and note their answers."""
    gate = asyncio.Semaphore(clients)

    async def one(asked: Asked) -> None:
        # A client of its own: leaving closes the connection. Certificates would take long to load, for nothing.
        async with gate, httpx.AsyncClient(base_url=running.server.url, timeout=WAIT_S * 3, verify=False) as client:
            try:
                async with asyncio.timeout(asked.leaves_after_s):
                    asked.answer = await _answer(client, asked)
            except TimeoutError:
                pass

    await asyncio.gather(*map(one, requests))


async def _answer(client: httpx.AsyncClient, asked: Asked) -> list[Any]:
    async with client.stream("POST", asked.route, json=asked.body) as response:
        assert response.status_code == 200, await response.aread()
        if not asked.body["stream"]:
            choices = json.loads(await response.aread())["choices"]
            return [_shown(choice) for choice in choices]
        parts: list[list[Any]] = [[] for _ in range(asked.body["n"])]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    parts[choice["index"]].append(choice)
        return [_joined(pieces) for pieces in parts]


def _shown(choice: dict[str, Any]) -> Any:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return [text, choice["finish_reason"], _tokens(choice["logprobs"])]


def _joined(pieces: list[dict[str, Any]]) -> Any:
    text = "".join(piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces)
    tokens = [token for piece in pieces if piece["logprobs"] for token in _tokens(piece["logprobs"])]
    return [text, pieces[-1]["finish_reason"], tokens]


def _tokens(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return logprobs["content"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(token) for token in zip(*(logprobs[name] for name in names), strict=True)]
