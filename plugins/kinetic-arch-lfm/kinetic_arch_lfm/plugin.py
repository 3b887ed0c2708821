"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The families of `general.architecture` = "lfm2", "lfm2moe" and "lfm3"."""
    return [
        Registration(
            "lfm2",
            "kinetic_arch_lfm.lfm2:Lfm2",
            keys=("lfm2",),
            summary="LFM2: short convolutions and attention",
        ),
        Registration(
            "lfm2moe",
            "kinetic_arch_lfm.lfm2:Lfm2Moe",
            keys=("lfm2moe",),
            summary="LFM2-MoE: LFM2 with experts",
        ),
        Registration(
            "lfm3",
            "kinetic_arch_lfm.lfm3:Lfm3",
            keys=("lfm3",),
            summary="LFM3: short convolutions, full and sliding-window attention",
        ),
    ]
