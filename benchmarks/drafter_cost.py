"""What the sources of guesses cost the engine's thread: microseconds per token, without a model.

Four streams of tokens are gone through token by token, as the engine does: `random` (nothing to guess), `prose` (words
of a Zipf distribution, sentences that come back now and then), `repetitive` (a loop) and `copy` (a text that the prompt
held, with every 40th token changed). The first tokens of a stream are the prompt. Printed per source and stream: the
prompt's indexing per token, the medians of `committed` and of `propose`, both together, the mean CPU time of both (with
what is learned now and then), how many of 100 steps had a draft, and the source's memory per token.

    python benchmarks/drafter_cost.py [--tokens 1000,8000,32000] [--sources context,requests]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from kinetic_core.plugins import load_registry

VOCABULARY = 49_152
STEPS = 500
"""Tokens gone through after the prompt."""
MAX_TOKENS = 8


def random_stream(n: int, source: random.Random) -> list[int]:
    """Tokens that have nothing to do with each other."""
    return [source.randrange(VOCABULARY) for _ in range(n)]


def prose_stream(n: int, source: random.Random) -> list[int]:
    """Zipf-distributed tokens, and every so often a phrase that was there before."""
    weights = [1 / (rank + 3) for rank in range(VOCABULARY)]
    tokens = source.choices(range(VOCABULARY), weights, k=n)
    for start in range(200, n - 12, 60):
        earlier = source.randrange(start - 20)
        tokens[start : start + 8] = tokens[earlier : earlier + 8]
    return tokens


def repetitive_stream(n: int, source: random.Random) -> list[int]:
    """A loop of 37 tokens."""
    loop = random_stream(37, source)
    return [loop[index % len(loop)] for index in range(n)]


def copy_stream(n: int, source: random.Random) -> list[int]:
    """A text whose last `STEPS` tokens are, edits aside, somewhere in its first ones."""
    tokens = prose_stream(n - STEPS, source)
    start = max(0, len(tokens) // 2 - STEPS)
    again = (tokens[start:] * (1 + STEPS // max(1, len(tokens) - start)))[:STEPS]
    for index in range(20, STEPS, 40):
        again[index] = source.randrange(VOCABULARY)
    return tokens + again


STREAMS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "random": random_stream,
    "prose": prose_stream,
    "repetitive": repetitive_stream,
    "copy": copy_stream,
}


def measure(name: str, tokens: Sequence[int]) -> str:
    """One line of figures for a source and a stream."""
    drafter = load_registry().get("drafter", name)()
    prompt, rest = tokens[:-STEPS], tokens[-STEPS:]
    if drafter.capabilities.learns_across_requests:  # an earlier request to learn from
        drafter.begin(0, tokens[: len(tokens) // 2])
        drafter.end(0)
    start = time.perf_counter()
    drafter.begin(1, prompt)
    begun = time.perf_counter()
    drafter.propose(1, MAX_TOKENS)
    indexing = time.perf_counter() - begun
    committing, proposing, both, n_drafts = [], [], [], 0
    cpu_start = time.thread_time()
    for token in rest:
        before = time.perf_counter()
        drafter.committed(1, (token,))
        between = time.perf_counter()
        n_drafts += drafter.propose(1, MAX_TOKENS) is not None
        after = time.perf_counter()
        committing.append(between - before)
        proposing.append(after - between)
        both.append(after - before)
    cpu_s = (time.thread_time() - cpu_start) / len(rest)
    memory = drafter.statistics()["memory_bytes"] / len(tokens)
    return (
        f"{(begun - start) * 1e6:8.0f} {indexing / len(prompt) * 1e6:10.2f}"
        + "".join(f" {statistics.median(times) * 1e6:10.1f}" for times in (committing, proposing, both))
        + f" {cpu_s * 1e6:10.1f} {100 * n_drafts / len(rest):8.0f} {memory:12.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1000,8000,32000", help="lengths of the streams, comma-separated")
    parser.add_argument("--sources", default="context,requests", help="registered names, comma-separated")
    options = parser.parse_args()
    print(
        f"{'source':9} {'stream':11} {'tokens':>7} {'begin µs':>8} {'index µs/t':>10} {'committed':>10} {'propose':>10}"
        f" {'both µs':>10} {'CPU µs':>10} {'drafts %':>8} {'bytes/token':>12}"
    )
    for name in options.sources.split(","):
        for stream, make in STREAMS.items():
            for n in map(int, options.tokens.split(",")):
                line = measure(name, make(n, random.Random(n)))
                print(f"{name:9} {stream:11} {n:7} {line}", flush=True)


if __name__ == "__main__":
    main()
