"""Running the application with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kinetic_core.errors import RequestError, describe
from kinetic_core.server.app import create_app
from kinetic_core.server.guard import is_loopback
from kinetic_core.server.settings import ServerSettings

if TYPE_CHECKING:
    import uvicorn

    from kinetic_core.engine.model import Model

log = logging.getLogger("kinetic.server")

_BACKLOG = 128
_WAIT_S = 10.0
"""How long a cancelled request may take to end."""


def serve(model: Model, settings: ServerSettings | None = None, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then end running answers within `shutdown_timeout_s`.

    on_ready: called with the server's URL once it accepts connections.
    Raises RequestError when the address cannot be used.
    """
    settings = settings or ServerSettings()
    with _listener(settings) as listener:
        server = _uvicorn_server(model, settings)
        if on_ready is not None:
            _call_when_ready(server, lambda: on_ready(_url(settings, listener)))
        with _quiet_signals():
            server.run(sockets=[listener])


class Server:
    """The server in a thread of its own, for notebooks and tests.

    ::

        with Server(model, ServerSettings(port=0)) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    """

    def __init__(self, model: Model, settings: ServerSettings | None = None) -> None:
        self._settings = settings or ServerSettings()
        self._stack = contextlib.ExitStack()
        self._server = _uvicorn_server(model, self._settings)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="kinetic-server", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens: `http://127.0.0.1:8080`."""
        assert self._listener is not None, "the server was not started"
        return _url(self._settings, self._listener)

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        app: Any = self._server.config.app
        count: int = app.state.workshop.in_flight
        return count

    def start(self) -> None:
        """Listen and answer. Raises RequestError when the address cannot be used."""
        self._listener = self._stack.enter_context(_listener(self._settings))
        ready = threading.Event()
        _call_when_ready(self._server, ready.set)
        self._thread.start()
        while not ready.wait(0.05):
            if not self._thread.is_alive():
                raise RuntimeError("the server's thread ended while it started; the log says why")

    def stop(self) -> None:
        """End running answers within `shutdown_timeout_s`, then the thread."""
        self._server.should_exit = True
        self._thread.join(self._settings.shutdown_timeout_s + 2 * _WAIT_S)
        self._stack.close()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        assert self._listener is not None
        self._server.run(sockets=[self._listener])


@contextlib.contextmanager
def _listener(settings: ServerSettings) -> Iterator[socket.socket]:
    """A listening socket. uvicorn's own would end the process when the address is taken."""
    if not is_loopback(settings.host) and settings.api_key is None:
        log.warning("listening on %s without a key: anybody who reaches this machine can use it", settings.host)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol by name: asyncio sends small pieces at once (TCP_NODELAY) only on sockets that name it, and without
    # it every event of a stream waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise RequestError(
            describe(
                f"the server cannot listen on {settings.host}:{settings.port}",
                got=error,
                hint="choose another --port or --host",
            ),
            field="port",
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises a signal again once it has shut down; the caller still has a model to close."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{port}"


def _uvicorn_server(model: Model, settings: ServerSettings) -> uvicorn.Server:
    import uvicorn

    app = create_app(model, settings)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        lifespan="on",
        ws="none",
        server_header=False,
        # A forwarded address would only be used by the log, and anybody can write one.
        proxy_headers=False,
        # Only for what `stop` does not end: uvicorn cuts connections off.
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s + _WAIT_S),
    )
    server = uvicorn.Server(config)
    shutdown = server.shutdown

    async def shutdown_and_stop(sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(settings.shutdown_timeout_s, app.state.workshop.stop)
        try:
            await shutdown(sockets)
        finally:
            timer.cancel()

    server.shutdown = shutdown_and_stop  # type: ignore[method-assign]
    return server


def _call_when_ready(server: uvicorn.Server, ready: Callable[[], None]) -> None:
    startup = server.startup

    async def startup_then_ready(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        ready()

    server.startup = startup_then_ready  # type: ignore[method-assign]
