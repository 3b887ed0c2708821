"""Refuses, by the name of the field, what a request may not ask for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kinetic_core.engine.counter_rng import SEED_LIMIT
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.errors import ContextLengthError, RequestError, describe, shown

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
"""Least and greatest value, both allowed, except that top_p must be above 0."""

_OF = {"prompt": "the prompt", "forced_ids": "forced_ids"}

MAX_TOP_K = 1_000_000
"""A top_k above the vocabulary counts as the whole vocabulary, up to this."""
MAX_BIAS = 1000.0
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000


def validate_request(request: GenerationRequest, vocab_size: int, context_length: int) -> GenerationRequest:
    """The request with every number in its own type and empty stops left out.

    Raises RequestError, whose `field` is the option at fault; ContextLengthError for a prompt that does not fit.
    """
    prompt_ids = _tokens("prompt", request.prompt_ids, vocab_size)
    if not prompt_ids:
        raise _wrong("prompt", "no tokens", "at least one token")
    forced_ids = _tokens("forced_ids", request.forced_ids, vocab_size)
    max_tokens = request.max_tokens
    if forced_ids and max_tokens is None:
        max_tokens = len(forced_ids)
    if max_tokens is not None:
        max_tokens = _integer("max_tokens", max_tokens, 0, 2**31 - 1)
    n = _integer("n", request.n, 1, MAX_CHOICES)
    # The last token of an answer never goes through the model, but it must have a position of its own.
    if len(prompt_ids) > context_length - (max_tokens != 0):
        raise ContextLengthError(len(prompt_ids), context_length)
    if forced_ids and max_tokens is not None and max_tokens > len(forced_ids):
        raise _wrong("max_tokens", max_tokens, f"at most the {len(forced_ids)} tokens of forced_ids")
    if not isinstance(request.salt, str):
        raise _wrong("salt", request.salt, "a string")
    for name in ("ignore_end", "echo_logprobs", "draft"):
        if not isinstance(getattr(request, name), bool):
            raise _wrong(name, getattr(request, name), "true or false")
    return attrs.evolve(
        request,
        prompt_ids=prompt_ids,
        forced_ids=forced_ids,
        sampling=validate_sampling(request.sampling, vocab_size),
        max_tokens=max_tokens,
        stop=_stops(request.stop),
        n=n,
    )


def validate_sampling(options: SamplingOptions, vocab_size: int) -> SamplingOptions:
    """The options with every number in its own type. Raises RequestError naming the field."""
    numbers = {name: _number(name, getattr(options, name), *limits) for name, limits in RANGES.items()}
    if numbers["top_p"] == 0:
        raise _wrong("top_p", options.top_p, "above 0, at most 1 (1 is off)")
    seed = None if options.seed is None else _integer("seed", options.seed, 0, SEED_LIMIT - 1)
    logprobs = None if options.logprobs is None else _integer("logprobs", options.logprobs, 0, MAX_LOGPROBS)
    return SamplingOptions(
        **numbers,
        top_k=_integer("top_k", options.top_k, 0, MAX_TOP_K),
        logit_bias=_bias(options.logit_bias, vocab_size),
        seed=seed,
        logprobs=logprobs,
    )


def unknown_option(name: str, known: Iterable[str]) -> RequestError:
    """The error for an option that does not exist, with the nearest one that does."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(known)}"
    return RequestError(describe(f"unknown option {name!r}", hint=hint), field=name)


def _wrong(field: str, got: object, expected: str) -> RequestError:
    return RequestError(describe(f"{field} cannot be used", got=shown(got), expected=expected), field=field)


def _number(field: str, value: object, least: float, greatest: float) -> float:
    expected = f"a number from {least:g} to {greatest:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(field, value, expected)
    if not least <= value <= greatest:  # also refuses NaN; a huge whole number is compared without becoming a float
        raise _wrong(field, value, expected)
    return float(value)


def _integer(field: str, value: object, least: int, greatest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
        raise _wrong(field, value, f"a whole number from {least} to {greatest}")
    return value


def _tokens(field: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
        raise _wrong(field, type(value).__name__, "a list of token ids")
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                describe(
                    f"token {place} of {_OF[field]} does not exist",
                    got=shown(token),
                    expected=f"an id from 0 to {vocab_size - 1}",
                ),
                field=field,
            )
    return tuple(value)


def _stops(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    expected = f"a string, or at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters"
    if not isinstance(value, (list, tuple)) or len(value) > MAX_STOPS:
        raise _wrong("stop", value, expected)
    for stop in value:
        if not isinstance(stop, str) or len(stop) > MAX_STOP_CHARACTERS:
            raise _wrong("stop", stop, expected)
    return tuple(stop for stop in value if stop)


def _bias(value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, "a mapping from token ids to numbers")
    checked: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise _wrong("logit_bias", token, f"token ids from 0 to {vocab_size - 1}")
        checked[token] = _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    return checked
