"""Guesses from the context: what followed the last places where the text stood as it stands now."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities, TokenTexts
from kinetic_drafters.alignment import CREDIT, WORTH_KEEPING, Alignment
from kinetic_drafters.continuation import Place, merged
from kinetic_drafters.edits import LONGEST
from kinetic_drafters.retelling import Retelling
from kinetic_drafters.running import Running
from kinetic_drafters.suffixes import PLACES, SuffixIndex


class _Text(SuffixIndex):
    """One sequence's text, and where it runs alongside itself: places farther back than the index looks."""

    __slots__ = ("alignment", "parted", "retelling", "since")

    def __init__(self, token_ids: Sequence[int], texts: TokenTexts | None) -> None:
        super().__init__(token_ids)
        self.retelling = None if texts is None else Retelling(texts)
        self.alignment: Alignment[None] | None = None
        self.parted: Alignment[None] | None = None
        self.since = 0  # the first token that ran alongside

    def _follow(self) -> None:
        """See whether the text went on as where it ran alongside itself."""
        ahead = self.alignment
        if ahead is None:
            return
        count = ahead.follow(self.tokens)
        if self.retelling is not None and self.retelling.edits:
            first = max(self.since, ahead.at - count - LONGEST)
            self.retelling.edits.kept(self.tokens[first : ahead.at], count)
        if ahead.at < len(self.tokens):
            self.alignment = None
            if ahead.length >= WORTH_KEEPING:
                self.parted = ahead

    def _met_again(self) -> tuple[int, int] | None:
        """(position, tokens of agreement) where the text agrees again with where it ran alongside itself before."""
        parted = self.parted
        met = None if parted is None else parted.met_again(self.tokens, len(self.tokens) - 1)
        if parted is not None and met is not None and self.retelling is not None:
            position, run = met
            old = self.tokens[parted.position + 1 : position - run + 1]
            self.retelling.edits.learn(old, self.tokens[parted.at : len(self.tokens) - run])
        return met

    def _aligned(self, found: dict[int, int]) -> list[tuple[int, int]]:
        """The places ranked, with where the text runs alongside itself; the best is taken for that from now on."""
        ahead = self.alignment
        met = None
        if ahead is not None:
            found[ahead.position] = ahead.length
        else:
            met = self._met_again()
            if met is not None:
                position, run = met
                found[position] = max(found.get(position, 0), run + CREDIT)
        ranked = _ranked(found)
        if ranked:
            length, position = ranked[0]
            if ahead is None or position != ahead.position:
                self.alignment = Alignment(None, self.tokens, position, length, len(self.tokens))
                self.since = len(self.tokens) - (met[1] if met is not None and met[0] == position else length)
        return ranked

    def _following(self, position: int, guessed: Sequence[int], max_tokens: int) -> array[int]:
        """The tokens after a position, the guesses among them; at the end the text is taken to repeat itself."""
        following = self.tokens[position + 1 : position + 1 + max_tokens]
        if len(following) < max_tokens:
            following.extend(guessed)
            following *= -(-max_tokens // len(following))
            del following[max_tokens:]
        return following

    def draft(self, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """What followed the places that look like the end of the text and these guesses."""
        self.update()
        self._follow()
        draft, ahead = self._by_tokens(guessed, max_tokens)
        if guessed or self.retelling is None:
            return draft
        return self.retelling.improved(draft, self.tokens, ahead, lambda *more: self._by_tokens(*more)[0], max_tokens)

    def _by_tokens(self, guessed: Sequence[int], max_tokens: int) -> tuple[Draft | None, int]:
        """A draft, and the index of the token that follows the best place."""
        found = self.places(guessed)
        if guessed:
            ahead = self.alignment
            if ahead is not None:
                start = ahead.position + 1
                if self.tokens[start : start + len(guessed)].tolist() == list(guessed):
                    found[start + len(guessed) - 1] = ahead.length + len(guessed)
            ranked = _ranked(found)
        else:
            ranked = self._aligned(found)
        if not ranked:
            return None, len(self.tokens)
        places = [Place(length, self._following(position, guessed, max_tokens)) for length, position in ranked[:PLACES]]
        return merged(places, max_tokens), ranked[0][1] + 1

    @property
    def all_bytes(self) -> int:
        """Bytes of memory, of the words too."""
        return self.held_bytes + (0 if self.retelling is None else self.retelling.held_bytes)


def _ranked(found: dict[int, int]) -> list[tuple[int, int]]:
    """[(length, position)] of {position: length}, the longest first, of these the last."""
    return sorted([(length, position) for position, length in found.items()], reverse=True)


class ContextDrafter(Drafter):
    """Prompt look-up: the continuation of the longest suffix that the sequence's own text has had before.

    Where the model has a tokenizer, words too: what followed the last words, whatever stands between them.
    """

    capabilities = DrafterCapabilities(branches=True, continues_guesses=True)

    def __init__(self) -> None:
        self._sequences: Running[_Text] = Running("context")
        self._texts: TokenTexts | None = None

    def read_texts(self, texts: TokenTexts) -> None:
        """Keep the tokenizer: words are guessed as well then."""
        self._texts = texts

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Keep the prompt; it is indexed when a draft is first asked for."""
        self._sequences.check_new(sequence_id)
        self._sequences[sequence_id] = _Text(token_ids, self._texts)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Keep the tokens."""
        self._sequences[sequence_id].pending.extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """What followed the last places that look like the end of the text."""
        self._sequences.check_most(max_tokens)
        return self._sequences[sequence_id].draft((), max_tokens)

    def propose_after(self, sequence_id: int, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """The same of the text with these guesses; they are not kept."""
        self._sequences.check_most(max_tokens)
        return self._sequences[sequence_id].draft(guessed, max_tokens)

    def end(self, sequence_id: int) -> None:
        """Forget the sequence."""
        self._sequences.take(sequence_id)

    def statistics(self) -> dict[str, Any]:
        """Figures of the running sequences."""
        texts = list(self._sequences.values())  # at once: another thread may ask
        return {
            "memory_bytes": sum(text.all_bytes for text in texts),
            "tokens_indexed": sum(len(text.tokens) for text in texts),
            "documents": len(texts),
            "evictions": 0,
        }
