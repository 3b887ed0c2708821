"""Drafting against plain decoding: the same answers, and how much sooner.

Both sides run in one process on one loaded model, in turn. Each drafted run has a salt of its own, so that nothing is
drafted from an earlier run of the same answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kinetic_core.bench.workloads import WORKLOADS, Workload, share_in_loops

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model
    from kinetic_core.engine.request import Completion

SEED = 21
"""With it the default model answers every workload without falling into a loop."""
TEMPERATURES = (0.0, 0.8)


@attrs.define
class _Salts:
    """A salt that no request had before."""

    count: int = 0

    def next(self) -> str:
        self.count += 1
        return f"bench {self.count}"


_salts = _Salts()


@attrs.frozen
class Pair:
    """One answer twice, and its seconds from the first token to the last.

    identical: the same tokens and log-probabilities. steps: of the drafted run.
    """

    plain_s: float
    drafted_s: float
    identical: bool
    n_tokens: int
    steps: int
    drafted: int
    accepted: int
    token_ids: tuple[int, ...]

    @property
    def speedup(self) -> float:
        """Plain time over drafted time."""
        return self.plain_s / self.drafted_s

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step of the drafted run gave; the first token is the prompt's."""
        return (self.n_tokens - 1) / max(1, self.steps - 1)


def run_pair(model: Model, prompt_ids: Sequence[int], *, drafted_first: bool = False, **options: Any) -> Pair:
    """The same request plain and drafted. options: as for `Model.request`; sampled with `SEED` unless given."""
    options = {"seed": SEED, **options}
    results: dict[bool, Completion] = {}
    for draft in (drafted_first, not drafted_first):
        request = model.request(prompt_ids, draft=draft, salt=_salts.next(), **options)
        (results[draft],) = model.engine.submit(request).result()
    plain, drafted = results[False], results[True]
    return Pair(
        plain_s=plain.timings.predict_s,
        drafted_s=drafted.timings.predict_s,
        identical=(plain.token_ids, plain.text, plain.logprobs) == (drafted.token_ids, drafted.text, drafted.logprobs),
        n_tokens=len(drafted.token_ids),
        steps=drafted.timings.steps,
        drafted=drafted.timings.drafted,
        accepted=drafted.timings.accepted,
        token_ids=drafted.token_ids,
    )


def measure_drafting(
    model: Model,
    n_answer: int,
    report: Callable[[str, float], None],
    workloads: Sequence[Workload] | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, Any]:
    """Every workload, plain and drafted, greedy and sampled with a seed, and its given answer (forced text).

    Keys: drafted_identical, and workloads {name: {"temperature 0": {plain_tok_s, drafted_tok_s, speedup,
    tokens_per_step, share_in_loops, n_tokens}, …, "forced": {…}}}. workloads: None is `WORKLOADS`. A short run before
    warms both sides up.
    """
    workloads = WORKLOADS if workloads is None else workloads
    run_pair(model, workloads[0].prompt_ids(model), max_tokens=min(16, n_answer), ignore_end=True)
    identical = True
    found: dict[str, dict[str, Any]] = {}
    n_runs = len(workloads) * (len(temperatures) + 1)
    for number, workload in enumerate(workloads):
        prompt_ids = workload.prompt_ids(model)
        room = model.context_length - len(prompt_ids)
        forced = tuple(model.tokenize(workload.answer, add_bos=False)[: min(n_answer, room)])
        most = len(forced) or min(n_answer, room)
        cases: dict[str, dict[str, Any]] = {
            f"temperature {temperature:g}": {"temperature": temperature, "max_tokens": most}
            for temperature in temperatures
        }
        if forced:
            cases["forced"] = {"temperature": 0.0, "forced_ids": forced, "ignore_end": True}
        for at, (name, options) in enumerate(cases.items()):
            report(f"drafting: {workload.name}", (number * (len(temperatures) + 1) + at) / n_runs)
            pair = run_pair(model, prompt_ids, **options)
            identical &= pair.identical
            found.setdefault(workload.name, {})[name] = describe_pairs([pair])
    return {"drafted_identical": identical, "workloads": found}


def describe_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of one workload's runs: medians, and tokens and steps of all."""
    n_steps = sum(pair.steps - 1 for pair in pairs)
    return {
        "plain_tok_s": statistics.median((pair.n_tokens - 1) / pair.plain_s for pair in pairs),
        "drafted_tok_s": statistics.median((pair.n_tokens - 1) / pair.drafted_s for pair in pairs),
        "speedup": statistics.median(pair.speedup for pair in pairs),
        "tokens_per_step": sum(pair.n_tokens - 1 for pair in pairs) / max(1, n_steps),
        "accepted": sum(pair.accepted for pair in pairs),
        "drafted": sum(pair.drafted for pair in pairs),
        "share_in_loops": share_in_loops(pairs[0].token_ids),
        "n_tokens": pairs[0].n_tokens,
    }
