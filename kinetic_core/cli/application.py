"""The typer application: our commands, then those of plugins."""

from __future__ import annotations

from typing import Annotated

import typer

from kinetic_core import __version__
from kinetic_core.cli import bench, chat, info, models, plugins, pull, run, serve
from kinetic_core.cli.console import warn
from kinetic_core.errors import PluginError
from kinetic_core.plugins import load_registry


def make_application() -> typer.Typer:
    """A fresh application with every command. A plugin whose command cannot be added is reported and left out."""
    app = typer.Typer(
        name="kinetic",
        help="Run language models from GGUF files on this computer.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    app.command()(chat.chat)
    app.command()(run.run)
    app.command()(serve.serve)
    app.command()(bench.bench)
    app.command()(info.info)
    app.command()(pull.pull)
    app.command()(models.models)
    app.command()(plugins.plugins)
    registry = load_registry()
    for name in registry.names("command"):
        try:
            registry.get("command", name)(app)
        except PluginError as error:
            warn(str(error))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kinetic {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models from GGUF files on this computer."""
