"""From chosen tokens to what may be shown: whole characters, nothing of a stop string, tokens in step with the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kinetic_core.engine.request import TokenLogprob
from kinetic_core.engine.sampler import log_softmax
from kinetic_core.program.ranking import best
from kinetic_core.text import StopMatcher, StreamDetokenizer

if TYPE_CHECKING:
    from kinetic_core.text import Tokenizer


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The token's exact bytes; none for an id that only pads the output layer."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def token_logprob(tokenizer: Tokenizer, logits: npt.NDArray[np.float32], token_id: int, n_best: int) -> TokenLogprob:
    """The log-probability of `token_id` under f32[vocab], with those of the `n_best` best tokens."""
    logprobs = log_softmax(logits)
    top = best(logits, n_best).tolist() if n_best else ()
    return TokenLogprob(
        token_id=token_id,
        token_bytes=token_bytes(tokenizer, token_id),
        logprob=float(logprobs[token_id]),
        top=tuple((other, token_bytes(tokenizer, other), float(logprobs[other])) for other in top),
    )


class AnswerText:
    """The text side of one choice.

    A token (with its log-probability) is shown with the first character that begins in it, so that the tokens of a
    stop string are never shown: a token whose text lies wholly inside the stop is dropped with it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._n_tokens = tokenizer.vocab_size
        self._detokenizer = StreamDetokenizer(tokenizer, continues=True)
        self._matcher = StopMatcher(stops)
        self._holds = any(stops)
        self._n_pushed = 0  # characters given to the matcher
        self._n_shown = 0  # characters that it passed on
        self._held: deque[tuple[int, int, TokenLogprob | None]] = deque()  # (first character, token, logprob)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        """One more token; True when a stop string is complete."""
        self._held.append((self._n_pushed, token_id, logprob))
        piece = self._detokenizer.push(token_id) if token_id < self._n_tokens else ""
        self._n_pushed += len(piece)
        text, stopped = self._matcher.push(piece)
        self._show(text, everything=not self._holds)
        return stopped

    def finish(self) -> bool:
        """The answer ends here; True when what was held back turned out to hold a stop string."""
        if not self._matcher.stopped:
            rest = self._detokenizer.finish()
            self._n_pushed += len(rest)
            text, stopped = self._matcher.push(rest)
            if not stopped:
                text += self._matcher.finish()
            self._show(text, everything=not self._matcher.stopped)
        self._held.clear()
        return self._matcher.stopped

    def _show(self, text: str, *, everything: bool) -> None:
        if text:
            self._text.append(text)
            self._n_shown += len(text)
        while self._held and (everything or self._held[0][0] < self._n_shown):
            _, token_id, logprob = self._held.popleft()
            self._tokens.append(token_id)
            if logprob is not None:
                self._logprobs.append(logprob)

    def take(self) -> tuple[str, tuple[int, ...], tuple[TokenLogprob, ...]]:
        """(text, token ids, log-probabilities) that may be shown and were not yet taken."""
        taken = "".join(self._text), tuple(self._tokens), tuple(self._logprobs)
        self._text, self._tokens, self._logprobs = [], [], []
        return taken
