"""``kinetic serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from kinetic_core.cli.console import note
from kinetic_core.cli.options import (
    BackendOption,
    ContextOption,
    KVOption,
    ModelArgument,
    NoDraftOption,
    StrictOption,
    ThreadsOption,
    load_model,
)

_SERVER = "Server"

API_KEY_VARIABLE = "KINETIC_API_KEY"


def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"Ask every client for this key. Better set {API_KEY_VARIABLE}: other users see command lines.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that clients may use for this server; may be given again.", rich_help_panel=_SERVER),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web origin whose pages may call; may be given again.", rich_help_panel=_SERVER),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in /v1/models.", rich_help_panel=_SERVER)] = None,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Requests answered at the same time. Default: 16.", rich_help_panel=_SERVER),
    ] = None,
    threads: ThreadsOption = None,
    ctx: ContextOption = None,
    kv: KVOption = "f16",
    backend: BackendOption = "auto",
    no_draft: NoDraftOption = False,
    strict: StrictOption = False,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health."""
    import logging

    from kinetic_core.server import ServerSettings
    from kinetic_core.server import serve as run_server

    hosts: Any = allow_host or ()
    origins: Any = allow_origin or ()
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key or os.environ.get(API_KEY_VARIABLE) or None,
        allowed_hosts=hosts,
        allowed_origins=origins,
        model_name=name,
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    loaded = load_model(
        model, threads=threads, ctx=ctx, kv=kv, backend=backend, strict=strict, parallel=parallel, draft=not no_draft
    )
    with loaded:
        run_server(loaded, settings, lambda url: note(f"{loaded.name} is served at {url} (Ctrl-C ends it)"))
