"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_drafters() -> list[Registration]:
    """The sources of guesses."""
    return [
        Registration(
            "context",
            "kinetic_drafters.context:ContextDrafter",
            summary="what followed where the text stood before as it stands now",
        ),
        Registration(
            "requests",
            "kinetic_drafters.requests:RequestsDrafter",
            summary="what followed in earlier and concurrent requests of the same tenant",
        ),
        Registration(
            "mtp",
            "kinetic_drafters.mtp:MtpDrafter",
            summary="the model's own prediction block, run several tokens ahead",
        ),
    ]
