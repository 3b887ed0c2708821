"""From a Hugging Face folder to a GGUF file: safetensors, vocabulary, quantizers, and `convert`, which joins them.

What belongs to a family (names, metadata, the order of rows) its architecture class says; see
`kinetic_core.checkpoint`.
"""

from kinetic_core.convert.convert import TYPES, Converted, convert

__all__ = ["TYPES", "Converted", "convert"]
