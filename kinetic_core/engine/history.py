"""A path's tokens, as penalties see them (rule 9: a draft row sees its own path)."""

from __future__ import annotations

from collections.abc import Iterable

REPEAT_WINDOW = 64
"""The repeat penalty looks at this many last tokens of the path, the prompt's included."""


class History:
    """The tokens of one path, and how often each occurs in the answer.

    tokens: prompt and answer; the answer starts at `n_prompt`.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.tokens: list[int] = list(prompt_ids)
        self.n_prompt = len(self.tokens)
        self.counts: dict[int, int] = {}

    @property
    def n_answer(self) -> int:
        """Tokens of the answer: the index of the next one."""
        return len(self.tokens) - self.n_prompt

    def push(self, token: int) -> None:
        """One more token of the answer."""
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1

    def pop(self) -> None:
        """Take the answer's last token back, as after looking at a draft."""
        token = self.tokens.pop()
        left = self.counts[token] - 1
        if left:
            self.counts[token] = left
        else:
            del self.counts[token]

    def recent(self) -> set[int]:
        """The tokens that the repeat penalty names."""
        return set(self.tokens[-REPEAT_WINDOW:])
