from __future__ import annotations

import pytest
from text_data import read_metadata

from kinetic_core.errors import TokenizerError
from kinetic_core.text.pretokenizers import PRE_TOKENIZERS
from kinetic_core.text.tokenizer import ByteLevelTokenizer

LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "falcon3", "dbrx")
SMOLLM_LIKE = ("smollm", "refact", "starcoder")

# Between pieces `·`; `_` stands for a space, `⍽` for a no-break space, `□` for U+200B, `=` for the column to the left.
SPLITS = [
    (r"IT'S_it's", r"IT·'S·_it·'s", "=", r"IT·'·S·_it·'s"),
    (r"x_'tis", r"x·_'·tis", "=", "="),
    (r"a__12345", r"a·_·_·123·45", r"a·_·_·1·2·3·4·5", r"a·__·1·2·3·4·5"),
    (r"x²Ⅷ", r"x·²Ⅷ", r"x·²·Ⅷ", "="),
    (r".x__x_\tx", r".x·_·_x·_·\tx", "=", r".·x·_·_x·_·\t·x"),
    (r"a.\n\nb", r"a·.\n\n·b", "=", r"a·.·\n·\n·b"),
    (r"a\n__b", r"a·\n·_·_b", "=", r"a·\n_·_b"),
    (r"a_\n\n_\n_b", r"a·_\n\n_\n·_b", "=", "="),
    (r"नमस्ते", r"नमस·्त·े", r"नमस्ते", r"नमस·्·त·े"),
    (r"a⍽⍽b", r"a·⍽·⍽b", "=", r"a·⍽·⍽·b"),
    (r"a□b", r"a·□b", "=", r"a·□·b"),
]


def _plain(text: str) -> str:
    for sign, character in (("_", " "), ("⍽", "\u00a0"), ("□", "\u200b"), (r"\n", "\n"), (r"\t", "\t")):
        text = text.replace(sign, character)
    return text


def _tokenizer(pre: str) -> ByteLevelTokenizer:
    return ByteLevelTokenizer({**read_metadata("llama"), "tokenizer.ggml.pre": pre})


@pytest.mark.parametrize("pre", [*LLAMA3_LIKE, "qwen35", *SMOLLM_LIKE])
def test_split_table(pre: str) -> None:
    column = 1 if pre in LLAMA3_LIKE else 2 if pre == "qwen35" else 3
    tokenizer = _tokenizer(pre)
    for row in SPLITS:
        wanted = next(cell for cell in reversed(row[1 : column + 1]) if cell != "=")
        assert tokenizer.split(_plain(row[0])) == [_plain(piece) for piece in wanted.split("·")], row[0]


@pytest.mark.parametrize(("pre", "counts"), [("qwen35", (2, 1, 4)), ("qwen2", (7, 3, 5)), ("llama-bpe", (7, 3, 5))])
def test_x1_combining_marks(pre: str, counts: tuple[int, ...]) -> None:
    tokenizer = _tokenizer(pre)
    texts = ("नमस्ते दुनिया", "สวัสดี", "x⃣ 1️⃣")
    assert tuple(len(tokenizer.split(text)) for text in texts) == counts


def test_qwen35_leaves_marks_out_of_punctuation() -> None:
    assert _tokenizer("qwen35").split("!!\u0301a") == ["!!", "\u0301a"]
    assert _tokenizer("qwen2").split("!!\u0301a") == ["!!\u0301", "a"]


def test_qwen2_takes_single_numbers() -> None:
    assert _tokenizer("qwen2").split("a  12 it'S\n\n b") == [
        "a", " ", " ", "1", "2", " it", "'S", "\n\n", " b",
    ]  # fmt: skip


@pytest.mark.parametrize("pre", ["gpt-2", "phi-2"])
def test_gpt2_keeps_numbers_together(pre: str) -> None:
    assert _tokenizer(pre).split("it's a 123  x'S") == ["it", "'s", " a", " 123", " ", " x", "'", "S"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_only_qwen_normalizes(pre: str) -> None:
    composed = pre.startswith("qwen")
    assert "".join(_tokenizer(pre).split("e\u0301")) == ("\u00e9" if composed else "e\u0301")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_whole_token_rule(pre: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "c", "bc", "abc"],
        "tokenizer.ggml.merges": ["b c"],
    }
    whole = pre in ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "falcon3")
    assert ByteLevelTokenizer(metadata).encode("abc") == ([4] if whole else [0, 3])


@pytest.mark.parametrize("pre", ["no-such", "", 3, None])
def test_unknown_pre_tokenizer_is_refused(pre: object) -> None:
    metadata = {**read_metadata("llama"), "tokenizer.ggml.pre": pre}
    with pytest.raises(TokenizerError) as caught:
        ByteLevelTokenizer(metadata)
    for name in ("tokenizer.ggml.pre", *PRE_TOKENIZERS):
        assert name in str(caught.value)
    if pre == "no-such":
        assert "'no-such'" in str(caught.value)
