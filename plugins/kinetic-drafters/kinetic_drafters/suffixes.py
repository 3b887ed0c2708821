"""Where a growing text had the tokens before that it ends with now."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

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

SIZES = (1, 2, 4, 8)
"""The n-grams that places are looked up by; the first is the least match."""
PLACES = 4
"""Places looked at per size: the last ones."""
STEPS = 32
"""Links followed per size: some lead to other n-grams of the same bucket."""
ENOUGH = 3
"""Places that make a look at shorter n-grams needless."""
FEW_NEW = 24
"""New tokens up to which a loop is faster than arrays."""
LEAST_BITS = 8
_LEAVING = tuple((size, POWERS[size]) for size in SIZES)
"""(n, what the token n places back counts for when the next one comes)."""


class SuffixIndex:
    """One text's tokens and, for every n-gram size, chains of the positions that fell into the same bucket.

    heads[k][bucket]: the last position whose n-gram of size SIZES[k] fell there, -1 for none.
    links[k][position]: the one before it, -1 for none.
    pending:            tokens that were not indexed yet.

    Takes O(1) per token: at most STEPS links are followed per size. At most 96 bytes per token and 8,000 besides.
    """

    __slots__ = ("bits", "heads", "links", "pending", "rolling", "tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.tokens = array("i")
        self.pending = list(token_ids)
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
        for k, (heads, links, (size, power)) in enumerate(zip(self.heads, self.links, _LEAVING, strict=True)):
            rolling[k] = value = (rolling[k] * BASE + token - tokens[position - size] * power) & MASK
            bucket = ((value * SCATTER) & MASK) >> shift
            links.append(heads[bucket])
            heads[bucket] = position

    def _insert_all(self, start: int) -> None:
        """As `_insert` of every position from `start` on: the hashes with arrays, the chains one by one."""
        n_tokens = len(self.tokens)
        before = max(0, start - SIZES[-1] + 1)
        for k, hashes in enumerate(slice_hashes(view(self.tokens, before), SIZES)):
            heads, links = self.heads[k], self.links[k]
            first = min(max(start, SIZES[k] - 1), n_tokens)
            links.extend([-1] * (first - start))
            link = links.append
            for position, bucket in enumerate(buckets_of(hashes[first - before :], self.bits).tolist(), first):
                link(heads[bucket])
                heads[bucket] = position
            if n_tokens >= SIZES[k]:
                self.rolling[k] = int(hashes[-1])

    def places(self, guessed: Sequence[int] = ()) -> dict[int, int]:
        """{position: length}: places whose last tokens are those that the text and then `guessed` end with.

        They are the last PLACES places of the longest n-grams of SIZES that come again; shorter ones are looked up
        until ENOUGH were found. Lengths go up to LONGEST. The text's own end is none. Call `update` before.
        """
        tokens = self.tokens
        tail = tokens[-LONGEST:]
        if guessed:
            tail.extend(guessed)
            del tail[:-LONGEST]
            hashes = tail_hashes(tail, SIZES)
            n_sizes, steps = len(hashes), STEPS
        else:  # the last that fell into the same buckets as the end is the end itself
            n_sizes, steps = len(SIZES) if tail else 0, STEPS - 1
        found: dict[int, int] = {}
        for k in range(n_sizes - 1, -1, -1):
            position = self.heads[k][bucket_of(hashes[k], self.bits)] if guessed else self.links[k][-1]
            if position < 0:
                continue
            size = SIZES[k]
            links = self.links[k]
            wanted = tail[-size:]
            n_found = 0
            for _ in range(steps):
                if tokens[position - size + 1 : position + 1] == wanted:
                    if position not in found:
                        found[position] = match_length(tokens, position, tail, size)
                    n_found += 1
                    if n_found == PLACES:
                        break
                position = links[position]
                if position < 0:
                    break
            if len(found) >= ENOUGH:
                break
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes of memory."""
        arrays = [self.tokens, *self.heads, *self.links]
        return sum(values.__sizeof__() for values in arrays) + self.pending.__sizeof__()
