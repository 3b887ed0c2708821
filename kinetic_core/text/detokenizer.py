"""Token by token back to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic_core.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Turns ids into text as they come; the joined pieces equal `Tokenizer.decode` of all ids.

    A character whose bytes lie in several tokens comes out with the token that completes it. Bytes that cannot begin
    or continue a character show as U+FFFD, one per maximal incomplete sequence, like in `decode`.

    Example:
        detokenizer = StreamDetokenizer(tokenizer)
        for token_id in ids:
            print(detokenizer.push(token_id), end="")
        print(detokenizer.finish())
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        """continues: whether the ids go on after other text, see `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_first_space and not continues

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often one word, sometimes nothing."""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_space and not self._tokenizer.is_special(token_id):
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left at the end: unfinished bytes as U+FFFD. The object starts over for the bytes that follow."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Passes text on until one of the stop strings appears, and holds back what may become one.

    The match that begins first wins (of several that begin there, any: nothing from there on is passed on either
    way). No character of a stop is passed on. Text held back comes out as soon as it can no longer begin a stop, or
    with `finish`. Time is linear in the text: each character is looked at about as often as the longest stop has
    characters.

    Example:
        matcher = StopMatcher(["###"])
        for piece in pieces:
            text, stopped = matcher.push(piece)
            ...
            if stopped:
                break
        else:
            text = matcher.finish()
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: the stop strings; empty ones are ignored."""
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; None so far."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    @property
    def held(self) -> str:
        """The text held back: it may still become a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text; return what may be shown, and whether a stop string was found.

        A stop is reported only once no other stop that begins earlier can still complete, so that the result does
        not depend on how the text was cut into pieces. After a match everything is swallowed.
        """
        if self.stopped:
            return "", True
        pending = self._held + text
        self._held = ""
        start, stop = self._find(pending)
        open_from = self._open_from(pending)
        if stop is not None and start <= open_from:
            self.matched = stop
            return pending[:start], True
        self._held = pending[open_from:]
        return pending[:open_from], False

    def finish(self) -> str:
        """The end of the text: return what may be shown of the held text. `stopped` tells if a stop was in it."""
        pending, self._held = self._held, ""
        start, stop = self._find(pending)
        if stop is not None:
            self.matched = stop
            return pending[:start]
        return pending

    def _find(self, text: str) -> tuple[int, str | None]:
        """Where the first stop begins, and the shortest that begins there."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start, len(stop)) < best[:2]):
                best = (start, len(stop), stop)
        return (best[0], best[2]) if best is not None else (len(text), None)

    def _open_from(self, text: str) -> int:
        """The first place from which the rest of `text` is the beginning of a stop; the end if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
