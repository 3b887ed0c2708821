"""The engine: one thread owns the model and batches the rows of every running request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.engine.answer import token_logprob
from kinetic_core.engine.generation import Generation
from kinetic_core.engine.request import FinishReason, GenerationRequest, SamplingOptions
from kinetic_core.engine.scheduler import Scheduler
from kinetic_core.engine.sequence import ActiveRequest, RowSink, Sequence
from kinetic_core.engine.validate import validate_request
from kinetic_core.errors import (
    BackendError,
    Cancelled,
    CapacityError,
    KineticError,
    NumericalError,
    RequestError,
    describe,
)
from kinetic_core.interfaces.batch import HeadRequest, RowBatch, SequenceRows
from kinetic_core.state import BlockPool, SlotPool
from kinetic_core.state.sequence import blocks_for

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.cache import PrefixCache
    from kinetic_core.text import Tokenizer

logger = logging.getLogger("kinetic.engine")


@attrs.frozen
class EngineOptions:
    """Sizes of the engine; the pools are those that the executable was loaded with.

    context_length: most positions of a sequence.
    n_blocks, n_slots, max_rows, max_outputs, kv_type: as in `LoadOptions`.
    has_states: has the program recurrent states?
    max_sequences: sequences that run at the same time.
    max_waiting:   requests that may wait; one more is refused with CapacityError.
    """

    context_length: int
    n_blocks: int
    n_slots: int
    max_rows: int
    max_outputs: int
    has_states: bool
    kv_type: str = "f16"
    max_sequences: int = 8
    max_waiting: int = 256

    def __attrs_post_init__(self) -> None:
        if self.n_blocks < blocks_for(self.context_length):
            raise CapacityError(
                describe(
                    "the KV pool holds less than one context",
                    got=f"{self.n_blocks} blocks",
                    expected=f"{blocks_for(self.context_length)}",
                    hint="lower --ctx",
                )
            )
        if self.max_sequences > min(self.max_outputs, self.n_slots if self.has_states else self.max_outputs):
            raise ValueError("max_sequences is above max_outputs or n_slots")
        if self.max_rows < self.max_sequences + 1:
            raise ValueError("max_rows must leave a row for a prompt")


@attrs.frozen
class _Head:
    """One output of a step: the next token after a sequence's last row, or the scores of a prompt row."""

    sequence: Sequence
    position: int
    top_k: int | None
    chooses: bool


class Engine:
    """Runs requests on a loaded model.

    ::

        engine = Engine(executable, tokenizer, vocab_size, options)
        generation = engine.submit(GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=20))
        for chunk in generation: ...
        engine.close()

    `submit` and `Generation.cancel` may be called from any thread or event loop. A request that fails fails alone; the
    engine goes on. Idle, the thread sleeps on a condition.
    """

    def __init__(
        self,
        executable: Executable,
        tokenizer: Tokenizer,
        vocab_size: int,
        options: EngineOptions,
        *,
        cache: PrefixCache | None = None,
    ) -> None:
        """vocab_size: rows of the output layer. cache: None starts every prompt from nothing."""
        self.options = options
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.blocks = BlockPool(options.n_blocks)
        self.slots = SlotPool(options.n_slots, has_states=options.has_states)
        self._executable = executable
        self._cache = cache
        self._scheduler = Scheduler(
            executable,
            self.blocks,
            self.slots,
            max_sequences=options.max_sequences,
            max_rows=options.max_rows,
            max_outputs=options.max_outputs,
        )
        self._wake = threading.Condition()
        self._submitted: deque[tuple[Generation, RowSink | None]] = deque()
        self._cancelled: deque[Generation] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._active: dict[Generation, ActiveRequest] = {}
        self._n_open = 0
        self._serial = 0
        self._counts = {"steps": 0, "prompt_rows": 0, "answer_rows": 0, "requests": 0, "cancelled": 0, "failed": 0}
        self._thread = threading.Thread(target=self._run, name="kinetic-engine", daemon=True)
        self._thread.start()

    # for callers

    def submit(self, request: GenerationRequest, *, row_sink: RowSink | None = None) -> Generation:
        """Queue a request. Raises RequestError, ContextLengthError, or CapacityError when too many wait.

        row_sink: called on the engine's thread with every prompt row's logits.
        """
        request = validate_request(request, self.vocab_size, self.options.context_length)
        generation = Generation(request, self._cancel)
        with self._wake:
            if self._closing:
                raise Cancelled("the engine is closed")
            if self._n_open >= self.options.max_waiting + self.options.max_sequences:
                raise CapacityError(
                    describe(
                        "too many requests wait",
                        got=f"{self._n_open} open",
                        expected=f"at most {self.options.max_waiting} waiting",
                        hint="try again later",
                    )
                )
            self._n_open += 1
            self._submitted.append((generation, row_sink))
            self._wake.notify()
        return generation

    def logits(self, token_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """f32[n_tokens, vocab]: the scores after every token of a text. Raises what `submit` and the model raise."""
        rows: dict[int, npt.NDArray[np.float32]] = {}
        request = GenerationRequest(token_ids, SamplingOptions(temperature=0.0), max_tokens=0)

        def keep(position: int, row: npt.NDArray[np.float32]) -> None:
            rows[position] = row.copy()

        self.submit(request, row_sink=keep).result()
        return np.stack([rows[position] for position in range(len(token_ids))])

    def statistics(self) -> dict[str, Any]:
        """Counts at this moment: requests, sequences, blocks, slots, rows so far."""
        scheduler = self._scheduler
        return {
            "open_requests": self._n_open,
            "running_sequences": len(scheduler.running),
            "waiting_sequences": len(scheduler.waiting),
            "gave_way": scheduler.n_gave_way,
            "blocks_used": self.blocks.n_used,
            "blocks": self.blocks.n_blocks,
            "slots_used": self.slots.n_used,
            "slots": self.slots.n_slots if self.slots.has_states else 0,
            "context_length": self.options.context_length,
            "max_sequences": self.options.max_sequences,
            **self._counts,
        }

    @property
    def failure(self) -> BaseException | None:
        """Why no more requests are taken: the engine was closed, or its thread ended; None while it runs."""
        if self._closing:
            return Cancelled("the engine is closed")
        return self._failure if self._thread.is_alive() else (self._failure or BackendError("the engine stopped"))

    def close(self) -> None:
        """Cancel what runs, stop the thread and close the executable. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _cancel(self, generation: Generation) -> None:
        with self._wake:
            self._cancelled.append(generation)
            self._wake.notify()

    # the thread

    def _run(self) -> None:
        try:
            while self._take_messages():
                try:
                    self._step()
                except Exception as error:  # a fault of the engine itself must not take later requests with it
                    logger.exception("the engine failed; every open request ends")
                    self._fail([*self._active.values()], _as_kinetic(error))
            for active in list(self._active.values()):
                self._end_all(active, "cancelled")
            self._executable.close()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._end_unread()

    def _end_unread(self) -> None:
        """The thread ends: nobody may wait for an answer that never comes."""
        with self._wake:
            self._closing = True
            waiting = [generation for generation, _ in self._submitted]
            self._submitted.clear()
            self._n_open -= len(waiting)
        for generation in [*waiting, *self._active]:
            generation.end(Cancelled("the engine stopped"))

    def _take_messages(self) -> bool:
        """Wait for something to do; take in new and cancelled requests. False: the engine closes."""
        with self._wake:
            while not (self._closing or self._submitted or self._cancelled or self._active):
                self._wake.wait()
            submitted, cancelled = list(self._submitted), list(self._cancelled)
            self._submitted.clear()
            self._cancelled.clear()
            closing = self._closing
        for generation, row_sink in submitted:
            self._begin(generation, row_sink)
        for generation in cancelled:
            active = self._active.get(generation)
            if active is not None:
                self._counts["cancelled"] += 1
                self._end_all(active, "cancelled")
        return not closing

    def _begin(self, generation: Generation, row_sink: RowSink | None) -> None:
        self._serial += 1
        self._counts["requests"] += 1
        active = ActiveRequest(self._serial, generation, row_sink)
        self._active[generation] = active
        try:
            active.sequences = [
                Sequence(active, index, self.tokenizer, self.vocab_size) for index in range(active.request.n)
            ]
        except Exception as error:
            self._fail([active], _as_kinetic(error))
            return
        self._scheduler.enqueue(active.sequences[0])  # the others are forks of it, once the prompt has run

    def _step(self) -> None:
        for sequence in self._scheduler.admit():
            self._admitted(sequence)
        rows = self._scheduler.plan()
        for sequence in self._scheduler.stuck:
            self._fail([sequence.active], CapacityError(describe("no memory for states is left", got="all in use")))
        self._scheduler.stuck.clear()
        if not rows:
            return
        n_prompt_rows = sum(n_rows for sequence, n_rows in rows.items() if sequence.n_pending > 1)
        n_answer_rows = sum(n_rows for sequence, n_rows in rows.items() if sequence.n_pending == 1)
        batch, heads = self._batch(rows)
        begun = time.perf_counter()
        try:
            self._executable.run(batch)
        except Exception as error:
            self._step_failed(rows, error)
            return
        self._scheduler.pace.measured(n_prompt_rows, n_answer_rows, time.perf_counter() - begun)
        self._counts["steps"] += 1
        self._counts["prompt_rows"] += n_prompt_rows
        self._counts["answer_rows"] += n_answer_rows
        for sequence, n_rows in rows.items():
            assert sequence.state is not None
            sequence.state.advance(n_rows)
        for output, head in enumerate(heads):
            if head.sequence.active.generation in self._active:  # an earlier output may have failed the request
                try:
                    self._read(output, head)
                except Exception as error:
                    self._fail([head.sequence.active], _as_kinetic(error))
        for sequence in rows:
            if sequence.n_pending == 0 and sequence.active.generation in self._active:
                self._end_all(sequence.active, "length")  # max_tokens 0: the prompt has run

    def _admitted(self, sequence: Sequence) -> None:
        active = sequence.active
        if active.admitted_s is None:
            active.admitted_s = time.perf_counter()
        if self._cache is None or active.reads_prompt_rows:
            return
        # The last token always runs: its scores choose the next one.
        prefix = self._cache.find(sequence.history.tokens[:-1])
        if prefix is None:
            return
        assert sequence.state is not None
        try:
            sequence.state.resume(prefix)
        except CapacityError:
            return  # no block for the copy: start from nothing
        if sequence.history.n_answer == 0:
            active.cached_tokens = prefix.n_tokens

    def _batch(self, rows: dict[Sequence, int]) -> tuple[RowBatch, list[_Head]]:
        token_ids: list[int] = []
        positions: list[int] = []
        parts: list[SequenceRows] = []
        heads: list[_Head] = []
        requests: list[HeadRequest] = []
        for sequence, n_rows in rows.items():
            state = sequence.state
            assert state is not None
            first, start, end = len(token_ids), state.n_tokens, state.n_tokens + n_rows
            token_ids.extend(sequence.history.tokens[start:end])
            positions.extend(range(start, end))
            parts.append(SequenceRows(first, start, n_rows, state.block_table, state.slot))
            for head in self._heads(sequence, start, end):
                heads.append(head)
                requests.append(HeadRequest(first + head.position - start, head.top_k))
        batch = RowBatch(np.array(token_ids, np.int32), np.array(positions, np.int32), tuple(parts), tuple(requests))
        return batch, heads

    def _heads(self, sequence: Sequence, start: int, end: int) -> list[_Head]:
        history = sequence.history
        last = len(history.tokens) - 1
        heads = []
        if sequence.active.reads_prompt_rows:
            heads = [
                _Head(sequence, position, None, chooses=False)
                for position in range(start, end)
                if sequence.wants_row(position) and (position < last or sequence.active.request.max_tokens == 0)
            ]
        if end > last and sequence.active.request.max_tokens != 0:
            heads.append(_Head(sequence, last, sequence.sampler.head_top_k(history), chooses=True))
        return heads

    # after a step

    def _read(self, output: int, head: _Head) -> None:
        sequence = head.sequence
        active = sequence.active
        if not head.chooses:
            self._read_prompt_row(output, head)
            return
        if sequence.history.n_answer == 0 and sequence.index == 0:
            active.answering_s = time.perf_counter()
            # The scores after the prompt serve every choice; then the others go on from copies of this state.
            for other in active.sequences[1:]:
                self._choose(other, output, head.top_k)
                if other in active.sequences:
                    assert sequence.state is not None
                    self._scheduler.adopt(other, sequence.state)
        self._choose(sequence, output, head.top_k)

    def _read_prompt_row(self, output: int, head: _Head) -> None:
        sequence, active = head.sequence, head.sequence.active
        logits = self._executable.logits(output)
        if active.row_sink is not None:
            active.row_sink(head.position, logits)
        if active.prompt_logprobs is not None and head.position < sequence.history.n_prompt - 1:
            n_best = active.request.sampling.logprobs or 0
            token = active.request.prompt_ids[head.position + 1]
            active.prompt_logprobs.append(token_logprob(self.tokenizer, logits, token, n_best))
        sequence.n_rows_read = head.position + 1

    def _choose(self, sequence: Sequence, output: int, top_k: int | None) -> None:
        """Choose a sequence's next token and hand out what may be shown."""
        request = sequence.active.request
        choice = sequence.sampler.choose(self._executable, output, top_k, sequence.history)
        token = choice.token_id
        if token in self.tokenizer.end_ids and not request.ignore_end:
            self._end(sequence, "stop")
            return
        logprob = None
        if request.sampling.logprobs is not None:
            assert choice.logits is not None
            logprob = token_logprob(self.tokenizer, choice.logits, token, request.sampling.logprobs)
        sequence.history.push(token)
        sequence.n_generated += 1
        if sequence.text.push(token, logprob):
            self._end(sequence, "stop")
        elif sequence.n_generated == request.max_tokens or (
            len(sequence.history.tokens) >= self.options.context_length
        ):
            self._end(sequence, "length")
        else:
            sequence.emit()

    # endings

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """One choice ends: free its state, hand out its last chunk, and the request's end with its last choice."""
        if sequence.text.finish() and reason == "length":
            reason = "stop"
        active = sequence.active
        self._keep_state(sequence)
        self._scheduler.remove(sequence)
        active.sequences.remove(sequence)
        last = not active.sequences
        if last:
            self._forget(active)
        sequence.emit(reason)
        if last:
            active.generation.end()

    def _end_all(self, active: ActiveRequest, reason: FinishReason) -> None:
        for sequence in list(active.sequences):
            self._end(sequence, reason)

    def _keep_state(self, sequence: Sequence) -> None:
        state = sequence.state
        if self._cache is not None and state is not None and state.n_tokens:
            self._cache.store(sequence.history.tokens[: state.n_tokens], state.block_ids, state.slot)

    def _fail(self, requests: list[ActiveRequest], error: KineticError) -> None:
        for active in requests:
            if active.generation not in self._active:
                continue
            self._counts["failed"] += 1
            for sequence in active.sequences:
                self._scheduler.remove(sequence)
            active.sequences.clear()
            self._forget(active)
            active.generation.end(error)

    def _forget(self, active: ActiveRequest) -> None:
        del self._active[active.generation]
        with self._wake:
            self._n_open -= 1

    def _step_failed(self, rows: dict[Sequence, int], error: Exception) -> None:
        """Some row of the step failed, and the states of all of them are unknown.

        A NaN belongs to one sequence: all start over, each alone until it has passed this point, and only the one to
        blame fails. Any other error fails every request of the step.
        """
        if isinstance(error, NumericalError) and len(rows) > 1:
            logger.warning("a step of %d sequences failed (%s); they run again one by one", len(rows), error)
            for sequence in rows:
                sequence.n_alone = len(sequence.history.tokens)
                self._scheduler.give_way(sequence)
            return
        if not isinstance(error, (KineticError, MemoryError)):
            logger.error("a step failed", exc_info=error)
        self._fail([sequence.active for sequence in rows], _as_kinetic(error))


def _as_kinetic(error: Exception) -> KineticError:
    if isinstance(error, RequestError) or not isinstance(error, KineticError):
        wrapped = BackendError(describe("running the model failed", got=f"{type(error).__name__}: {error}"))
        wrapped.__cause__ = error
        return wrapped
    return error
