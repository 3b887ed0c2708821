"""Running the measurements. Every comparison alternates its sides within one run, so that noise meets both."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kinetic_core.bench.peer import Peer, bench_tokens
from kinetic_core.bench.work import bytes_per_token
from kinetic_core.errors import BackendError, describe
from kinetic_core.interfaces.batch import BLOCK_TOKENS, HeadRequest, RowBatch, SequenceRows

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model
    from kinetic_core.interfaces.backend import Progress

ROW_COUNTS = (1, 2, 4, 8, 16)
ROW_ROUNDS = 7
FIRST_TOKEN_TIMEOUT_S = 600.0
PROFILE_VARIABLE = "KINETIC_PROFILE"
"""Set to 1, it has a backend that can do so keep the time of each operation."""


@attrs.frozen
class BenchOptions:
    """What is measured.

    n_prompt, n_predict: tokens of a run's prompt and answer. runs: medians are over so many.
    """

    n_prompt: int = 256
    n_predict: int = 64
    runs: int = 3


def measure(
    model: Model, options: BenchOptions, *, peer: Peer | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Prompt and plain decode speed, bytes per token, bandwidth and its share, and the cost of n rows.

    Keys: threads, prompt_tok_s, decode_tok_s, bytes_per_token, bandwidth_gb_s, bandwidth_share, rows_cost, rows_ms
    (one row) and, with a peer, peer {prompt_tok_s, decode_tok_s, prompt_ratio, decode_ratio}: ours over its, the
    median of the runs' ratios. No other request may run on the model.
    """
    from kinetic_core.bench.bandwidth import BandwidthMeter

    report = progress or (lambda _what, _share: None)
    n_threads = int(model.executable.statistics().get("n_threads", 1))
    n_bytes = bytes_per_token(
        model.program, model.source, model.engine.options.kv_type, options.n_prompt + options.n_predict // 2
    )
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    bandwidths: list[float] = []
    _run(model, options, options.runs)  # pages in, caches warm
    if peer is not None:
        peer.run(options.runs)
    with BandwidthMeter(n_threads) as meter:
        for run in range(options.runs):
            report("prompt and decode", run / options.runs)
            bandwidths.append(meter.gb_s())
            ours.append(_run(model, options, run))
            if peer is not None:
                answer = peer.run(run)
                theirs.append((answer["prompt_tok_s"], answer["decode_tok_s"]))
    report("rows of one step", 0.0)
    row_s = rows_seconds(model, options.n_prompt, report)
    result: dict[str, Any] = {
        "threads": n_threads,
        "prompt_tok_s": statistics.median(prompt for prompt, _ in ours),
        "decode_tok_s": statistics.median(decode for _, decode in ours),
        "bytes_per_token": n_bytes,
        "bandwidth_gb_s": statistics.median(bandwidths),
        "bandwidth_share": statistics.median(
            decode * n_bytes / (gb_s * 1e9) for (_, decode), gb_s in zip(ours, bandwidths, strict=True)
        ),
        "rows_cost": {str(n): seconds / row_s[1] for n, seconds in row_s.items()},
        "rows_ms": row_s[1] * 1e3,
    }
    if theirs:
        result["peer"] = {
            "prompt_tok_s": statistics.median(prompt for prompt, _ in theirs),
            "decode_tok_s": statistics.median(decode for _, decode in theirs),
            "prompt_ratio": statistics.median(a / b for (a, _), (b, _) in zip(ours, theirs, strict=True)),
            "decode_ratio": statistics.median(a / b for (_, a), (_, b) in zip(ours, theirs, strict=True)),
        }
    return result


def _run(model: Model, options: BenchOptions, run: int) -> tuple[float, float]:
    """(prompt, decode) tokens per second of one request; the answer's first token counts as the prompt's."""
    request = model.request(
        bench_tokens(options.n_prompt, run, model.vocab_size),
        temperature=0.0,
        max_tokens=options.n_predict,
        ignore_end=True,
        draft=False,
    )
    (completion,) = model.engine.submit(request).result()
    timings = completion.timings
    return options.n_prompt / timings.prompt_s, (len(completion.token_ids) - 1) / timings.predict_s


def rows_seconds(model: Model, start: int, report: Callable[[str, float], None]) -> dict[int, float]:
    """Seconds of a step with n rows of one sequence that has `start` tokens, the output layer run for each row."""
    executable = model.executable
    n_blocks = -(-(start + max(ROW_COUNTS)) // BLOCK_TOKENS)
    blocks = [model.engine.blocks.allocate() for _ in range(n_blocks)]
    slot = model.engine.slots.allocate()
    table = np.array(blocks, np.int32)
    counts = [n for n in ROW_COUNTS if start + n <= model.context_length]
    times: dict[int, list[float]] = {n: [] for n in counts}

    def step(position: int, n_rows: int, heads: Sequence[int]) -> None:
        executable.run(
            RowBatch(
                token_ids=np.array(bench_tokens(n_rows, position, model.vocab_size), np.int32),
                positions=np.arange(position, position + n_rows, dtype=np.int32),
                sequences=(
                    SequenceRows(first_row=0, start=position, n_committed=n_rows, block_table=table, slot=slot),
                ),
                heads=[HeadRequest(row, 1) for row in heads],
            )
        )

    try:
        if slot >= 0:
            executable.clear_slot(slot)
        for position in range(0, start, BLOCK_TOKENS):
            step(position, min(BLOCK_TOKENS, start - position), [])
        for n in counts:
            step(start, n, range(n))
        for round_number in range(ROW_ROUNDS):
            report("rows of one step", round_number / ROW_ROUNDS)
            for n in counts:
                began = time.perf_counter()
                step(start, n, range(n))
                times[n].append(time.perf_counter() - began)
    finally:
        model.engine.blocks.release(blocks)
        model.engine.slots.release(slot)
    return {n: statistics.median(values) for n, values in times.items()}


def measure_streams(model: Model, n_streams: int, options: BenchOptions) -> dict[str, float]:
    """Tokens per second of `n_streams` concurrent requests together, of one alone, and their ratio.

    Prompts have 32 tokens. Time runs from the first submission to the last token.
    """

    def tokens_per_second(count: int, run: int) -> float:
        began = time.perf_counter()
        generations = [
            model.engine.submit(
                model.request(
                    bench_tokens(32, 100 * run + number, model.vocab_size),
                    temperature=0.0,
                    max_tokens=options.n_predict,
                    ignore_end=True,
                    draft=False,
                )
            )
            for number in range(count)
        ]
        n_tokens = sum(len(generation.result()[0].token_ids) for generation in generations)
        return n_tokens / (time.perf_counter() - began)

    tokens_per_second(1, options.runs)
    pairs = [(tokens_per_second(1, run), tokens_per_second(n_streams, run)) for run in range(options.runs)]
    return {
        "streams": n_streams,
        "one_tok_s": statistics.median(one for one, _ in pairs),
        "all_tok_s": statistics.median(together for _, together in pairs),
        "ratio": statistics.median(together / one for one, together in pairs),
    }


def measure_profile(load: Callable[[], Model], options: BenchOptions) -> dict[str, dict[str, float]]:
    """Where the time goes: {"decode": {label: share}, "prompt": …}, for backends that keep a profile; else empty.

    load: loads the model anew, so that neither the profile's own cost nor other steps get into a figure.
    """
    cases = {
        "decode": BenchOptions(n_prompt=1, n_predict=options.n_predict),
        "prompt": BenchOptions(n_prompt=options.n_prompt, n_predict=2),
    }
    found: dict[str, dict[str, float]] = {}
    before = os.environ.get(PROFILE_VARIABLE)
    os.environ[PROFILE_VARIABLE] = "1"
    try:
        for name, case in cases.items():
            with load() as model:
                _run(model, case, 0)
                profile = model.executable.statistics().get("profile")
            if profile:
                found[name] = profile
    finally:
        if before is None:
            del os.environ[PROFILE_VARIABLE]
        else:
            os.environ[PROFILE_VARIABLE] = before
    return found


def measure_first_token(arguments: Sequence[str], runs: int) -> float:
    """Median seconds from starting `kinetic run` in a fresh process to the first byte of its answer.

    arguments: MODEL and loading options. Raises BackendError when a run fails.
    """
    command = [
        sys.executable,
        *("-m", "kinetic_core", "run", *arguments),
        *("--raw", "--temperature", "0", "--max-tokens", "1", "--", "The capital of France is"),
    ]
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.read(1)
            times.append(time.perf_counter() - began)
            errors = process.stderr.read().decode(errors="replace")
            if process.wait(FIRST_TOKEN_TIMEOUT_S) or not first:
                raise BackendError(
                    describe("`kinetic run` failed", got=errors.strip() or f"status {process.returncode}")
                )
    return statistics.median(times)
