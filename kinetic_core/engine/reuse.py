"""The engine's side of the prefix cache: where prompts start, what is kept, and a cache's faults kept from answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kinetic_core.engine.sequence import Sequence
from kinetic_core.errors import CapacityError
from kinetic_core.state.sequence import blocks_for

if TYPE_CHECKING:
    from kinetic_core.engine.step import Snapshot
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.cache import PrefixCache
    from kinetic_core.state import BlockPool, SlotPool

logger = logging.getLogger("kinetic.engine")


class Reuse:
    """A prefix cache, or none. A cache that raises is turned off for good: then every prompt runs from its start."""

    def __init__(self, cache: PrefixCache | None, executable: Executable, blocks: BlockPool, slots: SlotPool) -> None:
        self._cache = cache
        self._slots = slots
        self.failed = False
        if cache is not None:
            cache.attach(executable, blocks, slots)

    def begin(self, sequence: Sequence) -> None:
        """A sequence was admitted: start it from the longest stored prefix, and plan the snapshots it should leave.

        A request that reads every prompt row (echo) reuses nothing: its rows have to run.
        """
        active, state = sequence.active, sequence.state
        if self._cache is None or state is None:
            return
        try:
            # The last token always runs: its scores choose the next one.
            reads_rows = active.reads_prompt_rows
            prefix = None if reads_rows else self._cache.find(sequence.history.tokens[:-1])
            if prefix is not None:
                try:
                    state.resume(prefix)
                except CapacityError:
                    pass  # no block for the copy: it starts from nothing
                else:
                    if sequence.history.n_answer == 0:
                        active.cached_tokens = prefix.n_tokens
            sequence.snapshots = sorted(self._cache.wanted_snapshots(active.request.prompt_ids, state.n_tokens))
        except Exception:
            self._fail()

    def keep(self, sequence: Sequence) -> None:
        """A sequence ends: offer its state to the cache."""
        state = sequence.state
        if self._cache is not None and state is not None and state.n_tokens:
            self._store(sequence, state.n_tokens, state.slot)

    def keep_snapshots(self, snapshots: tuple[Snapshot, ...]) -> None:
        """A step took these snapshots: offer them to the cache and free their slots."""
        for snapshot in snapshots:
            self._store(snapshot.sequence, snapshot.n_tokens, snapshot.slot)
        self.drop_snapshots(snapshots)

    def drop_snapshots(self, snapshots: tuple[Snapshot, ...]) -> None:
        """Free the slots of snapshots."""
        for snapshot in snapshots:
            self._slots.release(snapshot.slot)

    def _store(self, sequence: Sequence, n_tokens: int, slot: int) -> None:
        if self._cache is None or sequence.state is None:
            return
        try:
            blocks = sequence.state.block_ids[: blocks_for(n_tokens)]
            self._cache.store(sequence.history.tokens[:n_tokens], blocks, slot)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        logger.exception("the prefix cache failed and is off from now on; answers are the same without it")
        self._cache = None
        self.failed = True
