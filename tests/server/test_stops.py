"""Stop strings as a client sees them, whole and streamed."""

from __future__ import annotations

import json

import pytest

from tests.server.support import Running


def _forced(running: Running, answer: bytes, **body):
    """A completion that is made to answer these bytes, each at most once: greedy among falling biases."""
    assert len(set(answer)) == len(answer) <= 7
    bias = {str(byte): 100 - 7 * place for place, byte in enumerate(answer)}
    asked = {"prompt": "hi", "temperature": 0, "repeat_penalty": 2, "logit_bias": bias, "max_tokens": len(answer)}
    return _both(running, "/v1/completions", asked | body)


def _both(running: Running, route: str, body: dict) -> tuple[str, str, list[str]]:
    """(text, finish_reason, pieces), after whole and streamed answers were found to agree."""
    choice = running.http.post(route, json=body).json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    pieces, reasons = [], []
    for line in running.http.post(route, json=body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            piece = json.loads(line[6:])["choices"][0]
            pieces.append(piece["text"] if "text" in piece else piece["delta"].get("content", ""))
            reasons.append(piece["finish_reason"])
    assert "".join(pieces) == text
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
    return text, choice["finish_reason"], [piece for piece in pieces if piece]


def test_s3_a_stop_split_over_two_tokens(running: Running):
    assert _forced(running, b"a\xc3\xa9b") == ("a\xe9b", "length", ["a", "\xe9", "b"])
    assert _forced(running, b"a\xc3\xa9b", stop="\xe9") == ("a", "stop", ["a"])
    assert _forced(running, b"\xc3\xa9b", stop=["\xe9"]) == ("", "stop", [])


def test_s3_a_stop_inside_an_emoji(running: Running):
    man_joined = "\N{MAN}\N{ZERO WIDTH JOINER}".encode()
    assert _forced(running, man_joined, stop="\N{ZERO WIDTH JOINER}") == ("\N{MAN}", "stop", ["\N{MAN}"])
    grin = "\N{GRINNING FACE}"
    assert _forced(running, grin.encode() + b"b", stop="b") == (grin, "stop", [grin])


def _alphabet(running: Running, **body):
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    return _both(running, "/v1/chat/completions", chat | body)[:2]


ALPHABET = "abcdefghijklmnopqrstuvwxyz."


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["bc", "bcd"], "a", "stop"),
        (["bcd", "bc"], "a", "stop"),
        (["cd", "bcde"], "a", "stop"),
        (["bcx", "cd"], "ab", "stop"),
        ("xyz.!", ALPHABET, "stop"),
        (["abd", "bce", "zz"], ALPHABET, "stop"),
        (".", ALPHABET[:-1], "stop"),
        ("", ALPHABET, "stop"),
        (["", "de"], "abc", "stop"),
        ("e", "abcd", "stop"),
    ],
)
def test_s3_stops(predictable: Running, stop, text: str, reason: str):
    assert _alphabet(predictable, stop=stop) == (text, reason)


def test_s3_held_text_is_flushed_at_the_length(predictable: Running):
    assert _alphabet(predictable, stop="cdefgh", max_tokens=5) == ("abcde", "length")


def test_s10_the_first_token_is_the_stop(predictable: Running):
    for route, body in (
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
        ),
        ("/v1/completions", {"prompt": "\n", "logprobs": 2}),
    ):
        asked = {"temperature": 0, "stop": "a", **body}
        choice = predictable.http.post(route, json=asked).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == ""
        logprobs = choice["logprobs"]
        assert (logprobs["content"] if "content" in logprobs else logprobs["tokens"]) == []
        stream = predictable.http.post(route, json=asked | {"stream": True}).text
        pieces = [json.loads(line[6:])["choices"][0] for line in stream.splitlines() if line.startswith("data: {")]
        assert pieces[-1]["finish_reason"] == "stop"
        assert not any((piece["logprobs"] or {}).get("content") for piece in pieces)
        assert not any((piece["logprobs"] or {}).get("tokens") for piece in pieces)
