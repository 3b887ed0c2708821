"""Special tokens in text: finding them, and breaking them where they must stay plain text.

Control tokens steer a model, so only the text of a template may name them, never what a user typed. Before a
template runs, `SpecialTexts.guard` breaks every special text inside a message with a *mark*: a character that
occurs nowhere in the request, chosen anew for each. After rendering, special tokens are cut out (a broken one no
longer matches) and the marks are dropped, so the remaining text is exactly what was typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from kinetic_core.errors import RequestError

# Rare printable signs without case or composition first (Byzantine musical notation, Anatolian hieroglyphs): a template
# that prints a mapping escapes what is not printable. Then characters that nobody has: noncharacters, private use.
_CANDIDATES = [
    *range(0x1D000, 0x1D0F6),
    *range(0x14400, 0x14647),
    *range(0xFDD0, 0xFDF0),
    *range(0xF0000, 0xFFFFE),
    *range(0x100000, 0x10FFFE),
]


class Marks(NamedTuple):
    """The characters that keep special texts of a message apart from those of the template."""

    inside: str
    quote: str

    def drop(self, text: str) -> str:
        """`text` without the marks: what was typed."""
        return text.replace(self.inside, "").replace(self.quote, "")


class SpecialTexts:
    """The texts of a set of tokens, with searches for them.

    Of texts that start at one place the longest is found; a match is never part of an earlier one.
    """

    def __init__(self, texts: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in texts.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        # The lengths to try at a place, by the place's first two characters (one, for texts of one character).
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        firsts = sorted({text[0] for text in self.ids})
        self._first = re.compile("[" + "".join(map(re.escape, firsts)) + "]") if firsts else None
        self._proper_prefixes = frozenset(text[:n] for text in self.ids for n in range(1, len(text)))
        self._proper_suffixes = frozenset(text[n:] for text in self.ids for n in range(1, len(text)))
        self._has_single = any(len(text) == 1 for text in self.ids)
        self._longest = max(map(len, self.ids), default=0)

    def _match_at(self, text: str, start: int) -> int:
        """Length of the longest special text at `start`; 0 if there is none."""
        for length in self._lengths.get(text[start : start + 2], ()):
            if text[start : start + length] in self.ids:
                return length
        return 1 if text[start] in self.ids else 0

    def split(self, text: str, quote: str | None = None) -> Iterator[str | int]:
        """Cut `text` into ids of special tokens (int) and the non-empty stretches between them (str).

        Where `quote` stands directly before a place, no special text starts there.
        """
        if self._first is None:
            if text:
                yield text
            return
        done = position = 0
        while found := self._first.search(text, position):
            start = found.start()
            quoted = quote is not None and start > 0 and text[start - 1] == quote
            length = 0 if quoted else self._match_at(text, start)
            if not length:
                position = start + 1
                continue
            if start > done:
                yield text[done:start]
            yield self.ids[text[start : start + length]]
            done = position = start + length
        if done < len(text):
            yield text[done:]

    def guard(self, text: str, marks: Marks) -> str:
        """`text` with a mark inside every special text, and where an edge could complete one.

        The edges are looked at without their white space, because templates trim messages before they put their own
        text beside them. A special text of one character has no inside: it gets the quote mark before it.
        """
        if self._first is None or not text:
            return text
        inserts: dict[int, str] = {}
        for found in self._first.finditer(text):
            start = found.start()
            if self._match_at(text, start) > 1:
                inserts[start + 1] = marks.inside
        end = len(text.rstrip())
        for length in range(1, min(self._longest - 1, end) + 1):
            if text[end - length : end] in self._proper_prefixes:
                inserts[end - length + 1] = marks.inside
        begin = len(text) - len(text.lstrip())
        for length in range(1, min(self._longest - 1, len(text) - begin) + 1):
            if text[begin : begin + length] in self._proper_suffixes:
                inserts[begin] = marks.inside
        if self._has_single:
            for position, character in enumerate(text):
                if character in self.ids:
                    inserts[position] = inserts.get(position, "") + marks.quote
        if not inserts:
            return text
        parts: list[str] = []
        done = 0
        for position in sorted(inserts):
            parts += (text[done:position], inserts[position])
            done = position
        parts.append(text[done:])
        return "".join(parts)


def choose_marks(texts: Iterable[str]) -> Marks:
    """Two characters that occur in none of `texts`. Raises RequestError if they hold every candidate."""
    used = set(chain.from_iterable(texts))
    free = (chr(code_point) for code_point in _CANDIDATES if chr(code_point) not in used)
    inside, quote = next(free, None), next(free, None)
    if inside is None or quote is None:
        raise RequestError("the messages use every rare character there is; remove some", field="messages")
    return Marks(inside, quote)
