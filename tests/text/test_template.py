from __future__ import annotations

from text_data import read_metadata, read_tokens

from kinetic_core.text import ChatTemplate, Tokenizer


def test_reference_chats(tokenizer: Tokenizer, family: str) -> None:
    template = ChatTemplate.from_metadata(read_metadata(family), tokenizer)
    for chat in read_tokens(family)["chats"]:
        prompt = chat["add_generation_prompt"]
        assert template.render(chat["messages"], prompt) == chat["text"]
        assert template.encode(tokenizer, chat["messages"], prompt) == chat["ids"]
