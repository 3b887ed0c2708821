from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.engine.validate import unknown_option, validate_request
from kinetic_core.errors import ContextLengthError, RequestError

VOCAB, CONTEXT = 300, 512
PLAIN = GenerationRequest(prompt_ids=(1, 2, 3))


def refused(field: str, **changes: Any) -> None:
    sampling = {name: value for name, value in changes.items() if hasattr(SamplingOptions(), name)}
    others = {name: value for name, value in changes.items() if name not in sampling}
    request = attrs.evolve(PLAIN, sampling=SamplingOptions(**sampling), **others)
    with pytest.raises(RequestError) as caught:
        validate_request(request, VOCAB, CONTEXT)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (math.nan, math.inf, -1, "1", 1e30, 10**400, None, True)],
        *[("top_p", value) for value in (0, 1.5, -0.1, math.nan, "x")],
        *[("top_k", value) for value in (-1, 10**9, 1.5, "40", None, True)],
        *[("min_p", value) for value in (2, -0.5, math.inf)],
        *[("repeat_penalty", value) for value in (1e9, 0, -1, math.nan)],
        *[("presence_penalty", value) for value in (1e9, -1e9, math.nan)],
        *[("frequency_penalty", value) for value in (1e9, "0", math.nan)],
        *[("seed", value) for value in (-1, 2**64, 2**70, 1.0, "1", True)],
        *[("n", value) for value in (0, -1, 10**6, 1.0, None)],
        *[("max_tokens", value) for value in (-1, 1.5, "1", 2**40)],
        *[("logprobs", value) for value in (-1, 21, 1.0, True)],
        *[("stop", value) for value in (5, [None], ["x" * 1001], ["x"] * 65)],
        *[("ignore_end", value) for value in (None, 1)],
        *[("echo_logprobs", value) for value in (None, "yes")],
        *[("logit_bias", value) for value in ({99999999: 5}, {-1: 1}, {300: 1}, {"5": 1}, {5: math.nan}, {5: 1e9})],
        *[("logit_bias", value) for value in ({True: 1}, [(1, 2)], None, {5: "1"})],
    ],
)
def test_s1_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    refused(field, **{field: value})


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_too_long_to_write_out_are_refused_by_name(sign: int) -> None:
    """Python refuses to write an integer of more than 4,300 digits; the message says its size instead."""
    number = sign * 10**5000
    for field in ("temperature", "top_p", "top_k", "seed", "n", "max_tokens", "logprobs", "ignore_end", "logit_bias"):
        refused(field, **{field: number})
    for field, value in (("stop", [number]), ("logit_bias", {number: 1}), ("logit_bias", {5: number})):
        refused(field, **{field: value})
    refused("logit_bias", logit_bias=[number])
    refused("prompt", prompt_ids=(1, number))
    with pytest.raises(RequestError, match=f"got a whole number of {number.bit_length()} bits"):
        validate_request(attrs.evolve(PLAIN, max_tokens=number), VOCAB, CONTEXT)


@pytest.mark.parametrize("prompt", [(), "text", None, (1, -1), (1, 300), (1, 2.0), (True,), ("1",)])
def test_prompts_that_are_no_ids_are_refused(prompt: Any) -> None:
    refused("prompt", prompt_ids=prompt)


def test_ends_of_the_ranges_are_allowed() -> None:
    for changes in (
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0},
        {"temperature": 100, "top_k": 10**6, "top_p": 1e-9, "min_p": 1, "seed": 2**64 - 1, "logprobs": 20},
        {"logit_bias": {0: -1000, 299: 1000}, "logprobs": 0},
    ):
        request = attrs.evolve(PLAIN, sampling=SamplingOptions(**changes))  # type: ignore[arg-type]
        checked = validate_request(request, VOCAB, CONTEXT).sampling
        assert isinstance(checked.temperature, float)


def test_s2_an_empty_stop_is_ignored() -> None:
    for given, kept in ((("",), ()), ((), ()), ("", ()), (["", "a"], ("a",)), ("ab", ("ab",))):
        assert validate_request(attrs.evolve(PLAIN, stop=given), VOCAB, CONTEXT).stop == kept


def test_s5_a_prompt_longer_than_the_context_names_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"512.*512") as caught:
        validate_request(GenerationRequest((1,) * 512), VOCAB, CONTEXT)
    assert (caught.value.prompt_tokens, caught.value.context_tokens, caught.value.field) == (512, 512, "prompt")
    validate_request(GenerationRequest((1,) * 511), VOCAB, CONTEXT)
    validate_request(GenerationRequest((1,) * 512, max_tokens=0), VOCAB, CONTEXT)


def test_an_unknown_option_comes_with_a_suggestion() -> None:
    error = unknown_option("temprature", ["temperature", "top_k"])
    assert error.field == "temprature"
    assert "did you mean 'temperature'?" in str(error)
