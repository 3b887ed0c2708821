"""What one tenant's requests taught: documents of tokens and where their n-grams end, in bounded memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque

import attrs
import numpy as np

from kinetic_drafters.ngrams import LONGEST, match_length, slice_hashes, tail_hashes, view
from kinetic_drafters.places import DOCUMENT_BITS, GROUP, MOST_BUCKETS, WAYS, PlaceTable

SIZES = (4, 8)
"""The n-grams that places are looked up by; the first is the least match."""
DOCUMENT = 1 << DOCUMENT_BITS
"""Most tokens of a document; a longer text is cut."""
ENOUGH = 3
"""Places that make a look at shorter n-grams needless."""
MOST_LOAD = 0.4
"""Indexed tokens per entry of a table beyond which it grows, or, for want of memory, documents leave."""
LEAST_LOAD = 0.3
"""The same below which it shrinks."""
HELPFUL = 32
"""Tokens of later texts that a document must have held, so that it counts as helpful."""
MOST_SLOTS = 1 << (31 - DOCUMENT_BITS)
"""As many as addresses have room for."""
SPARE_SLOTS = 64
SLOT_BYTES = 10
"""What a slot holds."""
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
    request:   that of its request: sequences that are forks of one another have it in common.
    serial:    the later, the higher.
    slot:      the upper bits of its tokens' addresses; -1 once it has left.
    helped:    tokens of other requests' texts that it foretold or held already.
    """

    tokens: array[int]
    lead: int
    owner: int
    request: int
    serial: int
    slot: int
    n_indexed: int = 0
    helped: int = 0

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

    Per size of n-gram a table holds the addresses (slot << DOCUMENT_BITS | index) of tokens where such n-grams end.

    Who leaves: of the documents that have not helped, while these hold more than half of the tokens, else of those that
    have, the one that was longest of no use. So what is new always has half of the memory to prove itself, and a flood
    of text that nobody asks for again leaves the other half alone.

    n_indexed: tokens of the documents that are indexed; n_unproven: those of documents that have not helped.
    evictions: documents that left.
    """

    def __init__(self) -> None:
        self.evictions = 0
        self._serial = 0
        self._clear()

    def _clear(self) -> None:
        """Nothing is remembered; whatever the most was, the memory is again the least."""
        self.n_indexed = 0
        self.n_unproven = 0
        self.n_documents = 0
        self._documents_bytes = 0
        self._slots: list[Document | None] = []
        self._worth = np.zeros(16, dtype=np.uint8)  # see `Worth`: 1 for a document, 2 for a helpful one
        self._free: deque[int] = deque()
        # By whether they are helpful: those that were longest not added to nor of help first.
        self._leaving: tuple[OrderedDict[Document, None], ...] = (OrderedDict(), OrderedDict())
        self.tables = [PlaceTable() for _ in SIZES]
        self._tables_bytes = sum(table.held_bytes for table in self.tables)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory."""
        return INDEX_BYTES + self._documents_bytes + len(self._slots) * SLOT_BYTES + self._tables_bytes

    # ---- documents

    def open(self, lead: array[int], owner: int, request: int) -> Document:
        """A new document, with tokens that go before."""
        slot = self._new_slot()
        self._serial += 1
        document = Document(lead[:], len(lead), owner, request, self._serial, slot)
        self._slots[slot] = document
        self._worth[slot] = 1
        self.n_documents += 1
        self._documents_bytes += document.held_bytes
        self._leaving[False][document] = None
        return document

    def _new_slot(self) -> int:
        # The longer a slot stays free, the more of the entries that point to it are known to be old and replaced.
        if len(self._slots) == MOST_SLOTS and not self._free:
            self.evict()
        if len(self._free) > self.n_documents + SPARE_SLOTS or len(self._slots) == MOST_SLOTS:
            return self._free.popleft()
        self._slots.append(None)
        if len(self._slots) == len(self._worth):
            self._worth = np.concatenate((self._worth, np.zeros_like(self._worth)))
        return len(self._slots) - 1

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
        self._leaving[document.is_helpful].move_to_end(document)
        self._fit_tables(limit_bytes)
        if document.slot >= 0:
            # With the first tokens the one before them: what followed it is new.
            self._index(document, max(0, start - 1) if start == document.lead else start)
        while self.held_bytes > limit_bytes and self.evict():
            pass
        return len(tokens)

    def append(self, document: Document, tokens: array[int]) -> None:
        """Add tokens that follow the document's without indexing them, as far as they have room."""
        self._documents_bytes -= document.held_bytes
        document.tokens.extend(tokens[: DOCUMENT - len(document.tokens)])
        self._documents_bytes += document.held_bytes

    def helped(self, document: Document, n_tokens: int) -> None:
        """The document foretold so many tokens of another request's text, or holds them already."""
        was_helpful = document.is_helpful
        document.helped += n_tokens
        if document.slot < 0:
            return
        del self._leaving[was_helpful][document]
        self._leaving[document.is_helpful][document] = None
        if document.is_helpful and not was_helpful:
            self.n_unproven -= document.n_indexed
            self._worth[document.slot] = 2

    def evict(self) -> bool:
        """Let the least useful document leave; False if there is none."""
        if not self.n_documents:
            return False
        unproven_first = 2 * self.n_unproven > self.n_indexed
        leaving = self._leaving[not unproven_first] or self._leaving[unproven_first]
        document, _ = leaving.popitem(last=False)
        self._slots[document.slot] = None
        self._worth[document.slot] = 0
        self._free.append(document.slot)
        document.slot = -1
        self.n_documents -= 1
        self.n_indexed -= document.n_indexed
        self.n_unproven -= document.n_indexed * (not document.is_helpful)
        self._documents_bytes -= document.held_bytes
        document.tokens = array("i")  # somebody may still hold the document
        self.evictions += 1
        if not self.n_documents:
            self._clear()
            return True
        for table in self.tables:
            needed = int(self.n_indexed / (LEAST_LOAD * WAYS)) // GROUP * GROUP + GROUP
            if needed < table.n_buckets:
                table.shrink(needed, self._worth)
        self._tables_bytes = sum(table.held_bytes for table in self.tables)
        return True

    # ---- the tables

    def _fit_tables(self, limit_bytes: int) -> None:
        """Let a table that is full grow, if it may, or documents leave until it is no longer full."""
        for table in self.tables:
            while self.n_indexed > MOST_LOAD * table.n_entries:
                growth_bytes = table.growth_bytes
                if table.n_buckets < MOST_BUCKETS and self.held_bytes + growth_bytes <= limit_bytes:
                    table.grow()
                    self._tables_bytes += growth_bytes
                elif not self.evict():
                    break

    def _index(self, document: Document, start: int) -> None:
        """Enter the tokens from `start` to the last one."""
        before = max(0, start - SIZES[-1] + 1)
        address = document.slot << DOCUMENT_BITS
        for table, size, hashes in zip(
            self.tables, SIZES, slice_hashes(view(document.tokens, before), SIZES), strict=True
        ):
            first = max(start, size - 1)
            if first < len(document.tokens):
                addresses = np.arange(address + first, address + len(document.tokens), dtype=np.int32)
                table.enter(hashes[first - before :], addresses, self._worth)

    def find(self, tail: array[int], but_owner: int | None = None) -> list[tuple[int, Document, int]]:
        """[(tokens, document, index)]: places whose last tokens are those that `tail` ends with, the best first.

        Best are the most tokens (at most LONGEST are compared), then the latest document, then the latest place.
        but_owner: a sequence whose documents do not count.
        """
        found: dict[tuple[int, int], tuple[int, Document, int]] = {}
        hashes = tail_hashes(tail, SIZES)
        for k in range(len(hashes) - 1, -1, -1):
            size = SIZES[k]
            for address in self.tables[k].look_up(hashes[k]):
                document = self._slots[address >> DOCUMENT_BITS]
                index = address & (DOCUMENT - 1)
                if document is None or document.owner == but_owner or not size <= index + 1 <= len(document.tokens):
                    continue
                if (document.serial, index) in found or document.tokens[index - size + 1 : index + 1] != tail[-size:]:
                    continue
                length = match_length(document.tokens, index, tail, size)
                found[document.serial, index] = (length, document, index)
            if len(found) >= ENOUGH:
                break
        return sorted(found.values(), key=lambda place: (-place[0], -place[1].serial, -place[2]))

    def known(self, tokens: array[int]) -> tuple[Document, int] | None:
        """(document, tokens): one that holds the most of these from the first on.

        It holds at least LONGEST of them, or all; None where none does.
        """
        size, least = SIZES[-1], min(LONGEST, len(tokens))
        if least < size:
            return None
        (value,) = tail_hashes(tokens[:size], SIZES[-1:])
        best = None
        for address in self.tables[-1].look_up(value):
            document = self._slots[address >> DOCUMENT_BITS]
            start = (address & (DOCUMENT - 1)) + 1 - size
            # Most places are told apart here, with no more than so many tokens.
            if document is None or start < 0 or document.tokens[start : start + least] != tokens[:least]:
                continue
            following = view(document.tokens, start)[: len(tokens)]
            differing = np.flatnonzero(following != view(tokens)[: len(following)])
            run = int(differing[0]) if len(differing) else len(following)
            if best is None or (run, document.serial, start) > best[:3]:
                best = (run, document.serial, start, document)
        return None if best is None else (best[3], best[0])
