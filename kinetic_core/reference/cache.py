"""The cache that keeps nothing: every prompt runs from its first token."""

from __future__ import annotations

from collections.abc import Sequence

from kinetic_core.interfaces.cache import CacheCapabilities, CachedPrefix, PrefixCache


class NullCache(PrefixCache):
    """Never finds a prefix."""

    capabilities = CacheCapabilities()

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        """No prefix."""
        return None

    def store(self, token_ids: Sequence[int], blocks: Sequence[int], slot: int, salt: str = "") -> None:
        """Takes no reference, so the blocks go back to the pool with their sequence."""

    def wanted_snapshots(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        """No snapshots."""
        return ()

    def clear(self) -> None:
        """Nothing to forget."""
