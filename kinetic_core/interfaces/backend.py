"""The kernel backend contract: lowers a recorded program once and runs it for any batch of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import RequestError, describe, shown

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.interfaces.batch import RowBatch, SequenceRows
    from kinetic_core.program.program import Program

Progress = Callable[[str, float], None]
"""Called with (what is being done, share done from 0 to 1)."""


@dataclass(frozen=True)
class BackendCapabilities:
    """Questions about a backend; every default is no."""

    supports_drafts: bool = False
    """Does a step take draft rows, and `commit` accept them?"""
    supports_snapshots: bool = False
    """Can recurrent states be copied after a named row, read and written?"""
    supports_prediction: bool = False
    """Can it run a program's prediction block?"""
    kv_types: tuple[str, ...] = ("f32",)
    """Types of the cache of keys and values that `LoadOptions.kv_type` may name."""


@attrs.frozen
class LoadOptions:
    """How to load a program. Raises RequestError for a number of threads that cannot be.

    n_threads:   worker threads, at least 1; None: the physical (performance) cores.
    kv_type:     ``"f16"`` or ``"f32"``.
    n_blocks:    KV blocks of 256 positions in the pool.
    n_slots:     recurrent-state slots.
    max_rows:    most rows of one step.
    max_outputs: most rows of one step whose logits are wanted.
    progress:    called while weights are packed and kernels compiled.
    """

    n_threads: int | None = None
    kv_type: str = "f16"
    n_blocks: int = 16
    n_slots: int = 4
    max_rows: int = 256
    max_outputs: int = 32
    progress: Progress | None = None

    def __attrs_post_init__(self) -> None:
        threads = self.n_threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            what = "n_threads cannot be used"
            raise RequestError(describe(what, got=shown(threads), expected="at least 1, or None"), field="n_threads")


class Executable(ABC):
    """A loaded program with its weights, KV blocks and recurrent-state slots. Used by one thread at a time.

    Rule 1 of docs/exactness.md holds: a row's result depends only on its path and the weights, bit for bit.
    """

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Most rows of one step, a prediction step included: `LoadOptions.max_rows`."""

    @abstractmethod
    def run(self, batch: RowBatch) -> None:
        """Run one step. Raises NumericalError when a wanted logit is NaN, BackendError when a kernel failed."""

    @abstractmethod
    def logits(self, output: int) -> npt.NDArray[np.float32]:
        """f32[vocab] of `batch.heads[output]` of the last step, whose `top_k` was None. Valid until the next step."""

    @abstractmethod
    def candidates(self, output: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(ids i32[k], scores f32[k]) of `batch.heads[output]`, best first; equal scores by ascending id."""

    @abstractmethod
    def commit(self, sequence: SequenceRows, accepted: Sequence[int]) -> None:
        """Make drafts of the last step part of their sequence.

        accepted: offsets (from `sequence.first_row`) of the accepted path, parent before child. The sequence's
        `block_table` must cover the new positions. Leaves the bits that plain decoding would have left.
        """

    def hidden(self, first_row: int, n_rows: int) -> npt.NDArray[np.float32]:
        """f32[n_rows, d_model]: hidden states after the last norm of rows of the last step, valid until the next.

        After `run` the trunk's, after `predict` the prediction block's own. Only where `supports_prediction`.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no hidden states")

    def predict(self, batch: RowBatch, hidden: npt.NDArray[np.float32]) -> None:
        """Run the prediction block; `logits`, `candidates` and `hidden` are then its own.

        batch:  committed rows only, positions from 1 on; no snapshots. A row is a token at its position; its logits
                are those of the token after it. Its keys and values go to the sequence's blocks, in place of what an
                earlier call left at that position: guesses are run again once their tokens are known. As in any
                batch of a program with recurrent states, each sequence names a slot that exists and no other names;
                nothing is read from it.
        hidden: f32[rows, d_model], each row's hidden state of the position before it (`hidden` of the step that ran
                it, or of an earlier `predict` when guessing further ahead).

        Drafts of the last step that were not committed by now are dropped. Recurrent states are not touched.
        """
        raise NotImplementedError(f"{type(self).__name__} runs no prediction blocks")

    @abstractmethod
    def copy_block(self, source: int, target: int) -> None:
        """Copy one KV block, for a fork's partly filled last block."""

    @abstractmethod
    def read_block(self, block: int) -> bytes:
        """The raw bytes of one KV block, all layers."""

    @abstractmethod
    def write_block(self, block: int, data: bytes) -> None:
        """Restore what `read_block` gave."""

    @abstractmethod
    def clear_slot(self, slot: int) -> None:
        """Set a slot's recurrent states to those of an empty sequence."""

    @abstractmethod
    def copy_slot(self, source: int, target: int) -> None:
        """Copy one slot's recurrent states."""

    @abstractmethod
    def read_slot(self, slot: int) -> bytes:
        """The raw bytes of one slot: a snapshot."""

    @abstractmethod
    def write_slot(self, slot: int, data: bytes) -> None:
        """Restore what `read_slot` gave."""

    @property
    @abstractmethod
    def kernel_digest(self) -> str:
        """Names everything in the backend that could change a bit of a saved state."""

    def statistics(self) -> dict[str, Any]:
        """Figures for `kinetic bench` and `info`: threads, lowering, bytes per token, time per op where measured.

        Raises BackendError after `close`.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop workers, free memory. Idempotent."""


class KernelBackend(ABC):
    """Runs programs on one kind of device.

    ::

        backend = registry.get("backend", "cpu")()
        executable = backend.load(program, tensors, LoadOptions(n_blocks=64))
        executable.run(batch)
        ids, scores = executable.candidates(0)
    """

    capabilities: ClassVar[BackendCapabilities]

    @abstractmethod
    def load(self, program: Program, source: TensorSource, options: LoadOptions) -> Executable:
        """Lower the program, pack its weights, allocate its pools.

        Raises BackendError (no such device, kernels do not compile), CapacityError (memory), TensorError (a type
        this backend cannot load).
        """
