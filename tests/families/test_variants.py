"""What single families have of their own: rope factors, sliding windows, the order of blocks."""

from __future__ import annotations

from typing import Any

import direct
import family
import numpy as np
import pytest

from kinetic_core.gguf import MemoryTensors


def assert_computes_the_equations(source: MemoryTensors) -> None:
    expected = direct.logits(source)
    np.testing.assert_allclose(family.logits(source), expected, atol=1e-4 * expected.std())


def test_rope_factors_divide_the_angles():
    plain = family.model("granitehybrid", "attention")
    factors = np.linspace(1.0, 3.0, plain.metadata.get_int("granitehybrid.rope.dimension_count") // 2)
    source = family.changed(plain, {"rope_freqs.weight": factors.astype(np.float32)})
    assert_computes_the_equations(source)
    assert np.abs(family.logits(source) - family.logits(plain)).max() > 0.01 * family.logits(plain).std()


def test_factors_of_1e30_stop_their_pairs():
    """The angle vanishes, which is not rope over a part of the head: the exponents count the whole head."""
    factors = np.array([1, 1, *[1e30] * 6], np.float32)
    assert_computes_the_equations(family.changed(family.model("lfm3", "partial-rope"), {"rope_freqs.weight": factors}))


def windows(name: str, keys: dict[str, Any] | None = None) -> list[int | None]:
    return [layer.window for layer in family.record(family.model("lfm3", name, keys)).kv_layers]


def test_only_sliding_blocks_have_a_window():
    assert windows("partial-rope") == [6, None]
    assert windows("full") == [None]


def test_without_a_pattern_no_block_slides():
    keys = {"attention.sliding_window_pattern": None}
    assert windows("partial-rope", keys) == [None, None]
    assert_computes_the_equations(family.model("lfm3", "partial-rope", keys))


@pytest.mark.parametrize(("key", "taps"), [("lfm2", 3), ("lfm2moe", 3), ("lfm3", 7)])
def test_a_convolution_keeps_the_rows_before(key: str, taps: int):
    states = family.record(family.model(key)).states
    assert states and all(state.shape == (taps - 1, 64) for state in states)


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("interval", {}, [True, False, True, False]),
        ("prediction-own", {}, [True, False, False]),
        (
            "interval",
            {"full_attention_interval": 3, "attention.recurrent_layers": [True, False, True, False]},
            [True, False, True, False],
        ),
        ("interval", {"full_attention_interval": 3}, [True, True, False, True]),
        # A prediction block is an attention block wherever the interval would put it.
        ("prediction-own", {"full_attention_interval": 4}, [True, True, False]),
    ],
)
def test_the_order_of_the_blocks(name: str, keys: dict[str, Any], expected: list[bool]):
    assert list(family.architecture(family.model("qwen35", name, keys)).recurrent) == expected
