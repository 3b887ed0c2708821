"""Architectures that are wrong on purpose: the miniature with one mistake each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kinetic_core.errors import TensorError
from kinetic_core.interfaces import (
    ArchitectureCapabilities,
    TinyVariant,
)
from kinetic_core.reference.tiny_hybrid import TinyHybrid


class IgnoresUnknown(TinyHybrid):
    """Lists as ignored whatever it does not know."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._names = [name for name in source.tensors if "unheard_of" in name]

    def ignored_tensors(self) -> Sequence[str]:
        return self._names


class ToleratesMissing(TinyHybrid):
    """Without its feed-forward layer a block goes on as it is."""

    def _feed_forward(self, block: Any, y: Any, suffix: str = "") -> Any:
        return super()._feed_forward(block, y, suffix) if block.has(f"ffn_up{suffix}.weight") else y

    def ignored_tensors(self) -> Sequence[str]:
        return [f"blk.{n}.ffn_{m}.weight" for n in range(self.n_layers) for m in ("gate", "down")]


class NamelessShapeError(TinyHybrid):
    def build(self, b: Any) -> Any:
        try:
            return super().build(b)
        except TensorError as error:
            raise TensorError("something does not fit" if "shape" in str(error) else str(error)) from None


class GuessesMissingKeys(TinyHybrid):
    def __init__(self, source: Any) -> None:
        from kinetic_core.gguf import MemoryTensors, read_tensor

        if "tiny-hybrid.rope.freq_base" not in source.metadata:
            metadata = {**source.metadata.raw, "tiny-hybrid.rope.freq_base": 10000.0}
            source = MemoryTensors(metadata, {name: read_tensor(source, name) for name in source.tensors})
        super().__init__(source)


class RouterBiasIsOptional(TinyHybrid):
    """Routes by sigmoid without the bias where the file has none, although its metadata asks for it."""

    def _experts(self, b: Any, block: Any, y: Any) -> Any:
        asked, self.sigmoid_routing = self.sigmoid_routing, block.has("exp_probs_b.bias")
        mixed = super()._experts(b, block, y)
        self.sigmoid_routing = asked
        return mixed


class DeclaresTooMuch(TinyHybrid):
    """Says that norms are optional, and needs them."""

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [dataclasses.replace(v, optional=(*v.optional, "blk.*.ssm_norm.weight")) for v in super().tiny()]


class NeverWithoutOutput(TinyHybrid):
    """Shows no file without an output layer, and says that there are some."""

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [variant for variant in super().tiny() if "output.weight" in variant.tensors]


class NamesAnotherKey(TinyHybrid):
    def __init__(self, source: Any) -> None:
        if "tiny-hybrid.rope.freq_base" not in source.metadata:
            source.metadata.get_float("tiny-hybrid.rope.frequency_base")
        super().__init__(source)


class AnotherDefault(TinyHybrid):
    """Uses three experts where the key is missing, and says that it uses one."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        if "tiny-hybrid.expert_used_count" not in source.metadata:
            self.n_experts_used = 3


class ReadsPastTheReads(TinyHybrid):
    """Takes a key from the raw metadata, so that nobody knows that it matters."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.embedding_scale *= source.metadata.raw.get("tiny-hybrid.extra", 1.0)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [dataclasses.replace(v, metadata={**v.metadata, "extra": 2.0}) for v in super().tiny()]


class DeniesWindow(TinyHybrid):
    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True, has_experts=True)


class ClaimsExperts(TinyHybrid):
    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [variant for variant in super().tiny() if "experts" not in variant.name]


class TwoOfAName(TinyHybrid):
    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        variants = list(super().tiny())
        return [*variants, variants[0]]


class Narrow(TinyHybrid):
    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [variant for variant in super().tiny() if "wide" not in variant.name]
