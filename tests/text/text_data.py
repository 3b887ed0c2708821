"""The tokenizer keys of the tiny models and what the reference tokenizers make of sample texts."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from kinetic_core.text import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "text"
FAMILIES = ("falconh1", "granitehybrid", "lfm2", "llama", "llama3rope", "qwen35")


@cache
def _read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def read_metadata(family: str) -> dict[str, Any]:
    """The tokenizer keys of a tiny model of `family`."""
    return {
        key: list(value) if isinstance(value, list) else value
        for key, value in _read(f"{family}-tokenizer.json.gz").items()
    }


def read_tokens(family: str) -> dict[str, Any]:
    """The reference tokenizer's ids for that model."""
    return dict(_read(f"{family}-tokens.json.gz"))


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer.from_metadata(read_metadata(family))
