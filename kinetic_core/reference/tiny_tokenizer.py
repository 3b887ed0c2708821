"""The vocabulary of the tiny hybrid: a byte-level BPE in which a byte's token id is the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MERGED, END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258, 259
MIN_VOCAB = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_NORMAL, _CONTROL = 1, 3


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself where printable, else from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_metadata(vocab: int) -> dict[str, Any]:
    """The ``tokenizer.*`` keys of a vocabulary of `vocab` tokens (at least 260).

    0 … 255 are the bytes, 256 the merged bytes 1 2 (a BPE needs one merge), then end of text, start and end of a turn,
    and reserved control tokens.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"the tiny vocabulary has at least {MIN_VOCAB} tokens, got {vocab}")
    alphabet = byte_alphabet()
    tokens = [*alphabet, alphabet[1] + alphabet[2], "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"<|reserved_{number}|>" for number in range(vocab - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([_NORMAL] * 257 + [_CONTROL] * (vocab - 257), np.int32),
        "tokenizer.ggml.merges": [f"{alphabet[1]} {alphabet[2]}"],
        "tokenizer.ggml.bos_token_id": END_OF_TEXT,
        "tokenizer.ggml.eos_token_id": TURN_END,
        "tokenizer.ggml.padding_token_id": END_OF_TEXT,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def predicted_next(vocab: int) -> npt.NDArray[np.int32]:
    """i32[vocab]: the token that greedy decoding of the predictable model picks after each token, a permutation.

    A line feed starts the answer "abcdefghijklmnopqrstuvwxyz." which ends the turn; the end of a turn gives a line
    feed. The other printable ASCII characters follow each other in a cycle, and so do all remaining tokens.
    """
    answer = [ord("\n"), *range(ord("a"), ord("z") + 1), ord("."), TURN_END]
    printable = [byte for byte in range(32, 127) if byte not in answer]
    rest = [token for token in range(vocab) if token not in {*answer, *printable}]
    following = np.empty(vocab, np.int32)
    for cycle in (answer, printable, rest):
        following[cycle] = np.roll(cycle, -1)
    return following
