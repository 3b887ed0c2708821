"""The typer application: our commands, then those of plugins."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kinetic_core import __version__
from kinetic_core.cli import bench, chat, conform, convert, info, models, plugins, pull, run, serve
from kinetic_core.cli.console import warn
from kinetic_core.errors import PluginError
from kinetic_core.plugins import load_registry

UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""A mistake in the command line; from click or from typer's copy of it, which only this name of typer leads to."""
Abort = typer.Abort
USAGE_STATUS = 2


def make_application() -> typer.Typer:
    """A fresh application with every command. A plugin whose command cannot be added is reported and left out."""
    app = typer.Typer(
        name="kinetic",
        cls=_Group,
        help="Run language models from GGUF files on this computer.",
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_common)
    app.command()(chat.chat)
    app.command()(run.run)
    app.command()(serve.serve)
    app.command()(bench.bench)
    app.command()(info.info)
    app.command()(pull.pull)
    app.command()(models.models)
    app.command()(convert.convert)
    app.command()(plugins.plugins)
    app.command()(conform.conform)
    registry = load_registry()
    for name in registry.names("command"):
        try:
            registry.get("command", name)(app)
        except PluginError as error:
            warn(str(error))
    for command in app.registered_commands:
        if command.cls is TyperCommand:
            command.cls = _Command
    return app


def _plain_flags(parameters: list[Any]) -> list[Any]:
    """The parameters of a command, its flags without the type that help would show beside them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> None:
        """Run the command; what it returns is not the exit status."""
        super().invoke(ctx)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kinetic {__version__}")
        raise typer.Exit


def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models from GGUF files on this computer."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(USAGE_STATUS)
