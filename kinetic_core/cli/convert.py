"""``kinetic convert``: a Hugging Face folder to a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kinetic_core.cli.console import megabytes, note, print_json, progress_bar
from kinetic_core.cli.options import JSONOption, StrictOption, ThreadsOption, usable_registry


def convert(
    source: Annotated[Path, typer.Argument(help="Folder with config.json, safetensors and tokenizer.json.")],
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    type_: Annotated[
        Literal["bf16", "f16", "f32", "q8_0", "q6_k", "q5_k_m", "q4_k_m"],
        typer.Option("--type", help="Type of the matrices."),
    ] = "bf16",
    pre_tokenizer: Annotated[
        str | None,
        typer.Option("--pre-tokenizer", help="tokenizer.ggml.pre, where tokenizer.json's is not recognised."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    threads: ThreadsOption = None,
    as_json: JSONOption = False,
    strict: StrictOption = False,
) -> None:
    """Convert a checkpoint in Hugging Face's format to a GGUF file."""
    from kinetic_core.convert import convert as write

    registry = usable_registry(strict)
    with progress_bar() as progress:
        done = write(
            source,
            out,
            type_,
            registry=registry,
            progress=progress,
            overwrite=overwrite,
            n_threads=threads,
            pre_tokenizer=pre_tokenizer,
        )
    for notice in done.notices:
        note(notice)
    if as_json:
        print_json(
            {
                "path": str(done.path),
                "architecture": done.architecture,
                "tensors": dict(done.n_tensors),
                "bytes": done.n_bytes,
                "notices": list(done.notices),
            }
        )
        return
    tensors = ", ".join(f"{count} {kind}" for kind, count in done.n_tensors.items())
    print(f"{done.path}: {done.architecture}, {megabytes(done.n_bytes)}, tensors: {tensors}")
