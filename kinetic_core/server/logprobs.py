"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from kinetic_core.engine.request import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write; OpenAI's value for it."""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice: each token's text (U+FFFD for half characters), bytes and best others."""
    return {
        "content": [
            _entry(token.token_bytes, token.logprob)
            | {"top_logprobs": [_entry(token_bytes, logprob) for _, token_bytes, logprob in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(token_bytes: bytes, logprob: float) -> dict[str, Any]:
    text = token_bytes.decode("utf-8", errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(token_bytes)}


def token_name(token_bytes: bytes) -> str:
    r"""A token as a key: its text, or `bytes:\xf0\x9f` for bytes that are no text, so that no two are called alike."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class TextLogprobs:
    """The `logprobs` of one text completion as its tokens come.

    `text_offset` counts characters of the choice's text: where the token's first byte shows.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def prompt(self, tokens: Sequence[tuple[bytes, TokenLogprob | None]], text: str) -> dict[str, Any]:
        """The echoed prompt's tokens: (bytes, log-probability or None for the first). text: what is echoed.

        Tokens before the echoed text begins (BOS, a space that the tokenizer puts first) have offset 0.
        """
        body = _empty()
        for token_bytes, token in tokens:
            self._add(body, token_bytes, token)
        unseen = self._characters - len(text)
        if unseen > 0:
            body["text_offset"] = [max(0, offset - unseen) for offset in body["text_offset"]]
        self._characters = len(text)
        self._decoder.reset()
        return body

    def answer(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens of the answer."""
        body = _empty()
        for token in tokens:
            self._add(body, token.token_bytes, token)
        return body

    def _add(self, body: dict[str, Any], token_bytes: bytes, token: TokenLogprob | None) -> None:
        name = token_name(token_bytes)
        body["tokens"].append(name)
        body["token_logprobs"].append(None if token is None else _finite(token.logprob))
        # Best first; the token itself is always there, so that there may be one more than was asked for.
        tops = None
        if token is not None:
            tops = {token_name(other): _finite(logprob) for _, other, logprob in reversed(token.top)}
            tops = dict(reversed(tops.items()))
            tops.setdefault(name, _finite(token.logprob))
        body["top_logprobs"].append(tops)
        body["text_offset"].append(self._characters)
        self._characters += len(self._decoder.decode(token_bytes))


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two stretches of tokens, one after the other."""
    return {name: first[name] + second[name] for name in first}
