"""Kinetic: a local LLM engine for GGUF models. See `load`."""

from __future__ import annotations

__version__ = "0.1.0"
