"""From what a user calls a model to a file on disk: paths, ``hf:`` repositories and known names.

    path = resolve("smollm2")                                   # fetched once, verified, kept in the cache directory
    path = resolve("hf:owner/repo:Q4_K_M")                      # through huggingface_hub
    path = resolve("models/my-model.gguf")

Nothing here opens a model: see `kinetic_core.gguf`.
"""

from kinetic_core.models.names import DEFAULT_MODEL, KNOWN_MODELS, TINY_HYBRID, KnownModel
from kinetic_core.models.resolve import FetchedModel, fetched_models, pull, resolve

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "TINY_HYBRID",
    "FetchedModel",
    "KnownModel",
    "fetched_models",
    "pull",
    "resolve",
]
