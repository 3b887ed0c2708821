"""Executables around another one that watch, hold, slow down or break its steps."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kinetic_core.interfaces import Executable, HeadRequest, RowBatch, SequenceRows
from kinetic_core.interfaces.batch import BLOCK_TOKENS


class Around:
    """Passes everything on; `before` is called with each batch on the engine's thread and may wait or raise."""

    def __init__(self, inner: Executable, before: Callable[[RowBatch], None]) -> None:
        self._inner = inner
        self._before = before

    def run(self, batch: RowBatch) -> None:
        self._before(batch)
        self._inner.run(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Gate:
    """Counts steps and lets them pass one by one, or all."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)
        self._open = threading.Event()
        self.batches: list[RowBatch] = []
        self._arrived = threading.Condition()

    def wrap(self, inner: Executable) -> Any:
        return Around(inner, self._before)

    def _before(self, batch: RowBatch) -> None:
        with self._arrived:
            self.batches.append(batch)
            self._arrived.notify_all()
        while not self._open.is_set() and not self._passes.acquire(timeout=0.01):
            pass

    def wait_for(self, n_batches: int) -> None:
        """Until this many steps have begun."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.batches) >= n_batches, timeout=20)

    def let_pass(self, n_steps: int = 1) -> None:
        self._passes.release(n_steps)

    def open(self) -> None:
        self._open.set()


class Timed:
    """No model at all: every step takes a time that depends on its rows, every answer is token 7."""

    def __init__(self, inner: Executable, seconds: Callable[[int], float]) -> None:
        self._inner = inner
        self._seconds = seconds
        self.batches: list[RowBatch] = []

    def run(self, batch: RowBatch) -> None:
        self.batches.append(batch)
        time.sleep(self._seconds(batch.n_rows))

    def candidates(self, output: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([7], np.int32), np.array([1.0], np.float32)

    def commit(self, part: SequenceRows, accepted: Sequence[int]) -> None:
        """There is no state."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class HashModel:
    """A model that is quick and unforgiving: a row's scores are a hash of its whole path.

    The path is read back from the KV blocks through the block table, and once more from the recurrent slot, so a
    wrong block, a stale position, a slot that was not copied or cleared all change the answer.
    """

    def __init__(self, n_blocks: int, n_slots: int, vocab: int) -> None:
        self._vocab = vocab
        self._blocks = np.full((n_blocks, BLOCK_TOKENS), -1, np.int32)
        self._slots = [12345] * n_slots
        self._scores = (np.random.default_rng(0).standard_normal(65536 + vocab) * 3).astype(np.float32)
        self._rows: list[np.ndarray] = []
        self._heads: tuple[HeadRequest, ...] = ()
        self._states: dict[int, int] = {}
        self._batch: RowBatch
        self.closed = False

    def run(self, batch: RowBatch) -> None:
        wanted = {head.row: output for output, head in enumerate(batch.heads)}
        self._batch = batch
        self._heads = tuple(batch.heads)
        self._rows = [np.empty(0, np.float32)] * len(wanted)
        self._states = {}
        for part in batch.sequences:
            for offset in range(part.n_rows):
                row = part.first_row + offset
                token, position = int(batch.token_ids[row]), int(batch.positions[row])
                path = self._ancestors(part, offset)
                assert position == part.start + min(offset, part.n_committed - 1) + len(path)
                before = self._states[part.first_row + self._parent(part, offset)] if offset else self._slot(part.slot)
                state = (before * 6364136223846793005 + token + 1) % 2**64 if part.slot >= 0 else 0
                self._states[row] = state
                if offset < part.n_committed:
                    self._write(part, position, token)
                    if part.slot >= 0:
                        self._slots[part.slot] = state
                for after, slot in part.snapshots:
                    if after == offset:
                        self._slots[slot] = state
                if row in wanted:
                    tokens = self._blocks[part.block_table].reshape(-1)[: position + 1 - len(path)]
                    drafts = batch.token_ids[[part.first_row + ancestor for ancestor in path]]
                    start = zlib.crc32(np.concatenate([tokens, drafts]).tobytes(), state & 0xFFFFFFFF) % 65536
                    self._rows[wanted[row]] = self._scores[start : start + self._vocab]

    def _slot(self, slot: int) -> int:
        return self._slots[slot] if slot >= 0 else 0

    def _write(self, part: SequenceRows, position: int, token: int) -> None:
        self._blocks[part.block_table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = token

    @staticmethod
    def _parent(part: SequenceRows, offset: int) -> int:
        return offset - 1 if offset < part.n_committed else part.draft_parents[offset - part.n_committed]

    def _ancestors(self, part: SequenceRows, offset: int) -> list[int]:
        path: list[int] = []
        while offset >= part.n_committed:
            path.insert(0, offset)
            offset = self._parent(part, offset)
        return path

    def commit(self, part: SequenceRows, accepted: Sequence[int]) -> None:
        assert any(part is ran for ran in self._batch.sequences)
        assert list(accepted) == self._ancestors(part, accepted[-1])
        for offset in accepted:
            row = part.first_row + offset
            self._write(part, int(self._batch.positions[row]), int(self._batch.token_ids[row]))
            if part.slot >= 0:
                self._slots[part.slot] = self._states[row]

    def logits(self, output: int) -> np.ndarray:
        assert self._heads[output].top_k is None
        return self._rows[output]

    def candidates(self, output: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-self._rows[output], kind="stable")[: self._heads[output].top_k]
        return order.astype(np.int32), self._rows[output][order]

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target] = self._blocks[source]

    def clear_slot(self, slot: int) -> None:
        self._slots[slot] = 0

    def copy_slot(self, source: int, target: int) -> None:
        self._slots[target] = self._slots[source]

    def close(self) -> None:
        self.closed = True
