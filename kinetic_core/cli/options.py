"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kinetic_core.cli.console import note, progress_bar, warn
from kinetic_core.plugins import load_registry

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model
    from kinetic_core.plugins import Registry

MODEL_HELP = "A path, hf:owner/repo[:quant or file], or a known name (`kinetic models`). Default: smollm2."

ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=False)]
KVType = Literal["f16", "f32"]

_LOADING = "Loading"
_SAMPLING = "Choice of tokens (default: the file's, else the project's)"

ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        min=1,
        max=1024,
        help="Worker threads. Default: the physical cores.",
        rich_help_panel=_LOADING,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        "-c",
        min=1,
        help="Most tokens of prompt and answer. Default: the model's, 32768 and what memory allows, the least of them.",
        rich_help_panel=_LOADING,
    ),
]
KVOption = Annotated[
    KVType, typer.Option("--kv", help="Type of the cache of keys and values.", rich_help_panel=_LOADING)
]
BackendOption = Annotated[
    str, typer.Option("--backend", help="Kernel backend, see `kinetic plugins`.", rich_help_panel=_LOADING)
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="A problem with any plugin is fatal.", rich_help_panel=_LOADING)
]
NoDraftOption = Annotated[
    bool,
    typer.Option(
        "--no-draft", help="Decode token by token, without guesses: for comparison.", rich_help_panel=_LOADING
    ),
]
JSONOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", min=0, help="Longest answer. Default: to the end.", rich_help_panel=_SAMPLING),
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=_SAMPLING)
]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="0 is off.", rich_help_panel=_SAMPLING)]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="1 is off.", rich_help_panel=_SAMPLING)]
MinPOption = Annotated[float | None, typer.Option("--min-p", help="0 is off.", rich_help_panel=_SAMPLING)]
RepeatOption = Annotated[float | None, typer.Option("--repeat-penalty", help="1 is off.", rich_help_panel=_SAMPLING)]
PresenceOption = Annotated[
    float | None, typer.Option("--presence-penalty", help="0 is off.", rich_help_panel=_SAMPLING)
]
FrequencyOption = Annotated[
    float | None, typer.Option("--frequency-penalty", help="0 is off.", rich_help_panel=_SAMPLING)
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same answer.", rich_help_panel=_SAMPLING)
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="Ends an answer; may be given again.", rich_help_panel=_SAMPLING)
]


def answer_options(**given: Any) -> dict[str, Any]:
    """The options of `Model.request` that were given on the command line."""
    return {name: value for name, value in given.items() if value is not None and value != []}


def usable_registry(strict: bool) -> Registry:
    """The plugins; problems are warnings, or fatal with --strict."""
    registry = load_registry(strict=strict)
    for problem in registry.problems:
        warn(problem)
    return registry


def load_model(
    model: str | None, *, threads: int | None, ctx: int | None, kv: str, backend: str, strict: bool, **others: Any
) -> Model:
    """Load the model that the command line names, with a progress bar."""
    from kinetic_core.engine.model import load

    registry = usable_registry(strict)
    with progress_bar() as progress:
        loaded = load(
            model,
            backend=backend,
            threads=threads,
            ctx=ctx,
            kv=kv,
            progress=progress,
            registry=registry,
            **others,
        )
    for notice in loaded.executable.statistics().get("notices", ()):
        note(notice)
    return loaded
