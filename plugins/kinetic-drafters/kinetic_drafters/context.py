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
        if self.retelling is not None:
            first = max(self.since, ahead.at - count - LONGEST)
            self.retelling.edits.kept(self.tokens[first : ahead.at], count)
        if ahead.at < len(self.tokens):
            self.alignment = None
            if ahead.length >= WORTH_KEEPING:
                self.parted = ahead

    def _align(self, found: dict[int, int]) -> None:
        """Add to the places found where the text runs alongside itself, and take the best for that from now on."""
        ahead = self.alignment
        met = None
        if ahead is not None:
            found[ahead.position] = ahead.length
        elif self.parted is not None:
            met = self.parted.met_again(self.tokens, len(self.tokens) - 1)
            if met is not None:
                position, run = met
                if self.retelling is not None:
                    old = self.tokens[self.parted.position + 1 : position - run + 1]
                    self.retelling.edits.learn(old, self.tokens[self.parted.at : len(self.tokens) - run])
                found[position] = max(found.get(position, 0), run + CREDIT)
        if found:
            length, position = max((length, position) for position, length in found.items())
            if ahead is None or position != ahead.position:
                self.alignment = Alignment(None, self.tokens, position, length, len(self.tokens))
                self.since = len(self.tokens) - (met[1] if met is not None and met[0] == position else length)

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
        if not guessed:
            self._align(found)
        elif self.alignment is not None:
            start = self.alignment.position + 1
            if self.tokens[start : start + len(guessed)].tolist() == list(guessed):
                found[start + len(guessed) - 1] = self.alignment.length + len(guessed)
        if not found:
            return None, len(self.tokens)
        ranked = sorted(found.items(), key=lambda item: (-item[1], -item[0]))[:PLACES]
        places = [Place(length, self._following(position, guessed, max_tokens)) for position, length in ranked]
        return merged(places, max_tokens), ranked[0][0] + 1

    @property
    def all_bytes(self) -> int:
        """Bytes of memory, of the words too."""
        return self.held_bytes + (0 if self.retelling is None else self.retelling.held_bytes)


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
