"""What chat and text completions have in common: from a body to a whole answer or a stream of events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import attrs
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from kinetic_core.engine.request import Chunk, GenerationRequest
from kinetic_core.errors import Cancelled, RequestError
from kinetic_core.server.answers import Answer, timings_body, usage_body
from kinetic_core.server.failures import ClientGone, as_api_error, json_response, to_json
from kinetic_core.server.fields import Fields
from kinetic_core.server.json_body import parse_object, read_body, send_failure
from kinetic_core.server.request_log import note, request_id
from kinetic_core.server.running import Workshop, events, while_connected
from kinetic_core.server.settings import ServerSettings

if TYPE_CHECKING:
    from kinetic_core.engine.generation import Generation
    from kinetic_core.server.served import ServedModel


class Writer(ABC):
    """Puts the choices of one request into an endpoint's words. Made for each request; may keep state per choice."""

    @abstractmethod
    def choice(self, answer: Answer, first: Answer) -> dict[str, Any]:
        """A whole choice; `first` is the first one of the same prompt, which alone has `prompt_logprobs`."""

    @abstractmethod
    def pieces(self, choice: int, chunk: Chunk) -> Sequence[dict[str, Any]]:
        """What a chunk adds to a choice, as the choices of one event each; none if there is nothing to show yet."""


@attrs.frozen
class Plan:
    """A checked request, ready for the engine. prompt_names: how errors call the prompts; n: choices per prompt."""

    prompt_names: tuple[str, ...]
    requests: tuple[GenerationRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    writer: Writer


class CompletionEndpoint(ABC):
    """An ASGI application for one POST route."""

    id_prefix: str
    object_name: str
    event_object_name: str

    def __init__(self, model: ServedModel, settings: ServerSettings, workshop: Workshop) -> None:
        self.model = model
        self.settings = settings
        self._workshop = workshop

    @abstractmethod
    def plan(self, fields: Fields) -> Plan:
        """Check every field of a body and make its prompts. Runs in a thread. Raises ApiError or KineticError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; nothing that goes wrong here leaves."""
        begun = False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            with self._workshop.place():
                body = await read_body(Request(scope, receive), self.settings)
                await while_connected(receive, self._answer(body, scope, receive, send_noted))
        except ClientGone:
            note(scope, finish="client-left")
        except Exception as error:
            failure = as_api_error(error)
            note(scope, error=failure.code)
            if not begun:
                await send_failure(failure, scope, receive, send)
            else:
                await _send_event(send, failure.body())
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        plan = await self._workshop.prepare(lambda: self.plan(Fields(parse_object(body, self.settings.max_json_depth))))
        with self._workshop.running() as take:
            generations: list[Generation] = []
            for name, request in zip(plan.prompt_names, plan.requests, strict=True):
                request = attrs.evolve(request, log_name=request_id(scope))
                generations.append(self._submit(request, name))
                take(generations[-1])
            answers = [Answer(index) for index in range(len(generations) * plan.n)]
            head = {
                "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
                "object": self.event_object_name if plan.stream else self.object_name,
                "created": int(time.time()),
                "model": self.model.name,
                "system_fingerprint": self.model.fingerprint,
            }
            if plan.stream:
                await self._stream(plan, generations, answers, head, send)
            else:
                whole = head | await self._whole(plan, generations, answers)
                await json_response(whole)(scope, receive, send)
            _note_counts(scope, answers, plan.n)

    def _submit(self, request: GenerationRequest, prompt_name: str) -> Generation:
        try:
            return self.model.submit(request)
        except RequestError as error:
            if error.field == "prompt":
                error.field = prompt_name
            raise

    async def _whole(self, plan: Plan, generations: Sequence[Generation], answers: Sequence[Answer]) -> dict[str, Any]:
        async with aclosing(events(generations, plan.n)) as chunks:
            async for event in chunks:
                answers[event.choice].add(event.chunk)
        _check_finished(answers)
        return {
            "choices": [plan.writer.choice(answer, answers[answer.index // plan.n * plan.n]) for answer in answers],
            "usage": usage_body(answers, plan.n),
            "seed": answers[0].seed,
            "timings": timings_body(answers),
        }

    async def _stream(
        self, plan: Plan, generations: Sequence[Generation], answers: Sequence[Answer], head: dict[str, Any], send: Send
    ) -> None:
        usage = {"usage": None} if plan.include_usage else {}
        begun = False
        async with aclosing(events(generations, plan.n)) as chunks:
            async for event in chunks:
                answers[event.choice].add_counts(event.chunk)
                if event.chunk.finish_reason == "cancelled":
                    continue
                if not begun:
                    # Only now: a request that fails before its first token still gets its own status.
                    begun = True
                    await send(_STREAM_START)
                seed = {"seed": event.chunk.seed} if event.chunk.finish_reason else {}
                for piece in plan.writer.pieces(event.choice, event.chunk):
                    await _send_event(send, head | {"choices": [piece]} | usage | seed)
        _check_finished(answers)
        if plan.include_usage:
            last = {"choices": [], "usage": usage_body(answers, plan.n), "timings": timings_body(answers)}
            await _send_event(send, head | last)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


async def _send_event(send: Send, value: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": b"data: " + to_json(value) + b"\n\n", "more_body": True})


def _check_finished(answers: Sequence[Answer]) -> None:
    # The client is still here, so it was not the client that cancelled.
    if any(answer.finish_reason in (None, "cancelled") for answer in answers):
        raise Cancelled("the engine stopped before the answer was complete")


def _note_counts(scope: Scope, answers: Sequence[Answer], n: int) -> None:
    usage = usage_body(answers, n)
    note(
        scope,
        prompt=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        completion=usage["completion_tokens"],
        finish=",".join(sorted({str(answer.finish_reason) for answer in answers})),
    )
