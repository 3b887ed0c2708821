"""Guesses from earlier requests: what followed where another request stood as this one stands now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinetic_core.errors import describe
from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities
from kinetic_drafters.learner import SLICE, Learner
from kinetic_drafters.running import Running
from kinetic_drafters.tenants import TENANT_BYTES, Tenant, Tenants

DEFAULT_MEMORY_BYTES = 64 << 20
MOST_AT_ENDS = 2048
"""Tokens that are learned when a sequence begins, and when one ends: about 2 ms."""
MOST_AT_TOKENS = 256
"""The same when tokens were chosen: about 0.4 ms. A step may choose some for every sequence, and several of one."""
LEAST_AT_TOKENS = 256
"""Tokens of a running sequence that are learned at the least: few at a time cost several times as much each."""


class RequestsDrafter(Drafter):
    """Remembers the tokens of every request, running or over, and continues as the one that fits best did.

    Tenants (salts) are apart: each has an index of its own. While the memory does not do for all, documents leave the
    largest index, so nobody loses any while holding no more than an equal share. One more tenant than there is room
    for takes the place of the one that was longest without a request.

    What a call learns is bounded, so that no long prompt holds up the engine's thread. What is left when a sequence
    ends waits for later calls: those for the same tenant first, then anybody's. At most an eighth of a tenant's memory
    waits; the oldest is dropped. Sequences that are forks of one request teach its text once, and do not count as
    helped by each other.

    memory_bytes: bound on what is held, in bytes (tables, documents and waiting texts of all tenants). A running
                  sequence holds besides 4 bytes per token of its own.
    Raises ValueError for a bound below one tenant's least, 64 KiB.
    """

    capabilities = DrafterCapabilities(branches=True, continues_guesses=True, learns_across_requests=True)

    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        if memory_bytes < TENANT_BYTES:
            raise ValueError(
                describe("memory_bytes", where="the drafter requests", got=memory_bytes, expected=f"≥ {TENANT_BYTES}")
            )
        self._sequences: Running[tuple[Tenant, Learner] | None] = Running("requests")
        self._tenants = Tenants(memory_bytes)
        self._serial = 0

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Keep the prompt; it is learned while the answer runs."""
        self._sequences.check_new(sequence_id)
        tenant = self._tenants.enter(salt)
        if tenant is None:
            self._sequences[sequence_id] = None
            return
        self._serial += 1
        self._sequences[sequence_id] = tenant, Learner(self._serial, tenant.index, token_ids)
        self._learn(tenant, MOST_AT_ENDS)

    def forked(self, sequence_id: int, parent_id: int) -> None:
        """Both are of one request."""
        sequence, parent = self._sequences[sequence_id], self._sequences[parent_id]
        if sequence is not None and parent is not None:
            sequence[1].forked(parent[1])

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Keep the tokens; every 256 of them they are learned, so that other requests may profit."""
        sequence = self._sequences[sequence_id]
        if sequence is not None:
            tenant, learner = sequence
            learner.pending.extend(token_ids)
            self._learn(tenant, MOST_AT_TOKENS, learner)

    def _learn(self, tenant: Tenant, most: int, running: Learner | None = None) -> None:
        """Learn at most so many tokens: those that wait for a tenant, then a running sequence's, then other tenants'.

        The order keeps tenants apart: no other's text delays when one's own is learned.
        """
        most = self._tenants.work_off(tenant, most)
        if running is not None and most > 0:
            n_tokens = min(running.n_unlearned, most) // SLICE * SLICE
            if n_tokens >= LEAST_AT_TOKENS:
                self._tenants.learn(tenant, running, n_tokens)
                most -= n_tokens
        self._tenants.work_off_others(most)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """What followed the places in other requests that look like the end of the text."""
        return self.propose_after(sequence_id, (), max_tokens)

    def propose_after(self, sequence_id: int, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """The same of the text with these guesses; they are not learned."""
        self._sequences.check_most(max_tokens)
        sequence = self._sequences[sequence_id]
        return None if sequence is None else sequence[1].draft(guessed, max_tokens)

    def end(self, sequence_id: int) -> None:
        """Learn what is left of the sequence, now or later."""
        sequence = self._sequences.take(sequence_id)
        if sequence is not None:
            tenant, learner = sequence
            self._tenants.wait(tenant, learner)
            self._tenants.leave(tenant)
            self._learn(tenant, MOST_AT_ENDS)

    def statistics(self) -> dict[str, Any]:
        """Figures of all tenants together."""
        tenants = self._tenants.all()
        return {
            "memory_bytes": sum(tenant.held_bytes for tenant in tenants),
            "tokens_indexed": sum(tenant.index.n_indexed for tenant in tenants),
            "documents": sum(tenant.index.n_documents for tenant in tenants),
            "evictions": self._tenants.evictions + sum(tenant.index.evictions for tenant in tenants),
            "waiting_bytes": sum(tenant.waiting_bytes for tenant in tenants),
            "tenants": len(tenants),
            "sequences": len(self._sequences),
        }
