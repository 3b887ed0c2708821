"""A small cache that is right, and caches that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kinetic_core.errors import CapacityError
from kinetic_core.interfaces import CacheCapabilities, CachedPrefix, PrefixCache

Key = tuple[str, tuple[int, ...]]


class Keeper(PrefixCache):
    """Keeps whole states, blocks by reference and slots by copy; gives up everything when asked for room."""

    capabilities = CacheCapabilities(shares_blocks=True)

    def __init__(self) -> None:
        self.entries: dict[Key, tuple[tuple[int, ...], int]] = {}

    def attach(self, executable: Any, blocks: Any, slots: Any) -> None:
        self.executable, self.blocks, self.slots = executable, blocks, slots
        blocks.add_reclaimer(lambda count: self.clear())
        slots.add_reclaimer(lambda count: self.clear())

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        tokens = tuple(token_ids)
        keys = [key for key in self.entries if key[0] == salt and tokens[: len(key[1])] == key[1]]
        if not keys:
            return None
        found = max(keys, key=lambda key: len(key[1]))
        blocks, slot = self.entries[found]
        self.blocks.share(blocks)
        return CachedPrefix(len(found[1]), blocks, slot, "live")

    def store(self, token_ids: Sequence[int], blocks: Sequence[int], slot: int, salt: str = "") -> None:
        key = (salt, tuple(token_ids))
        if key in self.entries:
            return
        try:
            own = self.slots.allocate()
        except CapacityError:
            return
        if own >= 0:
            self.executable.copy_slot(slot, own)
        self.blocks.share(blocks)
        self.entries[key] = (tuple(blocks), own)

    def wanted_snapshots(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        return [position for position in range(128, len(token_ids), 128) if position > start]

    def clear(self) -> None:
        while self.entries:
            blocks, slot = self.entries.pop(next(iter(self.entries)))
            self.blocks.release(blocks)
            self.slots.release(slot)


class StaleStates(Keeper):
    """Hands out states that are not those of the tokens."""

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        found = super().find(token_ids, salt)
        if found is not None and found.slot >= 0:
            self.executable.clear_slot(found.slot)
        return found


class SharesAmongTenants(Keeper):
    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        return super().find(token_ids, "a tenant")


class FindsTooMuch(Keeper):
    """Compares the first token only."""

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        for key in self.entries:
            if key[0] == salt and key[1][0] == token_ids[0]:
                return super().find(key[1], salt)
        return None


class KeepsAll(Keeper):
    def attach(self, executable: Any, blocks: Any, slots: Any) -> None:
        self.executable, self.blocks, self.slots = executable, blocks, slots


class Leaks(Keeper):
    """Takes a reference each time, and gives one back."""

    def store(self, token_ids: Sequence[int], blocks: Sequence[int], slot: int, salt: str = "") -> None:
        super().store(token_ids, blocks, slot, salt)
        self.blocks.share(blocks)


class WantsThePast(Keeper):
    def wanted_snapshots(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        return [128]


class RemembersAll(Keeper):
    """One memory for all objects."""

    shared: ClassVar[dict[Key, tuple[tuple[int, ...], int]]] = {}

    def __init__(self) -> None:
        self.entries = self.shared

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        known = (salt, tuple(token_ids)) in self.entries
        return CachedPrefix(len(token_ids), (0, 1), 0, "live") if known else None
