"""The drafter that never guesses: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from kinetic_core.interfaces.drafter import Draft, Drafter, DrafterCapabilities


class NullDrafter(Drafter):
    """Proposes nothing."""

    capabilities = DrafterCapabilities()

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Nothing to remember."""

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Nothing to remember."""

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """No draft."""
        return None

    def end(self, sequence_id: int) -> None:
        """Nothing to forget."""
