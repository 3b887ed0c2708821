"""The sampler once more, in plain loops: what is slow and obvious, to compare the fast one with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kinetic_core.engine.counter_rng import uniform
from kinetic_core.engine.request import SamplingOptions
from kinetic_core.program.elementary import exp64

ORDER = ("bias", "penalties", "top_k", "temperature", "top_p", "min_p")


def oracle(
    logits: np.ndarray,
    options: SamplingOptions,
    prompt: Sequence[int],
    answer: Sequence[int],
    seed: int,
    choice: int = 0,
    order: Sequence[str] = ORDER,
) -> int:
    """The token that the sampler must choose; `order` other than the right one makes a mutant."""
    scores = {token: float(score) for token, score in enumerate(logits)}
    path = [*prompt, *answer]
    temperature = options.temperature
    tempered = False

    def ranked() -> list[int]:
        return sorted(scores, key=lambda token: (-scores[token], token))

    def weights(kept: list[int]) -> list[float]:
        scale = temperature if tempered else 1.0
        return exp64([(scores[token] - scores[kept[0]]) / scale for token in kept]).tolist()

    for stage in order:
        if stage == "bias":
            for token, bias in options.logit_bias.items():
                if token in scores:
                    scores[token] += bias
        elif stage == "penalties":
            for token in set(path[-64:]) & scores.keys():
                score = scores[token]
                scores[token] = score / options.repeat_penalty if score > 0 else score * options.repeat_penalty
            for token in set(answer) & scores.keys():
                scores[token] -= options.presence_penalty
                scores[token] -= options.frequency_penalty * list(answer).count(token)
        elif stage == "top_k":
            n = 1 if temperature == 0 else options.top_k or len(scores)
            scores = {token: scores[token] for token in ranked()[:n]}
        elif stage == "temperature":
            tempered = temperature > 0
        elif stage == "top_p" and options.top_p < 1:
            kept = ranked()
            cumulative = list(np.cumsum(weights(kept)))
            n = next(i for i, total in enumerate(cumulative) if total >= options.top_p * cumulative[-1]) + 1
            scores = {token: scores[token] for token in kept[:n]}
        elif stage == "min_p":
            kept = ranked()
            scores = {token: scores[token] for token, w in zip(kept, weights(kept), strict=True) if w >= options.min_p}
    kept = ranked()
    if temperature == 0:
        return kept[0]
    cumulative = list(np.cumsum(weights(kept)))
    target = uniform(seed, choice, len(answer)) * cumulative[-1]
    return next(token for token, total in zip(kept, cumulative, strict=True) if total > target)
