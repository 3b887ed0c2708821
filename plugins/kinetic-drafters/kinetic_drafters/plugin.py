"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_drafters() -> list[Registration]:
    """The sources of guesses."""
    return []
