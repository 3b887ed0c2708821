"""``kinetic bench``: how fast a model runs here, and how close that is to what the memory allows."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinetic_core import __version__
from kinetic_core.cli.console import megabytes, print_json, progress_bar
from kinetic_core.cli.options import (
    BackendOption,
    JSONOption,
    KVOption,
    ModelArgument,
    NoDraftOption,
    StrictOption,
    ThreadsOption,
    load_model,
)

if TYPE_CHECKING:
    from kinetic_core.bench.peer import Peer
    from kinetic_core.engine.model import Model


def bench(
    model: ModelArgument = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    predict: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Figures are medians over so many runs.")] = 3,
    peer: Annotated[bool, typer.Option("--peer", help="Alternate with llama.cpp (package xllamacpp).")] = False,
    streams: Annotated[
        int | None, typer.Option(min=2, max=256, help="Also compare so many concurrent requests with one.")
    ] = None,
    answer: Annotated[
        int, typer.Option(min=2, help="Tokens of an answer that is decoded with and without drafts.")
    ] = 400,
    profile: Annotated[bool, typer.Option("--profile", help="Also show where the time goes, per operation.")] = False,
    as_json: JSONOption = False,
    threads: ThreadsOption = None,
    kv: KVOption = "f16",
    backend: BackendOption = "auto",
    no_draft: NoDraftOption = False,
    strict: StrictOption = False,
) -> None:
    """Measure loading, prompt and decode speed, the share of the memory's bandwidth, the cost of rows, and drafting.

    Plain decoding first: greedy answers to made-up prompts, end tokens ignored. Then answers with and without drafts,
    which have to be the same: exit status 1 if they are not, or if a drafter failed.
    """
    from kinetic_core.bench import (
        BenchOptions,
        measure,
        measure_drafting,
        measure_first_token,
        measure_profile,
        measure_streams,
    )

    options = BenchOptions(n_prompt=prompt, n_predict=predict, runs=runs)
    loading: dict[str, Any] = {
        "threads": threads,
        "ctx": None,
        "kv": kv,
        "backend": backend,
        "strict": strict,
        "parallel": max(16, streams or 0),
        "draft": not no_draft,
    }
    began = time.perf_counter()
    loaded = load_model(model, **loading)
    load_s = time.perf_counter() - began
    result: dict[str, Any] = {"version": __version__, "model": loaded.name, "load_s": load_s}
    with contextlib.ExitStack() as stack:
        stack.enter_context(loaded)
        progress = stack.enter_context(progress_bar())
        other = stack.enter_context(_peer(loaded, options.n_prompt, options.n_predict)) if peer else None
        result |= {"prompt_tokens": prompt, "predict_tokens": predict, "runs": runs}
        result |= measure(loaded, options, peer=other, progress=progress)
        if streams is not None:
            progress("concurrent requests", 0.0)
            result["streams"] = measure_streams(loaded, streams, options)
        if loaded.engine.statistics()["drafters"]:
            if not all(_failed(loaded).values()):
                result |= measure_drafting(loaded, answer, progress)
            result["drafter_failed"] = [name for name, failed in _failed(loaded).items() if failed]
        result["backend"] = loaded.executable.statistics()
        result["kernel_digest"] = loaded.kernel_digest
    if profile:
        result["profile"] = measure_profile(lambda: load_model(model, **loading), options)
    arguments = [*(["--model", model] if model is not None else []), "--kv", kv, "--backend", backend]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    with progress_bar() as progress:
        progress("start to first token", 0.0)
        result["first_token_s"] = measure_first_token(arguments, runs)
    if as_json:
        print_json(result)
    else:
        _print(result)
    if not result.get("drafted_identical", True) or result.get("drafter_failed"):
        raise typer.Exit(1)


def _failed(model: Model) -> dict[str, bool]:
    """Per drafter: did it fail, and is it off? One that failed when the model was loaded counts."""
    return {name: figures["failed"] for name, figures in model.engine.statistics()["drafters"].items()}


def _peer(model: Model, n_prompt: int, n_predict: int) -> Peer:
    from kinetic_core.bench.peer import Peer
    from kinetic_core.errors import ModelNotFoundError, describe

    path = getattr(model.source, "path", None)
    if path is None:
        raise ModelNotFoundError(describe(f"{model.name} lives in memory: there is no file that llama.cpp could read"))
    return Peer(
        path,
        n_threads=int(model.executable.statistics().get("n_threads", 1)),
        n_prompt=n_prompt,
        n_predict=n_predict,
        vocab_size=model.vocab_size,
    )


def _print(result: dict[str, Any]) -> None:
    def line(label: str, value: str) -> None:
        print(f"{label + ':':<24} {value}")

    line("model", f"{result['model']}, {result['threads']} threads")
    line("load", f"{result['load_s']:.2f} s")
    line("start to first token", f"{result['first_token_s']:.2f} s")
    line(f"prompt of {result['prompt_tokens']}", f"{result['prompt_tok_s']:.1f} tok/s")
    line("decode", f"{result['decode_tok_s']:.1f} tok/s")
    line("read per token", megabytes(result["bytes_per_token"]))
    line("read bandwidth", f"{result['bandwidth_gb_s']:.1f} GB/s, {result['bandwidth_share']:.0%} used by decode")
    line("cost of rows", ", ".join(f"{n}: {cost:.2f}" for n, cost in result["rows_cost"].items()))
    if "streams" in result:
        streams = result["streams"]
        line(f"{streams['streams']} streams", f"{streams['all_tok_s']:.1f} tok/s, {streams['ratio']:.2f} x one")
    for name, cases in result.get("workloads", {}).items():
        for case, figures in cases.items():
            if figures["speedup"] is None:
                line(f"{name}, {case}", f"an answer of {figures['n_tokens']} tokens: no time between two")
                continue
            line(
                f"{name}, {case}",
                f"{figures['plain_tok_s']:.1f} tok/s, drafted {figures['drafted_tok_s']:.1f} "
                f"({figures['speedup']:.2f} x), {figures['tokens_per_step']:.2f} tokens a step, "
                f"{figures['share_in_loops']:.0%} in loops",
            )
    for name in result.get("workloads_skipped", ()):
        line(name, "skipped: its prompt leaves no room for an answer in the model's context")
    failed = result.get("drafter_failed")
    if failed:
        print(f"drafters that failed and were turned off (the log tells why): {', '.join(failed)}")
    if "drafted_identical" in result:
        identical = "yes" if result["drafted_identical"] else "no"
        partly = ", with the drafters that failed turned off" if failed else ""
        print(f"drafted output identical to plain decoding: {identical}{partly}")
    for name, shares in result.get("profile", {}).items():
        line(f"time of {name}", ", ".join(f"{label} {share:.1%}" for label, share in shares.items()))
    if "peer" in result:
        peer = result["peer"]
        line("llama.cpp prompt", f"{peer['prompt_tok_s']:.1f} tok/s; ours is {peer['prompt_ratio']:.2f} x")
        line("llama.cpp decode", f"{peer['decode_tok_s']:.1f} tok/s; ours is {peer['decode_ratio']:.2f} x")
