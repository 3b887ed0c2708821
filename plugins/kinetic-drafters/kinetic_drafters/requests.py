"""Guesses from earlier requests: what followed where another request stood as this one stands now."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kinetic_core.errors import describe
from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities
from kinetic_drafters.alignment import CREDIT, WORTH_KEEPING, Alignment
from kinetic_drafters.continuation import Place, merged
from kinetic_drafters.ngrams import LONGEST
from kinetic_drafters.running import Running
from kinetic_drafters.tenant import DOCUMENT, Document, TenantIndex

DEFAULT_MEMORY_BYTES = 64 << 20
TENANT_BYTES = 64 << 10
"""What a tenant is promised: as many are remembered as the memory has room for this."""
SLICE = 64
"""Tokens of a running sequence that are learned at a time, and the least that are recognized as known."""
PLACES = 4
"""Places that a draft is made of."""
MOST_AT_ONCE = DOCUMENT
"""Tokens of a prompt that are learned at a time."""
TRAILING = 32
"""Tokens that a document keeps of what follows it in another document: drafts go on over the edge."""


class _Sequence:
    """One sequence: its tokens, how many of them were learned or known, and the document that is being written."""

    __slots__ = ("alignment", "document", "learned", "parted", "pending", "serial", "tenant", "tokens")

    def __init__(self, serial: int, tenant: TenantIndex, token_ids: Sequence[int]) -> None:
        self.serial = serial
        self.tenant = tenant
        self.tokens = array("i")
        self.pending = list(token_ids)
        self.learned = 0
        self.document: Document | None = None
        self.alignment: Alignment[Document] | None = None
        self.parted: Alignment[Document] | None = None

    def pull(self) -> None:
        """Take in the tokens that came since."""
        if self.pending:
            self.tokens.fromlist(self.pending)
            self.pending = []

    def learn(self, end: int, limit_bytes: int) -> None:
        """Remember the tokens up to `end` that no document has yet."""
        tenant, tokens = self.tenant, self.tokens
        while self.learned < end:
            known = tenant.known(tokens[self.learned : end])
            if known is not None:
                document, n_known = known
                tenant.helped(document, n_known)
                if self.document is not None and self.document.slot >= 0:
                    tenant.append(self.document, tokens[self.learned : self.learned + TRAILING])
                self.document = None
                self.learned += n_known
                continue
            new = self.learned + SLICE
            while new < end and tenant.known(tokens[new:end]) is None:
                new += SLICE
            new = min(new, end)
            while self.learned < new:
                if self.document is None or self.document.slot < 0 or len(self.document.tokens) == DOCUMENT:
                    lead = tokens[max(0, self.learned - LONGEST) : self.learned]
                    self.document = tenant.open(lead, self.serial)
                self.learned += tenant.extend(self.document, tokens[self.learned : new], limit_bytes)

    def _follow(self) -> None:
        """See whether the text went on as the document that it ran alongside."""
        ahead = self.alignment
        if ahead is None:
            return
        count = ahead.follow(self.tokens)
        gone = ahead.source.slot < 0
        if count and not gone:
            self.tenant.helped(ahead.source, count)
        if gone or ahead.at < len(self.tokens):
            self.alignment = None
            if ahead.length >= WORTH_KEEPING and not gone:
                self.parted = ahead

    def _met_again(self) -> tuple[int, Document, int] | None:
        """Where the text agrees again with the document that it parted from."""
        ahead = self.parted
        if ahead is None or ahead.source.slot < 0:
            return None
        met = ahead.met_again(self.tokens, len(ahead.text))
        return None if met is None else (met[1] + CREDIT, ahead.source, met[0])

    def draft(self, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """What followed the places that look like the end of the text and these guesses."""
        self.pull()
        self._follow()
        tail = self.tokens[-LONGEST:]
        if guessed:
            tail.extend(guessed)
            del tail[:-LONGEST]
        if not tail:
            return None
        found = self.tenant.find(tail, self.serial)
        ahead = self.alignment
        if ahead is None:
            met = None if guessed else self._met_again()
        else:
            expected = ahead.text[ahead.position + 1 : ahead.position + 1 + len(guessed)]
            met = None
            if expected.tolist() == list(guessed):
                met = (ahead.length + len(guessed), ahead.source, ahead.position + len(guessed))
        if met is not None:
            found = [place for place in found if place[1:] != met[1:]]
            found.append(met)
            found.sort(key=lambda place: (-place[0], -place[1].serial, -place[2]))
        if not found:
            return None
        if not guessed:
            length, document, position = found[0]
            if ahead is None or document is not ahead.source or position != ahead.position:
                self.alignment = Alignment(document, document.tokens, position, length, len(self.tokens))
        places = [Place(length, d.tokens[index + 1 : index + 1 + max_tokens]) for length, d, index in found[:PLACES]]
        return merged(places, max_tokens)


class RequestsDrafter(Drafter):
    """Remembers the tokens of every request, running or over, and continues as the one that fits best did.

    Tenants (salts) are apart: each has an index of its own. While the memory does not do for all, documents leave the
    largest index, so nobody loses any while holding no more than an equal share. One more tenant than there is room
    for takes the place of the one that was longest without a request.

    memory_bytes: bound on what is remembered, in bytes (tables and documents of all tenants). A running sequence holds
                  besides 4 bytes per token of its own.
    Raises ValueError for a bound below one tenant's least, 64 KiB.
    """

    capabilities = DrafterCapabilities(branches=True, continues_guesses=True, learns_across_requests=True)

    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        if memory_bytes < TENANT_BYTES:
            raise ValueError(
                describe("memory_bytes", where="the drafter requests", got=memory_bytes, expected=f"≥ {TENANT_BYTES}")
            )
        self._memory_bytes = memory_bytes
        self._sequences: Running[_Sequence | None] = Running("requests")
        self._tenants: dict[str, TenantIndex] = {}  # the one without a request for longest first
        self._held_bytes = 0
        self._serial = 0
        self._evictions = 0

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Keep the prompt; it is learned while the answer runs."""
        self._sequences.check_new(sequence_id)
        tenant = self._tenant(salt)
        if tenant is None:
            self._sequences[sequence_id] = None
            return
        tenant.n_running += 1
        self._serial += 1
        self._sequences[sequence_id] = _Sequence(self._serial, tenant, token_ids)

    def _tenant(self, salt: str) -> TenantIndex | None:
        """The index of a salt, now the last used one; None where all that there may be have running sequences."""
        tenant = self._tenants.pop(salt, None)
        if tenant is None:
            if len(self._tenants) == self._memory_bytes // TENANT_BYTES:
                idle = next((name for name, other in self._tenants.items() if not other.n_running), None)
                if idle is None:
                    return None
                gone = self._tenants.pop(idle)
                self._held_bytes -= gone.held_bytes
                self._evictions += gone.evictions + gone.n_documents
            tenant = TenantIndex()
            self._held_bytes += tenant.held_bytes
        self._tenants[salt] = tenant
        self._make_room()
        return tenant

    def _make_room(self) -> None:
        """Let documents of the largest index leave until all fit."""
        while self._held_bytes > self._memory_bytes:
            largest = max(self._tenants.values(), key=lambda tenant: tenant.held_bytes)
            self._held_bytes -= largest.held_bytes
            largest.evict()
            self._held_bytes += largest.held_bytes

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Keep the tokens; every `SLICE` of them they are learned, so that other requests may profit."""
        sequence = self._sequences[sequence_id]
        if sequence is None:
            return
        sequence.pending.extend(token_ids)
        if len(sequence.pending) + len(sequence.tokens) - sequence.learned >= SLICE:
            sequence.pull()
            n_new = min(len(sequence.tokens) - sequence.learned, MOST_AT_ONCE)
            self._learn(sequence, sequence.learned + n_new // SLICE * SLICE)

    def _learn(self, sequence: _Sequence, end: int) -> None:
        tenant = sequence.tenant
        others = self._held_bytes - tenant.held_bytes
        share = self._memory_bytes // len(self._tenants)
        sequence.learn(end, max(share, self._memory_bytes - others))
        self._held_bytes = others + tenant.held_bytes
        self._make_room()

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """What followed the places in other requests that look like the end of the text."""
        return self.propose_after(sequence_id, (), max_tokens)

    def propose_after(self, sequence_id: int, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """The same of the text with these guesses; they are not learned."""
        self._sequences.check_most(max_tokens)
        sequence = self._sequences[sequence_id]
        return None if sequence is None else sequence.draft(guessed, max_tokens)

    def end(self, sequence_id: int) -> None:
        """Learn what is left of the sequence."""
        sequence = self._sequences.take(sequence_id)
        if sequence is None:
            return
        sequence.pull()
        while sequence.learned < len(sequence.tokens):
            self._learn(sequence, min(len(sequence.tokens), sequence.learned + MOST_AT_ONCE))
        sequence.tenant.n_running -= 1

    def statistics(self) -> dict[str, Any]:
        """Figures of all tenants together."""
        tenants = list(self._tenants.values())  # at once: another thread may ask
        return {
            "memory_bytes": sum(tenant.held_bytes for tenant in tenants),
            "tokens_indexed": sum(tenant.n_indexed for tenant in tenants),
            "documents": sum(tenant.n_documents for tenant in tenants),
            "evictions": self._evictions + sum(tenant.evictions for tenant in tenants),
            "tenants": len(tenants),
            "sequences": len(self._sequences),
        }
