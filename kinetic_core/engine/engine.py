"""The engine: one thread owns the model and batches the rows of every running request."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.engine.answer import token_logprob
from kinetic_core.engine.drafting import Drafting, DraftPolicy
from kinetic_core.engine.generation import Generation
from kinetic_core.engine.request import FinishReason, GenerationRequest, SamplingOptions
from kinetic_core.engine.reuse import Reuse
from kinetic_core.engine.scheduler import Scheduler
from kinetic_core.engine.sequence import ActiveRequest, RowSink, Sequence
from kinetic_core.engine.step import Head, Step, build_step
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
from kinetic_core.state import BlockPool, SlotPool
from kinetic_core.state.sequence import blocks_for

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.cache import PrefixCache
    from kinetic_core.interfaces.drafter import Drafter, DraftTree
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
    draft_policy:  which guesses are run: those that pay by measured costs, or always all (for tests).
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
    draft_policy: DraftPolicy = "measured"

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
        drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        """vocab_size: rows of the output layer. cache: None starts from nothing. drafters: by name; none: plain."""
        self.options = options
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.blocks = BlockPool(options.n_blocks)
        self.slots = SlotPool(options.n_slots, has_states=options.has_states)
        self._executable = executable
        self._reuse = Reuse(cache, executable, self.blocks, self.slots)
        self._drafting = Drafting(
            drafters or {}, executable, vocab_size, options.context_length, options.draft_policy, tokenizer
        )
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
        self._numbers = itertools.count()
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
        """f32[n_tokens, vocab]: the scores after every token of a text.

        Raises what `submit` and the model raise; Cancelled when the engine is closed meanwhile.
        """
        rows: dict[int, npt.NDArray[np.float32]] = {}
        request = GenerationRequest(token_ids, SamplingOptions(temperature=0.0), max_tokens=0)

        def keep(position: int, row: npt.NDArray[np.float32]) -> None:
            rows[position] = row.copy()

        if self.submit(request, row_sink=keep).result()[0].finish_reason == "cancelled":
            raise Cancelled("the engine was closed")
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
            **self._drafting.statistics(),
            "cache_failed": self._reuse.failed,
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
                Sequence(active, index, next(self._numbers), self.tokenizer, self.vocab_size)
                for index in range(active.request.n)
            ]
        except Exception as error:
            self._fail([active], _as_kinetic(error))
            return
        self._scheduler.enqueue(active.sequences[0])  # the others are forks of it, once the prompt has run

    def _step(self) -> None:
        for sequence in self._scheduler.admit():
            if sequence.active.admitted_s is None:
                sequence.active.admitted_s = time.perf_counter()
            self._reuse.begin(sequence)
            self._drafting.begin(sequence)
        rows = self._scheduler.plan()
        for sequence in self._scheduler.stuck:
            self._fail([sequence.active], CapacityError(describe("no memory for states is left", got="all in use")))
        self._scheduler.stuck.clear()
        if not rows:
            return
        answering = [sequence for sequence in rows if sequence.n_pending == 1]
        n_prompt_rows = sum(n_rows for sequence, n_rows in rows.items() if sequence.n_pending > 1)
        trees = self._propose(rows, answering, n_prompt_rows)
        step = build_step(rows, trees, self.slots)
        begun = time.perf_counter()
        try:
            self._executable.run(step.batch)
        except Exception as error:
            self._step_failed(step, error)
            return
        n_drafts = step.batch.n_rows - sum(rows.values())
        self._scheduler.pace.measured(n_prompt_rows, len(answering), n_drafts, time.perf_counter() - begun)
        self._counts["steps"] += 1
        self._counts["prompt_rows"] += n_prompt_rows
        self._counts["answer_rows"] += step.batch.n_rows - n_prompt_rows
        for sequence, n_rows in rows.items():
            assert sequence.state is not None
            sequence.state.advance(n_rows)
        self._reuse.keep_snapshots(step.snapshots)
        accepted = self._read_outputs(step)
        if not n_prompt_rows:
            seconds, n_accepted = time.perf_counter() - begun, sum(map(len, accepted.values()))
            self._drafting.measured(len(answering), step.batch.n_rows, seconds, n_accepted)
        self._drafting.stepped(
            (sequence, part.start, part.committed_rows(accepted.get(sequence, ())))
            for sequence, part in step.parts.items()
        )
        for sequence in rows:
            if sequence.n_pending == 0 and sequence.active.generation in self._active:
                self._end_all(sequence.active, "length")  # max_tokens 0: the prompt has run

    def _read_outputs(self, step: Step) -> dict[Sequence, list[int]]:
        """Choose what the step's outputs are for; per sequence with drafts the nodes of its tree that came true."""
        accepted: dict[Sequence, list[int]] = {}
        for output, head in enumerate(step.heads):
            # An earlier output may have ended the request; drafts are read from their sequence's own row on.
            if head.node < 0 and head.sequence in head.sequence.active.sequences:
                try:
                    accepted[head.sequence] = self._read(step, output, head)
                except Exception as error:
                    self._fail([head.sequence.active], _as_kinetic(error))
        return accepted

    def _propose(
        self, rows: dict[Sequence, int], answering: list[Sequence], n_prompt_rows: int
    ) -> dict[Sequence, DraftTree]:
        if any(sequence.active.reads_prompt_rows for sequence in rows) or any(s.runs_alone for s in answering):
            return {}  # every output is spoken for; or a step failed here, and the cause is looked for
        free = min(self.options.max_rows - sum(rows.values()), self.options.max_outputs - len(rows))
        return self._drafting.propose(answering, free, beside_prompts=n_prompt_rows > 0)

    # after a step

    def _read(self, step: Step, output: int, head: Head) -> list[int]:
        sequence = head.sequence
        active = sequence.active
        if not head.chooses:
            self._read_prompt_row(output, head)
            return []
        active.steps += 1
        if sequence.history.n_answer == 0 and sequence.index == 0:
            active.answering_s = time.perf_counter()
            # The scores after the prompt serve every choice; then the others go on from copies of this state.
            for other in active.sequences[1:]:
                self._drafting.begin(other, sequence)
                self._choose(other, output, head.top_k)
                if other in active.sequences:
                    assert sequence.state is not None
                    self._scheduler.adopt(other, sequence.state)
        token = self._choose(sequence, output, head.top_k)
        tree = step.trees.get(sequence)
        return self._verify(step, output, sequence, tree, token) if tree is not None and token is not None else []

    def _verify(self, step: Step, output: int, sequence: Sequence, tree: DraftTree, token: int | None) -> list[int]:
        """Follow the draft as far as it is what the sampler chooses, then make that part of the sequence.

        token: what was chosen after the last committed row, whose output is `output`; the drafts' outputs follow it.
        Returns the nodes of the tree that came true.
        """
        part = step.parts[sequence]
        accepted: list[int] = []
        node = -1
        while token is not None:
            children = (i for i, parent in enumerate(tree.parents) if parent == node and tree.token_ids[i] == token)
            node = next(children, -1)
            if node < 0:
                break
            accepted.append(node)
            self._drafting.kept(sequence, node)  # before the choice: it may be the answer's last
            token = self._choose(sequence, output + 1 + node, step.heads[output + 1 + node].top_k)
        if accepted and sequence.state is not None:
            self._executable.commit(part, [part.n_committed + node for node in accepted])
            sequence.state.advance(len(accepted))
        return accepted

    def _read_prompt_row(self, output: int, head: Head) -> None:
        sequence, active = head.sequence, head.sequence.active
        logits = self._executable.logits(output)
        if active.row_sink is not None:
            active.row_sink(head.position, logits)
        if active.prompt_logprobs is not None and head.position < sequence.history.n_prompt - 1:
            n_best = active.request.sampling.logprobs or 0
            token = active.request.prompt_ids[head.position + 1]
            active.prompt_logprobs.append(token_logprob(self.tokenizer, logits, token, n_best))
        sequence.n_rows_read = head.position + 1

    def _choose(self, sequence: Sequence, output: int, top_k: int | None) -> int | None:
        """Choose a sequence's next token and hand out what may be shown; the token, or None when that was the end."""
        request = sequence.active.request
        choice = sequence.sampler.choose(self._executable, output, top_k, sequence.history)
        token = request.forced_ids[sequence.n_generated] if request.forced_ids else choice.token_id
        if token in self.tokenizer.end_ids and not request.ignore_end:
            self._end(sequence, "stop")
            return None
        logprob = None
        if request.sampling.logprobs is not None:
            assert choice.logits is not None
            logprob = token_logprob(self.tokenizer, choice.logits, token, request.sampling.logprobs)
        sequence.history.push(token)
        sequence.n_generated += 1
        self._drafting.chosen(sequence, token)
        if sequence.text.push(token, logprob):
            self._end(sequence, "stop")
            return None
        if sequence.n_generated == request.max_tokens or (len(sequence.history.tokens) >= self.options.context_length):
            self._end(sequence, "length")
            return None
        sequence.emit()
        return token

    # endings

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """One choice ends: free its state, hand out its last chunk, and the request's end with its last choice."""
        if sequence.text.finish() and reason == "length":
            reason = "stop"
        active = sequence.active
        self._reuse.keep(sequence)
        self._drafting.end(sequence)
        self._scheduler.remove(sequence)
        active.sequences.remove(sequence)
        last = not active.sequences
        if last:
            self._forget(active)
        sequence.emit(reason)
        if last:
            active.generation.end()
            logger.info(
                "%s: reused %d of %d prompt tokens, last choice %s after %d tokens",
                active.request.log_name or f"request {active.serial}",
                active.cached_tokens,
                sequence.history.n_prompt,
                reason,
                sequence.n_generated,
            )

    def _end_all(self, active: ActiveRequest, reason: FinishReason) -> None:
        for sequence in list(active.sequences):
            self._end(sequence, reason)

    def _fail(self, requests: list[ActiveRequest], error: KineticError) -> None:
        for active in requests:
            if active.generation not in self._active:
                continue
            self._counts["failed"] += 1
            for sequence in active.sequences:
                self._drafting.end(sequence)
                self._scheduler.remove(sequence)
            active.sequences.clear()
            self._forget(active)
            active.generation.end(error)

    def _forget(self, active: ActiveRequest) -> None:
        del self._active[active.generation]
        with self._wake:
            self._n_open -= 1

    def _step_failed(self, step: Step, error: Exception) -> None:
        """Some row of the step failed, and the states of all of them are unknown.

        A NaN belongs to one sequence: all start over, each alone until it has passed this point, and only the one to
        blame fails. Any other error fails every request of the step.
        """
        self._reuse.drop_snapshots(step.snapshots)
        # With a draft even a lone sequence runs again: the NaN may be that of a guess that nobody would have made.
        if isinstance(error, NumericalError) and (len(step.parts) > 1 or step.trees):
            logger.warning("a step of %d sequences failed (%s); they run again one by one", len(step.parts), error)
            for sequence in step.trees:  # the same guess would break the next step as well
                self._drafting.end(sequence)
                sequence.refuses_drafts = True
            for sequence in step.parts:
                sequence.n_alone = len(sequence.history.tokens)
                self._scheduler.give_way(sequence)
            return
        if not isinstance(error, (KineticError, MemoryError)):
            logger.error("a step failed", exc_info=error)
        self._fail([sequence.active for sequence in step.parts], _as_kinetic(error))


def _as_kinetic(error: Exception) -> KineticError:
    if isinstance(error, RequestError) or not isinstance(error, KineticError):
        wrapped = BackendError(describe("running the model failed", got=f"{type(error).__name__}: {error}"))
        wrapped.__cause__ = error
        return wrapped
    return error
