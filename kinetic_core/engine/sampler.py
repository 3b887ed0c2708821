"""Chooses tokens: bias, penalties, top-k, temperature, softmax, top-p, min-p, inverse of the cumulative, in this order.

Scores are taken as they come from the head (f32) and handled in float64. "The kept" are always in (score descending,
id ascending) order, so sums and ties have one result. exp and log are the project's own: the same bits on every CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.engine.counter_rng import uniform
from kinetic_core.program.elementary import exp64, log64
from kinetic_core.program.ranking import best, not_finite

if TYPE_CHECKING:
    from kinetic_core.engine.history import History
    from kinetic_core.engine.request import SamplingOptions

MAX_CANDIDATES = 256
"""Above this many candidates the whole distribution is read: one selection costs more than the copy."""

_PIECE = 4096


class Outputs(Protocol):
    """The part of `Executable` that a sampler reads."""

    def logits(self, output: int) -> npt.NDArray[np.float32]:
        """f32[vocab]."""
        ...

    def candidates(self, output: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(ids i32[k], scores f32[k]), best first."""
        ...


@attrs.frozen
class Choice:
    """The chosen token; logits: f32[vocab] where the whole distribution was read, valid until the next step."""

    token_id: int
    logits: npt.NDArray[np.float32] | None


class Sampler:
    """Chooses the tokens of one choice of one request.

    seed, choice: with the index of the token they give its random number.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int, seed: int, choice: int = 0) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._seed = seed
        self._choice = choice
        self._greedy = options.temperature == 0
        self._top_k = 1 if self._greedy else min(options.top_k, vocab_size)
        self._bias = {token: float(bias) for token, bias in options.logit_bias.items() if bias != 0}
        self._counts_answer = options.presence_penalty != 0 or options.frequency_penalty != 0
        self._adjusts = bool(self._bias) or options.repeat_penalty != 1 or self._counts_answer
        # Where every adjustment can only lower a score, the best k after it are among the best k + (ids named) before:
        # at least k of those are not named and stay ahead. Otherwise any token may rise, and all scores are read.
        self._only_lowers = (
            all(bias < 0 for bias in self._bias.values())
            and options.repeat_penalty >= 1
            and options.presence_penalty >= 0
            and options.frequency_penalty >= 0
        )
        self._reads_all = options.logprobs is not None or self._top_k == 0

    def head_top_k(self, history: History) -> int | None:
        """What to ask of the head for the next token: `HeadRequest.top_k`."""
        if self._reads_all:
            return None
        wanted = self._top_k
        if self._adjusts:
            if not self._only_lowers:
                return None
            wanted += len(self._named(history))
        return wanted if wanted <= min(MAX_CANDIDATES, self._vocab_size) else None

    def choose(self, outputs: Outputs, output: int, top_k: int | None, history: History) -> Choice:
        """The token after `history`, from output `output` of the last step, which was asked for `top_k`.

        Raises NumericalError when a score is NaN or no score is finite.
        """
        ids: npt.NDArray[np.intp] | npt.NDArray[np.int32]
        if top_k is not None:
            ids, raw = outputs.candidates(output)
            if self._greedy and not self._adjusts:
                if not raw[0] < np.inf or raw[0] == -np.inf:
                    raise not_finite()
                return Choice(int(ids[0]), None)
            scores = raw.astype(np.float64)
            if self._adjusts:
                self._adjust_some(ids, scores, history)
                order = np.lexsort((ids, -scores))[: self._top_k]
                ids, scores = ids[order], scores[order]
            return Choice(self._pick(ids, scores, history.n_answer), None)
        logits = outputs.logits(output)
        if not self._adjusts:
            ids = best(logits, self._top_k or self._vocab_size)
            return Choice(self._pick(ids, logits[ids].astype(np.float64), history.n_answer), logits)
        scores = logits.astype(np.float64)
        self._adjust_all(scores, history)
        ids = best(scores, self._top_k or self._vocab_size)
        return Choice(self._pick(ids, scores[ids], history.n_answer), logits)

    # bias and penalties

    def _named(self, history: History) -> set[int]:
        named = set(self._bias)
        if self._options.repeat_penalty != 1:
            named |= history.recent()
        if self._counts_answer:
            named |= history.counts.keys()
        return named

    def _adjusted(self, token: int, score: float, recent: set[int], history: History) -> float:
        options = self._options
        score += self._bias.get(token, 0.0)
        if token in recent:
            score = score / options.repeat_penalty if score > 0 else score * options.repeat_penalty
        count = history.counts.get(token, 0)
        if count:
            score -= options.presence_penalty
            score -= options.frequency_penalty * count
        return score

    def _recent(self, history: History) -> set[int]:
        return history.recent() if self._options.repeat_penalty != 1 else set()

    def _adjust_some(self, ids: npt.NDArray[np.int32], scores: npt.NDArray[np.float64], history: History) -> None:
        named, recent = self._named(history), self._recent(history)
        for place, token in enumerate(ids.tolist()):
            if token in named:
                scores[place] = self._adjusted(token, float(scores[place]), recent, history)

    def _adjust_all(self, scores: npt.NDArray[np.float64], history: History) -> None:
        recent = self._recent(history)
        for token in self._named(history):
            scores[token] = self._adjusted(token, float(scores[token]), recent, history)

    # from scores to a token

    def _pick(
        self,
        ids: npt.NDArray[np.int32] | npt.NDArray[np.intp],
        scores: npt.NDArray[np.float64],
        token_index: int,
    ) -> int:
        """ids and scores f64[kept], best first."""
        top = scores[0]
        if not np.isfinite(top):
            raise not_finite()
        if self._greedy or len(ids) == 1:
            return int(ids[0])
        options = self._options
        # Each weight is the probability times the sum of all; the division is left out, top-p is scaled instead.
        weights = _exp((scores - top) / options.temperature)
        cumulative = np.cumsum(weights)  # one after the other: a fixed order of additions
        n_kept = len(ids)
        if options.top_p < 1:
            n_kept = min(n_kept, int(np.searchsorted(cumulative, options.top_p * cumulative[-1], side="left")) + 1)
        if options.min_p > 0:
            n_kept = min(n_kept, int(np.count_nonzero(weights >= options.min_p)))  # the best token's weight is 1
        target = uniform(self._seed, self._choice, token_index) * cumulative[n_kept - 1]
        place = int(np.searchsorted(cumulative[:n_kept], target, side="right"))
        if place >= n_kept:  # the product was rounded up to the sum itself
            place = int(np.flatnonzero(weights[:n_kept])[-1])
        return int(ids[place])


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """f64[vocab]: natural logarithms of the probabilities of f32[vocab], before temperature, penalties and bias.

    The sum runs over ascending ids, one after the other. Raises NumericalError when a score is NaN or none is finite.
    """
    scores = logits.astype(np.float64)
    top = scores.max()
    if not np.isfinite(top):
        raise not_finite()
    scores -= top
    total = np.cumsum(_exp(scores))[-1:]
    scores -= log64(total)
    return scores


def _exp(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`exp64` of f64[n], in pieces whose intermediate results stay in the cache: twice as fast for a vocabulary."""
    if len(x) <= _PIECE:
        return exp64(x)
    return np.concatenate([exp64(x[start : start + _PIECE]) for start in range(0, len(x), _PIECE)])
