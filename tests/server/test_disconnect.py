"""A client that leaves: its work stops within one batch, and nobody else notices."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.support import Gate, Running, Slow, tiny_model, wait_until

NO_END = {"257": -100, "259": -100}
OTHER = {"prompt": "Somebody else", "seed": 5, "max_tokens": 25, "logprobs": 3, "logit_bias": NO_END}


class Leaver:
    """A client on a bare socket, which can leave whenever it likes."""

    def __init__(self, running: Running, body: dict[str, Any], route: str = "/v1/completions") -> None:
        host, port = running.server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        data = json.dumps(body).encode()
        head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)

    def read_until(self, count: int) -> None:
        """Read until `count` events have come."""
        got = b""
        while got.count(b"data: ") < count:
            part = self._socket.recv(65536)
            assert part, "the server ended the stream"
            got += part

    def leave(self) -> None:
        self._socket.close()


def _slow(make_server, **sizes: Any) -> Running:
    return make_server(tiny_model(Slow, **sizes))


def _rows(running: Running) -> int:
    statistics = running.model.engine.statistics()
    return statistics["prompt_rows"] + statistics["answer_rows"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_s4_the_client_leaves_during_a_long_prompt(make_server, stream: bool, n: int):
    running = _slow(make_server, max_rows=32)
    leaver = Leaver(running, {"prompt": "x" * 1500, "stream": stream, "n": n})
    wait_until(lambda: _rows(running) >= 64)
    leaver.leave()
    running.wait_idle()
    assert 64 <= _rows(running) < 1000
    assert running.model.engine.statistics()["cancelled"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_s4_the_client_leaves_amid_the_answer(make_server, stream: bool):
    running = _slow(make_server)
    leaver = Leaver(running, {"prompt": "x", "stream": stream, "max_tokens": 1500, "logit_bias": NO_END})
    if stream:
        leaver.read_until(3)
    wait_until(lambda: _rows(running) >= 5)
    leaver.leave()
    running.wait_idle()
    assert _rows(running) < 200
    assert running.model.engine.statistics()["cancelled"] == 1


def test_s4_the_client_of_several_prompts_leaves(make_server):
    running = _slow(make_server)
    body = {"prompt": ["x", "y", "z"], "stream": True, "max_tokens": 600, "logit_bias": NO_END}
    leaver = Leaver(running, body)
    leaver.read_until(4)
    leaver.leave()
    running.wait_idle()
    assert running.model.engine.statistics()["cancelled"] == 3


def test_s4_the_client_leaves_while_queued(make_server):
    gates: list[Gate] = []

    def gate(executable):
        gates.append(Gate(executable))
        return gates[0]

    running = make_server(tiny_model(gate, max_sequences=1))
    statistics = running.model.engine.statistics
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(running.complete, **OTHER)
        wait_until(lambda: statistics()["open_requests"] == 1)
        leavers = [Leaver(running, {"prompt": "queued", "stream": stream}) for stream in (False, True)]
        wait_until(lambda: statistics()["open_requests"] == 3)
        for leaver in leavers:
            leaver.leave()
        wait_until(lambda: running.server.in_flight == 1)
        gates[0].opened.set()
        answer = first.result().json()
    running.wait_idle()
    assert statistics()["cancelled"] == 2
    assert answer["choices"] == running.complete(**OTHER).json()["choices"]


def test_s4_others_are_unaffected_bit_for_bit(make_server):
    running = _slow(make_server)
    solo = running.complete(**OTHER).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(running.complete, **OTHER)
        for turn in range(3):
            body = {"prompt": "leaves " * 30 * (turn + 1), "stream": True, "max_tokens": 500, "logit_bias": NO_END}
            leaver = Leaver(running, body)
            if turn:
                leaver.read_until(turn)
            leaver.leave()
        assert other.result().json()["choices"] == solo
    running.wait_idle()


def test_s4_the_client_leaves_before_its_body_is_whole(make_server):
    running = make_server()
    host, port = running.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        wait_until(lambda: running.server.in_flight == 1)
    wait_until(lambda: running.server.in_flight == 0)
    assert running.model.engine.statistics()["requests"] == 0


def test_s4_the_client_leaves_while_its_prompt_is_prepared(make_server):
    class Held:
        """A template whose rendering takes until the test says so."""

        def __init__(self) -> None:
            from threading import Event

            self.begun, self.go_on = Event(), Event()

        def start(self) -> None:
            pass

        def encode(self, *args: object, **variables: object) -> list[int]:
            self.begun.set()
            assert self.go_on.wait(20)
            return [65]

    model = tiny_model()
    held = model.template = Held()
    running = make_server(model, prepare_threads=1)
    leaver = Leaver(running, {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")
    assert held.begun.wait(20)
    leaver.leave()
    wait_until(lambda: running.server.in_flight == 0)
    held.go_on.set()
    assert running.complete().status_code == 200
    assert model.engine.statistics()["requests"] == 1
