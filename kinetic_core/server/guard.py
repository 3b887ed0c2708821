"""Who may talk to the server: its names (Host), the pages that may call it (Origin), and the key.

A page of any web site can make a person's browser send requests to a server on loopback, and can point a name of its
own at 127.0.0.1 (DNS rebinding) to read the answers. So a request must name this server by a loopback name, by the
address it was bound to or by a configured name, and a page's origin must be a loopback one, the server's own or a
configured one. A refused request gets no CORS headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinetic_core.server.failures import ApiError
from kinetic_core.server.settings import ServerSettings

OPEN_ROUTE = "/health"
_PREFLIGHT_AGE_S = "600"


def host_name(authority: str) -> str | None:
    """The name or address of `name[:port]`, lower case, brackets and a root's dot left out; None if malformed."""
    try:
        parts = urlsplit(f"//{authority}")
        parts.port  # noqa: B018 - raises for a port that is no number
    except ValueError:
        return None
    if "@" in authority or parts.path or parts.query or parts.fragment or not parts.hostname:
        return None
    return parts.hostname.removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether a host name can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class Guard:
    """ASGI middleware that refuses before anything of a request is read."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._hosts = frozenset(name.lower() for name in (*settings.allowed_hosts, settings.host))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)
        # Bound beyond loopback, the machine is reached by its addresses; an address cannot be rebound, only a name.
        self._any_address = not is_loopback(settings.host)
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, answer a preflight, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            origin = self._check_origin(headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if origin is not None:
            send = _with_cors(send, origin)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers)(scope, receive, send)
                return
        try:
            self._check_key(scope, headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        name = host_name(given[0]) if len(given) == 1 else None
        if name is not None and (
            "*" in self._hosts
            or is_loopback(name)
            or name in self._hosts
            or (self._any_address and _address(name) is not None)
        ):
            return
        shown = ", ".join(given)[:200] or "none"
        raise ApiError(
            403,
            f"this server is not called {shown!r}; use a loopback name, or allow the name when the server is started",
            code="host_not_allowed",
        )

    def _check_origin(self, headers: Headers) -> str | None:
        given = headers.getlist("origin")
        if not given:
            return None
        origin = given[0]
        if len(given) == 1:
            if "*" in self._origins or origin.lower() in self._origins:
                return origin
            scheme, separator, authority = origin.partition("://")
            name = host_name(authority) if separator and scheme.lower() in ("http", "https") else None
            if name is not None and (is_loopback(name) or authority.lower() == headers["host"].lower()):
                return origin
        raise ApiError(
            403,
            f"pages of {origin[:200]!r} may not call this server; allow the origin when the server is started",
            code="origin_not_allowed",
        )

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if self._key is None or scope["path"] == OPEN_ROUTE:
            return
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        # Digests have one length, so that the time tells nothing about the key's either.
        matches = hmac.compare_digest(_digest(key.encode("latin-1")), self._key)
        if not matches or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "a key is needed: send it as 'Authorization: Bearer KEY'" if not given else "the key is not right",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _with_cors(send: Send, origin: str) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_headers


def _preflight(headers: Headers) -> Response:
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": _PREFLIGHT_AGE_S,
    }
    if headers.get("access-control-request-private-network") == "true":
        # A page from the network that was configured asks for a server on this machine.
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)
