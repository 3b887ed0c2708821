from __future__ import annotations

import subprocess
import sys
import threading
import time
import unicodedata
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_data import FAMILIES, read_metadata, read_tokens, tokenizer_of

from kinetic_core.errors import RequestError, TokenizerError
from kinetic_core.text import Tokenizer
from kinetic_core.text.tokenizer import MAX_CHARACTERS, ByteLevelTokenizer

FAMILY_EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"


def small(tokens: list[str], merges: list[str] | None, **keys: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "dbrx",
        "tokenizer.ggml.tokens": tokens,
    }
    if merges is not None:
        metadata["tokenizer.ggml.merges"] = merges
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def test_reference_ids(tokenizer: Tokenizer, family: str) -> None:
    for case in read_tokens(family)["cases"]:
        assert tokenizer.encode(case["text"], add_bos=False, parse_special=True) == case["ids"], case["text"]


def test_reference_defaults(tokenizer: Tokenizer, family: str) -> None:
    reference = read_tokens(family)
    assert tokenizer.encode("Hello") == reference["hello_default"]
    assert tokenizer.encode(reference["prompt"], parse_special=True) == reference["prompt_ids"]
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.eos_id) == (
        reference["add_bos"],
        reference["bos"],
        reference["eos"],
    )


def test_reference_chat_text(tokenizer: Tokenizer, family: str) -> None:
    for chat in read_tokens(family)["chats"]:
        assert tokenizer.encode(chat["text"], add_bos=False, parse_special=True) == chat["ids"]


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("falconh1", {"<|end_of_text|>", "<|im_end|>"}),
        ("granitehybrid", {"<|end_of_text|>"}),
        ("lfm2", {"<|im_end|>", "<|endoftext|>"}),
        ("llama", {"<|im_end|>", "<|endoftext|>"}),
        ("llama3rope", {"<|eot_id|>", "<|end_of_text|>"}),
        ("qwen35", {"<|im_end|>", "<|endoftext|>"}),
    ],
)
def test_end_ids(family: str, ends: set[str]) -> None:
    tokenizer = tokenizer_of(family)
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.end_ids} == ends


def test_end_ids_from_keys_and_control_tokens_only() -> None:
    tokens = ["a", "<|im_end|>", "<|eot_id|>", "stop", "more", "end"]
    keys = {"eos_token_id": 5, "eot_token_id": 3, "eom_token_id": 4}
    # <|im_end|> is user-defined here, <|eot_id|> a control token.
    metadata = small(tokens, ["a a"], token_type=[1, 4, 3, 3, 3, 3], **keys)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "aa"]
    metadata["tokenizer.ggml.token_type"] = [1, 4, 3, 3, 3, 3, 1]
    assert Tokenizer.from_metadata(metadata).end_ids == {2, 3, 4, 5}


def test_arrays_instead_of_lists() -> None:
    metadata = read_metadata("llama")
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], dtype=np.int32)
    metadata["tokenizer.ggml.tokens"] = tuple(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(metadata["tokenizer.ggml.bos_token_id"])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("Hello <|im_end|>", parse_special=True) == tokenizer_of("llama").encode(
        "Hello <|im_end|>", parse_special=True
    )
    assert tokenizer.bos_id == 1 and type(tokenizer.bos_id) is int


def test_bos(family: str, tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("Hello", add_bos=False)
    if tokenizer.bos_id is None:
        with pytest.raises(RequestError, match="BOS"):
            tokenizer.encode("Hello", add_bos=True)
    else:
        assert tokenizer.encode("Hello", add_bos=True) == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("", add_bos=False) == []


@pytest.mark.parametrize(("pre", "added"), [("llama-bpe", True), ("dbrx", False)])
def test_bos_default_without_the_key(pre: str, added: bool) -> None:
    metadata = small(["a", "<s>"], [], token_type=[1, 3], bos_token_id=1, pre=pre)
    assert Tokenizer.from_metadata(metadata).encode("a") == ([1, 0] if added else [0])
    del metadata["tokenizer.ggml.bos_token_id"]
    assert Tokenizer.from_metadata(metadata).encode("a") == [0]


def test_x2_special_tokens_only_when_asked_for() -> None:
    tokenizer = tokenizer_of("qwen35")
    text = "<think>ok</think><tool_call><|im_end|>"
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == [1022, *tokenizer.encode("ok"), 1023, 1020, 1017]
    typed = tokenizer.encode(text)
    assert not {1015, 1016, 1017, 1018, 1019, 1020, 1021, 1022, 1023}.intersection(typed)
    assert tokenizer.decode(typed) == tokenizer.decode(ids) == text


def test_typed_text_never_gives_control_tokens(family: str, tokenizer: Tokenizer) -> None:
    for text in tokenizer.special.ids:
        typed = tokenizer.encode(text, add_bos=False)
        assert not set(typed).intersection(tokenizer.special.ids.values()), text
        assert tokenizer.decode(typed) == text


def test_whole_token_rule_and_merges_do_not_reach_control_tokens() -> None:
    # "pad" is one piece, a whole token and the result of a merge, but a control token.
    tokens = ["p", "a", "d", "pa", "pad", "da"]
    metadata = small(tokens, ["p a", "pa d", "d a"], token_type=[1, 1, 1, 1, 3, 1], pre="llama-bpe")
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("pad") == [3, 2]
    assert tokenizer.encode("da") == [5]
    assert tokenizer.encode("pad", parse_special=True) == [4]


def test_user_defined_tokens_that_merges_name_stay_mergeable(caplog: pytest.LogCaptureFixture) -> None:
    metadata = small(["a", "b", "ab", "abb", "ba", "c"], ["a b", "ab b", "b a"], token_type=[1, 4, 4, 1, 4, 4])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("abb") == [3]  # "ab" is part of a merge
    assert tokenizer.encode("bc") == [1, 5]  # the only tokens of their bytes
    assert tokenizer.encode("ba") == [4]  # made by a merge
    assert not caplog.text


def test_a_text_that_is_both_a_control_and_a_normal_token() -> None:
    tokenizer = Tokenizer.from_metadata(small(["ab", "a", "b", "ab"], ["a b"], token_type=[3, 1, 1, 1]))
    assert tokenizer.encode("ab") == [3]
    assert tokenizer.encode("ab", parse_special=True) == [0]


def test_special_tokens_longest_first() -> None:
    tokens = ["<", "a", ">", "<a", "<a>", "a>>"]
    tokenizer = Tokenizer.from_metadata(small(tokens, [], token_type=[1, 1, 1, 3, 3, 3]))
    assert tokenizer.encode("<a>><a<aa>>", parse_special=True) == [4, 2, 3, 3, 5]


def test_g8_duplicated_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(small(["a", "b", "a"], []))
    assert tokenizer.encode("aba") == [0, 1, 0]
    assert tokenizer.decode([0, 1, 2]) == "aba"
    assert tokenizer.vocab_size == 3
    special = Tokenizer.from_metadata(small(["a", "<s>", "<s>"], [], token_type=[1, 3, 3]))
    assert special.encode("<s>", parse_special=True) == [1]
    assert special.decode([1, 2]) == "<s><s>"


@pytest.mark.parametrize(("tokens", "merges"), [(["a", "b"], None), (["a", "b", "ab"], [])])
def test_g9_no_merges(tokens: list[str], merges: list[str] | None) -> None:
    with pytest.raises(TokenizerError, match=r"without merges.*tokenizer\.ggml\.merges"):
        Tokenizer.from_metadata(small(tokens, merges))


@pytest.mark.parametrize("merge", ["ab", "a ", " b", "a b c", "a  b"])
def test_malformed_merges(merge: str) -> None:
    with pytest.raises(TokenizerError, match="merge 1 is malformed"):
        Tokenizer.from_metadata(small(["a", "b", "ab"], ["a b", merge]))


def test_merges_outside_the_vocabulary_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    metadata = small(["a", "b", "ab", "aba"], ["b a", "a b", "ab a", "x y", "a x"])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("ababa") == [2, 3]
    assert "3 of 5 merges" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "t5", "'t5'"),
        ("model", None, "no key"),
        ("tokens", None, "no vocabulary"),
        ("tokens", [], "no vocabulary"),
        ("tokens", "ab", "not an array"),
        ("tokens", ["a", 3], "entry 1 is not a string"),
        ("token_type", [1], "number of types"),
        ("token_type", [1, 1, "x"], "integers"),
        ("merges", [1], "entry 0 is not a string"),
        ("bos_token_id", 3, "no such token"),
        ("eos_token_id", -1, "no such token"),
        ("eos_token_id", "1", "not a token id"),
        ("add_bos_token", "yes", "not a flag"),
        ("add_bos_token", True, "BOS is asked for"),
    ],
)
def test_bad_metadata_names_the_key(key: str, value: object, words: str) -> None:
    metadata = small(["a", "b", "ab"], ["a b"]) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_metadata(metadata)
    assert words in str(caught.value) and f"tokenizer.ggml.{key}" in str(caught.value)


def test_text_outside_the_vocabulary() -> None:
    tokenizer = Tokenizer.from_metadata(small(["a", "b"], []))
    with pytest.raises(RequestError, match="0x63") as caught:
        tokenizer.encode("abc", field="input")
    assert caught.value.field == "input"


def test_ids_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match="no such token"):
            tokenizer.decode([0, token_id])
        with pytest.raises(RequestError, match="no such token"):
            tokenizer.is_special(token_id)


def test_token_bytes() -> None:
    tokenizer = tokenizer_of("qwen35")
    assert tokenizer.token_bytes(1016) == b"<|im_start|>" and tokenizer.is_special(1016)
    assert tokenizer.token_bytes(1022) == b"<think>" and not tokenizer.is_special(1022)
    assert not tokenizer.is_special(0)
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([byte]) for byte in range(256)]
    metadata = small(["ĠfÃ³x", "a b", "a", "aa"], ["a a"])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_bytes(0) == " fóx".encode() and tokenizer.token_text(0) == " fóx"
    special = Tokenizer.from_metadata(small(["a", "Ġé"], [], token_type=[1, 4]))
    assert special.token_bytes(1) == "Ġé".encode()
    assert tokenizer.token_bytes(1) == b"a b"  # not written in the byte alphabet


X3 = ["", "\n", " \n\n  x", "\r\n", "12345", "a\0b", "\0", FAMILY_EMOJI, "\ufdd0\ufffe", "\ufeff", " " * 10_000]


@pytest.mark.parametrize("text", X3, ids=range(len(X3)))
def test_x3_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_x3_lone_surrogates(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        tokenizer.encode(text, field="messages[0].content")
    assert caught.value.field == "messages[0].content"


@pytest.mark.parametrize("unit", [" ", "\n", " \n", "!", "\t "])
def test_long_runs_are_one_piece(family: str, unit: str) -> None:
    """A run of n characters is a constant number of pieces, and each id covers as much of it for any n."""
    tokenizer = tokenizer_of(family)
    assert isinstance(tokenizer, ByteLevelTokenizer)
    counts = [(len(tokenizer.split(unit * n + "x")), len(tokenizer.encode(unit * n))) for n in (5_000, 10_000)]
    assert counts[0][0] == counts[1][0] <= 3
    assert counts[1][1] <= 2 * counts[0][1] + 2


def test_text_length_is_bounded() -> None:
    tokenizer = tokenizer_of("llama3rope")
    with pytest.raises(RequestError, match="text too long"):
        tokenizer.encode(" " * (MAX_CHARACTERS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3rope", "llama"])
def test_longest_run_encodes(family: str) -> None:
    tokenizer = tokenizer_of(family)
    text = " " * (MAX_CHARACTERS - 1) + "x"
    assert len(b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_bos=False)))) == MAX_CHARACTERS


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \n\r\t'sSt<|>_im0123é́नम्👍\ufe0f\u200d")


@settings(max_examples=150, deadline=None)
@given(text=texts, family=st.sampled_from(FAMILIES))
def test_any_text_round_trips(text: str, family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode(text, add_bos=False)
    if family == "qwen35":
        assert unicodedata.normalize("NFC", tokenizer.decode(ids)) == unicodedata.normalize("NFC", text)
    else:
        assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_special(token_id) for token_id in ids)


def test_import_is_light() -> None:
    code = (
        "import sys, kinetic_core.text as text; assert 'tokenizers' not in sys.modules\n"
        "text.Tokenizer, text.StreamDetokenizer, text.StopMatcher, text.ChatTemplate\n"
        "print(sorted({'numba', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_long_text_has_the_ids_of_its_pieces_and_lets_other_threads_run() -> None:
    tokenizer = tokenizer_of("llama")
    words = [f" word{number} {number * 7919}" for number in range(12_000)]
    text = "".join(words)
    beside: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.002):
            beside.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    ids = tokenizer.encode(text, add_bos=False)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert ids == list(chain.from_iterable(tokenizer.encode(word, add_bos=False) for word in words))
    assert sum(begin < moment < end for moment in beside) >= 10
