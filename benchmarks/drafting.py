"""What drafting gains and costs, plain and drafted in turn in one process. docs/rad1.md explains the tables.

    python benchmarks/drafting.py [MODEL] [--parts workloads,forms,unguessable,agent,streams] [--pairs 30] [--json]

forms        given answers that tell the prompt again in another form; --without-words: drafts of tokens alone
workloads    answers that repeat much of their prompt: greedy, sampled with a seed, and given (forced text)
unguessable  free prose, sampled, random tokens, and random tokens of one tenant whose index of earlier requests is
             full, so that many places match by chance: the median of drafted over plain time, its 95 % interval
agent        the log of an agent, run twice: the second time drafts from what the server saw the first time
streams      requests at the same time, drafted and plain: tokens per second of all together
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from kinetic_drafters.context import ContextDrafter
from kinetic_drafters.requests import RequestsDrafter

import kinetic_core
from kinetic_core.bench.drafted import TEMPERATURES, Pair, describe_pairs, run_pair
from kinetic_core.bench.measure import rows_seconds
from kinetic_core.bench.workloads import CODE, FILLED, LINES, PASSAGE, PEOPLE, PLAIN_PROSE, WORKLOADS, chat_ids
from kinetic_core.plugins import Registry, load_registry

N_PROSE = 160
N_RANDOM = 160
N_AGENT = 120
N_RANDOM_PROMPT = 64
N_STREAM = 120
STREAMS_S = 6.0
"""Tokens of an answer, and seconds that are counted, with requests at the same time: several answers of each client.

Where plain clients only just did not end their first answer, the faster ones alone would have prompts to run.
"""
N_FILLING = 200_000
N_FILLING_TEXT = 2000
"""Tokens of other text in the filled index, and of each request that brought it."""
FILLED_SALT = "filled index"


class FillableRequests(RequestsDrafter):
    """The drafter of earlier requests, which first takes in the texts in `filling`, as requests that are over."""

    filling: ClassVar[Sequence[Sequence[int]]] = ()

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """On the engine's thread, so what has to be taken in is taken in here."""
        texts, FillableRequests.filling = FillableRequests.filling, ()
        for text in texts:
            super().begin(-1, text, FILLED_SALT)
            self.end(-1)
        super().begin(sequence_id, token_ids, salt)


class WordlessContext(ContextDrafter):
    """The drafter of the context, without the words."""

    def read_texts(self, texts: object) -> None:
        """Left alone."""


class ChangedRegistry(Registry):
    """The installed plugins, with `FillableRequests` for the drafter of earlier requests, and others of `changed`."""

    changed: ClassVar[dict[str, type]] = {"requests": FillableRequests}

    def get(self, kind: Any, name: str) -> Any:
        """As of any registry."""
        return self.changed.get(name) if kind == "drafter" and name in self.changed else super().get(kind, name)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and a 95 % interval of it: order statistics, by the binomial's normal approximation."""
    ordered = sorted(values)
    n = len(ordered)
    reach = 0.98 * n**0.5
    low = ordered[max(0, int(n / 2 - reach))]
    high = ordered[min(n - 1, int(n / 2 + reach))]
    return statistics.median(ordered), low, high


def workloads(model: kinetic_core.Model, n_pairs: int) -> dict[str, Any]:
    """Tokens per step, speed and loops per workload; the forced texts together; the cost of n rows."""
    costs = rows_seconds(model, 512, lambda _what, _share: None)
    found: dict[str, Any] = {"rows_cost": {str(n): seconds / costs[1] for n, seconds in costs.items()}}
    forced_pairs: list[Pair] = []
    counts_before = _counts(model)
    for workload in WORKLOADS:
        prompt_ids = workload.prompt_ids(model)
        forced = tuple(model.tokenize(workload.answer, add_bos=False))
        cases: dict[str, dict[str, Any]] = {
            f"temperature {temperature:g}": {"temperature": temperature, "max_tokens": len(forced)}
            for temperature in TEMPERATURES
        }
        cases["forced"] = {"temperature": 0.0, "forced_ids": forced, "ignore_end": True}
        for name, options in cases.items():
            if name == "forced":
                counts_before = _counts(model)
            pairs = [run_pair(model, prompt_ids, drafted_first=bool(run % 2), **options) for run in range(n_pairs)]
            found.setdefault(workload.name, {})[name] = describe_pairs(pairs) | {
                "identical": all(pair.identical for pair in pairs)
            }
            if name == "forced":
                forced_pairs += pairs
                found[workload.name][name] |= _against_costs(pairs, _counts(model), counts_before, costs)
    plain = sum(pair.plain_s for pair in forced_pairs)
    drafted = sum(pair.drafted_s for pair in forced_pairs)
    found["forced together"] = {"speedup": plain / drafted}
    return found


def _counts(model: kinetic_core.Model) -> dict[int, int]:
    return {int(n): count for n, count in model.engine.statistics()["steps_by_rows"].items()}


def _against_costs(
    pairs: Sequence[Pair], after: dict[int, int], before: dict[int, int], costs: dict[int, float]
) -> dict[str, float]:
    """The speed that the rows alone would allow: the plain side's steps over the drafted side's, at measured costs."""
    steps = {n: after[n] - before.get(n, 0) for n in after}
    n_plain = sum(pair.n_tokens - 1 for pair in pairs)
    steps[1] = steps.get(1, 0) - n_plain
    known = sorted(costs)

    def cost(n_rows: int) -> float:
        low = max(n for n in known if n <= min(n_rows, known[-1]))
        high = min((n for n in known if n >= n_rows), default=known[-1])
        if high == low:
            return costs[low] / costs[1] * max(1.0, n_rows / known[-1])
        share = (n_rows - low) / (high - low)
        return (costs[low] + share * (costs[high] - costs[low])) / costs[1]

    n_steps = sum(steps.values())
    mean_cost = sum(cost(n) * count for n, count in steps.items()) / max(1, n_steps)
    tokens_per_step = n_plain / max(1, n_steps)
    speedup = statistics.median(pair.speedup for pair in pairs)
    return {"mean_rows_cost": mean_cost, "share_of_possible": speedup / (tokens_per_step / mean_cost)}


def _rows(row: str, head: str = "") -> str:
    return head + "\n".join(row.format(*person) for person in PEOPLE)


CSV = _rows("{},{},{},{},{}", "name,job,city,age,hobby\n")
TABLE = _rows("| {} | {} | {} | {} | {} |", "| name | job | city | age | hobby |\n|---|---|---|---|---|\n")
YAML = _rows("- name: {}\n  job: {}\n  city: {}\n  age: {}\n  hobby: {}")
SENTENCES = _rows("{} is a {} from {}, {} years old, who likes {}.")
FORMS = (
    ("fields to JSON", LINES, FILLED),
    ("fields to sentences", LINES, SENTENCES),
    ("CSV to JSON", CSV, FILLED),
    ("CSV to a table", CSV, TABLE),
    ("JSON to YAML", FILLED, YAML),
    ("JSON to a table", FILLED, TABLE),
    ("sentences to JSON", SENTENCES, FILLED),
)


def forms(model: kinetic_core.Model, n_pairs: int) -> dict[str, Any]:
    """Tokens per step and speed of given answers that say the same as the prompt in another form."""
    found: dict[str, Any] = {}
    for name, source, answer in FORMS:
        prompt_ids = chat_ids(model, f"Write the same in the other form.\n\n{source}")
        forced = tuple(model.tokenize(answer, add_bos=False))
        pairs = [
            run_pair(
                model, prompt_ids, drafted_first=bool(run % 2), temperature=0.0, forced_ids=forced, ignore_end=True
            )
            for run in range(n_pairs)
        ]
        assert all(pair.identical for pair in pairs)
        found[name] = describe_pairs(pairs)
    return found


def unguessable(model: kinetic_core.Model, n_pairs: int) -> dict[str, Any]:
    """Drafted over plain time of text that cannot be guessed."""
    found: dict[str, Any] = {}
    prose_ids = PLAIN_PROSE.prompt_ids(model)
    rng = random.Random(5)
    # Real text has frequent tokens and rare ones, and the more frequent they are the more places match by chance.
    frequencies = list(accumulate(1.0 / rank for rank in range(1, model.vocab_size + 1)))
    for name in ("free prose", "random text", "random text, filled index"):
        if name == "random text, filled index":
            _fill(model, rng, frequencies)
        ratios = []
        before = model.engine.statistics()
        total_s = 0.0
        for run in range(n_pairs):
            if name == "free prose":
                options: dict[str, Any] = {"temperature": 0.8, "seed": 100 + run, "max_tokens": N_PROSE}
                prompt_ids = prose_ids
            else:
                n_tokens = N_RANDOM_PROMPT + N_RANDOM
                if name == "random text":
                    tokens = [rng.randrange(model.vocab_size) for _ in range(n_tokens)]
                    options = {}
                else:
                    tokens = rng.choices(range(model.vocab_size), cum_weights=frequencies, k=n_tokens)
                    options = {"salt": FILLED_SALT}
                prompt_ids = tokens[:N_RANDOM_PROMPT]
                options |= {"temperature": 0.0, "forced_ids": tuple(tokens[N_RANDOM_PROMPT:])}
            pair = run_pair(model, prompt_ids, drafted_first=bool(run % 2), ignore_end=True, **options)
            assert pair.identical
            ratios.append(pair.drafted_s / pair.plain_s)
            total_s += pair.drafted_s
        after = model.engine.statistics()
        median, low, high = median_interval(ratios)
        found[name] = {
            "pairs": n_pairs,
            "time_ratio": median,
            "interval_95": [low, high],
            "guessing_share": (after["guessing_s"] - before["guessing_s"]) / total_s,
            "wasted_share": (after["wasted_s"] - before["wasted_s"]) / total_s,
            "drafted": after["drafted"] - before["drafted"],
            "accepted": after["accepted"] - before["accepted"],
        }
    return found


def _fill(model: kinetic_core.Model, rng: random.Random, frequencies: Sequence[float]) -> None:
    """Fill the index of earlier requests of the tenant `FILLED_SALT`."""
    FillableRequests.filling = [
        rng.choices(range(model.vocab_size), cum_weights=frequencies, k=N_FILLING_TEXT)
        for _ in range(N_FILLING // N_FILLING_TEXT)
    ]
    model.engine.submit(model.request([0, 1], max_tokens=1, salt=FILLED_SALT)).result()
    held = model.engine.statistics()["drafters"]["requests"]["tokens_indexed"]
    assert held >= N_FILLING, f"{held} tokens are indexed, not {N_FILLING}"


TOOL_OUTPUT = """\
$ python -m pytest tests/test_basket.py -q
..F.                                                                     [100%]
=================================== FAILURES ===================================
_________________________________ test_receipt _________________________________
    def test_receipt():
        basket = Basket()
        basket.add("tea", 450, 2)
>       assert basket.receipt().splitlines()[-1] == "total EUR 9.00"
E       AssertionError: assert 'total EUR 9.0' == 'total EUR 9.00'
1 failed, 3 passed in 0.04s
"""

AGENT_LOG = (
    f"This is basket.py:\n\n```python\n{CODE}```\n\nDescribe what each method of the class does.",
    f"A test fails. This is its output:\n\n```\n{TOOL_OUTPUT}```\n\nWhat is wrong, and which line should be changed?",
    f"This is basket.py:\n\n```python\n{CODE}```\n\nThis is the test's output:\n\n```\n{TOOL_OUTPUT}```\n\n"
    "Write the corrected method `receipt`.",
    f"Summarize this note for the log:\n\n{PASSAGE}",
)


def agent(model: kinetic_core.Model, n_runs: int) -> dict[str, Any]:
    """The second run of a log against the first, which is drafted too (from its own context); greedy answers.

    "sent again": the same requests. "reworded": the same files and tool output, and a question that ends differently.
    Each pair of runs has a salt of its own.
    """
    found: dict[str, Any] = {}
    for name, ending in (("sent again", ""), ("reworded", " Be precise.")):
        runs = []
        for run in range(n_runs):
            both = []
            for attempt in (0, 1):
                n_tokens, n_steps, total_s = 0, 0, 0.0
                for content in AGENT_LOG:
                    content = content + ending * attempt
                    ids = chat_ids(model, content)
                    request = model.request(ids, temperature=0.0, max_tokens=N_AGENT, salt=f"agent {name} {run}")
                    (completion,) = model.engine.submit(request).result()
                    if len(completion.token_ids) < 2:  # no time between two tokens
                        continue
                    n_tokens += len(completion.token_ids) - 1
                    n_steps += completion.timings.steps - 1
                    total_s += completion.timings.predict_s
                assert n_steps, "every answer ended before its second token"
                both.append((n_tokens / total_s, n_tokens / n_steps))
            runs.append(both)
        found[name] = {
            "first_tok_s": statistics.median(first[0] for first, _ in runs),
            "second_tok_s": statistics.median(second[0] for _, second in runs),
            "first_tokens_per_step": statistics.median(first[1] for first, _ in runs),
            "second_tokens_per_step": statistics.median(second[1] for _, second in runs),
            "speedup": statistics.median(second[0] / first[0] for first, second in runs),
        }
    return found


def streams(model: kinetic_core.Model, n_pairs: int, n_streams: int = 4) -> dict[str, Any]:
    """Drafted over plain tokens per second of clients that ask again as soon as they are answered.

    Each client has a prompt of its own: of the workloads and free prose, or free prose only. Counted are the tokens of
    `STREAMS_S` seconds, so that no client is left alone at the end.
    """
    found: dict[str, Any] = {}
    for name in ("workloads", "free prose"):
        prompts = [workload.prompt_ids(model) for workload in WORKLOADS] if name == "workloads" else []
        prompts += [PLAIN_PROSE.prompt_ids(model)] * (n_streams - len(prompts))
        ratios = []
        for run in range(n_pairs):
            counts = {
                draft: _stream_tokens(model, prompts, draft, f"streams {name} {run}", 1000 * run)
                for draft in (bool(run % 2), not run % 2)
            }
            ratios.append(counts[True] / counts[False])
        median, low, high = median_interval(ratios)
        found[name] = {"streams": n_streams, "pairs": n_pairs, "speed_ratio": median, "interval_95": [low, high]}
    return found


def _stream_tokens(
    model: kinetic_core.Model, prompts: Sequence[Sequence[int]], draft: bool, salt: str, seed: int
) -> int:
    """Tokens that these clients get together, from when all have their first until `STREAMS_S` seconds later."""
    begun = threading.Barrier(len(prompts))

    def client(number: int) -> int:
        n_tokens, deadline = 0, 0.0
        for request in itertools.count():
            generation = model.engine.submit(
                model.request(
                    prompts[number],
                    temperature=0.8,
                    seed=seed + 10 * number + request,
                    max_tokens=N_STREAM,
                    ignore_end=True,
                    draft=draft,
                    salt=f"{salt} {draft} {number} {request}",
                )
            )
            with generation:
                for chunk in generation:
                    if not deadline:
                        begun.wait()
                        deadline = time.perf_counter() + STREAMS_S
                    if time.perf_counter() >= deadline:
                        return n_tokens
                    n_tokens += len(chunk.token_ids)
        raise AssertionError("clients end at their deadline")

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        n_tokens = sum(pool.map(client, range(len(prompts))))
    while model.engine.statistics()["open_requests"]:  # those that were left may have a step running
        time.sleep(0.001)
    return n_tokens


def show(name: str, value: Any, indent: int = 0) -> None:
    """Print nested figures, one line each."""
    pad = "  " * indent
    if isinstance(value, dict):
        print(f"{pad}{name}")
        for key, entry in value.items():
            show(key, entry, indent + 1)
    else:
        shown = f"{value:.3f}" if isinstance(value, float) else value
        print(f"{pad}{name}: {shown}")


def main() -> None:
    """Measure the parts asked for and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--parts", default="workloads,forms,unguessable,agent,streams")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--workload-pairs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--without-words", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.without_words:
        ChangedRegistry.changed["context"] = WordlessContext
    parts = {
        "workloads": lambda: workloads(model, options.workload_pairs),
        "forms": lambda: forms(model, options.workload_pairs),
        "unguessable": lambda: unguessable(model, options.pairs),
        "agent": lambda: agent(model, options.workload_pairs),
        "streams": lambda: streams(model, options.pairs),
    }
    found: dict[str, Any] = {}
    registry = ChangedRegistry(load_registry().plugins)
    with kinetic_core.load(options.model, threads=options.threads, ctx=4096, parallel=8, registry=registry) as model:
        run_pair(model, PLAIN_PROSE.prompt_ids(model), max_tokens=16, ignore_end=True)
        for name in options.parts.split(","):
            found[name] = parts[name]()
            if not options.json:
                show(name, found[name])
        found["engine"] = model.engine.statistics()
    if options.json:
        print(json.dumps(found))
    else:
        show("drafters", found["engine"]["drafters"])


if __name__ == "__main__":
    main()
