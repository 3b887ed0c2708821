"""What goes wrong behind the server: every failure has a body, and the server lives."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from kinetic_core.engine.request import GenerationRequest
from kinetic_core.errors import (
    BackendError,
    Cancelled,
    CapacityError,
    ContextLengthError,
    KineticError,
    ModelError,
    NumericalError,
    RequestError,
    TemplateError,
)
from kinetic_core.server.failures import as_api_error
from tests.server.support import WAIT_S, Failing, Gate, Slow, tiny_model, wait_until


def _failing(error: Exception, at: range):
    return tiny_model(lambda executable: Failing(executable, error, at))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendError("worker 3 failed"), "backend_error"),
        (NumericalError("logit 7 is NaN"), "numerical_error"),
        (RuntimeError("broken"), "backend_error"),
        (MemoryError(), "backend_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_before_the_first_token(make_server, error: Exception, code: str, stream: bool):
    running = make_server(_failing(error, range(1)))
    answer = running.chat(stream=stream)
    assert answer.status_code == 500
    body = answer.json()["error"]
    assert (body["type"], body["code"], body["param"]) == ("server_error", code, None)
    assert running.chat(max_tokens=2, stream=stream).status_code == 200
    assert running.http.get("/health").status_code == 200


def test_an_engine_that_fails_amid_a_stream(make_server):
    running = make_server(_failing(NumericalError("logit 7 is NaN"), range(6, 7)))
    client = openai.OpenAI(base_url=running.server.url + "/v1", api_key="none", max_retries=0)
    pieces = []
    no_end = {"257": -100, "259": -100}
    stream = client.completions.create(model="tiny-hybrid", prompt="hi", max_tokens=20, stream=True, logit_bias=no_end)
    with pytest.raises(openai.APIError, match="logit 7 is NaN"):
        for chunk in stream:
            pieces.append(chunk.choices[0].text)
    assert 1 <= len(pieces) <= 6
    again = running.complete(max_tokens=20, logit_bias=no_end).json()
    assert again["usage"]["completion_tokens"] == 20


def test_a_failing_stream_ends_without_done(make_server):
    running = make_server(_failing(BackendError("x"), range(4, 5)))
    lines = [line for line in running.complete(max_tokens=20, stream=True, seed=1).text.splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "backend_error"
    assert "data: [DONE]" not in lines


def test_unexpected_exceptions_are_not_described(make_server, caplog: pytest.LogCaptureFixture):
    class Broken:
        def encode(self, *args: object, **variables: object) -> list[int]:
            raise ZeroDivisionError("a secret")

        def start(self) -> None:
            pass

    model = tiny_model()
    model.template = Broken()
    running = make_server(model)
    answer = running.chat()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "ZeroDivisionError" not in answer.text
    assert "a secret" in caplog.text
    assert running.complete().status_code == 200


def test_a_full_queue_asks_to_come_back(make_server):
    gates: list[Gate] = []

    def gate(executable):
        gates.append(Gate(executable))
        return gates[0]

    model = tiny_model(gate, max_sequences=1, max_waiting=1)
    running = make_server(model)
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(running.complete, seed=seed) for seed in range(2)]
        wait_until(lambda: model.engine.statistics()["open_requests"] == 2)
        for answer in (running.complete(), running.chat(stream=True), running.complete(prompt=["a", "b"])):
            assert answer.status_code == 503
            assert answer.headers["Retry-After"] == "1"
            assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == (
                "overloaded_error",
                "overloaded",
            )
        assert running.http.get("/health").status_code == 200
        gates[0].opened.set()
        assert [future.result().status_code for future in held] == [200, 200]
    assert running.complete().status_code == 200


def test_too_many_requests_in_flight(make_server):
    gates: list[Gate] = []

    def gate(executable):
        gates.append(Gate(executable))
        return gates[0]

    running = make_server(tiny_model(gate), max_in_flight=2)
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(running.complete) for _ in range(2)]
        wait_until(lambda: running.server.in_flight == 2)
        answer = running.complete()
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
        gates[0].opened.set()
        assert [future.result().status_code for future in held] == [200, 200]
    assert running.server.in_flight == 0


def test_an_engine_that_is_closed(make_server):
    model = tiny_model(Slow)
    running = make_server(model)
    no_end = {"257": -100, "259": -100}
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(running.complete, max_tokens=1000, logit_bias=no_end)
        stream = pool.submit(running.complete, max_tokens=1000, stream=True, logit_bias=no_end)
        wait_until(lambda: model.engine.statistics()["answer_rows"] > 4)
        model.engine.close()
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "cancelled"
        assert '"code":"cancelled"' in stream.result().text
        assert "[DONE]" not in stream.result().text
    assert running.complete().status_code == 503
    health = running.http.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "failed"})


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (ContextLengthError(10, 5), 400, "context_length_exceeded", "prompt"),
        (RequestError("x", field="seed"), 400, "invalid_value", "seed"),
        (TemplateError("x"), 400, "template_error", None),
        (CapacityError("x"), 503, "overloaded", None),
        (Cancelled("x"), 503, "cancelled", None),
        (NumericalError("x"), 500, "numerical_error", None),
        (BackendError("x"), 500, "backend_error", None),
        (ModelError("x"), 500, "internal_error", None),
        (KineticError("x"), 500, "internal_error", None),
        (ValueError("x"), 500, "internal_error", None),
    ],
)
def test_the_table_of_failures(error: Exception, status: int, code: str, param: str | None):
    failure = as_api_error(error)
    assert (failure.status, failure.code, failure.param) == (status, code, param)
    assert ("Retry-After" in failure.headers) == (status == 503)
    assert isinstance(error, ValueError) or str(error) in failure.message


ATTACKS = [
    "{{ ''.__class__.__mro__ }}",
    "{% for a in range(3000) %}" * 3 + "{% endfor %}" * 3,
    "{{ 'a' * 200000000 }}",
    "{% for a in messages %}",
    "{{ messages[7].content }}",
]


@pytest.mark.parametrize("template", ATTACKS)
def test_g12_templates_that_attack(make_server, template: str):
    running = make_server(tiny_model(template=template))
    answer = running.chat(max_tokens=1)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "template_error"
    assert "template" in answer.json()["error"]["message"]
    assert running.http.get("/health").status_code == 200
    assert running.complete().status_code == 200


SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [SYSTEM_FIRST, SYSTEM_FIRST.replace("raise_exception('", "messages.nothing('")])
def test_s9_a_system_message_that_comes_late(make_server, template: str):
    running = make_server(tiny_model(template=template))
    roles = ["user", "assistant", "system", "user"]
    answer = running.chat(messages=[{"role": role, "content": "x"} for role in roles], max_tokens=1)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[2]"
    assert "messages[2]" in error["message"]
    first = running.chat(messages=[{"role": role, "content": "x"} for role in ("system", "user")], max_tokens=1)
    assert first.status_code == 200


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ messages.nothing('never') }}"])
def test_a_template_that_fails_for_no_message_of_its_own(make_server, template: str):
    running = make_server(tiny_model(template=template))
    for roles in (["system", "user"], ["user"]):
        answer = running.chat(messages=[{"role": role, "content": "x"} for role in roles], max_tokens=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("messages")
        assert "not the first" not in answer.json()["error"]["message"]


def test_one_log_line_per_request_without_what_was_said(make_server, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "kinetic.server")
    running = make_server()
    answers = [
        running.chat(messages=[{"role": "user", "content": "a secret"}], max_tokens=3, seed=1),
        running.complete(temperature=9),
        running.http.get("/v1/%0aFORGED%20line"),
        running.http.get("/health", headers={"Host": "evil.example"}),
    ]
    wait_until(lambda: len(caplog.records) >= 4)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    for line, answer in zip(lines, answers, strict=True):
        assert line.startswith(answer.headers["X-Request-Id"] + " ")
        assert f" {answer.status_code} " in line
        assert "\n" not in line
        assert "secret" not in line
    usage = answers[0].json()["usage"]
    assert f"prompt={usage['prompt_tokens']} cached=0 completion={usage['completion_tokens']} finish=" in lines[0]
    assert "POST /v1/chat/completions 200" in lines[0]
    assert "error=invalid_value" in lines[1]
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == 4


def test_the_engines_lines_name_the_request(make_server, caplog: pytest.LogCaptureFixture):
    """One per prompt, of requests that ran; beside requests of nobody's name, which have a number."""
    caplog.set_level(logging.INFO, "kinetic.engine")
    running = make_server()
    answer = running.complete(prompt=["secret", "other"], max_tokens=3)
    refused = running.complete(temperature=9)
    running.model.engine.submit(GenerationRequest((1, 2), max_tokens=2)).result()
    wait_until(lambda: len(caplog.records) >= 3)
    *served, direct = [record.getMessage() for record in caplog.records]
    for line in served:
        assert re.fullmatch(r"(req-\w+): reused 0 of \d+ prompt tokens, last choice \w+ after \d tokens", line)
        assert line.startswith(answer.headers["X-Request-Id"] + ": ")
        assert refused.headers["X-Request-Id"] not in line
    assert direct.startswith("request 3: reused 0 of ")


SERVE = """
import kinetic_core
from kinetic_core.server import ServerSettings, serve
model = kinetic_core.load("tiny-hybrid", backend="reference", ctx=2048, parallel=2)
serve(model, ServerSettings(port=0, shutdown_timeout_s=1.0), on_ready=lambda url: print(url, flush=True))
model.close()
print("closed", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are sent in another way there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_at_a_signal_with_a_stream_running(number: signal.Signals):
    """The client is told, the model is closed, and nothing is printed."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        body = {"prompt": "A", "stream": True, "max_tokens": 1900, "logit_bias": {"66": 100}}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            threading.Timer(0.1, process.send_signal, [number]).start()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
        assert process.communicate(timeout=WAIT_S) == ("closed\n", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
