"""Guesses from the context: what followed the last places where the text stood as it stands now."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities
from kinetic_drafters.alignment import CREDIT, WORTH_KEEPING, Alignment
from kinetic_drafters.continuation import Place, merged
from kinetic_drafters.ngrams import (
    BASE,
    LONGEST,
    MASK,
    POWERS,
    SCATTER,
    bucket_of,
    buckets_of,
    match_length,
    slice_hashes,
    tail_hashes,
    view,
)
from kinetic_drafters.running import Running

SIZES = (2, 4, 8)
"""The n-grams that places are looked up by; the first is the least match."""
PLACES = 4
"""Places looked at per size: the last ones."""
STEPS = 32
"""Links followed per size: some lead to other n-grams of the same bucket."""
ENOUGH = 3
"""Places that make a look at shorter n-grams needless."""
FEW_NEW = 12
"""New tokens up to which a loop is faster than arrays."""
LEAST_BITS = 8
_LEAVING = tuple((size, POWERS[size]) for size in SIZES)
"""(n, what the token n places back counts for when the next one comes)."""


class _Text:
    """One sequence's tokens and, for every n-gram size, chains of the positions that fell into the same bucket.

    heads[k][bucket]: the last position whose n-gram of size SIZES[k] fell there, -1 for none.
    links[k][position]: the one before it, -1 for none.
    """

    __slots__ = ("alignment", "bits", "heads", "links", "parted", "pending", "rolling", "tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.tokens = array("i")
        self.pending = list(token_ids)
        self.alignment: Alignment[None] | None = None
        self.parted: Alignment[None] | None = None
        self._clear(LEAST_BITS)

    def _clear(self, bits: int) -> None:
        self.bits = bits
        self.heads = [array("i", [-1]) * (1 << bits) for _ in SIZES]
        self.links = [array("i") for _ in SIZES]
        self.rolling = [0] * len(SIZES)

    def update(self) -> None:
        """Index the tokens that came since."""
        pending = self.pending
        if not pending:
            return
        start = len(self.tokens)
        self.tokens.fromlist(pending)
        self.pending = []
        if len(self.tokens) > 1 << self.bits:
            self._clear(len(self.tokens).bit_length() + 1)
            start = 0
        if start >= SIZES[-1] and len(self.tokens) - start <= FEW_NEW:
            for position in range(start, len(self.tokens)):
                self._insert(position)
        else:
            self._insert_all(start)

    def _insert(self, position: int) -> None:
        """Index one token; at least `SIZES[-1]` were before it."""
        tokens, rolling, shift = self.tokens, self.rolling, 32 - self.bits
        token = tokens[position]
        for k, (size, power) in enumerate(_LEAVING):
            rolling[k] = value = (rolling[k] * BASE + token - tokens[position - size] * power) & MASK
            bucket = ((value * SCATTER) & MASK) >> shift
            heads = self.heads[k]
            self.links[k].append(heads[bucket])
            heads[bucket] = position

    def _insert_all(self, start: int) -> None:
        """As `_insert` of every position from `start` on, with arrays."""
        before = max(0, start - SIZES[-1] + 1)
        hashes = slice_hashes(view(self.tokens, before), SIZES)
        for k, size in enumerate(SIZES):
            first = max(start, size - 1)
            links = np.full(len(self.tokens) - start, -1, dtype=np.int32)
            if first < len(self.tokens):
                chosen = buckets_of(hashes[k][first - before :], self.bits)
                order = np.argsort(chosen, kind="stable")
                ordered = chosen[order]
                opens = np.ones(len(order), dtype=bool)
                np.not_equal(ordered[1:], ordered[:-1], out=opens[1:])
                closes = np.ones(len(order), dtype=bool)
                closes[:-1] = opens[1:]
                heads = np.frombuffer(self.heads[k], dtype=np.int32)
                positions = (order + first).astype(np.int32)
                previous = np.empty_like(positions)
                previous[1:] = positions[:-1]
                previous[opens] = heads[ordered[opens]]
                links[positions - start] = previous
                heads[ordered[closes]] = positions[closes]
            self.links[k].frombytes(links.tobytes())
            if len(self.tokens) >= size:
                self.rolling[k] = int(hashes[k][-1])

    def places(self, tail: array[int], hashes: list[int], last: int) -> dict[int, int]:
        """{position: length of the match}: the last places, not `last`, of the longest n-grams that end `tail`."""
        found: dict[int, int] = {}
        for k in range(len(hashes) - 1, -1, -1):
            size = SIZES[k]
            links = self.links[k]
            wanted = tail[-size:]
            position = self.heads[k][bucket_of(hashes[k], self.bits)]
            n_found = 0
            for _ in range(STEPS):
                if position < 0 or n_found == PLACES:
                    break
                if position != last and self.tokens[position - size + 1 : position + 1] == wanted:
                    n_found += 1
                    if position not in found:
                        found[position] = match_length(self.tokens, position, tail, size)
                position = links[position]
            if len(found) >= ENOUGH:
                break
        return found

    def _follow(self) -> None:
        """See whether the text went on as where it ran alongside itself."""
        ahead = self.alignment
        if ahead is None:
            return
        ahead.follow(self.tokens)
        if ahead.at < len(self.tokens):
            self.alignment = None
            if ahead.length >= WORTH_KEEPING:
                self.parted = ahead

    def _align(self, found: dict[int, int]) -> None:
        """Add to the places found where the text runs alongside itself, and take the best for that from now on."""
        ahead = self.alignment
        if ahead is not None:
            found[ahead.position] = ahead.length
        elif self.parted is not None:
            met = self.parted.met_again(self.tokens, len(self.tokens) - 1)
            if met is not None:
                position, run = met
                found[position] = max(found.get(position, 0), run + CREDIT)
        if found:
            length, position = max((length, position) for position, length in found.items())
            if ahead is None or position != ahead.position:
                self.alignment = Alignment(None, self.tokens, position, length, len(self.tokens))

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
        tokens = self.tokens
        if guessed:
            tail = tokens[-LONGEST:]
            tail.extend(guessed)
            del tail[:-LONGEST]
            found = self.places(tail, tail_hashes(tail, SIZES), -1)
            ahead = self.alignment
            if ahead is not None and ahead.text[ahead.position + 1 :][: len(guessed)] == array("i", guessed):
                found[ahead.position + len(guessed)] = ahead.length + len(guessed)
        else:
            tail = tokens[-LONGEST:]
            found = self.places(tail, self.rolling[: bisect_right(SIZES, len(tokens))], len(tokens) - 1)
            self._align(found)
        if not found:
            return None
        ranked = sorted(found.items(), key=lambda item: (-item[1], -item[0]))[:PLACES]
        return merged([Place(length, self._following(p, guessed, max_tokens)) for p, length in ranked], max_tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of the tokens and the chains."""
        arrays = [self.tokens, *self.heads, *self.links]
        return sum(len(values) * values.itemsize for values in arrays) + 8 * len(self.pending)


class ContextDrafter(Drafter):
    """Prompt look-up: the continuation of the longest suffix that the sequence's own text has had before."""

    capabilities = DrafterCapabilities(branches=True, continues_guesses=True)

    def __init__(self) -> None:
        self._texts: Running[_Text] = Running("context")

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Keep the prompt; it is indexed when a draft is first asked for."""
        self._texts.check_new(sequence_id)
        self._texts[sequence_id] = _Text(token_ids)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Keep the tokens."""
        self._texts[sequence_id].pending.extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """What followed the last places that look like the end of the text."""
        self._texts.check_most(max_tokens)
        return self._texts[sequence_id].draft((), max_tokens)

    def propose_after(self, sequence_id: int, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """The same of the text with these guesses; they are not kept."""
        self._texts.check_most(max_tokens)
        return self._texts[sequence_id].draft(guessed, max_tokens)

    def end(self, sequence_id: int) -> None:
        """Forget the sequence."""
        self._texts[sequence_id].pending.clear()  # an unknown one is refused here
        del self._texts[sequence_id]

    def statistics(self) -> dict[str, Any]:
        """Figures of the running sequences."""
        texts = self._texts.values()
        return {
            "memory_bytes": sum(text.held_bytes for text in texts),
            "tokens_indexed": sum(len(text.tokens) for text in texts),
            "documents": len(texts),
            "evictions": 0,
        }
