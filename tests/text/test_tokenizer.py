from __future__ import annotations

from text_data import read_tokens

from kinetic_core.text import Tokenizer


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
