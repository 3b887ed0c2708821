"""A request and its client: bounded places, work off the event loop, and an end when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from starlette.types import Receive

from kinetic_core.engine.request import Chunk
from kinetic_core.server.failures import ClientGone, overloaded
from kinetic_core.server.settings import ServerSettings

if TYPE_CHECKING:
    from kinetic_core.engine.generation import Generation

T = TypeVar("T")


class Workshop:
    """The bounded places of a server: requests in flight, and the threads that prepare them.

    in_flight: requests that hold a place now.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._pool = ThreadPoolExecutor(settings.prepare_threads, thread_name_prefix="kinetic-prepare")
        self._limit = settings.max_in_flight
        self.in_flight = 0
        self._generations: set[Generation] = set()
        self._stopping = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the places. Raises ApiError 503 with Retry-After when all are taken."""
        if self.in_flight >= self._limit:
            raise overloaded(f"{self._limit} requests are running already; try again")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @contextmanager
    def running(self) -> Iterator[Callable[[Generation], None]]:
        """A function that notes a request's generations; they are cancelled at the end of the block, or by `stop`.

        Whatever ends the block (an answer, a failure, the client's leaving), a finished generation ignores it.
        """
        noted: list[Generation] = []

        def take(generation: Generation) -> None:
            noted.append(generation)
            self._generations.add(generation)
            if self._stopping:
                generation.cancel()

        try:
            yield take
        finally:
            for generation in noted:
                generation.cancel()
            self._generations.difference_update(noted)

    def stop(self) -> None:
        """Cancel what runs, and what is still prepared once it begins: the server ends."""
        self._stopping = True
        for generation in self._generations:
            generation.cancel()

    async def prepare(self, work: Callable[[], T]) -> T:
        """Run `work` (parsing, templates, tokenizing) in a thread; dropped on cancellation if not yet begun."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Stop the threads; work not yet begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(watcher, task)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    if unfinished:
        await asyncio.wait(unfinished)
    for task in unfinished:
        if not task.cancelled():
            task.exception()  # taken, so that asyncio does not report it: there is nobody to tell


@attrs.frozen
class Event:
    """One chunk of one prompt's generation. choice: number among all prompts' choices."""

    choice: int
    chunk: Chunk


async def events(generations: Sequence[Generation], n: int) -> AsyncGenerator[Event, None]:
    """The chunks of several prompts' generations of `n` choices each, as they come."""
    if len(generations) == 1:
        async for chunk in generations[0]:
            yield Event(chunk.index, chunk)
        return
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    async def pump(prompt: int, generation: Generation) -> None:
        try:
            async for chunk in generation:
                queue.put_nowait(Event(prompt * n + chunk.index, chunk))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.ensure_future(pump(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(pumps)
        while running:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        await _end(*pumps)
