"""``kinetic run``: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kinetic_core.cli.console import note, print_json, printable
from kinetic_core.cli.options import (
    BackendOption,
    ContextOption,
    FrequencyOption,
    JSONOption,
    KVOption,
    MaxTokensOption,
    MinPOption,
    NoDraftOption,
    PresenceOption,
    RepeatOption,
    SeedOption,
    StopOption,
    StrictOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    answer_options,
    load_model,
)

if TYPE_CHECKING:
    from kinetic_core.engine.request import Completion, Timings, Usage


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="The prompt, or a model and a prompt. Without a prompt, the standard input is one.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model, if it is not the first argument.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    as_json: JSONOption = False,
    timings: Annotated[bool, typer.Option("--timings", help="End with tokens per second.")] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repeat_penalty: RepeatOption = None,
    presence_penalty: PresenceOption = None,
    frequency_penalty: FrequencyOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    threads: ThreadsOption = None,
    ctx: ContextOption = None,
    kv: KVOption = "f16",
    backend: BackendOption = "auto",
    no_draft: NoDraftOption = False,
    strict: StrictOption = False,
) -> None:
    """Answer one prompt, given as an argument or on the standard input.

    A single argument is the prompt, unless it is a known name or tiny-hybrid, starts with hf: or ends in .gguf: then it
    is the model.
    """
    model, prompt = split_words(words or [], model)
    if prompt is None:
        prompt = _read_standard_input()
    options = answer_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
    )
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out", param_hint="--system")
    loaded = load_model(
        model, threads=threads, ctx=ctx, kv=kv, backend=backend, strict=strict, parallel=1, draft=not no_draft
    )
    with loaded:
        if raw:
            request = loaded.request(prompt, **options)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt})
            request = loaded.request(loaded.template.encode(loaded.tokenizer, messages), **options)
        with loaded.engine.submit(request) as generation:
            if as_json:
                (completion,) = generation.result()
                print_json(_described(completion))
                return
            last = None
            for chunk in generation:
                sys.stdout.write(printable(chunk.text))
                sys.stdout.flush()
                last = chunk
            print(flush=True)
            if timings and last and last.usage and last.timings:
                note(speed_line(last.usage, last.timings))


def split_words(words: list[str], model: str | None) -> tuple[str | None, str | None]:
    """(model, prompt) from the arguments; a missing part is None."""
    from kinetic_core.models import KNOWN_MODELS, TINY_HYBRID

    if len(words) > (1 if model is not None else 2):
        raise typer.BadParameter("too many arguments: put the prompt in quotes", param_hint="PROMPT")
    if model is None and len(words) == 2:
        return words[0], words[1]
    if not words:
        return model, None
    (word,) = words
    names_model = word in (*KNOWN_MODELS, TINY_HYBRID) or word.startswith("hf:") or word.endswith(".gguf")
    return (word, None) if model is None and names_model else (model, word)


def speed_line(usage: Usage, timings: Timings) -> str:
    """Tokens per second of an answer, whose first token comes with the prompt, and what guesses did for it."""
    n_tokens, seconds = usage.completion_tokens, timings.predict_s
    speed = f", {(n_tokens - 1) / seconds:.1f} tok/s" if n_tokens > 1 and seconds > 0 else ""
    guesses = f", {timings.accepted / timings.steps:.2f} guessed a step" if timings.accepted and timings.steps else ""
    return f"{n_tokens} token{'' if n_tokens == 1 else 's'}{speed}{guesses}"


def _read_standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    return sys.stdin.read().removesuffix("\n")


def _described(completion: Completion) -> dict[str, Any]:
    usage, timings = completion.usage, completion.timings
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": attrs.asdict(timings),
    }
