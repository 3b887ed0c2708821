"""What kinetic-core itself registers, by the same hooks as every plugin."""

from __future__ import annotations

from kinetic_core.hookspecs import Registration, hookimpl


@hookimpl
def kinetic_architectures() -> list[Registration]:
    """The miniature hybrid."""
    return [
        Registration(
            "tiny-hybrid",
            "kinetic_core.reference.tiny_hybrid:TinyHybrid",
            summary="a miniature hybrid model in memory, for tests and tours",
        )
    ]


@hookimpl
def kinetic_backends() -> list[Registration]:
    """The CPU backend and the NumPy reference."""
    return [
        Registration("cpu", "kinetic_core.backends.cpu:CpuBackend", summary="compiled SIMD kernels on all cores"),
        Registration(
            "reference",
            "kinetic_core.reference.backend:ReferenceBackend",
            summary="plain NumPy, the truth that backends are compared with; slow",
        ),
    ]


@hookimpl
def kinetic_drafters() -> list[Registration]:
    """No drafts."""
    return [Registration("none", "kinetic_core.reference.drafter:NullDrafter", summary="no drafts: plain decoding")]


@hookimpl
def kinetic_caches() -> list[Registration]:
    """No cache."""
    return [Registration("none", "kinetic_core.reference.cache:NullCache", summary="no reuse between prompts")]


@hookimpl
def kinetic_heads() -> list[Registration]:
    """The full head."""
    return [Registration("full", "kinetic_core.reference.head:FullHead", summary="the whole output layer")]
