"""Exact integer dot products of the linear kernels, by lowering."""

from __future__ import annotations

__all__: list[str] = []
