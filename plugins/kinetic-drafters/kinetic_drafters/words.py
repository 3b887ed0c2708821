"""The words of a growing text, and which come next where it tells again what it told before.

A table, a list of fields, sentences and JSON of the same content share their words, in order, but hardly two tokens in
a row: quotes and spaces become part of tokens, and a word is cut otherwise behind a space than behind a quote. What
stands between the words does not matter here, nor upper and lower case.

The next word is looked for in two ways: behind earlier places where the last words were the same, and by a pointer that
runs alongside the text through what it retells. A form puts words of its own between those retold ("job" in
`"job": "nurse"`) and leaves others out, so the pointer stays where it is for a while, and the index learns how many
words farther the text goes on after which of the form's own words.
"""

from __future__ import annotations

import re
from array import array
from typing import NamedTuple
from zlib import crc32

_LETTERS = (
    rb"(?:[0-9A-Za-z]+|[\xc3-\xdf][\x80-\xbf]|(?:[\xe0\xe1\xe4-\xee][\x80-\xbf]|\xe3[\x81-\xbf])[\x80-\xbf]"
    rb"|[\xf0-\xf4][\x80-\xbf]{3})"
)
_WORD = _LETTERS + rb"+"
WORD = re.compile(_WORD)
"""A word in UTF-8. Beyond ASCII nearly all is letters, but U+0080 to U+00BF, U+2000 to U+303F and U+F000 to U+FFFF."""
RUN = re.compile(_WORD + rb"(?:[ _'.@-]" + _WORD + rb")*")
"""Words that are taken over as they stand: a name of several words, a number with a point, an address."""
MOST_RUN_BYTES = 48
LEAST_MATCHED = 2
MOST_MATCHED = 8
"""Words that have to agree at an earlier place, and that are compared."""
MATCHED_ESTIMATES = (0.0, 0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""By words that agree: how likely the next one does too. From words in other forms, where 8 gave 0.98."""
PLACES = 6
"""Earlier places that are looked at: the last ones."""
REACH = 6
"""Words after the pointer among which the next retold one is."""
MOST_MISSED = 7
"""Words in a row that are not among those, after which the pointer is given up."""
FIRST_SHARE = 0.4
"""How often a habit is right, before more is known."""
LEARNING, TRUST_LEARNING = 0.4, 0.1
"""Weight of the last time in a habit's share, and in what is thought of habits that were not seen yet."""
LEAST_ESTIMATE = 0.25
"""Words less likely than that are not worth a guess."""
MOST_HABITS = 4096
MOST_INDEXED_BYTES = 16384
"""Bytes of text that are indexed at a time."""


class NextWords(NamedTuple):
    """Words that may come next.

    estimate: how likely. begun: the bytes of them that the text ends with already. words: all of them.
    """

    estimate: float
    begun: bytes
    words: bytes


class _Pointer(NamedTuple):
    """How far the text has retold an earlier part of itself.

    at: index of the word that was retold last, -1: none. missed: words since that were none of the `REACH` next there.
    """

    at: int
    missed: int


class _Habit(NamedTuple):
    """How the retelling goes on. step: words from the last one retold to the next. share: how often it was so."""

    step: int
    share: float


class WordIndex:
    """Finds words that may come next.

    text:   bytes so far.
    words:  checksums of the indexed words, in order; starts: where they begin.
    places: checksums of two words -> index of the second where they stood last; links[i]: where the words i - 1 and i
            stood before that, -1 for nowhere.
    """

    __slots__ = ("_end", "_habits", "_pointer", "_scanned", "_trust", "links", "places", "starts", "text", "words")

    def __init__(self) -> None:
        self.text = bytearray()
        self.words = array("I")
        self.starts = array("I")
        self.links = array("i")
        self.places: dict[int, int] = {}
        self._scanned = 0
        self._end = 0  # of the last word that was indexed
        self._pointer = _Pointer(-1, 0)
        self._habits: dict[int, _Habit] = {}
        self._trust = [FIRST_SHARE] * (MOST_MISSED + 1)  # in a new habit, by the pointer's `missed`

    def update(self) -> bool:
        """Index the words that came to `text` since; False where more are left than are indexed at a time."""
        text, words = self.text, self.words
        whole = _whole(text, len(text))
        end = min(whole, _whole(text, self._scanned + MOST_INDEXED_BYTES))
        at = end
        for match in WORD.finditer(text, self._scanned, end):
            if match.end() == end:  # it may go on, but is not looked at for ever
                at = match.start() if end == whole or match.start() > self._scanned else end
                break
            word = crc32(match.group().lower())
            pair = _pair(words[-1], word) if words else -1
            before = self.places.get(pair, -1)
            pointer = self._moved(self._pointer, word, before)
            if self._pointer.at >= 0:
                key = self._habit_key(self._pointer, words[-1], text[self._end : match.start()])
                self._learn(key, pointer.at - self._pointer.at if pointer.missed == 0 else 0)
            self._pointer = pointer
            self.links.append(before)
            self.places[pair] = len(words)
            words.append(word)
            self.starts.append(match.start())
            self._end = match.end()
        self._scanned = at
        return end == whole

    def _moved(self, pointer: _Pointer, word: int, before: int) -> _Pointer:
        """The pointer after one more word. before: where it stood before behind the same word, -1: nowhere."""
        at, missed = pointer
        if at >= 0:
            ahead = self.words[at + 1 : at + 1 + REACH]
            if word in ahead:
                return _Pointer(at + 1 + ahead.index(word), 0)
            if missed < MOST_MISSED:
                return _Pointer(at, missed + 1)
        return _Pointer(before, 0)

    def _learn(self, key: int, step: int) -> None:
        """The text went on with the word `step` after the pointer; not above 0: with another."""
        missed = self._pointer.missed
        usual, share = self._habit(self._pointer, key)
        self._trust[missed] += TRUST_LEARNING * ((step == usual) - self._trust[missed])
        share += LEARNING * ((step == usual) - share)
        first = (FIRST_SHARE + self._trust[missed]) / 2
        if step > 0 and share < first:
            usual, share = step, first
        if len(self._habits) == MOST_HABITS:
            self._habits.clear()
        self._habits[key] = _Habit(usual, share)

    @staticmethod
    def _habit_key(pointer: _Pointer, last: int, between: bytes | bytearray) -> int:
        """Habits are told apart by the form's own word, if it is the last one, and by what stands behind it."""
        return crc32(between, last if pointer.missed else 0)

    def _habit(self, pointer: _Pointer, key: int) -> _Habit:
        return self._habits.get(key) or _Habit(1, self._trust[pointer.missed])

    def following(self, guessed: bytes = b"") -> list[NextWords]:
        """The words that may come after the text and these bytes, the likeliest first.

        Where the bytes end with a part of a word, words that begin with it. `update` must have returned True.
        """
        rest = self.text[self._end :]
        rest += guessed
        if rest and rest[-1] >= 0x80 and _whole(rest, len(rest)) < len(rest):
            return []
        new = list(WORD.finditer(rest))
        begun = bytes(new.pop().group()) if new and new[-1].end() == len(rest) else b""
        pointer, context = self._pointer, self.words[-MOST_MATCHED:]
        for match in new:
            word = crc32(match.group().lower())
            pointer = self._moved(pointer, word, self.places.get(_pair(context[-1], word), -1) if context else -1)
            context.append(word)
        if len(context) < LEAST_MATCHED:
            return []
        between = rest[new[-1].end() if new else 0 : len(rest) - len(begun)]
        found: dict[bytes, float] = {}
        for at, estimate in (*self._ahead(pointer, context, between), *self._again(context)):
            words = self._run(at)
            if len(words) > len(begun) and words.startswith(begun):
                found[words] = max(found.get(words, 0.0), estimate)
        return sorted((NextWords(share, begun, words) for words, share in found.items()), reverse=True)

    def _ahead(self, pointer: _Pointer, context: array[int], between: bytearray) -> list[tuple[int, float]]:
        """[(index of a word, estimate)] by the pointer. between: what stands behind the last word."""
        if pointer.at < 0:
            return []
        habit = self._habit(pointer, self._habit_key(pointer, context[-1], between))
        return [(pointer.at + habit.step, habit.share)] if habit.share >= LEAST_ESTIMATE else []

    def _again(self, context: array[int]) -> list[tuple[int, float]]:
        """[(index of a word, estimate)] behind places where the last words were the same."""
        words = self.words
        found: list[tuple[int, float]] = []
        at = self.places.get(_pair(context[-2], context[-1]), -1)
        while at >= 0 and len(found) < PLACES:
            matched, most = LEAST_MATCHED, min(len(context), at + 1, MOST_MATCHED)
            while matched < most and words[at - matched] == context[-1 - matched]:
                matched += 1
            found.append((at + 1, MATCHED_ESTIMATES[matched]))
            at = self.links[at]
        return found

    def _run(self, at: int) -> bytes:
        """A word and those that go with it; empty beyond the last word."""
        if at >= len(self.words):
            return b""
        match = RUN.match(self.text, self.starts[at], self.starts[at] + MOST_RUN_BYTES)
        return b"" if match is None else bytes(match.group())

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, about: an entry of a dictionary takes 100 bytes, a habit 200."""
        arrays = (self.text, self.words, self.starts, self.links)
        return sum(values.__sizeof__() for values in arrays) + 100 * len(self.places) + 200 * len(self._habits)


def _pair(first: int, second: int) -> int:
    return first << 32 | second


def _whole(text: bytes | bytearray, end: int) -> int:
    """`end`, or where the UTF-8 character begins that it cuts."""
    end = min(end, len(text))
    for back in range(1, min(4, end + 1)):
        byte = text[end - back]
        if byte >= 0xC0:
            return end - back if back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else end
        if byte < 0x80:
            break
    return end
