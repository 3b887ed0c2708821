"""What server tests share: real engines on a tiny model, and executables that are slow or fail on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import httpx

from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.model import Model
from kinetic_core.engine.request import SamplingOptions
from kinetic_core.interfaces import Executable, LoadOptions
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.tiny_hybrid import TinyHybrid, tiny_hybrid_source
from kinetic_core.server import Server, ServerSettings
from kinetic_core.text import ChatTemplate, Tokenizer

NAME = "tiny-hybrid"
WAIT_S = 20.0


@attrs.define
class TinyModel:
    """What the server asks of a loaded model, with an engine whose executable a test may wrap."""

    tokenizer: Tokenizer
    template: ChatTemplate
    engine: Engine
    context_length: int
    vocab_size: int
    kernel_digest: str
    name: str = NAME
    defaults: SamplingOptions = attrs.field(factory=SamplingOptions)


def tiny_model(
    wrap: Callable[[Executable], Executable] = lambda executable: executable,
    *,
    predictable: bool = False,
    template: str | None = None,
    **sizes: Any,
) -> TinyModel:
    """A tiny hybrid on the reference backend.

    predictable: greedy answers are the alphabet; else they depend on the whole path.
    """
    source = tiny_hybrid_source(0, predictable=predictable)
    architecture = TinyHybrid(source)
    program = record_program(architecture, FullHead(), source)
    tokenizer = Tokenizer.from_metadata(source.metadata.raw)
    values: dict[str, Any] = {"n_blocks": 40, "n_slots": 8, "max_rows": 64, "max_outputs": 32, **sizes}
    values = {"context_length": min(2048, values["n_blocks"] * 256), "has_states": True, **values}
    loaded = {name: values[name] for name in ("n_blocks", "n_slots", "max_rows", "max_outputs")}
    executable = ReferenceBackend().load(program, source, LoadOptions(**loaded))
    chat_template = ChatTemplate.from_metadata(source.metadata.raw, tokenizer)
    if template is not None:
        chat_template = ChatTemplate(template, seconds=1.0, characters=100_000)
    return TinyModel(
        tokenizer,
        chat_template,
        Engine(wrap(executable), tokenizer, architecture.vocab_size, EngineOptions(**values)),
        values["context_length"],
        architecture.vocab_size,
        executable.kernel_digest,
    )


class Wrapped:
    """An executable with another `run`; everything else is the wrapped one's."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


class Slow(Wrapped):
    """Sleeps before each step and counts the rows it ran."""

    seconds = 0.02

    def __init__(self, executable: Executable) -> None:
        super().__init__(executable)
        self.rows = 0

    def run(self, batch: Any) -> None:
        time.sleep(self.seconds)
        self.rows += len(batch.token_ids)
        self._executable.run(batch)


class Failing(Wrapped):
    """Raises `error` at the steps whose number is in `at` (from 0)."""

    def __init__(self, executable: Executable, error: Exception, at: range) -> None:
        super().__init__(executable)
        self._error = error
        self._at = at
        self._steps = 0

    def run(self, batch: Any) -> None:
        self._steps += 1
        if self._steps - 1 in self._at:
            raise self._error
        self._executable.run(batch)


class Gate(Wrapped):
    """Holds every step until `opened` is set."""

    def __init__(self, executable: Executable) -> None:
        super().__init__(executable)
        self.opened = threading.Event()

    def run(self, batch: Any) -> None:
        assert self.opened.wait(WAIT_S), "the test left the gate closed"
        self._executable.run(batch)


@attrs.frozen
class Running:
    """A server with its model, and a plain HTTP client of it."""

    model: TinyModel | Model
    server: Server
    http: httpx.Client

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4, **body})

    def idle(self) -> bool:
        """Nothing runs and nothing is held."""
        statistics = self.model.engine.statistics()
        held = ("open_requests", "running_sequences", "waiting_sequences", "blocks_used", "slots_used")
        return self.server.in_flight == 0 and not any(statistics[name] for name in held)

    def wait_idle(self) -> None:
        wait_until(self.idle)


def wait_until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Wait for a condition that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def settings(**changes: Any) -> ServerSettings:
    """Settings for a server on any free port."""
    return ServerSettings(**{"port": 0, "shutdown_timeout_s": 1.0, **changes})
