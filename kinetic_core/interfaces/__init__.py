"""What plugins implement: one abstract class and one frozen `Capabilities` per kind.

Legend of axes, used in every docstring: rows (tokens of one step), outputs (rows whose logits are wanted), d_model,
heads, kv_heads, head_dim, vocab. Arrays are written ``x: f32[rows, d_model]``; sizes carry their unit in the name.
"""

from kinetic_core.interfaces.architecture import (
    Architecture,
    ArchitectureCapabilities,
    TinyVariant,
)
from kinetic_core.interfaces.backend import (
    BackendCapabilities,
    Executable,
    KernelBackend,
    LoadOptions,
)
from kinetic_core.interfaces.batch import BLOCK_TOKENS, HeadRequest, RowBatch, SequenceRows
from kinetic_core.interfaces.cache import CacheCapabilities, CachedPrefix, PrefixCache
from kinetic_core.interfaces.drafter import (
    Draft,
    Drafter,
    DrafterCapabilities,
    DraftTree,
    SequenceStep,
    TokenTexts,
)
from kinetic_core.interfaces.head import HeadCapabilities, OutputHead

__all__ = [
    "BLOCK_TOKENS",
    "Architecture",
    "ArchitectureCapabilities",
    "BackendCapabilities",
    "CacheCapabilities",
    "CachedPrefix",
    "Draft",
    "DraftTree",
    "Drafter",
    "DrafterCapabilities",
    "Executable",
    "HeadCapabilities",
    "HeadRequest",
    "KernelBackend",
    "LoadOptions",
    "OutputHead",
    "PrefixCache",
    "RowBatch",
    "SequenceRows",
    "SequenceStep",
    "TinyVariant",
    "TokenTexts",
]
