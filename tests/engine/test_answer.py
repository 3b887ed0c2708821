from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from conftest import TinyModel

from kinetic_core.engine.answer import AnswerText
from kinetic_core.engine.request import TokenLogprob


def feed(model: TinyModel, tokens: Iterable[int], stops: Sequence[str]) -> tuple[str, list[int], bool, list[str]]:
    """(text, tokens shown, stopped, the pieces); the tiny vocabulary's first 256 ids are the bytes."""
    answer = AnswerText(model.tokenizer, stops)
    pieces, shown, n_logprobs = [], [], 0
    stopped = False
    for token in tokens:
        stopped = answer.push(token, TokenLogprob(token, bytes([token % 256]), -1.0))
        text, ids, logprobs = answer.take()
        pieces.append(text)
        shown.extend(ids)
        n_logprobs += len(logprobs)
        assert [entry.token_id for entry in logprobs] == list(ids)
        if stopped:
            break
    stopped = answer.finish() or stopped
    text, ids, logprobs = answer.take()
    pieces.append(text)
    shown.extend(ids)
    assert n_logprobs + len(logprobs) == len(shown)
    return "".join(pieces), shown, stopped, pieces


def test_without_stops_every_token_is_shown_at_once(predictable: TinyModel) -> None:
    text, shown, stopped, pieces = feed(predictable, "a😀b".encode(), [])
    assert (text, stopped) == ("a😀b", False)
    assert pieces == ["a", "", "", "", "😀", "b", ""]
    assert shown == list("a😀b".encode())


def test_s3_a_stop_of_one_character_split_over_two_tokens(predictable: TinyModel) -> None:
    text, shown, stopped, _ = feed(predictable, "caféteria".encode(), ["é"])
    assert (text, stopped, shown) == ("caf", True, list(b"caf"))


def test_s3_a_stop_inside_an_emoji_of_several_characters(predictable: TinyModel) -> None:
    family = "👨‍👩‍👧"
    text, shown, stopped, _ = feed(predictable, f"x{family}y".encode(), ["\u200d"])
    assert (text, stopped) == ("x👨", True)
    assert shown == list("x👨".encode())


@pytest.mark.parametrize("stops", [["END", "ENDING"], ["ENDING", "END"]])
def test_s3_one_stop_is_the_beginning_of_another(predictable: TinyModel, stops: list[str]) -> None:
    text, shown, stopped, _ = feed(predictable, b"abENDING", stops)
    assert (text, stopped, shown) == ("ab", True, list(b"ab"))


def test_s3_a_stop_that_never_completes_is_flushed(predictable: TinyModel) -> None:
    text, shown, stopped, pieces = feed(predictable, b"abSTO", ["STOP"])
    assert (text, stopped, shown) == ("abSTO", False, list(b"abSTO"))
    assert pieces == ["a", "b", "", "", "", "STO"]
    text, shown, stopped, pieces = feed(predictable, b"aSTx", ["STOP"])
    assert (text, shown) == ("aSTx", list(b"aSTx"))
    assert pieces == ["a", "", "", "STx", ""]


def test_s10_nothing_of_a_stop_is_shown(predictable: TinyModel) -> None:
    assert feed(predictable, b"STOP", ["STOP"])[:3] == ("", [], True)


def test_an_unfinished_character_ends_as_one_replacement(predictable: TinyModel) -> None:
    text, shown, stopped, pieces = feed(predictable, [0x61, 0xE5, 0xA5], [])
    assert (text, stopped, shown) == ("a\ufffd", False, [0x61, 0xE5, 0xA5])
    assert pieces == ["a", "", "", "\ufffd"]
    text, shown, _, _ = feed(predictable, [0x61, 0xE5, 0xA5], ["\ufffd"])
    assert (text, shown) == ("a", [0x61])


def test_a_token_that_only_pads_the_output_layer_has_no_text(predictable: TinyModel) -> None:
    text, shown, _, _ = feed(predictable, [0x61, 100_000, 0x62], [])
    assert (text, shown) == ("ab", [0x61, 100_000, 0x62])
