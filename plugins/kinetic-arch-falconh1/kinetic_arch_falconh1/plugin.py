"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The family of `general.architecture` = "falcon-h1"."""
    return [
        Registration(
            "falcon-h1",
            "kinetic_arch_falconh1.architecture:FalconH1",
            keys=("falcon-h1",),
            summary="Falcon-H1: attention and Mamba-2 side by side in every block",
        )
    ]
