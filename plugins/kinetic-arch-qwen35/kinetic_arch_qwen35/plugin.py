"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The families of `general.architecture` = "qwen35" and "qwen35moe"."""
    module = "kinetic_arch_qwen35.architecture"
    return [
        Registration(
            "qwen35",
            f"{module}:Qwen35",
            keys=("qwen35",),
            summary="Qwen3.5 dense: gated delta net with some gated attention, and a prediction block",
        ),
        Registration(
            "qwen35moe",
            f"{module}:Qwen35Moe",
            keys=("qwen35moe",),
            summary="Qwen3.5 with experts: the same blocks, routed experts beside a shared one",
        ),
    ]
