"""What one tenant's requests taught: documents of tokens and where their n-grams end, in bounded memory."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_drafters.ngrams import LONGEST, bucket_of, buckets_of, match_length, slice_hashes, tail_hashes, view

SIZES = (4, 8, 16)
"""The n-grams that places are looked up by; the first is the least match."""
WAYS = 4
"""Places that a bucket holds: the last that fell there."""
DOCUMENT_BITS = 12
DOCUMENT = 1 << DOCUMENT_BITS
"""Most tokens of a document; a longer text is cut."""
ENOUGH = 3
"""Places that make a look at shorter n-grams needless."""
LEAST_BITS = 8
MOST_LOAD = 1.25
"""Indexed tokens per entry of the table beyond which it grows, or, for want of memory, documents leave."""
LEAST_LOAD = 0.5
"""The same below which it shrinks."""
HELPFUL = 32
"""Tokens of later texts that a document must have held, so that it counts as helpful."""
DOCUMENT_BYTES = 500
"""What a document holds besides its tokens: objects, and its entry in the order of leaving."""
INDEX_BYTES = 1000
"""The same of an index without documents and table."""


@attrs.define(eq=False)
class Document:
    """Tokens that followed each other in one request.

    tokens:    i32[≤ DOCUMENT]: `lead` ones from before (other documents have them too), then those indexed, then some
               from after.
    n_indexed: how many are.
    owner:     the serial number of the sequence that they come from.
    serial:    the later, the higher.
    slot:      the upper bits of its tokens' addresses; -1 once it has left.
    helped:    tokens of later texts that it foretold or held already.
    used:      the index's clock when it was last added to or helped.
    """

    tokens: array[int]
    lead: int
    owner: int
    serial: int
    slot: int
    n_indexed: int = 0
    helped: int = 0
    used: int = 0

    @property
    def is_helpful(self) -> bool:
        """Has it helped enough to stay longer than what never did?"""
        return self.helped >= HELPFUL

    @property
    def held_bytes(self) -> int:
        """Bytes of memory."""
        return DOCUMENT_BYTES + self.tokens.__sizeof__()


class TenantIndex:
    """Finds the places in a tenant's documents that look like the end of a text.

    A table of buckets holds, per size of n-gram, the addresses (slot << DOCUMENT_BITS | index) of tokens where such
    n-grams end. An entry is only a hint: tokens are compared, so entries of documents that left may stay.

    Who leaves: of the documents that have not helped, while these hold more than half of the tokens, else of those that
    have, the one that was longest of no use. So what is new always has half of the memory to prove itself, and a flood
    of text that nobody asks for again leaves the other half alone.

    clock:     tokens learned so far.
    n_indexed: tokens of the documents that are indexed; n_unproven: those of documents that have not helped.
    evictions: documents that left.
    n_running: sequences of the tenant; kept by the index's user.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.n_indexed = 0
        self.n_unproven = 0
        self.n_running = 0
        self.n_documents = 0
        self.evictions = 0
        self._documents_bytes = 0
        self._slots: list[Document | None] = []
        self._free: list[int] = []
        # By whether they are helpful: (used, serial, document), as of when it was put there.
        self._leaving: tuple[list[tuple[int, int, Document]], ...] = ([], [])
        self._to_index: list[Document] = []
        self._serial = 0
        self._new_table(LEAST_BITS)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory."""
        return INDEX_BYTES + self._documents_bytes + self._table_bytes

    # ---- documents

    def open(self, lead: array[int], owner: int) -> Document:
        """A new document, with tokens that go before."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._slots)
            self._slots.append(None)
        self._serial += 1
        document = Document(lead[:], len(lead), owner, self._serial, slot, used=self.clock)
        self._slots[slot] = document
        self.n_documents += 1
        self._documents_bytes += document.held_bytes
        heappush(self._leaving[False], (document.used, document.serial, document))
        return document

    def extend(self, document: Document, tokens: array[int], limit_bytes: int) -> int:
        """Add tokens that follow the document's; returns how many had room in it.

        limit_bytes: what the index may hold. Where it would hold more, documents leave.
        """
        tokens = tokens[: DOCUMENT - len(document.tokens)]
        start = len(document.tokens)
        self.append(document, tokens)
        document.n_indexed += len(tokens)
        self.n_indexed += len(tokens)
        self.n_unproven += len(tokens) * (not document.is_helpful)
        self.clock += len(tokens)
        document.used = self.clock
        self._index(document, start)
        self._fit_table(limit_bytes)
        while self.held_bytes > limit_bytes and self.evict():
            pass
        if self._to_index:
            waiting = self._to_index.pop()
            if waiting.slot >= 0:
                self._index(waiting, waiting.lead)
        return len(tokens)

    def append(self, document: Document, tokens: array[int]) -> None:
        """Add tokens that follow the document's without indexing them, as far as they have room."""
        self._documents_bytes -= document.held_bytes
        document.tokens.extend(tokens[: DOCUMENT - len(document.tokens)])
        self._documents_bytes += document.held_bytes

    def helped(self, document: Document, n_tokens: int) -> None:
        """The document foretold so many tokens of a text, or holds them already."""
        was_helpful = document.is_helpful
        document.helped += n_tokens
        document.used = self.clock
        if document.is_helpful and not was_helpful and document.slot >= 0:
            self.n_unproven -= document.n_indexed
            heappush(self._leaving[True], (document.used, document.serial, document))

    def evict(self) -> bool:
        """Let the least useful document leave; False if there is none."""
        document = self._least_useful()
        if document is None:
            return False
        self._slots[document.slot] = None
        self._free.append(document.slot)
        document.slot = -1
        self.n_documents -= 1
        self.n_indexed -= document.n_indexed
        self.n_unproven -= document.n_indexed * (not document.is_helpful)
        self._documents_bytes -= document.held_bytes
        self.evictions += 1
        bits = self._bits
        while bits > LEAST_BITS and self.n_indexed < LEAST_LOAD * (WAYS << bits):
            bits -= 1
        if bits < self._bits:
            # What stays is entered again piece by piece, the last used first: all at once would hold up a step.
            self._new_table(bits)
            self._to_index = sorted((d for d in self._slots if d is not None), key=lambda d: (d.used, d.serial))
        return True

    def _least_useful(self) -> Document | None:
        unproven_first = 2 * self.n_unproven > self.n_indexed
        for helpful in (not unproven_first, unproven_first):
            heap = self._leaving[helpful]
            while heap:
                used, _, document = heappop(heap)
                if document.slot < 0 or document.is_helpful != helpful:
                    continue  # it left, or is in the other heap by now
                if document.used == used:
                    return document
                heappush(heap, (document.used, document.serial, document))
        return None

    # ---- the table

    def _new_table(self, bits: int) -> None:
        self._set_table(
            np.full((len(SIZES), 1 << bits, WAYS), -1, dtype=np.int32), np.zeros((len(SIZES), 1 << bits), np.uint8)
        )

    def _set_table(self, table: npt.NDArray[np.int32], turns: npt.NDArray[np.uint8]) -> None:
        """table: i32[sizes, buckets, WAYS]: addresses, -1 for none. turns: u8[sizes, buckets]: the way to fill next."""
        self._bits = table.shape[1].bit_length() - 1
        self._table, self._turns = table.reshape(-1, WAYS), turns.reshape(-1)
        self._entries = table.shape[1] * WAYS
        self._table_bytes = table.nbytes + turns.nbytes
        self._rows = self._table.reshape(-1).data

    def _fit_table(self, limit_bytes: int) -> None:
        """Double a full table, if it may be, or let documents leave until it is no longer full."""
        while self.n_indexed > MOST_LOAD * self._entries:
            if self.held_bytes + self._table_bytes <= limit_bytes:
                # Buckets are the hashes' upper bits: one becomes two neighbours. Each gets all of its entries; those
                # that belong to the other one are no worse than those of documents that left.
                shape = (len(SIZES), 1 << self._bits)
                table = self._table.reshape(*shape, WAYS).repeat(2, axis=1)
                self._set_table(table, self._turns.reshape(shape).repeat(2, axis=1))
            elif not self.evict():
                break

    def _index(self, document: Document, start: int) -> None:
        """Enter the tokens from `start` to the last indexed one."""
        before = max(0, start - SIZES[-1] + 1)
        end = document.lead + document.n_indexed
        hashes = slice_hashes(view(document.tokens, before)[: end - before], SIZES)
        rows, addresses = [], []
        for k, size in enumerate(SIZES):
            first = max(start, size - 1)
            if first < end:
                rows.append(buckets_of(hashes[k][first - before :], self._bits).astype(np.int64) + (k << self._bits))
                addresses.append(np.arange(first, end, dtype=np.int32) + np.int32(document.slot << DOCUMENT_BITS))
        if not rows:
            return
        row, address = np.concatenate(rows), np.concatenate(addresses)
        order = np.argsort(row, kind="stable")
        row, address = row[order], address[order]
        starts = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
        counts = np.append(starts[1:], len(row)) - starts
        # Of more than WAYS that fall in one bucket at once the last ones stay.
        ways = np.arange(len(row)) - np.repeat(starts, counts) + self._turns[row]
        self._table[row, ways % WAYS] = address
        self._turns[row[starts]] = (self._turns[row[starts]] + counts) % WAYS

    def find(
        self, tail: array[int], but_owner: int | None = None, least: int = SIZES[0]
    ) -> list[tuple[int, Document, int]]:
        """[(tokens, document, index)]: places whose last tokens are those that `tail` ends with, the best first.

        Best are the most tokens (at most LONGEST are compared), then the latest document, then the latest place.
        but_owner: a sequence whose documents do not count. least: one of SIZES, the least match.
        """
        found: dict[tuple[int, int], tuple[int, Document, int]] = {}
        hashes = tail_hashes(tail, SIZES)
        last = tail[-1]
        for k in range(len(hashes) - 1, SIZES.index(least) - 1, -1):
            size = SIZES[k]
            row = ((k << self._bits) + bucket_of(hashes[k], self._bits)) * WAYS
            for address in self._rows[row : row + WAYS].tolist():
                if address < 0:
                    continue
                document = self._slots[address >> DOCUMENT_BITS]
                index = address & (DOCUMENT - 1)
                if document is None or document.owner == but_owner or not size <= index + 1 <= len(document.tokens):
                    continue
                tokens = document.tokens
                if tokens[index] != last or (document.serial, index) in found:
                    continue
                if tokens[index - size + 1 : index + 1] == tail[-size:]:
                    length = match_length(tokens, index, tail, size)
                    found[document.serial, index] = (length, document, index)
            if len(found) >= ENOUGH:
                break
        return sorted(found.values(), key=lambda place: (-place[0], -place[1].serial, -place[2]))

    def known(self, tokens: array[int]) -> tuple[Document, int] | None:
        """(document, tokens): one that holds the most of these from the first on, at least LONGEST of them."""
        if len(tokens) < LONGEST:
            return None
        best = None
        for _, document, index in self.find(tokens[: SIZES[-1]], least=SIZES[-1]):
            following = view(document.tokens, index + 1)
            wanted = view(tokens, SIZES[-1])[: len(following)]
            differing = np.flatnonzero(following[: len(wanted)] != wanted)
            run = SIZES[-1] + (int(differing[0]) if len(differing) else len(wanted))
            if run >= LONGEST and (best is None or run > best[1]):
                best = (document, run)
        return best
