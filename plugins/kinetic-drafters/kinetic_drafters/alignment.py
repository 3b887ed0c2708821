"""A text that runs alongside a sequence, token for token, and what becomes of it after an edit."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

WORTH_KEEPING = 8
"""Tokens that two texts must have agreed for, so that where they part is taken for an edit."""
WINDOW = 24
"""Tokens after the parting, in either text, in which they may meet again."""
CREDIT = 4
"""Tokens of agreement that texts which meet again are given for having agreed before."""

Source = TypeVar("Source")


class Alignment(Generic[Source]):
    """A place in a text: its last `length` tokens are the sequence's.

    source:   whose text it is.
    position: index in `text` of the token that the sequence's last followed one equals.
    at:       how many tokens of the sequence were followed.
    """

    __slots__ = ("at", "length", "position", "source", "text")

    def __init__(self, source: Source, text: array[int], position: int, length: int, at: int) -> None:
        self.source = source
        self.text = text
        self.position = position
        self.length = length
        self.at = at

    def follow(self, tokens: array[int]) -> int:
        """Goes on as far as the sequence's tokens do the same; how far. It ran on if `at` is now their number."""
        new = tokens[self.at :]
        expected = self.text[self.position + 1 : self.position + 1 + len(new)]
        count = 0
        if new == expected:
            count = len(new)
        else:
            for token, other in zip(new, expected, strict=False):
                if token != other:
                    break
                count += 1
        self.position += count
        self.length += count
        self.at += count
        return count

    def met_again(self, tokens: array[int], end: int) -> tuple[int, int] | None:
        """(position < end, tokens) where the texts agree again after they parted: the most tokens, then the nearest."""
        apart = len(tokens) - self.at
        if self.length < WORTH_KEEPING or not 0 < apart <= WINDOW:
            return None
        last = tokens[-1]
        best = None
        for position in range(self.position + 1, min(self.position + 1 + WINDOW, end)):
            if self.text[position] != last:
                continue
            run = 1
            while run < apart and position - run > self.position and self.text[position - run] == tokens[-1 - run]:
                run += 1
            if best is None or run > best[1]:
                best = (position, run)
        return best
