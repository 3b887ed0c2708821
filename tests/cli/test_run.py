from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from kinetic_core.cli.console import megabytes, one_line, printable
from kinetic_core.cli.run import speed_line, split_words
from kinetic_core.engine.request import Timings, Usage

TINY = ("--backend", "reference", "--temperature", "0")


def test_an_argument_and_the_standard_input_give_the_same_answer(kinetic: Any) -> None:
    first = kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "8")
    assert first.status == 0 and len(first.out) == 9 and first.err == ""
    assert kinetic("run", "-m", "tiny-hybrid", *TINY, "-n", "8", typed="hello\n").out == first.out
    assert kinetic("run", "--model", "tiny-hybrid", "hello", *TINY, "-n", "8").out == first.out


def test_json_is_everything_about_the_answer(kinetic: Any) -> None:
    answer = json.loads(kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "5", "--json", "--seed", "7").out)
    assert len(answer["token_ids"]) == 5 and answer["finish_reason"] == "length" and answer["seed"] == 7
    assert answer["usage"]["completion_tokens"] == 5 and answer["timings"]["predict_s"] > 0
    plain = kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "5").out
    assert plain == answer["text"] + "\n"


def test_raw_leaves_the_template_out(kinetic: Any) -> None:
    count = {
        raw: json.loads(kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "1", "--json", *raw).out)["usage"]
        for raw in ((), ("--raw",), ("--system", "Be kind."))
    }
    prompts = {raw: usage["prompt_tokens"] for raw, usage in count.items()}
    assert prompts["--raw",] < prompts[()] < prompts["--system", "Be kind."]
    ended = kinetic("run", "tiny-hybrid", "x", *TINY, "--raw", "--system", "y")
    assert ended.status == 2 and "--system needs the chat template" in ended.err


def test_a_seed_repeats_and_options_reach_the_sampler(kinetic: Any) -> None:
    words = ("run", "tiny-hybrid", "hello", "--backend", "reference", "-n", "20", "--temperature", "5", "--top-k", "0")
    one = kinetic(*words, "--top-p", "1", "--min-p", "0", "--seed", "1").out
    assert kinetic(*words, "--top-p", "1", "--min-p", "0", "--seed", "1").out == one
    assert kinetic(*words, "--top-p", "1", "--min-p", "0", "--seed", "2").out != one
    greedy = kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "20").out
    assert kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "20", "--repeat-penalty", "50").out != greedy
    stop = greedy[3]
    assert kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "20", "--stop", stop).out == greedy[:3] + "\n"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--min-p", "2"], "min_p"),
        (["--top-k", "-1"], "top_k"),
        (["--seed", "-1"], "seed"),
        (["--ctx", "999999"], "ctx"),
    ],
)
def test_values_out_of_range_are_named(kinetic: Any, words: list[str], field: str) -> None:
    ended = kinetic("run", "tiny-hybrid", "hello", "--backend", "reference", *words)
    assert (ended.status, ended.out) == (7, "")
    assert field in ended.err and ended.err.startswith("error: ") and ended.err.count("\n") == 1


def test_a_prompt_longer_than_the_context(kinetic: Any) -> None:
    ended = kinetic("run", "tiny-hybrid", "hello " * 20, "--raw", "--ctx", "16", *TINY)
    assert ended.status == 7 and "the context holds 16" in ended.err


def test_other_errors_have_their_own_status(kinetic: Any) -> None:
    assert kinetic("run", "no-such-model.gguf", "x", *TINY).status == 4
    ended = kinetic("run", "tiny-hybrid", "x", "--backend", "refrence")
    assert ended.status == 6 and "did you mean reference?" in ended.err
    assert kinetic("run", "tiny-hybrid", "x", *TINY, typed=None).status == 0
    assert kinetic("run", "-m", "tiny-hybrid", *TINY, typed=None).status == 2
    assert kinetic("run", "a", "b", "c").status == 2


def test_timings_go_to_the_standard_error(kinetic: Any) -> None:
    ended = kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "8", "--timings")
    assert ended.err.startswith("8 tokens, ") and ended.err.endswith(" tok/s\n")


@pytest.mark.parametrize(
    ("words", "model", "expected"),
    [
        ([], None, (None, None)),
        (["hello"], None, (None, "hello")),
        (["smollm2"], None, ("smollm2", None)),
        (["tiny-hybrid"], None, ("tiny-hybrid", None)),
        (["hf:a/b"], None, ("hf:a/b", None)),
        (["x.gguf"], None, ("x.gguf", None)),
        (["x", "y"], None, ("x", "y")),
        (["smollm2"], "m", ("m", "smollm2")),
    ],
)
def test_which_argument_is_what(words: list[str], model: str | None, expected: tuple[str, str]) -> None:
    assert split_words(words, model) == expected


def test_too_many_arguments() -> None:
    with pytest.raises(typer.BadParameter, match="quotes"):
        split_words(["a", "b"], "m")


def test_what_is_printed_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2J\x9b1m\tb\r\n\x07é") == "a[2J1m\tb\né"
    assert one_line("a\n b\x00\t c") == "a b c"
    assert [megabytes(n) for n in (5, 1500, 98_362_432, 1_055_609_536, 386_404_992)] == [
        "5 B",
        "1.5 kB",
        "98.4 MB",
        "1.06 GB",
        "386 MB",
    ]


def test_the_line_about_speed() -> None:
    plain = Timings(queue_s=0.0, prompt_s=1.0, predict_s=2.0, steps=11)
    assert speed_line(Usage(3, 1), plain) == "1 token"
    assert speed_line(Usage(3, 11), plain) == "11 tokens, 5.0 tok/s"
    drafted = Timings(queue_s=0.0, prompt_s=1.0, predict_s=2.0, drafted=12, accepted=6, steps=5)
    assert speed_line(Usage(3, 11), drafted) == "11 tokens, 5.0 tok/s, 1.20 guessed a step"


def test_what_was_converted_is_said_once(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kinetic_core.reference.backend import ReferenceBackend

    executable = ReferenceBackend.load

    def load(*arguments: Any) -> Any:
        loaded = executable(*arguments)
        monkeypatch.setattr(loaded, "statistics", lambda: {"notices": ["3 tensors of type X are held as F32"]})
        return loaded

    monkeypatch.setattr(ReferenceBackend, "load", load)
    assert kinetic("run", "tiny-hybrid", "hello", *TINY, "-n", "2").err == "3 tensors of type X are held as F32\n"
