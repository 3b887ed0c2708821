"""Text in and out of a model: tokenizers built from GGUF metadata, streaming detokenizers, chat templates.

Importing this package is cheap: each public name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic_core.text.detokenizer import StopMatcher, StreamDetokenizer
    from kinetic_core.text.template import ChatTemplate
    from kinetic_core.text.tokenizer import Tokenizer

_HOMES = {
    "ChatTemplate": "template",
    "StopMatcher": "detokenizer",
    "StreamDetokenizer": "detokenizer",
    "Tokenizer": "tokenizer",
}

__all__ = ["ChatTemplate", "StopMatcher", "StreamDetokenizer", "Tokenizer"]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
