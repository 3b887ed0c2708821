"""A good body, damaged at random, never makes the server fail."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic_core.server import Server
from tests.server import support

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
        ],
        "model": support.NAME, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2,
        "seed": 1, "stop": ["x"], "logit_bias": {"65": 1}, "logprobs": True, "top_logprobs": 2, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repeat_penalty": 1.1, "metadata": {"a": [1, 2]},
    },
    "/v1/completions": {
        "prompt": ["hi", [72, 73]], "max_tokens": 2, "echo": True, "logprobs": 2, "n": 2, "seed": 1, "stop": "x",
        "temperature": 0.5, "logit_bias": {"65": 1}, "stream": False, "best_of": 2,
    },
}  # fmt: skip

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.sampled_from([2**63, -(2**63), 10**400, 1e308, "\ud800", "<|im_end|>", "", " ", "\0", "text", "user", "system"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, item in items for place in _places(item, (*path, key))]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body with up to three values replaced, removed or added, then perhaps some bytes changed."""
    route = draw(st.sampled_from(sorted(GOOD)))
    body = copy.deepcopy(GOOD[route])
    for _ in range(draw(st.integers(1, 3))):
        places = _places(body)
        if not places:
            break
        *parents, last = draw(st.sampled_from(places))
        holder = body
        for key in parents:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                holder[last] = draw(VALUES)
            case "remove":
                del holder[last]
            case _ if isinstance(holder, dict):
                holder[draw(st.text(max_size=8))] = draw(VALUES)
            case _:
                holder.append(draw(VALUES))
    data = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return route, bytes(data)


@pytest.fixture(scope="module")
def small():
    """A server whose context is short, so that an answer without a length ends soon."""
    with ExitStack() as stack:
        model = support.tiny_model(context_length=96)
        stack.callback(model.engine.close)
        server = stack.enter_context(Server(model, support.settings(max_n=4)))
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=support.WAIT_S))
        yield support.Running(model, server, http)


@pytest.mark.parametrize("route", sorted(GOOD))
def test_the_bodies_are_good(small: support.Running, route: str):
    assert small.http.post(route, json=GOOD[route]).status_code == 200


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(damaged())
def test_damaged_bodies_never_make_it_fail(small: support.Running, body: tuple[str, bytes]):
    route, data = body
    answer = small.http.post(route, content=data)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200:
        assert "error" not in answer.text
    else:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert len(answer.content) < 2000


def test_nothing_is_left_behind(small: support.Running):
    small.wait_idle()
    assert small.model.engine.statistics()["failed"] == 0
