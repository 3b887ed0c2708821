"""Who may talk to the server: host names, origins, keys, and how much a body may hold."""

from __future__ import annotations

import asyncio
import hmac
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import openai
import pytest

from kinetic_core.errors import RequestError
from kinetic_core.server import Server, ServerSettings, create_app
from kinetic_core.server.guard import host_name, is_loopback
from tests.server.support import NAME, Running

KEY = "sk-a secret é"
ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/" + NAME), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("GET", "/"), ("GET", "/docs"), ("GET", "/v1/unknown"), ("DELETE", "/v1/models"), ("GET", "/health/"),
    ("GET", "/health%20"), ("GET", "/HEALTH"), ("GET", "//health"), ("OPTIONS", "/v1/models"),
    ("GET", "/health/../v1/models"),
]  # fmt: skip


def _ask(app: Any, method: str, path: str, headers: list[tuple[str, str]], host: str = "127.0.0.1") -> httpx.Response:
    """One request straight to the application: header values arrive as they are, nothing is stripped on the way."""

    async def ask() -> httpx.Response:
        sent: list[dict[str, Any]] = []
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"host", host.encode()), *((a.lower().encode(), b.encode("latin-1")) for a, b in headers)],
        }  # fmt: skip

        bodies = [b"{}"]

        async def receive() -> dict[str, Any]:
            if not bodies:
                await asyncio.Event().wait()  # the client stays
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=body)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def locked(shared: Running) -> Any:
    return create_app(shared.model, ServerSettings(api_key=KEY))


def _bearer(key: str) -> str:
    return "Bearer " + key.encode().decode("latin-1")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_s7_every_route_but_health_wants_the_key(locked: Any, method: str, path: str):
    wrong = [
        [], [("Authorization", "")], [("Authorization", "Bearer")], [("Authorization", "Bearer ")],
        [("Authorization", _bearer(KEY) + " ")], [("Authorization", _bearer(" " + KEY))],
        [("Authorization", _bearer(KEY[:-1]))], [("Authorization", _bearer(KEY + "x"))],
        [("Authorization", _bearer(KEY.upper()))], [("Authorization", _bearer(KEY).replace("Bearer", "Basic"))],
        [("Authorization", _bearer(KEY).replace("Bearer ", ""))], [("X-Api-Key", "x")],
        [("Authorization", _bearer(KEY)), ("Authorization", _bearer("x"))],
    ]  # fmt: skip
    for headers in wrong:
        answer = _ask(locked, method, path, headers)
        assert answer.status_code == 401, headers
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert KEY not in answer.text
    for scheme in ("Bearer", "bearer"):
        answer = _ask(locked, method, path, [("Authorization", _bearer(KEY).replace("Bearer", scheme))])
        assert answer.status_code in (200, 400, 404, 405)


def test_s7_health_is_open(locked: Any):
    assert _ask(locked, "GET", "/health", []).status_code == 200
    assert _ask(locked, "POST", "/health", []).status_code == 405


def test_s7_the_key_is_compared_in_constant_time(shared: Running, monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def noting(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    app = create_app(shared.model, ServerSettings(api_key="sk-1"))
    for header in ("Bearer x", "Bearer " + "y" * 99, "Basic sk-1", "", "Bearer sk-1"):
        _ask(app, "GET", "/v1/models", [("Authorization", header)])
    assert compared == [(32, 32)] * 5


def test_a_key_through_the_client(make_server):
    running = make_server(api_key="sk-1")
    client = openai.OpenAI(base_url=running.server.url + "/v1", api_key="sk-1", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=running.server.url + "/v1", api_key="sk-2", max_retries=0).models.list()
    assert running.http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("key", ["", " x", "x ", "a\nb", "\t"])
def test_keys_that_could_never_be_sent(key: str):
    with pytest.raises(RequestError, match="API key"):
        ServerSettings(api_key=key)
    assert "sk-1" not in repr(ServerSettings(api_key="sk-1"))


GOOD_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1",
    "127.0.0.1:9",
    "127.9.9.9",
    "[::1]:80",
    "[::1]",
    "a.localhost",
]
BAD_HOSTS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example#localhost",
    "localhost@evil.example", "evil.example/localhost", "192.168.1.5", "[::2]", "", "localhost:port", "localhost:1:2",
    "[::1",     "evillocalhost", "0x7f.1", "2130706433",
]  # fmt: skip


def test_s6_hosts(shared: Running):
    app = create_app(shared.model)
    for host in GOOD_HOSTS:
        assert _ask(app, "GET", "/v1/models", [], host).status_code == 200, host
    for host in BAD_HOSTS:
        for path in ("/v1/models", "/health", "/unknown"):
            answer = _ask(app, "GET", path, [], host)
            assert answer.status_code == 403, host
            assert answer.json()["error"]["code"] == "host_not_allowed"
            assert not any(name.startswith("access-control") for name in answer.headers)
    assert _ask(app, "GET", "/v1/models", [("Host", "evil.example")]).status_code == 403


def test_s6_host_over_the_wire(running: Running):
    answer = running.http.get("/v1/models", headers={"Host": "evil.example:8000"})
    assert answer.status_code == 403
    assert running.http.get("/v1/models", headers={"Host": "localhost:8000"}).status_code == 200


def test_configured_hosts(shared: Running):
    app = create_app(shared.model, ServerSettings(allowed_hosts=("Box.lan",)))
    assert _ask(app, "GET", "/v1/models", [], "box.lan:80").status_code == 200
    assert _ask(app, "GET", "/v1/models", [], "other.lan").status_code == 403
    any_name = create_app(shared.model, ServerSettings(allowed_hosts=("*",)))
    assert _ask(any_name, "GET", "/v1/models", [], "other.lan").status_code == 200
    # Bound to every address: addresses cannot be rebound, names can.
    everywhere = create_app(shared.model, ServerSettings(host="0.0.0.0"))
    assert _ask(everywhere, "GET", "/v1/models", [], "192.168.1.5:8080").status_code == 200
    assert _ask(everywhere, "GET", "/v1/models", [], "evil.example").status_code == 403


FOREIGN = [
    "https://evil.example", "null", "", "http://localhost.evil.example", "file://", "http://localhost@evil.example",
    "https://evil.example:8080", "chrome-extension://localhost", "localhost", "http://127.0.0.1.evil.example",
    "http://evil.example/localhost",
]  # fmt: skip
OWN = ["http://localhost:3000", "http://127.0.0.1", "https://localhost", "http://[::1]:5173"]


def test_s6_foreign_origins_get_no_cors_headers(shared: Running):
    app = create_app(shared.model)
    preflight = [("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "content-type")]
    for origin in FOREIGN:
        for method, extra in (("GET", []), ("POST", []), ("OPTIONS", preflight)):
            answer = _ask(app, method, "/v1/models", [("Origin", origin), *extra])
            assert answer.status_code == 403, origin
            assert answer.json()["error"]["code"] == "origin_not_allowed"
            assert not any(name.startswith("access-control") for name in answer.headers)
    two = [("Origin", "http://localhost"), ("Origin", "https://evil.example")]
    assert _ask(app, "GET", "/v1/models", two).status_code == 403


def test_s6_loopback_origins_work(shared: Running):
    app = create_app(shared.model, ServerSettings(api_key="sk-1"))
    for origin in OWN:
        preflight = [
            ("Origin", origin), ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "authorization, content-type"),
        ]  # fmt: skip
        answer = _ask(app, "OPTIONS", "/v1/chat/completions", preflight)  # browsers send no key with it
        assert answer.status_code == 204
        assert answer.headers["Access-Control-Allow-Origin"] == origin
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        assert "Access-Control-Allow-Credentials" not in answer.headers
        assert "Access-Control-Allow-Private-Network" not in answer.headers
        private = _ask(app, "OPTIONS", "/v1/models", [*preflight, ("Access-Control-Request-Private-Network", "true")])
        assert private.headers["Access-Control-Allow-Private-Network"] == "true"
        asked = [("Origin", origin), ("Authorization", "Bearer sk-1")]
        answer = _ask(app, "GET", "/v1/models", asked)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == origin
        assert "Origin" in answer.headers["Vary"]
        refused = _ask(app, "GET", "/v1/models", [("Origin", origin)])
        assert refused.status_code == 401  # which the page may read
        assert refused.headers["Access-Control-Allow-Origin"] == origin


def test_configured_and_own_origins(shared: Running):
    app = create_app(
        shared.model, ServerSettings(allowed_origins=("https://App.example/",), allowed_hosts=("box.lan",))
    )
    assert _ask(app, "GET", "/v1/models", [("Origin", "https://app.example")]).status_code == 200
    assert _ask(app, "GET", "/v1/models", [("Origin", "https://app.example:444")]).status_code == 403
    assert _ask(app, "GET", "/v1/models", [("Origin", "http://box.lan:80")], "box.lan:80").status_code == 200
    assert _ask(app, "GET", "/v1/models", [("Origin", "http://box.lan:81")], "box.lan:80").status_code == 403
    every = create_app(shared.model, ServerSettings(allowed_origins=("*",)))
    assert _ask(every, "GET", "/v1/models", [("Origin", "https://evil.example")]).status_code == 200


@pytest.mark.parametrize(
    ("authority", "name"),
    [("A.b:1", "a.b"), ("[::1]:5", "::1"), ("x.", "x"), ("x:y", None), ("a@b", None), ("a/b", None), ("", None)],
)
def test_host_names(authority: str, name: str | None):
    assert host_name(authority) == name


def test_loopback_names():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.255.0.1", "::1", "x.localhost"]))
    assert not any(map(is_loopback, ["localhost.x", "128.0.0.1", "::2", "0.0.0.0", "", "xlocalhost"]))


def test_unknown_routes_and_methods_have_error_bodies(running: Running):
    answer = running.http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert "/v1/nothing" in answer.json()["error"]["message"]
    answer = running.http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert running.http.get("/v1/models/").status_code == 404


def test_models(running: Running, client: openai.OpenAI):
    models = list(client.models.list())
    assert [(model.id, model.object, model.owned_by) for model in models] == [(NAME, "model", "kinetic")]
    assert client.models.retrieve(NAME) == models[0]
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("owner/other")
    body = running.http.get("/v1/models").json()
    assert body["object"] == "list"
    assert body["data"][0]["context_length"] == running.model.context_length


def test_a_name_with_a_slash(make_server):
    running = make_server(model_name="hf:owner/repo")
    assert running.http.get("/v1/models/hf:owner/repo").json()["id"] == "hf:owner/repo"
    assert running.chat(model="hf:owner/repo", max_tokens=1).json()["model"] == "hf:owner/repo"
    assert running.chat(model=NAME, max_tokens=1).status_code == 404


def test_s8_a_huge_body_is_refused_at_once(make_server):
    running = make_server(max_body_bytes=100_000)
    piece = b" " * 65536

    def pieces():
        for _ in range(1600):  # 100 MB
            yield piece

    begun = time.monotonic()
    declared = _send_raw(running, b"Content-Length: 104857600\r\n\r\n" + piece)
    chunked = _send_raw(running, b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + piece + b"\r\n") * 3)
    huge = _send_raw(running, b"Content-Length: 99999999999999999999\r\n\r\n")
    for answer in (declared, chunked, huge):
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
        assert b'"code":"body_too_large"' in answer
    for content in (piece * 1600, pieces()):
        answer = running.http.post("/v1/completions", content=content)
        assert answer.status_code == 413
    assert time.monotonic() - begun < 10
    just_fits = b'{"prompt": "hi", "max_tokens": 0' + b" " * (100_000 - 33) + b"}"
    assert len(just_fits) == 100_000
    assert running.http.post("/v1/completions", content=just_fits).status_code == 200
    assert running.http.post("/v1/completions", content=just_fits + b" ").status_code == 413


def _send_raw(running: Running, rest: bytes) -> bytes:
    """The answer to a POST whose body is never finished."""
    host, port = running.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + rest)
        begun = time.monotonic()
        answer = connection.recv(65536)
        assert time.monotonic() - begun < 0.8
        while part := connection.recv(65536):
            answer += part
    return answer


def test_a_body_that_does_not_arrive(make_server):
    running = make_server(body_timeout_s=0.2)
    answer = _send_raw(running, b'Content-Length: 100\r\n\r\n{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize(
    "field", ["max_body_bytes", "max_n", "max_in_flight", "prepare_threads", "body_timeout_s", "max_json_depth"]
)
def test_settings_out_of_range(field: str):
    with pytest.raises(RequestError, match=field):
        ServerSettings(**{field: 0})


def test_importing_the_server_needs_neither_uvicorn_nor_numba():
    script = "import sys, kinetic_core.server; print([name for name in ('uvicorn', 'numba') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_small_answers_are_not_held_back(running: Running):
    """With Nagle's algorithm on, an answer's body would wait 40 ms for the acknowledgement of its head."""
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        running.http.get("/health")
        seconds.append(time.perf_counter() - begun)
    assert sorted(seconds)[10] < 0.035


@pytest.mark.parametrize("port", [-1, 65536, 10**20])
def test_ports_that_are_none(shared: Running, port: int):
    with pytest.raises(RequestError, match="cannot listen"):
        Server(shared.model, ServerSettings(port=port)).start()


def test_an_address_that_is_taken(shared: Running):
    port = int(shared.server.url.rpartition(":")[2])
    with pytest.raises(RequestError, match="cannot listen") as caught:
        Server(shared.model, ServerSettings(port=port)).start()
    assert caught.value.field == "port"
