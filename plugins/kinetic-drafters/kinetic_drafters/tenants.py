"""The tenants that earlier requests are remembered for: who there is room for, and who gives way in the memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush

from kinetic_drafters.learner import SLICE, Learner
from kinetic_drafters.tenant import TenantIndex

TENANT_BYTES = 64 << 10
"""What a tenant is promised: as many are remembered as the memory has room for this."""
WAITING_SHARE = 8
"""Texts that wait to be learned hold one part in so many of what their tenant may hold: more than the tokens that the
index has room for."""


class Tenant:
    """A salt's index, the number of its running sequences, and the ended ones that wait, the first to be learned first.

    number: the later it came, the higher.
    """

    __slots__ = ("index", "n_running", "number", "salt", "waiting", "waiting_bytes")

    def __init__(self, salt: str, number: int) -> None:
        self.salt = salt
        self.number = number
        self.index = TenantIndex()
        self.n_running = 0
        self.waiting: deque[Learner] = deque()
        self.waiting_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory: what is remembered and what waits."""
        return self.index.held_bytes + self.waiting_bytes


class Tenants:
    """All tenants, in `memory_bytes` together. While these do not do, the largest one gives way.

    evictions: documents that left with tenants that were put out.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.held_bytes = 0
        self.evictions = 0
        self._by_salt: dict[str, Tenant] = {}
        self._idle: OrderedDict[Tenant, None] = OrderedDict()  # the one without a request for longest first
        self._owing: OrderedDict[Tenant, None] = OrderedDict()  # those for whom something waits
        self._serial = 0
        # What each held when it was last looked at, and (-bytes, number, tenant), the largest first, outdated ones too.
        self._sizes: dict[Tenant, int] = {}
        self._by_size: list[tuple[int, int, Tenant]] = []

    def all(self) -> list[Tenant]:
        """All of them; at once, since another thread may ask."""
        return list(self._by_salt.values())

    def enter(self, salt: str) -> Tenant | None:
        """The tenant of one more running sequence; None where all that there may be have running sequences."""
        tenant = self._by_salt.get(salt)
        if tenant is None:
            if len(self._by_salt) == self.memory_bytes // TENANT_BYTES and not self._put_out():
                return None
            self._serial += 1
            self._by_salt[salt] = tenant = Tenant(salt, self._serial)
            self._changed(tenant)
        self._idle.pop(tenant, None)
        tenant.n_running += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One of its sequences runs no longer."""
        tenant.n_running -= 1
        if not tenant.n_running:
            self._idle[tenant] = None

    def _put_out(self) -> bool:
        """Forget the tenant that was longest without a request, and what waits for it; False if all have one."""
        if not self._idle:
            return False
        tenant, _ = self._idle.popitem(last=False)
        del self._by_salt[tenant.salt]
        self._owing.pop(tenant, None)
        self.held_bytes -= self._sizes.pop(tenant)
        self.evictions += tenant.index.evictions + tenant.index.n_documents
        return True

    # ---- memory

    def _limit_bytes(self, tenant: Tenant) -> int:
        """What a tenant may hold: an equal share, or what the others leave."""
        others = self.held_bytes - self._sizes[tenant]
        return max(self.memory_bytes // len(self._by_salt), self.memory_bytes - others)

    def _changed(self, tenant: Tenant) -> None:
        """A tenant may hold more or less than before; let the largest give way until all fit."""
        self._count(tenant)
        while self.held_bytes > self.memory_bytes:
            largest = self._largest()
            if not largest.index.evict():
                if not largest.waiting:
                    return  # nobody holds more than an index without documents
                self._drop(largest)
            else:
                self._count(largest)

    def _count(self, tenant: Tenant) -> None:
        held, counted = tenant.held_bytes, self._sizes.get(tenant, 0)
        if held == counted:
            return
        self.held_bytes += held - counted
        self._sizes[tenant] = held
        heappush(self._by_size, (-held, tenant.number, tenant))
        if len(self._by_size) > 2 * len(self._sizes) + 16:
            self._by_size = [(-held, tenant.number, tenant) for tenant, held in self._sizes.items()]
            heapify(self._by_size)

    def _largest(self) -> Tenant:
        while True:
            held, _, tenant = self._by_size[0]
            if self._sizes.get(tenant) == -held:
                return tenant
            heappop(self._by_size)

    # ---- learning

    def learn(self, tenant: Tenant, learner: Learner, n_tokens: int) -> None:
        """Learn the next tokens of a sequence."""
        learner.learn(learner.learned + n_tokens, self._limit_bytes(tenant) - tenant.waiting_bytes)
        self._changed(tenant)

    def wait(self, tenant: Tenant, learner: Learner) -> None:
        """A sequence has ended; what it has not learned yet waits, as far as there is room."""
        most_bytes = self._limit_bytes(tenant) // WAITING_SHARE
        learner.ended(most_bytes)
        if not learner.n_unlearned:
            return
        tenant.waiting.append(learner)
        tenant.waiting_bytes += learner.held_bytes
        self._owing[tenant] = None
        self._drop_beyond(tenant, most_bytes)
        self._changed(tenant)

    def _drop_beyond(self, tenant: Tenant, most_bytes: int) -> None:
        while tenant.waiting_bytes > most_bytes:
            self._drop(tenant)

    def _drop(self, tenant: Tenant) -> None:
        """Forget the first that waits."""
        tenant.waiting_bytes -= tenant.waiting.popleft().held_bytes
        if not tenant.waiting:
            del self._owing[tenant]
        self._count(tenant)

    def work_off(self, tenant: Tenant, most: int) -> int:
        """Learn at most so many tokens, a multiple of SLICE, of what waits for a tenant; how many may still be."""
        if tenant.waiting:
            self._drop_beyond(tenant, self._limit_bytes(tenant) // WAITING_SHARE)
        while most > 0 and tenant.waiting:
            learner = tenant.waiting[0]
            n_tokens = min(most, learner.n_unlearned)
            self.learn(tenant, learner, n_tokens)
            most -= -(-n_tokens // SLICE) * SLICE
            if not learner.n_unlearned and tenant.waiting and tenant.waiting[0] is learner:
                self._drop(tenant)
        return most

    def work_off_others(self, most: int) -> None:
        """The same for any tenant, in turns."""
        while most > 0 and self._owing:
            tenant = next(iter(self._owing))
            self._owing.move_to_end(tenant)
            most = self.work_off(tenant, most)
