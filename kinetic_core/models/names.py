"""The table of known names."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

DEFAULT_MODEL = "smollm2"
TINY_HYBRID = "tiny-hybrid"
"""The miniature model that lives in memory: for tours and tests, nothing is fetched. The engine makes it."""


@attrs.frozen
class KnownModel:
    """A model that a short name stands for.

    source: ``"embedded"`` for the default model, else the ``hf:`` reference that the name stands for.
    """

    name: str
    source: str
    n_bytes: int
    license: str
    title: str


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(DEFAULT_MODEL, "embedded", 98_362_432, "Apache-2.0", "SmolLM2 135M Instruct, Q4_1"),
        KnownModel(
            "smollm2-360m",
            "hf:HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
            386_404_992,
            "Apache-2.0",
            "SmolLM2 360M Instruct, Q8_0",
        ),
        KnownModel(
            "smollm2-1.7b",
            "hf:HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
            1_055_609_536,
            "Apache-2.0",
            "SmolLM2 1.7B Instruct, Q4_K_M",
        ),
    )
}
