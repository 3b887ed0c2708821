"""Checks against the NumPy reference, within a stated table.

Backends round the activations that a quantized matrix meets to 8 bits. That alone moves the logits of a miniature by
0.8 to 4 % of their spread, far more than a wrong kernel might, so a quantized model is held to the reference with the
same rounding, which a right backend meets as closely as an F32 model meets the plain one: until one activation that
lies in the middle of two steps is rounded the other way, after which everything that follows has roundings of its own.
Then most of many short prompts, in which that is rare, must meet the reference, and the error of the long one may not
be larger than what rounding makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kinetic_core.conformance.models import TinyModel, tokens_of
from kinetic_core.conformance.rounding import RoundingBackend, ShortRoundingBackend
from kinetic_core.conformance.rows import folded
from kinetic_core.conformance.steps import F32, Part, make_batch, run, step
from kinetic_core.conformance.suite import Fault
from kinetic_core.gguf import BLOCK_FORMATS
from kinetic_core.interfaces import Executable
from kinetic_core.program import ops
from kinetic_core.reference.backend import ReferenceBackend

FLOATS = 1e-4
QUANTIZED = 1e-3
HALF_CACHE = 2**-11
"""Of the spread of the reference's logits. Without quantized matrices: the largest difference of any logit. With them:
the root of the mean square. An f16 cache adds half a step of float16, where a key or value lies near the middle of two.
"""
AS_ROUNDING = 1.25
"""A long prompt with roundings of its own: its error in units of what rounding to 8 bits makes."""
LONG, SHORTER = 70, 34
"""Tokens of the long prompt: over the edge of a tile of 64 positions without quantized matrices, fewer with them."""
N_PROMPTS, PROMPT_LENGTH, ENOUGH = 12, 5, 8
"""Short prompts, and how many of them must meet the reference."""

Rows = Callable[[Executable], F32]
"""Runs something on an executable; returns the logits of its rows, f32[rows, vocab]."""


def agrees_with_reference(model: TinyModel) -> None:
    """A prompt, a tree of drafts, a commit and what follows, each against the reference."""
    n_tokens = SHORTER if is_quantized(model) else LONG
    prompts = [_prompt(tokens_of(100 + n, PROMPT_LENGTH, model.vocab)) for n in range(N_PROMPTS)]
    for kv_type in cache_types(model):
        what = f"{model.tensor_type} with an {kv_type} cache"
        require_agreement(model, kv_type, what, lambda executable: _conversation(model, executable, n_tokens), prompts)


def is_quantized(model: TinyModel) -> bool:
    """Is any matrix stored in blocks?"""
    return any(BLOCK_FORMATS[info.type].block_size > 1 for info in model.source.tensors.values())


def cache_types(model: TinyModel) -> list[str]:
    """The types of the cache that are compared: all for unquantized matrices, else the one that rounds least."""
    kv_types: list[str] = [kv_type for kv_type in ("f32", "f16") if kv_type in model.backend.capabilities.kv_types]
    return kv_types[:1] if is_quantized(model) else kv_types


def _conversation(model: TinyModel, executable: Executable, n_tokens: int) -> F32:
    tokens = model.tokens(40, n_tokens)
    at = n_tokens - 17
    parents = (at - 1, at, at, at + 2)
    drafts = tuple(zip(folded((5, 6, 7, 8), model.vocab), parents, strict=True))
    if not model.backend.capabilities.supports_drafts:
        drafts = ()
    batch = make_batch(Part(tokens[:at], drafts=drafts))
    rows = [run(executable, batch)[0]]
    if drafts:
        executable.commit(batch.sequences[0], (at, at + 2, at + 3))
    rows.append(step(executable, Part(tokens[at:], at + 3 * bool(drafts)))[0])
    return np.concatenate(rows)


def _prompt(tokens: tuple[int, ...]) -> Rows:
    return lambda executable: step(executable, Part(tokens))[0]


def require_agreement(model: TinyModel, kv_type: str, what: str, whole: Rows, prompts: list[Rows]) -> None:
    """Raise Fault unless `whole`, or else enough of the short `prompts`, give the reference's rows within the table."""

    def rows_of(given: Rows, backend: type[ReferenceBackend] | None) -> Any:
        if backend is None:
            return given(model.executable("reference", kv_type=kv_type)).astype(np.float64)
        return given(model.reference(kv_type, backend)).astype(np.float64)

    cache = HALF_CACHE if kv_type == "f16" else 0.0
    got = rows_of(whole, None)
    if not is_quantized(model):
        expected = rows_of(whole, ReferenceBackend)
        error, limit = float(np.abs(got - expected).max() / expected.std()), FLOATS + cache
        if not error <= limit:
            raise Fault(_found(what, "largest difference from the reference", error, limit))
        return
    longest = max(BLOCK_FORMATS[info.type].block_size for info in model.source.tensors.values())
    kinds = [
        RoundingBackend,
        ReferenceBackend,
        *([ShortRoundingBackend] if longest > ShortRoundingBackend.longest else []),
    ]
    limit, errors, references = QUANTIZED + cache, [], []
    for kind in kinds:
        references.append(rows_of(whole, kind))
        errors.append(_root_mean_square(got - references[-1]) / float(references[-1].std()))
        if errors[-1] <= limit:
            return
    rounded, exact = references[:2]
    routed = any(isinstance(op, ops.Route) for op in model.program.all_ops)
    error, rounding = (_typical(rows - exact, routed) / float(exact.std()) for rows in (got, rounded))
    if not error <= AS_ROUNDING * rounding:
        measure = f"{'median row' if routed else 'root mean square'} of the difference from the reference"
        raise Fault(_found(what, measure, error, AS_ROUNDING * rounding))
    most = 0
    for kind in kinds:
        pairs = [(rows_of(given, None), rows_of(given, kind)) for given in prompts]
        spread = float(np.concatenate([expected for _, expected in pairs]).std())
        most = max(most, sum(_root_mean_square(ours - theirs) <= limit * spread for ours, theirs in pairs))
        if most >= ENOUGH:
            return
    raise Fault(
        f"{what}: {most} of {len(prompts)} short prompts are within {limit:.2g} of the spread of the reference, with "
        f"or without its activations rounded to 8 bits, expected at least {ENOUGH}; a long one is {min(errors):.2g} off"
    )


def _root_mean_square(difference: Any) -> float:
    return float(np.sqrt(np.mean(difference**2)))


def _typical(difference: Any, routed: bool) -> float:
    """The root mean square, of the median row where another choice of experts may move a whole row."""
    return float(np.median(np.sqrt(np.mean(difference**2, axis=1)))) if routed else _root_mean_square(difference)


def _found(what: str, measure: str, error: float, limit: float) -> str:
    return f"{what}: the {measure} is {error:.2g} of the spread, expected at most {limit:.2g}"
