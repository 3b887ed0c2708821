"""Servers on loopback: one for most tests, and a maker of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

import kinetic_core
from kinetic_core.server import Server
from tests.server.support import NAME, WAIT_S, Running, TinyModel, settings, tiny_model

MakeServer = Callable[..., Running]


def _start(stack: ExitStack, model: TinyModel | kinetic_core.Model, **changes: Any) -> Running:
    stack.callback(model.engine.close)
    server = stack.enter_context(Server(model, settings(**changes)))
    http = stack.enter_context(httpx.Client(base_url=server.url, timeout=WAIT_S))
    return Running(model, server, http)


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    """A server with default settings; its model's answers depend on the whole path."""
    with ExitStack() as stack:
        yield _start(stack, tiny_model())


@pytest.fixture(scope="session")
def alphabet() -> Iterator[Running]:
    """A server over a model from `kinetic_core.load`, whose greedy answers are the alphabet and a full stop."""
    with ExitStack() as stack, kinetic_core.load(NAME, backend="reference", ctx=1024, parallel=4) as model:
        yield _start(stack, model)


@pytest.fixture
def running(shared: Running) -> Iterator[Running]:
    """`shared`, which each test must leave idle."""
    yield shared
    shared.wait_idle()


@pytest.fixture
def predictable(alphabet: Running) -> Iterator[Running]:
    """`alphabet`, which each test must leave idle."""
    yield alphabet
    alphabet.wait_idle()


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """Starts servers of a test's own; afterwards none may hold a sequence or a block."""
    with ExitStack() as stack:
        started: list[Running] = []

        def make(model: TinyModel | None = None, **changes: Any) -> Running:
            started.append(_start(stack, model or tiny_model(), **changes))
            return started[-1]

        yield make
        for server in started:
            server.wait_idle()


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def alphabet_client(predictable: Running) -> Iterator[openai.OpenAI]:
    url = predictable.server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client
