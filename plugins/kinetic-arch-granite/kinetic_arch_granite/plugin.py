"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The family of `general.architecture` = "granitehybrid"."""
    return [
        Registration(
            "granitehybrid",
            "kinetic_arch_granite.architecture:GraniteHybrid",
            keys=("granitehybrid",),
            summary="Granite 4.0 H, dense and with experts: Mamba-2 blocks with a few attention blocks",
        )
    ]
