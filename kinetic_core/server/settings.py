"""What a server is started with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kinetic_core.errors import RequestError, describe

MIB = 1 << 20


def _at_least(minimum: float) -> Callable[[object, attrs.Attribute[Any], float], None]:
    def check(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
        if not value >= minimum:
            raise RequestError(
                describe(
                    "a server setting is too small", where=attribute.name, got=value, expected=f"at least {minimum}"
                ),
                field=attribute.name,
            )

    return check


def _check_key(instance: object, attribute: attrs.Attribute[str | None], value: str | None) -> None:
    # A key with a space or a control character at an end could never be sent: HTTP strips header values.
    if value is not None and (not value or value != value.strip() or not value.isprintable()):
        raise RequestError(
            describe(
                "the API key cannot be sent in a header",
                got="an empty text, blanks at an end, or characters that cannot be printed",
                expected="printable characters without blanks at either end",
            ),
            field=attribute.name,
        )


@attrs.frozen
class ServerSettings:
    """How the server listens and what it lets through. Raises RequestError naming a field out of range.

    host, port: where to listen; port 0 takes any free one.
    api_key: when set, every route but /health wants `Authorization: Bearer <key>`.
    allowed_hosts: names that requests may use for this server besides loopback names and `host`; ``"*"``: any.
    allowed_origins: web origins (``"https://app.example"``) whose pages may call besides loopback ones; ``"*"``: any.
    model_name: the name that /v1/models lists; None: the model's own.
    max_body_bytes: longest body; a longer one is refused as soon as that is known.
    max_json_depth: deepest nesting of arrays and objects in a body.
    max_n: most answers of one request (prompts × n).
    max_in_flight: most requests read, prepared or answered at once; one more is refused with Retry-After.
    prepare_threads: threads that parse bodies, render templates and tokenize.
    body_timeout_s: longest wait for a body to arrive whole.
    shutdown_timeout_s: how long running answers may go on after the server was told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = attrs.field(default=None, repr=False, validator=_check_key)
    allowed_hosts: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    allowed_origins: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    model_name: str | None = None
    max_body_bytes: int = attrs.field(default=8 * MIB, validator=_at_least(1))
    max_json_depth: int = attrs.field(default=64, validator=_at_least(4))
    max_n: int = attrs.field(default=16, validator=_at_least(1))
    max_in_flight: int = attrs.field(default=256, validator=_at_least(1))
    prepare_threads: int = attrs.field(default=2, validator=_at_least(1))
    body_timeout_s: float = attrs.field(default=60.0, validator=_at_least(0.001))
    shutdown_timeout_s: float = attrs.field(default=5.0, validator=_at_least(0))
