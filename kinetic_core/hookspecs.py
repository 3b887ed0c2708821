"""The contract between Kinetic and its plugins: six hooks, each of which only lists registrations.

A plugin is a module named by an entry point in the group ``kinetic``. It implements the hooks below with `hookimpl`;
each returns `Registration` objects whose target is named as a string ``"module:Class"``, so that finding plugins
imports no heavy module. No hook is called on the token path: the registry resolves a target once, when it is needed.

    from kinetic_core.hookspecs import Registration, hookimpl

    @hookimpl
    def kinetic_architectures():
        return [Registration("llama", "kinetic_arch_llama.architecture:Llama", keys=("llama",))]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

ENTRY_POINT_GROUP = "kinetic"

hookspec = pluggy.HookspecMarker("kinetic")
hookimpl = pluggy.HookimplMarker("kinetic")


@dataclass(frozen=True)
class Registration:
    """One class that a plugin offers.

    name:    what users type and see; unique within its kind.
    target:  ``"package.module:Class"``, imported on first use; the class subclasses its kind's interface.
    keys:    what the class answers to besides its name; for an architecture, the values of ``general.architecture``.
    summary: one line for ``kinetic plugins``.
    """

    name: str
    target: str
    keys: tuple[str, ...] = ()
    summary: str = ""


@hookspec
def kinetic_architectures() -> Iterable[Registration]:  # type: ignore[empty-body]
    """Subclasses of `kinetic_core.interfaces.Architecture`."""


@hookspec
def kinetic_backends() -> Iterable[Registration]:  # type: ignore[empty-body]
    """Subclasses of `kinetic_core.interfaces.KernelBackend`."""


@hookspec
def kinetic_drafters() -> Iterable[Registration]:  # type: ignore[empty-body]
    """Subclasses of `kinetic_core.interfaces.Drafter`."""


@hookspec
def kinetic_caches() -> Iterable[Registration]:  # type: ignore[empty-body]
    """Subclasses of `kinetic_core.interfaces.PrefixCache`."""


@hookspec
def kinetic_heads() -> Iterable[Registration]:  # type: ignore[empty-body]
    """Subclasses of `kinetic_core.interfaces.OutputHead`."""


@hookspec
def kinetic_commands() -> Iterable[Registration]:  # type: ignore[empty-body]
    """Functions that take the ``typer.Typer`` application and add commands to it."""
