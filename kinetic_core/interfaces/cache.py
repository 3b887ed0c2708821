"""The cache contract: remembers the states that prompts left, and finds the longest one a new prompt can start from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.state import BlockPool, SlotPool


@dataclass(frozen=True)
class CacheCapabilities:
    """Questions about a cache; every default is no."""

    shares_blocks: bool = False
    """Do running sequences share the KV blocks of a common prefix?"""
    survives_restart: bool = False
    """Does it find after a restart what was stored before?"""


@attrs.frozen(eq=False)
class CachedPrefix:
    """A stored prefix.

    n_tokens: positions it covers.
    blocks:   KV blocks that hold them, each with a reference taken for the caller.
    slot:     recurrent-state slot with the states at n_tokens; -1 for a program without recurrent states.
    source:   ``"live"``, ``"memory"`` or ``"disk"``.
    """

    n_tokens: int
    blocks: tuple[int, ...]
    slot: int
    source: str


class PrefixCache(ABC):
    """Finds and keeps prefixes. The restored state is the bytes that were saved: warm equals cold to the bit."""

    capabilities: ClassVar[CacheCapabilities]

    def attach(self, executable: Executable, blocks: BlockPool, slots: SlotPool) -> None:  # noqa: B027 - optional
        """Called once, before anything else, with the loaded model and the pools that running sequences use.

        A cache that holds blocks or slots registers with `add_reclaimer`, so that running requests come first.
        """

    @abstractmethod
    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        """The longest stored prefix of these tokens (compared as tokens, never as a hash alone), or None."""

    @abstractmethod
    def store(self, token_ids: Sequence[int], blocks: Sequence[int], slot: int, salt: str = "") -> None:
        """Keep the state of a sequence that has exactly these tokens. Takes its own references and copies."""

    @abstractmethod
    def wanted_snapshots(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        """Positions after `start` at which this prompt should leave a snapshot, ascending."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""
