"""A table from the hashes of n-grams to the last places where they ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kinetic_drafters.ngrams import MASK, SCATTER

WAYS = 16
"""Places that a bucket holds."""
LEAST_BITS = 6
GROUP = 1 << LEAST_BITS
"""Buckets that a table has at least, and by which it grows and shrinks."""
MOST_BUCKETS = GROUP << 16
"""As many as tags tell apart."""
SPARE = 128
"""A table that outgrows its memory gets one part in so many more than it needs."""
BUCKET_BYTES = WAYS * 6 + 1
"""What a bucket holds: addresses, tags, whose turn it is."""
_FOLD = 15
DOCUMENT_BITS = 12
"""The lower bits of an address: which token of a document. The upper ones say which document."""

Addresses = npt.NDArray[np.int32]
Tags = npt.NDArray[np.uint16]
Worth = npt.NDArray[np.uint8]
"""By the upper bits of an address: 0 for a document that left, and the more, the rather its entries stay.

The last value is 0: it is that of address -1, no entry.
"""


class PlaceTable:
    """Addresses in buckets of `WAYS`. What is entered takes the place of what is worth least, of that the oldest.

    An entry is a hint: other n-grams have the same hash, so whoever asks compares the tokens.

    A hash is scattered; its lower bits are the bucket, the 16 bits after the first `LEAST_BITS` are kept as a tag. They
    tell n-grams of a bucket apart. The table grows by linear hashing (Litwin, 1980): with n buckets, 2**k <= n <
    2**(k + 1), those below n - 2**k have been split by the k-th bit, which is one of the tag's. So it grows a few
    buckets at a time, and no request waits for all of a large table to be laid out anew.
    """

    def __init__(self) -> None:
        self.n_buckets = GROUP
        self._set(np.full((GROUP, WAYS), -1, np.int32), np.zeros((GROUP, WAYS), np.uint16), np.zeros(GROUP, np.uint8))

    def _set(self, entries: Addresses, tags: Tags, turns: npt.NDArray[np.uint8]) -> None:
        """entries: i32[room, WAYS], -1 for none. tags: u16[room, WAYS]. turns: u8[room]: the oldest's way."""
        self._entries, self._tags, self._turns = entries, tags, turns
        self.held_bytes = len(turns) * BUCKET_BYTES
        # For reading few values: several times faster than arrays.
        self._entry_values, self._tag_values = entries.reshape(-1).data, tags.reshape(-1).data

    @property
    def n_entries(self) -> int:
        """Addresses that there is room for."""
        return self.n_buckets * WAYS

    @property
    def _split_bits(self) -> int:
        """Lower bits of a scattered hash that tell all buckets apart but those that were split (see the class)."""
        return self.n_buckets.bit_length() - 1

    def look_up(self, value: int) -> list[int]:
        """The addresses entered with the hash `value`, and few others, in no order."""
        scattered = (value * SCATTER) & MASK
        scattered ^= scattered >> _FOLD
        tag = (scattered >> LEAST_BITS) & 0xFFFF
        bits = self._split_bits
        bucket = scattered & ((2 << bits) - 1)
        start = (bucket if bucket < self.n_buckets else bucket - (1 << bits)) * WAYS
        tags = self._tag_values[start : start + WAYS].tolist()
        if tag not in tags:
            return []
        entries = self._entry_values[start : start + WAYS].tolist()
        return [address for address, other in zip(entries, tags, strict=True) if other == tag and address >= 0]

    def enter(self, hashes: npt.NDArray[np.uint32], addresses: Addresses, worth: Worth) -> None:
        """Enter addresses, the later the newer, with their hashes. Of too many for one bucket the last ones stay."""
        scattered = hashes * np.uint32(SCATTER)
        scattered ^= scattered >> np.uint32(_FOLD)
        bits = self._split_bits
        buckets = scattered & np.uint32((2 << bits) - 1)
        buckets[buckets >= self.n_buckets] -= np.uint32(1 << bits)
        order = np.argsort(buckets, kind="stable")
        buckets, scattered, addresses = buckets[order], scattered[order], addresses[order]
        opens = np.ones(len(buckets), dtype=bool)
        np.not_equal(buckets[1:], buckets[:-1], out=opens[1:])
        starts = opens.nonzero()[0]
        group = opens.cumsum() - 1
        rank = np.arange(len(buckets)) - starts[group]
        touched = buckets[starts]
        # Which way is given up first: by worth, then by age.
        worths = worth[self._entries[touched] >> DOCUMENT_BITS]
        age = (np.arange(WAYS, dtype=np.uint8) - self._turns[touched, None]) % WAYS
        ways = np.argsort(worths * np.uint8(WAYS) + age, axis=1)
        way = ways[group, rank % WAYS]
        self._entries[buckets, way] = addresses
        self._tags[buckets, way] = scattered >> np.uint32(LEAST_BITS)
        counts = np.append(starts[1:], len(buckets)) - starts
        n_lost = np.maximum(0, counts - (worths == 0).sum(axis=1))
        self._turns[touched] = (self._turns[touched] + n_lost) % WAYS

    # ---- size

    @property
    def growth_bytes(self) -> int:
        """What `grow` adds to `held_bytes`."""
        room = len(self._turns)
        return (_room(self.n_buckets + GROUP, room) - room) * BUCKET_BYTES

    def grow(self) -> None:
        """`GROUP` buckets more: as many are split."""
        bits = self._split_bits
        self._fit(_room(self.n_buckets + GROUP, len(self._turns)))
        first = self.n_buckets - (1 << bits)
        old, new = slice(first, first + GROUP), slice(self.n_buckets, self.n_buckets + GROUP)
        moved = (self._tags[old] >> np.uint16(bits - LEAST_BITS)) & np.uint16(1) == 1
        self._entries[new] = np.where(moved, self._entries[old], -1)
        self._entries[old][moved] = -1
        self._tags[new] = self._tags[old]
        self._turns[new] = self._turns[old]
        self.n_buckets += GROUP

    def shrink(self, n_buckets: int, worth: Worth) -> None:
        """Have so many buckets, a multiple of `GROUP`: the last ones join those that they were split from."""
        while self.n_buckets > n_buckets:
            half = 1 << (self.n_buckets - 1).bit_length() - 1
            last, first = self.n_buckets, max(n_buckets, half)
            self._join(slice(first - half, last - half), slice(first, last), worth)
            self.n_buckets = first
        self._fit(_room(n_buckets, len(self._turns)))

    def _join(self, old: slice, new: slice, worth: Worth) -> None:
        (entries, tags), (joining, their_tags) = self._by_age(old), self._by_age(new)
        entries, tags = np.concatenate((entries, joining), axis=1), np.concatenate((tags, their_tags), axis=1)
        kept = worth[entries >> DOCUMENT_BITS] > 0
        rank = kept.cumsum(axis=1, dtype=np.int8) - 1
        rows, columns = np.nonzero(kept & (rank < WAYS))
        ways = rank[rows, columns]
        self._entries[old] = -1
        self._entries[old][rows, ways] = entries[rows, columns]
        self._tags[old][rows, ways] = tags[rows, columns]
        self._turns[old] = 0

    def _by_age(self, buckets: slice) -> tuple[Addresses, Tags]:
        ways = (np.arange(WAYS, dtype=np.uint8) + self._turns[buckets, None]) % WAYS
        entries, tags = self._entries[buckets], self._tags[buckets]
        return np.take_along_axis(entries, ways, axis=1), np.take_along_axis(tags, ways, axis=1)

    def _fit(self, room: int) -> None:
        """Have memory for so many buckets."""
        if room != len(self._turns):
            del self._entry_values, self._tag_values  # nothing else refers to the arrays' memory
            for array in (self._entries, self._tags, self._turns):
                array.resize((room, *array.shape[1:]), refcheck=False)  # in place: large memory need not be copied
            self._set(self._entries, self._tags, self._turns)


def _room(n_buckets: int, room: int) -> int:
    """The buckets to have memory for where there is `room`: some more than needed, so that it rarely changes."""
    if n_buckets <= room <= n_buckets + 2 * n_buckets // SPARE:
        return room
    return n_buckets + n_buckets // SPARE
