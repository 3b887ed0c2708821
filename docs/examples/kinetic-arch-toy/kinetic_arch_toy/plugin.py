"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The family of `general.architecture` = "toy"."""
    target = "kinetic_arch_toy.architecture:Toy"
    return [Registration("toy", target, keys=("toy",), summary="linear memory in some layers, attention in others")]
