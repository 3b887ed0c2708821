from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_data import FAMILIES, tokenizer_of

from kinetic_core.text import StopMatcher, StreamDetokenizer, Tokenizer
from kinetic_core.text.tokenizer import CHARACTER_OF_BYTE

REPLACEMENT = "\ufffd"


def byte_tokenizer(*extra: bytes) -> Tokenizer:
    """One token per byte, at the byte's value, then `extra`."""
    tokens = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += ["".join(CHARACTER_OF_BYTE[byte] for byte in data) for data in extra]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "aa"],
        "tokenizer.ggml.merges": ["a a"],
    }
    return Tokenizer.from_metadata(metadata)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def test_x4_characters_split_over_tokens() -> None:
    tokenizer = byte_tokenizer(b"\xf0\x9f", b"\x98\x80", b"\xe5\xa5")
    assert stream(tokenizer, [256, 257]) == ["", "\U0001f600", ""]
    assert stream(tokenizer, [256, 257, 258]) == ["", "\U0001f600", "", REPLACEMENT]
    assert tokenizer.decode([256, 257, 258]) == "\U0001f600" + REPLACEMENT
    assert [list(tokenizer.token_bytes(i)) for i in (256, 257)] == [[240, 159], [152, 128]]


def test_broken_bytes_show_as_soon_as_they_are_broken() -> None:
    tokenizer = byte_tokenizer()
    assert stream(tokenizer, [0xE5, 0xA5, 0x41, 0xFF, 0x98, 0xF0]) == [
        "", "", REPLACEMENT + "A", REPLACEMENT, REPLACEMENT, "", REPLACEMENT,
    ]  # fmt: skip


def test_finish_starts_over() -> None:
    detokenizer = StreamDetokenizer(byte_tokenizer())
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.push(0x41) == "A"
    assert detokenizer.finish() == ""


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40))
@example(data="né👍".encode()[:-1])
def test_streamed_bytes_equal_unstreamed(data: bytes) -> None:
    tokenizer = byte_tokenizer()
    ids = list(data)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 1023), max_size=40), family=st.sampled_from(FAMILIES))
def test_streamed_ids_equal_unstreamed(ids: list[int], family: str) -> None:
    tokenizer = tokenizer_of(family)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What a client sees, and the stop that ended it."""
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        assert stopped == matcher.stopped
        if stopped:
            return shown, matcher.matched
    return shown + matcher.finish(), matcher.matched


def test_s3_stop_split_over_pieces() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = StreamDetokenizer(tokenizer)
    matcher = StopMatcher(["é"])
    seen = [matcher.push(detokenizer.push(byte)) for byte in "aé".encode()]
    assert seen == [("a", False), ("", False), ("", True)]
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("x E", "N", "D y", "z")] == [
        ("x ", False), ("", False), ("", True), ("", True),
    ]  # fmt: skip
    assert matcher.matched == "END"
    assert matcher.finish() == ""


def test_s3_stop_inside_an_emoji() -> None:
    # A stop that is the joiner inside an emoji of several code points.
    assert run(["\u200d"], ["a\U0001f468", "\u200d\U0001f469"]) == ("a\U0001f468", "\u200d")


def test_s3_one_stop_a_prefix_of_another() -> None:
    for stops in (["ab", "abc"], ["abc", "ab"]):
        assert run(stops, ["xa", "b", "c"]) == ("x", "ab")
        assert run(stops, ["xabc"]) == ("x", "ab")
    # The longer one begins earlier: it wins although the shorter one completes first.
    assert run(["bc", "abcd"], ["xa", "b", "c", "d"]) == ("x", "abcd")
    assert run(["bc", "abcd"], ["xa", "b", "c", "e"]) == ("xa", "bc")
    assert run(["bc", "abcd"], ["xabc"]) == ("xa", "bc")


def test_s3_a_stop_that_never_completes() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a STO") == ("a ", False)
    assert matcher.held == "STO"
    assert matcher.finish() == "STO" and not matcher.stopped
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_empty_stops_are_ignored() -> None:
    assert run(["", ""], ["a", "b"]) == ("ab", None)
    assert run(["", "b"], ["a", "b"]) == ("a", "b")
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", False)


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab", max_size=5), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_matcher_equals_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    shown, matched = run(stops, pieces)
    if found:
        first = min(start for start, _ in found)
        assert shown == text[:first]
        assert (first, matched) in found
    else:
        assert (shown, matched) == (text, None)


@settings(max_examples=200, deadline=None)
@given(stop=st.text("ab", min_size=1, max_size=5), pieces=st.lists(st.text("abc", max_size=4), max_size=8))
def test_nothing_is_held_that_cannot_become_the_stop(stop: str, pieces: list[str]) -> None:
    matcher = StopMatcher([stop])
    for piece in pieces:
        if matcher.push(piece)[1]:
            return
        assert stop.startswith(matcher.held) and matcher.held != stop


@pytest.mark.parametrize("continues", [False, True])
def test_byte_level_text_keeps_its_first_space(continues: bool) -> None:
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode(" a")
    assert tokenizer.decode(ids, continues=continues) == " a"
