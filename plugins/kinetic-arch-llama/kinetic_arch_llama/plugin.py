"""What this package registers."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The family of `general.architecture` = "llama"."""
    return [
        Registration(
            "llama",
            "kinetic_arch_llama.architecture:Llama",
            keys=("llama",),
            summary="Llama-shaped dense models: Llama, SmolLM2, TinyLlama, Mistral 7B",
        )
    ]
