"""Kinetic: a local LLM engine for GGUF models. See `load`.

    import kinetic_core

    with kinetic_core.load("smollm2") as model:
        print(model.generate("The capital of France is", max_tokens=8).text)

Importing this package is cheap: what runs a model is imported by `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model, load

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> object:
    """Import `load` and `Model` on first use."""
    if name in ("load", "Model"):
        from kinetic_core.engine import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
