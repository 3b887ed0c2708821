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
N_COMPARED = 32
"""Most tokens of the answers whose log-probabilities are compared; asking for these takes time: none of it is timed."""
N_LOGPROBS = 5
LEAST_ROOM = 2
"""Tokens that a context must hold after a workload's prompt: the time between two tokens is what is measured."""


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

    identical: the same tokens and text, and the same log-probabilities where they were asked for. n_tokens, steps,
    drafted, accepted, token_ids: of the drafted run.
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
    def is_timed(self) -> bool:
        """Was there a second token? The seconds of an answer that ends before it say nothing."""
        return self.n_tokens >= 2 and self.plain_s > 0 and self.drafted_s > 0


def run_pair(model: Model, prompt_ids: Sequence[int], *, drafted_first: bool = False, **options: Any) -> Pair:
    """The same request plain and drafted.

    options: as for `Model.request`; `SEED` and a salt that is new unless given.
    """
    options = {"seed": SEED, "salt": _salts.next(), **options}
    results: dict[bool, Completion] = {}
    for draft in (drafted_first, not drafted_first):
        request = model.request(prompt_ids, draft=draft, **options)
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

    Of each, first the answer's beginning is compared with its log-probabilities, then the whole is timed.

    Keys: drafted_identical (absent where no workload was run); workloads {name: {"temperature 0": {plain_tok_s,
    drafted_tok_s, speedup, tokens_per_step, accepted, drafted, share_in_loops, n_tokens}, …, "forced": {…}}}, where
    speeds are None if no answer had a second token; workloads_skipped: names of those whose prompt leaves too little
    of the context. workloads: None is `WORKLOADS`. A short run before warms both sides up.
    """
    workloads = WORKLOADS if workloads is None else workloads
    prompts = {workload.name: workload.prompt_ids(model) for workload in workloads}
    fitting = [w for w in workloads if len(prompts[w.name]) + LEAST_ROOM <= model.context_length]
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "workloads": found,
        "workloads_skipped": [workload.name for workload in workloads if workload not in fitting],
    }
    if not fitting:
        return result
    first_ids = prompts[fitting[0].name]
    run_pair(model, first_ids, max_tokens=min(16, n_answer, model.context_length - len(first_ids)), ignore_end=True)
    identical = True
    n_runs = len(fitting) * (len(temperatures) + 1)
    for number, workload in enumerate(fitting):
        prompt_ids = prompts[workload.name]
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
            beginning = options | {"max_tokens": min(N_COMPARED, most), "logprobs": N_LOGPROBS}
            pairs = [run_pair(model, prompt_ids, **beginning), run_pair(model, prompt_ids, **options)]
            identical &= all(pair.identical for pair in pairs)
            found.setdefault(workload.name, {})[name] = describe_pairs(pairs[1:])
    return {"drafted_identical": identical, **result}


def describe_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of one workload's runs: medians, and tokens and steps of all.

    Speeds and tokens_per_step are of the answers with a second token, None where there are none.
    """
    timed = [pair for pair in pairs if pair.is_timed]
    n_steps = sum(pair.steps - 1 for pair in timed)
    return {
        "plain_tok_s": statistics.median((pair.n_tokens - 1) / pair.plain_s for pair in timed) if timed else None,
        "drafted_tok_s": statistics.median((pair.n_tokens - 1) / pair.drafted_s for pair in timed) if timed else None,
        "speedup": statistics.median(pair.speedup for pair in timed) if timed else None,
        "tokens_per_step": sum(pair.n_tokens - 1 for pair in timed) / max(1, n_steps) if timed else None,
        "accepted": sum(pair.accepted for pair in pairs),
        "drafted": sum(pair.drafted for pair in pairs),
        "share_in_loops": share_in_loops(pairs[0].token_ids),
        "n_tokens": pairs[0].n_tokens,
    }
