from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kinetic_core.errors import RequestError, TokenizerError
from kinetic_core.text import StreamDetokenizer, Tokenizer
from kinetic_core.text.spm import SentencePieceTokenizer

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {
    SPACE: -30.0, "a": -31.0, "b": -32.0, "c": -33.0,
    "ab": -2.0, "bc": -1.0, SPACE + "a": -3.0, "abc": -4.0, SPACE + "abc": -5.0, "aa": -6.0, SPACE * 2: -7.0,
}  # fmt: skip


def metadata_of(pieces: dict[str, float] = PIECES, **keys: Any) -> dict[str, Any]:
    """Ids: 0 unknown, 1 BOS, 2 EOS, 3 to 258 the bytes, then `pieces`, then the user-defined <think>."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, "<think>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()) + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def build(**keys: Any) -> SentencePieceTokenizer:
    tokenizer = Tokenizer.from_metadata(metadata_of(**keys))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def pieces_of(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode(text, **options)]


def test_best_score_merges_first() -> None:
    tokenizer = build(add_bos_token=False)
    # bc (-1) before ab (-2); then a + bc gives abc (-4), and with the space before it the whole.
    assert pieces_of(tokenizer, "abc") == [SPACE + "abc"]
    assert pieces_of(tokenizer, "babc") == [SPACE, "b", "abc"]
    # Equal scores: the leftmost pair first.
    assert pieces_of(tokenizer, "baaa") == [SPACE, "b", "aa", "a"]


def test_bos_and_special_tokens() -> None:
    tokenizer = build()
    assert pieces_of(tokenizer, "abc") == ["<s>", SPACE + "abc"]
    assert pieces_of(tokenizer, "abc</s>abc", parse_special=True, add_bos=False) == [
        SPACE + "abc", "</s>", SPACE + "abc",
    ]  # fmt: skip
    typed = tokenizer.encode("</s>", add_bos=False)
    assert 2 not in typed and tokenizer.decode(typed) == "</s>"
    # User-defined pieces belong to the segmentation of any text.
    assert pieces_of(tokenizer, "<think>a", add_bos=False) == [SPACE, "<think>", "a"]
    assert tokenizer.end_ids == {2}


def test_bytes_for_what_the_vocabulary_lacks() -> None:
    tokenizer = build()
    ids = tokenizer.encode("é\n", add_bos=False)
    assert ids == [tokenizer.vocabulary.tokens.index(t) for t in (SPACE, "<0xC3>", "<0xA9>", "<0x0A>")]
    assert tokenizer.decode(ids) == "é\n"


def test_unknown_without_bytes() -> None:
    metadata = metadata_of()
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [1] * (len(metadata["tokenizer.ggml.tokens"]) - 3)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("a é", add_bos=False)[-1] == 0
    metadata["tokenizer.ggml.token_type"][0] = 3
    with pytest.raises(RequestError, match="cannot express"):
        Tokenizer.from_metadata(metadata).encode("é")


@pytest.mark.parametrize("token", ["<0x-1>", "<0xGG>", "<0x1>", "<0x100>", "<0x٠١>", "0x41", "<0x4 >"])
def test_g11_malformed_byte_tokens_are_text(token: str) -> None:
    metadata = metadata_of()
    metadata["tokenizer.ggml.tokens"][3 + 0x41] = token  # where <0x41> was
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_bytes(3 + 0x41) == token.encode()
    assert tokenizer.encode("A", add_bos=False)[-1] == 0  # unknown: no token is byte 0x41
    assert tokenizer.token_bytes(3 + 0x42) == b"B"


def test_first_space() -> None:
    tokenizer = build()
    ids = tokenizer.encode("abc abc")
    assert tokenizer.decode(ids[1:]) == "abc abc"
    assert tokenizer.decode(ids) == "<s>abc abc"
    assert tokenizer.decode(ids[1:], continues=True) == " abc abc"
    for continues in (False, True):
        detokenizer = StreamDetokenizer(tokenizer, continues=continues)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == tokenizer.decode(ids, continues=continues)
    bare = build(add_space_prefix=False)
    assert pieces_of(bare, "abc", add_bos=False) == ["abc"]
    assert bare.decode(bare.encode(" abc", add_bos=False)) == " abc"


def test_token_bytes() -> None:
    tokenizer = build()
    tokens = tokenizer.vocabulary.tokens
    assert tokenizer.token_bytes(tokens.index(SPACE + "abc")) == b" abc"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_bytes(1) == b"<s>"


def test_duplicated_pieces_take_the_lowest_id() -> None:
    metadata = metadata_of()
    metadata["tokenizer.ggml.tokens"][-2] = "abc"
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("babc", add_bos=False)
    assert ids[-1] == metadata["tokenizer.ggml.tokens"].index("abc")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", None),
        ("scores", [0.0]),
        ("scores", "x"),
        ("scores", [float("nan")] * 271),
        ("remove_extra_whitespaces", True),
        ("add_space_prefix", 1),
    ],
)
def test_bad_metadata_names_the_key(key: str, value: object) -> None:
    with pytest.raises(TokenizerError, match=f"tokenizer.ggml.{key}"):
        build(**{key: value})


def naive(text: str, pieces: dict[str, float]) -> list[str]:
    symbols = list(text)
    while True:
        pairs = [
            (-pieces[symbols[i] + symbols[i + 1]], i)
            for i in range(len(symbols) - 1)
            if symbols[i] + symbols[i + 1] in pieces
        ]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    pieces=st.dictionaries(st.text("ab", min_size=2, max_size=5), st.integers(-4, 0).map(float), max_size=20),
)
@example(text="abab", pieces={"ab": -1.0, "abab": -2.0})
@example(text="aabb", pieces={"aa": 0.0, "bb": -1.0, "aabb": -2.0})
def test_merging_equals_its_slow_twin(text: str, pieces: dict[str, float]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata_of({"a": -9.0, "b": -9.0, **pieces}))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.merge(text) == naive(text, pieces)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE)) | st.text("abc  \n<s>"))
def test_any_text_round_trips(text: str) -> None:
    tokenizer = build()
    ids = tokenizer.encode(text, add_bos=False)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_special(token_id) for token_id in ids)


def test_long_runs_take_ids_in_proportion() -> None:
    tokenizer = build()
    assert len(tokenizer.encode(" " * 9_999, add_bos=False)) == 5_000
