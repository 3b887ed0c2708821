"""A request while it runs, and its choices: each is one sequence of the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kinetic_core.engine.answer import AnswerText
from kinetic_core.engine.counter_rng import draw_seed
from kinetic_core.engine.history import History
from kinetic_core.engine.request import Chunk, FinishReason, Timings, TokenLogprob, Usage
from kinetic_core.engine.sampler import Sampler

if TYPE_CHECKING:
    from kinetic_core.engine.generation import Generation
    from kinetic_core.state import SequenceState
    from kinetic_core.text import Tokenizer

RowSink = Callable[[int, npt.NDArray[np.float32]], None]
"""Called on the engine's thread with (position, f32[vocab]) of every prompt row; the array is the step's."""


class ActiveRequest:
    """One submitted request.

    serial:    its place in the order of submission: who came earlier goes first and is never made to give way.
    sequences: its choices that have not ended.
    row_sink:  wants every prompt row's logits; None for requests that only want an answer.
    """

    def __init__(self, serial: int, generation: Generation, row_sink: RowSink | None = None) -> None:
        self.serial = serial
        self.generation = generation
        self.request = generation.request
        self.row_sink = row_sink
        self.sequences: list[Sequence] = []
        self.seed = draw_seed() if self.request.sampling.seed is None else self.request.sampling.seed
        self.cached_tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.steps = 0
        # The first token has nothing before it. None: not asked for, or handed out.
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if self.request.echo_logprobs else None
        self.submitted_s = time.perf_counter()
        self.admitted_s: float | None = None
        self.answering_s: float | None = None

    @property
    def reads_prompt_rows(self) -> bool:
        """Are the scores of every prompt row wanted?"""
        return self.request.echo_logprobs or self.row_sink is not None

    def timings(self) -> Timings:
        """Seconds up to now."""
        now = time.perf_counter()
        admitted = self.admitted_s if self.admitted_s is not None else now
        answering = self.answering_s if self.answering_s is not None else now
        return Timings(
            queue_s=admitted - self.submitted_s,
            prompt_s=answering - admitted,
            predict_s=now - answering,
            drafted=self.drafted,
            accepted=self.accepted,
            steps=self.steps,
        )


class Sequence:
    """One choice of a request.

    number:  tells the sequences of an engine apart.
    history: all its tokens, the prompt's and the answer's; the model has run the first `state.n_tokens` of them.
    state:   None while it waits: a sequence that had to give way starts over from its tokens, which by rule 1 leaves
             the same bits.
    snapshots: positions at which the cache wants the states, ascending.
    is_drafted: do the drafters know it? refuses_drafts: one of its guesses broke a step.
    """

    def __init__(self, active: ActiveRequest, index: int, number: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        request = active.request
        self.number = number
        self.active = active
        self.index = index
        self.order = (active.serial, index)
        self.history = History(request.prompt_ids)
        self.sampler = Sampler(request.sampling, vocab_size, active.seed, index)
        self.text = AnswerText(tokenizer, request.stop)
        self.state: SequenceState | None = None
        self.snapshots: list[int] = []
        self.is_drafted = False
        self.refuses_drafts = False
        self.n_generated = 0
        self.n_alone = 0  # after a failed step: runs alone until it has so many tokens
        self.n_rows_read = 0  # prompt rows whose scores were handed on

    @property
    def n_run(self) -> int:
        """Tokens that the model has run."""
        return self.state.n_tokens if self.state is not None else 0

    @property
    def n_pending(self) -> int:
        """Tokens still to run before the next one can be chosen: 1 while answering, more while running a prompt."""
        return len(self.history.tokens) - self.n_run

    @property
    def runs_alone(self) -> bool:
        """Did a step with this sequence fail, and has it not passed that point since?"""
        return self.n_run < self.n_alone

    def wants_row(self, position: int) -> bool:
        """Are the scores of the prompt's row at `position` wanted, and not yet handed on?"""
        last = self.history.n_prompt - (self.active.row_sink is None)
        return self.index == 0 and self.active.reads_prompt_rows and self.n_rows_read <= position < last

    def emit(self, finish_reason: FinishReason | None = None) -> None:
        """Hand what may be shown to the reader, and the end with its figures."""
        text, token_ids, logprobs = self.text.take()
        active = self.active
        prompt_logprobs = None
        if active.prompt_logprobs is not None and self.index == 0:
            prompt_logprobs, active.prompt_logprobs = tuple(active.prompt_logprobs), None
        if finish_reason is None:
            if text or token_ids or prompt_logprobs is not None:
                chunk = Chunk(self.index, text, token_ids, logprobs, prompt_logprobs=prompt_logprobs)
                active.generation.push(chunk)
            return
        usage = Usage(self.history.n_prompt, self.n_generated, active.cached_tokens)
        active.generation.push(
            Chunk(
                index=self.index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                seed=active.seed,
                prompt_logprobs=prompt_logprobs,
                usage=usage,
                timings=active.timings(),
            )
        )
