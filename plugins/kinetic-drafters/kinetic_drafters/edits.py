"""Replacements that a text makes where it tells an earlier part of itself again: a renamed variable, a new price."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

LONGEST = 8
"""Tokens of a replacement, on either side."""
SHARES = (0.6, 0.8, 0.9)
"""How likely it is made again where the old tokens come: after it was made once, twice, and more often."""
MOST = 64
"""Replacements that are kept: the last ones."""


class Edit(NamedTuple):
    """`old` tokens became `new`; share: how likely they do the next time."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    share: float


class Edits:
    """The replacements of one text so far, by their old tokens; the last made at the end."""

    __slots__ = ("_by_first", "_counts")

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}  # old -> (new, how often)
        self._by_first: dict[int, list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def learn(self, old: Iterable[int], new: Iterable[int]) -> None:
        """A replacement was made. Insertions, deletions and long ones are left alone."""
        before, after = tuple(old), tuple(new)
        if not (1 <= len(before) <= LONGEST and 1 <= len(after) <= LONGEST) or before == after:
            return
        known, count = self._counts.get(before, ((), 0))
        self.forget(before)
        if len(self._counts) == MOST:
            self.forget(next(iter(self._counts)))
        self._counts[before] = after, count + 1 if known == after else 1
        self._by_first.setdefault(before[0], []).append(before)

    def forget(self, old: tuple[int, ...]) -> None:
        """It is not made any more."""
        if self._counts.pop(old, None) is not None:
            same_first = self._by_first[old[0]]
            same_first.remove(old)
            if not same_first:
                del self._by_first[old[0]]

    def kept(self, tokens: array[int], n_new: int) -> None:
        """The last tokens, `n_new` of them new, were told again as they are: forget what would have replaced them."""
        tokens = tokens[-(n_new + LONGEST - 1) :]
        if self.touches(tokens):
            for start in range(len(tokens)):
                edit = self.at(tokens, start)
                if edit is not None and start + len(edit.old) > len(tokens) - n_new:
                    self.forget(edit.old)

    def at(self, tokens: array[int], start: int) -> Edit | None:
        """The replacement of the tokens at `start`, the longest; None where there is none."""
        if start >= len(tokens) or tokens[start] not in self._by_first:
            return None
        fitting = [old for old in self._by_first[tokens[start]] if tokens[start : start + len(old)] == array("i", old)]
        if not fitting:
            return None
        old = max(fitting, key=len)
        new, count = self._counts[old]
        return Edit(old, new, SHARES[min(count, len(SHARES)) - 1])

    def touches(self, tokens: array[int]) -> bool:
        """Might one of these tokens begin a replacement?"""
        return not self._by_first.keys().isdisjoint(tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, about."""
        return 400 * len(self._counts)
