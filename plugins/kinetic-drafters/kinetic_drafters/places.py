"""A table from the hashes of n-grams to the last places where they ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kinetic_drafters.ngrams import MASK, SCATTER

WAYS = 16
"""Places that a bucket holds."""
LEAST_BITS = 6
"""Binary logarithm of the least number of buckets."""
MOST_BITS = LEAST_BITS + 16
_TAG_SHIFT = 16 - LEAST_BITS
DOCUMENT_BITS = 12
"""The lower bits of an address: which token of a document. The upper ones say which document."""

Addresses = npt.NDArray[np.int32]
Worth = npt.NDArray[np.uint8]
"""By the upper bits of an address: 0 for a document that left, and the more, the rather its entries stay.

The last value is 0: it is that of address -1, no entry.
"""


class PlaceTable:
    """Addresses in buckets of `WAYS`. What is entered takes the place of what is worth least, of that the oldest.

    An entry is a hint: other n-grams have the same hash, so whoever asks compares the tokens.

    A hash is scattered; its upper bits are the bucket, the 16 bits after the first `LEAST_BITS` are kept as a tag. They
    tell n-grams of a bucket apart, and tell which half of its bucket an entry belongs to when the table doubles.
    """

    def __init__(self) -> None:
        buckets = 1 << LEAST_BITS
        self._set(
            np.full((buckets, WAYS), -1, np.int32), np.zeros((buckets, WAYS), np.uint16), np.zeros(buckets, np.uint8)
        )

    def _set(self, entries: Addresses, tags: npt.NDArray[np.uint16], turns: npt.NDArray[np.uint8]) -> None:
        """entries: i32[buckets, WAYS], -1 for none. tags: u16[buckets, WAYS]. turns: u8[buckets]: the oldest's way."""
        self._entries, self._tags, self._turns = entries, tags, turns
        self.bits = len(turns).bit_length() - 1
        self.n_entries = len(turns) * WAYS
        self.held_bytes = entries.nbytes + tags.nbytes + turns.nbytes
        # For reading few values: several times faster than arrays.
        self._entry_values, self._tag_values = entries.reshape(-1).data, tags.reshape(-1).data

    def look_up(self, value: int) -> list[int]:
        """The addresses entered with the hash `value`, and few others, in no order."""
        scattered = (value * SCATTER) & MASK
        tag = (scattered >> _TAG_SHIFT) & 0xFFFF
        start = (scattered >> (32 - self.bits)) * WAYS
        tags = self._tag_values[start : start + WAYS].tolist()
        if tag not in tags:
            return []
        entries = self._entry_values[start : start + WAYS].tolist()
        return [address for address, other in zip(entries, tags, strict=True) if other == tag and address >= 0]

    def enter(self, hashes: npt.NDArray[np.uint32], addresses: Addresses, worth: Worth) -> None:
        """Enter addresses, the later the newer, with their hashes. Of too many for one bucket the last ones stay."""
        scattered = hashes * np.uint32(SCATTER)
        buckets = scattered >> np.uint32(32 - self.bits)
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
        self._tags[buckets, way] = scattered >> np.uint32(_TAG_SHIFT)
        counts = np.append(starts[1:], len(buckets)) - starts
        n_lost = np.maximum(0, counts - (worths == 0).sum(axis=1))
        self._turns[touched] = (self._turns[touched] + n_lost) % WAYS

    def double(self, worth: Worth) -> None:
        """Twice as many buckets: each one's entries go to two."""
        entries, tags = self._by_age()
        upper = (tags >> np.uint16(MOST_BITS - 1 - self.bits)) & np.uint16(1) == 1
        kept = worth[entries >> DOCUMENT_BITS] > 0
        halves = np.stack((kept & ~upper, kept & upper), axis=1).reshape(-1, WAYS)
        self._set(*_compacted(entries.repeat(2, axis=0), tags.repeat(2, axis=0), halves))

    def halve(self, worth: Worth) -> None:
        """Half as many buckets: two become one."""
        entries, tags = self._by_age()
        entries, tags = entries.reshape(-1, 2 * WAYS), tags.reshape(-1, 2 * WAYS)
        self._set(*_compacted(entries, tags, worth[entries >> DOCUMENT_BITS] > 0))

    def _by_age(self) -> tuple[Addresses, npt.NDArray[np.uint16]]:
        ways = (np.arange(WAYS, dtype=np.uint8) + self._turns[:, None]) % WAYS
        return np.take_along_axis(self._entries, ways, axis=1), np.take_along_axis(self._tags, ways, axis=1)


def _compacted(
    entries: Addresses, tags: npt.NDArray[np.uint16], kept: npt.NDArray[np.bool_]
) -> tuple[Addresses, npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """The first `WAYS` entries of each row for which `kept` is True, and the way to give up next."""
    rank = kept.cumsum(axis=1, dtype=np.int8) - 1
    rows, columns = np.nonzero(kept & (rank < WAYS))
    ways = rank[rows, columns]
    new_entries = np.full((len(entries), WAYS), -1, np.int32)
    new_tags = np.zeros((len(entries), WAYS), np.uint16)
    new_entries[rows, ways] = entries[rows, columns]
    new_tags[rows, ways] = tags[rows, columns]
    return new_entries, new_tags, np.zeros(len(entries), np.uint8)
