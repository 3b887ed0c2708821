"""What `Engine.submit` returns: a running request, read by any thread or event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import attrs

from kinetic_core.engine.request import Chunk, Completion, GenerationRequest, TokenLogprob
from kinetic_core.errors import Cancelled, KineticError

if TYPE_CHECKING:
    import asyncio

_POLL_S = 1.0
"""A blocked reader wakes this often, so that an interrupt from the keyboard reaches it on every system."""


class Generation:
    """The chunks of one request as they come. Read it once, by `for`, by `async for`, or by `result`.

    ::

        with engine.submit(request) as generation:
            for chunk in generation:
                print(chunk.text, end="")

    Leaving the `with` block early cancels. An error of the request is raised to the reader after the chunks that came
    before it. A cancelled request ends with chunks whose finish_reason is "cancelled".
    """

    def __init__(self, request: GenerationRequest, on_cancel: Callable[[Generation], None]) -> None:
        self.request = request
        self._on_cancel = on_cancel
        self._ready = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._ended = False
        self._cancelled = False
        self._error: KineticError | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # for the reader

    @property
    def cancelled(self) -> bool:
        """Was `cancel` called before the request ended?"""
        return self._cancelled

    @property
    def ended(self) -> bool:
        """Has the engine finished with this request? (Chunks may still be unread.)"""
        return self._ended

    def cancel(self) -> None:
        """Stop the work within one batch. From any thread, at any time, as often as one likes."""
        with self._ready:
            if self._ended or self._cancelled:
                return
            self._cancelled = True
        self._on_cancel(self)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._ready:
            while not self._chunks and not self._ended:
                self._ready.wait(_POLL_S)
            return self._take(StopIteration)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            with self._ready:
                if self._chunks or self._ended:
                    return self._take(StopAsyncIteration)
                import asyncio  # brings in sockets and TLS, which a command that answers once never needs

                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, future)
            try:
                await future
            finally:
                with self._ready:
                    self._waiter = None

    def _take(self, end: type[StopIteration] | type[StopAsyncIteration]) -> Chunk:
        if self._chunks:
            return self._chunks.popleft()
        if self._error is not None:
            raise self._error
        raise end

    def result(self) -> list[Completion]:
        """Wait for the end; the choices in order of their index. Raises the request's error."""
        return collect(list(self), self.request.n)

    async def result_async(self) -> list[Completion]:
        """`result` for an event loop."""
        return collect([chunk async for chunk in self], self.request.n)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    # for the engine

    def push(self, chunk: Chunk) -> None:
        """Give a chunk to the reader."""
        with self._ready:
            self._chunks.append(chunk)
            self._wake()

    def end(self, error: KineticError | None = None) -> None:
        """No more chunks; `error` is raised to the reader."""
        with self._ready:
            self._ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        self._ready.notify_all()
        if self._waiter is None:
            return
        loop, future = self._waiter
        self._waiter = None
        try:
            loop.call_soon_threadsafe(_resolve, future)
        except RuntimeError:  # the loop was closed: nobody will read this
            if not self._ended:
                self._cancelled = True
                self._on_cancel(self)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@attrs.define
class _Parts:
    """What is known of one choice while its chunks are put together."""

    text: list[str] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    last: Chunk | None = None


def collect(chunks: list[Chunk], n: int) -> list[Completion]:
    """The chunks of a request with `n` choices, put together. Raises Cancelled when a choice has no last chunk."""
    choices = [_Parts() for _ in range(n)]
    for chunk in chunks:
        parts = choices[chunk.index]
        parts.text.append(chunk.text)
        parts.token_ids.extend(chunk.token_ids)
        parts.logprobs.extend(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            parts.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            parts.last = chunk
    completions = []
    for index, parts in enumerate(choices):
        last = parts.last
        if last is None or last.finish_reason is None or last.seed is None or not last.usage or not last.timings:
            raise Cancelled(f"choice {index} did not end")
        completions.append(
            Completion(
                index=index,
                text="".join(parts.text),
                token_ids=tuple(parts.token_ids),
                finish_reason=last.finish_reason,
                seed=last.seed,
                usage=last.usage,
                timings=last.timings,
                logprobs=tuple(parts.logprobs),
                prompt_logprobs=parts.prompt_logprobs,
            )
        )
    return completions
