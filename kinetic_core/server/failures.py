"""Failures as OpenAI's error bodies: `{"error": {message, type, param, code}}` with a fitting status."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kinetic_core.errors import (
    BackendError,
    Cancelled,
    CapacityError,
    ContextLengthError,
    KineticError,
    NumericalError,
    RequestError,
    TemplateError,
)

log = logging.getLogger("kinetic.server")

RETRY_AFTER_S = 1

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    status: the HTTP status. code: OpenAI's or our short name of the failure. param: the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def message(self) -> str:
        """What is told to the client."""
        return str(self)

    def body(self) -> dict[str, object]:
        """The error body."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The error as a response."""
        return json_response(self.body(), self.status, self.headers)


class InvalidField(ApiError):  # noqa: N818 - reads as what it reports
    """Status 400 for one field of the body."""

    def __init__(self, message: str, param: str | None, *, code: str = "invalid_value") -> None:
        super().__init__(400, message, code=code, param=param)


class ClientGone(Exception):  # noqa: N818 - reads as the state it reports
    """The client left: there is nobody to answer."""


# The first class that fits, most derived first: (class, status, code).
_STATUS: tuple[tuple[type[KineticError], int, str], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_value"),
    (TemplateError, 400, "template_error"),
    (CapacityError, 503, "overloaded"),
    (Cancelled, 503, "cancelled"),
    (NumericalError, 500, "numerical_error"),
    (BackendError, 500, "backend_error"),
    (KineticError, 500, "internal_error"),
)


def overloaded(message: str) -> ApiError:
    """Status 503 that asks the client to come back."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})


def as_api_error(error: Exception) -> ApiError:
    """The answer that `error` gives. Unexpected exceptions are logged with their traceback and not described."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, KineticError):
        status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
        if status == 500:
            log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        return ApiError(
            status,
            str(error),
            code=code,
            param=getattr(error, "field", None),
            headers={"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None,
        )
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    log.error("unexpected failure", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says how", code="internal_error")


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for unknown routes and methods."""
    failure = as_api_error(error)
    if failure.code == "not_found":
        failure = ApiError(404, f"no such route: {request.method} {request.url.path}", code="not_found")
    elif failure.code == "method_not_allowed":
        failure = ApiError(
            405,
            f"{request.url.path} does not answer {request.method}; it answers {failure.headers.get('Allow', 'others')}",
            code="method_not_allowed",
            headers=failure.headers,
        )
    return failure.response()


def to_json(value: object) -> bytes:
    """Compact UTF-8 JSON. Raises ValueError for NaN or infinity: JSON has no such numbers."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")
