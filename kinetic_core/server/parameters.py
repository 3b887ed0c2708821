"""The fields that chat and text completions share: sampling, lengths, stop strings, streaming."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import attrs

from kinetic_core.engine.request import SamplingOptions
from kinetic_core.engine.validate import MAX_TOP_K
from kinetic_core.errors import describe
from kinetic_core.server.failures import ApiError, InvalidField
from kinetic_core.server.fields import Fields
from kinetic_core.server.json_body import type_name

if TYPE_CHECKING:
    from kinetic_core.server.served import ServedModel

MAX_TOKENS = (1 << 31) - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARACTERS = 256
MAX_LOGIT_BIAS = 100.0
MAX_SEED = (1 << 64) - 1

# A drawn seed is below 2**53: JavaScript and others read JSON numbers as float64, and the client may send it back.
_DRAWN_SEED_BITS = 53

HARMLESS_FIELDS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields about accounts and billing: accepted, and without effect on a local server."""


@attrs.frozen
class Common:
    """What both kinds of completions take, checked. Fields as in `GenerationRequest` and `SamplingOptions`."""

    sampling: SamplingOptions
    max_tokens: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    salt: str


def read_common(
    fields: Fields, model: ServedModel, *, max_n: int, default_max_tokens: int | None, logprobs: int | None
) -> Common:
    """Read the shared fields. Raises InvalidField naming the field at fault, ApiError 404 for another model."""
    _check_model(fields, model)
    stream = fields.boolean("stream", False)
    fields.accept(*HARMLESS_FIELDS)
    return Common(
        sampling=_read_sampling(fields, model, logprobs),
        max_tokens=_read_max_tokens(fields, default_max_tokens),
        stop=_read_stop(fields),
        n=fields.integer("n", 1, 1, max_n),
        stream=stream,
        include_usage=_read_stream_options(fields, stream),
        salt=_read_salt(fields),
    )


def _read_salt(fields: Fields) -> str:
    """The field `cache_salt`: what is learned from a request serves requests of the same salt only."""
    salt = fields.string("cache_salt") or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        fields.fail("cache_salt", "salt too long", got=len(salt), expected=f"at most {MAX_SALT_CHARACTERS} characters")
    return salt


def _check_model(fields: Fields, model: ServedModel) -> None:
    name = fields.string("model")
    if name is not None and name != model.name:
        raise ApiError(
            404,
            describe("no such model", got=repr(name[:200]), expected=repr(model.name), hint="leave the field out"),
            code="model_not_found",
            param="model",
        )


def _read_sampling(fields: Fields, model: ServedModel, logprobs: int | None) -> SamplingOptions:
    default = model.sampling
    return SamplingOptions(
        temperature=fields.number("temperature", default.temperature, 0, 2),
        top_k=fields.integer("top_k", default.top_k, 0, MAX_TOP_K),
        top_p=fields.number("top_p", default.top_p, 0, 1, above_minimum=True),
        min_p=fields.number("min_p", default.min_p, 0, 1),
        repeat_penalty=fields.number("repeat_penalty", default.repeat_penalty, 0.01, 2),
        presence_penalty=fields.number("presence_penalty", default.presence_penalty, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", default.frequency_penalty, -2, 2),
        logit_bias=_read_logit_bias(fields, model) or default.logit_bias,
        seed=fields.integer("seed", secrets.randbits(_DRAWN_SEED_BITS), 0, MAX_SEED),
        logprobs=logprobs,
    )


def _read_logit_bias(fields: Fields, model: ServedModel) -> dict[int, float]:
    biases = fields.object("logit_bias")
    found: dict[int, float] = {}
    for name in biases.names():
        # Decimal digits only: int() would also take "1_0", " 1" and digits of other scripts.
        known = name.isascii() and name.isdecimal() and len(name) <= 12 and int(name) < model.vocab_size
        if not known:
            fields.fail(
                "logit_bias", "no such token", got=repr(name[:40]), expected=f"ids from 0 to {model.vocab_size - 1}"
            )
        if biases.take(name) is None:
            biases.fail(name, "not a number", got="null", expected="a number from -100 to 100")
        token_id = int(name)
        if token_id in found:
            fields.fail("logit_bias", "a token is given twice", got=repr(name))
        found[token_id] = biases.number(name, 0.0, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return found


def _read_max_tokens(fields: Fields, default: int | None) -> int | None:
    old = fields.integer("max_tokens", None, 0, MAX_TOKENS)
    new = fields.integer("max_completion_tokens", None, 0, MAX_TOKENS)
    if old is not None and new is not None and old != new:
        fields.fail(
            "max_tokens", "contradicts max_completion_tokens", got=f"{old} and {new}", expected="one of the two"
        )
    if old is None and new is None:
        return default
    found: int = new if old is None else old
    return found


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    stops: list[Any] = value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        fields.fail("stop", "too many stop strings", got=len(stops), expected=f"at most {MAX_STOPS}")
    for stop in stops:
        if not isinstance(stop, str):
            fields.fail("stop", "not a string", got=type_name(stop), expected="a string or an array of strings")
        if len(stop) > MAX_STOP_CHARACTERS:
            fields.fail(
                "stop", "stop string too long", got=len(stop), expected=f"at most {MAX_STOP_CHARACTERS} characters"
            )
    # An empty stop would end every answer before it begins: it is ignored.
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def _read_stream_options(fields: Fields, stream: bool) -> bool:
    given = fields.take("stream_options") is not None
    options = fields.object("stream_options")
    include_usage = options.boolean("include_usage", False)
    options.boolean("include_obfuscation", False)
    options.finish()
    if given and not stream:
        raise InvalidField(
            describe("stream_options without stream", expected='"stream": true beside it'), "stream_options"
        )
    return include_usage
