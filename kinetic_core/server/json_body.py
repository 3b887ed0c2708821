"""A request body as JSON, read strictly (RFC 8259): bounded in length, time and depth, every text valid Unicode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections import Counter
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kinetic_core.errors import describe
from kinetic_core.server.failures import ApiError, ClientGone, InvalidField
from kinetic_core.server.settings import ServerSettings

_LINGER_S = 1.0

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_CHECKED = (str, float, dict, list)
"""What `_check_values` looks into. Whole numbers are not, so that no name is made for each of a million token ids."""


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too long, 408 when it does not arrive."""
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise _too_long(f"{declared} bytes" if len(declared) <= 18 else "a huge length", limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_long(f"more than {limit} bytes", limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            describe("the body did not arrive", got=f"{size} bytes in {settings.body_timeout_s:g} s"),
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


async def send_failure(failure: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error. Where the body was left unread, the rest is thrown away for a moment.

    To close a connection with unread bytes resets it, and the client might lose the answer that is on its way.
    """
    response = failure.response()
    if response.headers.get("connection") != "close":
        await response(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            more = True
            while more:
                message = await receive()
                more = message["type"] == "http.request" and message.get("more_body", False)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _too_long(got: str, limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413,
        describe("the body is too long", got=got, expected=f"at most {limit} bytes"),
        code="body_too_large",
        headers={"Connection": "close"},
    )


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `body`. Numbers that are not finite and lone surrogates are refused naming their field."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(
            describe("the body is not UTF-8", got=f"byte {body[error.start]:#04x} at offset {error.start}"),
            None,
            code="invalid_json",
        ) from None
    _check_depth(body, max_depth)
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except InvalidField:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidField(
            describe("the body is not JSON", got=str(error)[:200], expected="one JSON object"),
            None,
            code="invalid_json",
        ) from None
    if not isinstance(value, dict):
        raise InvalidField(
            describe("the body is not a JSON object", got=type_name(value), expected="an object"),
            None,
            code="invalid_json",
        )
    _check_values(value, "")
    return value


def type_name(value: object) -> str:
    """A value's type in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _check_depth(body: bytes, max_depth: int) -> None:
    # Before parsing: a parser of nested arrays is recursive, and its own limit is the interpreter's stack.
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    text = np.frombuffer(_STRING.sub(b"", body), np.uint8)
    opening = (text == ord("[")) | (text == ord("{"))
    closing = (text == ord("]")) | (text == ord("}"))
    depth = int(np.cumsum(opening.astype(np.int64) - closing).max(initial=0))
    if depth > max_depth:
        raise InvalidField(
            describe("the body is nested too deeply", got=depth, expected=f"at most {max_depth} arrays and objects"),
            None,
            code="invalid_json",
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise InvalidField(describe("a field is given twice", got=ascii(twice)), _shown(twice))
    return values


def _shown(name: str) -> str:
    """A field's name fit for an answer: valid Unicode, not too long."""
    return name.encode("utf-8", errors="replace").decode("utf-8")[:200]


def _check_values(value: Any, path: str) -> None:
    """Refuse what JSON texts cannot carry onwards. Recursion is bounded by the depth already checked."""
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidField(
                describe("not a finite number", where=path, got=value, expected="a number that JSON can write"), path
            )
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_text(name, path)
            if isinstance(item, _CHECKED):
                _check_values(item, f"{path}.{_shown(name)}" if path else _shown(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, _CHECKED):
                _check_values(item, f"{path}[{index}]")


def _check_text(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidField(
            describe(
                "text is not valid Unicode",
                where=path or "the body",
                got=f"a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
                expected="whole characters",
            ),
            path or None,
        ) from None
