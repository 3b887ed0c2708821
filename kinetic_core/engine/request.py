"""What a caller asks of the engine and what it gets back. Shared by the Python API, the commands and the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

FinishReason = Literal["stop", "length", "cancelled"]


@attrs.frozen
class SamplingOptions:
    """How tokens are chosen; docs/exactness.md gives the fixed order. Validated by `engine.validate`.

    temperature: 0 is greedy (lowest id among equals).
    top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    repeat_penalty: divides (positive) or multiplies (negative) scores of the path's last 64 tokens; 1 is off.
    presence_penalty, frequency_penalty: subtracted once, and per occurrence, for tokens of the answer; 0 is off.
    logit_bias: token id -> added to its score.
    seed: 0 … 2**64 - 1; None: drawn, and returned in the result.
    logprobs: None: none; k: each token's own log-probability and those of the k best (0 … 20).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    seed: int | None = None
    logprobs: int | None = None


@attrs.frozen
class GenerationRequest:
    """One request: `n` sequences that share a prompt.

    prompt_ids: at least one token.
    max_tokens: None: until an end token, a stop string or the end of the context; 0: run the prompt only.
    stop: strings that end an answer and are not part of it.
    ignore_end: carry on after end-of-turn tokens (benchmarks).
    echo_logprobs: also give the prompt tokens' log-probabilities (needs every prompt row).
    draft: guess tokens where drafters are loaded; the answer is the same without.
    forced_ids: these are the answer's tokens, whatever the sampler chooses, which still runs; the answer ends with the
        last of them. For measurements on a given text.
    salt: keeps what drafters learn from this request apart from requests of another salt (tenants).
    log_name: what the request's line in the log begins with; None: "request" and its number.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingOptions = SamplingOptions()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    ignore_end: bool = False
    echo_logprobs: bool = False
    draft: bool = True
    forced_ids: tuple[int, ...] = ()
    salt: str = ""
    log_name: str | None = None


@attrs.frozen
class TokenLogprob:
    """One position's log-probability (natural logarithm, of the distribution before temperature and penalties).

    token_bytes: the token's exact bytes.
    top: the best (token_id, token_bytes, logprob), best first.
    """

    token_id: int
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@attrs.frozen
class Usage:
    """Counts of one choice or request. cached_tokens: prompt tokens whose state was reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@attrs.frozen
class Timings:
    """Seconds: waiting in the queue, running the prompt, answering; and what drafting did for the answer.

    drafted, accepted: guesses that were run, and those that became part of the answer.
    steps: steps that chose tokens of the answer, the one that ended the prompt included.
    """

    queue_s: float
    prompt_s: float
    predict_s: float
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


@attrs.frozen
class Chunk:
    """One event of a running request.

    index: the choice (0 … n - 1) it belongs to.
    text: what may be shown now (held back while a stop string or a character is incomplete).
    token_ids, logprobs: the tokens that this chunk adds to the answer.
    finish_reason: set on the choice's last chunk.
    seed: the seed in use, on a choice's last chunk.
    prompt_logprobs: on the first chunk, when asked for; None for the first token.
    usage, timings: on the choice's last chunk.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    seed: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@attrs.frozen
class Completion:
    """One choice, whole. Fields as in `Chunk`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
