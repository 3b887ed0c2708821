"""Collecting a request's chunks, and the counts that an answer reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kinetic_core.engine.request import Chunk, Timings, TokenLogprob, Usage


@attrs.define
class Answer:
    """One choice as it grows. Fields as in `Chunk`."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    seed: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    _texts: list[str] = attrs.field(factory=list)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in."""
        self._texts.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)
        self.add_counts(chunk)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self.text = "".join(self._texts)

    def add_counts(self, chunk: Chunk) -> None:
        """Take in what a last chunk carries besides text: how it ended, seed, counts."""
        if chunk.finish_reason is not None:
            self.finish_reason, self.seed = chunk.finish_reason, chunk.seed
            self.usage, self.timings = chunk.usage, chunk.timings


def usage_body(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """OpenAI's usage object. A prompt counts once, however many answers it was given."""
    firsts = [answer.usage for answer in answers[::n] if answer.usage is not None]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    completion_tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
    }


def timings_body(answers: Sequence[Answer]) -> dict[str, Any]:
    """Milliseconds of the slowest of the answers in each phase; tokens drafted and accepted, and steps, in all."""
    timings = [answer.timings for answer in answers if answer.timings is not None]
    return {
        "queue_ms": _ms(max((timing.queue_s for timing in timings), default=0.0)),
        "prompt_ms": _ms(max((timing.prompt_s for timing in timings), default=0.0)),
        "predict_ms": _ms(max((timing.predict_s for timing in timings), default=0.0)),
        "drafted": sum(timing.drafted for timing in timings),
        "accepted": sum(timing.accepted for timing in timings),
        "steps": sum(timing.steps for timing in timings),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
