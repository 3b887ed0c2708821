"""One log line per request: what was asked, how it ended, how long it took. Never what was said."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("kinetic.server")

CLIENT_GONE_STATUS = 499
_NOTES = "kinetic.notes"
_REQUEST_ID = "kinetic.request_id"


def note(scope: Scope, **values: Any) -> None:
    """Add `name=value` to the request's line."""
    scope.setdefault(_NOTES, {}).update(values)


def request_id(scope: Scope) -> str | None:
    """The request's X-Request-Id; None outside of `RequestLog`."""
    found: str | None = scope.get(_REQUEST_ID)
    return found


class RequestLog:
    """ASGI middleware that gives each request an id (header X-Request-Id) and logs its line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes: dict[str, Any] = scope.setdefault(_NOTES, {})
        own_id = scope[_REQUEST_ID] = f"req-{uuid.uuid4().hex[:16]}"
        status = CLIENT_GONE_STATUS  # unless an answer is begun

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = own_id
            await send(message)

        start = time.perf_counter()
        try:
            await self._app(scope, receive, send_noted)
        finally:
            # The path is the client's: quoted, so that it cannot forge a line, and cut.
            path = quote(scope["path"], safe="/")[:200]
            details = "".join(f" {name}={value}" for name, value in notes.items())
            ms = (time.perf_counter() - start) * 1e3
            log.info("%s %s %s %d %.0f ms%s", own_id, scope["method"], path, status, ms, details)
