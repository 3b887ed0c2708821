"""Typed reads of metadata: what they accept, and what they say when they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kinetic_core.errors import MetadataError, UnsupportedModelError
from kinetic_core.gguf import GGMLType, Metadata, TensorInfo, check_block_count

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.rope.freq_base": 10000.0,
    "llama.flag": True,
    "llama.heads": [4, 0, 4],
    "llama.pattern": [True, False, True],
    "llama.clamp": np.array([1.0, 2.0, 3.0], np.float32),
    "llama.whole": 2,
    "llama.nan": float("nan"),
    "llama.huge": np.array([2**64 - 1], np.uint64),
    "llama.empty": [],
    "tokens": ["a", "b"],
}


@pytest.fixture
def metadata() -> Metadata:
    return Metadata(VALUES)


@pytest.fixture
def llama(metadata: Metadata) -> Metadata:
    return metadata.prefixed("llama")


def message(read: Any) -> str:
    with pytest.raises(MetadataError) as caught:
        read()
    return str(caught.value)


def test_scalars(metadata: Metadata, llama: Metadata) -> None:
    assert metadata.get_int("llama.block_count") == llama.get_int("block_count") == 3
    assert llama.get_float("rope.freq_base") == 10000.0
    whole = llama.get_float("whole")
    assert whole == 2.0 and isinstance(whole, float)
    assert llama.get_bool("flag") is True
    assert metadata.get_str("general.architecture", choices=["llama", "qwen35"]) == "llama"


def test_defaults_are_for_missing_keys_only(llama: Metadata) -> None:
    assert llama.get_int("none", 7) == 7
    assert llama.get_int("none", None) is None
    assert llama.get_float("none", None) is None
    assert llama.get_bool("none", False) is False
    assert llama.get_str("none", "x") == "x"
    assert llama.get_ints("none", None) is None
    assert llama.get_floats("none", None) is None
    assert llama.get_bools("none", None) is None
    assert llama.get_strs("none", ()) == ()
    assert llama.get_ints_per_layer("none", 3, 8) == (8, 8, 8)
    for read in (llama.get_int, llama.get_bool, llama.get_ints, llama.get_bools):
        message(lambda read=read: read("rope.freq_base", None))  # there, but of another type


@pytest.mark.parametrize(
    "method",
    ["get_int", "get_float", "get_bool", "get_str", "get_ints", "get_floats", "get_bools", "get_strs"],
)
def test_missing_keys_are_named_in_full(llama: Metadata, method: str) -> None:
    assert "'llama.none' is missing" in message(lambda: getattr(llama, method)("none"))


def test_types_are_never_bent(llama: Metadata, metadata: Metadata) -> None:
    text = message(lambda: llama.get_int("rope.freq_base"))
    assert "'llama.rope.freq_base'" in text and "got the float 10000.0" in text and "expected an integer" in text
    assert "expected an integer" in message(lambda: llama.get_int("flag"))
    assert "expected a float" in message(lambda: llama.get_float("flag"))
    assert "expected a bool" in message(lambda: llama.get_bool("whole"))
    assert "expected a string" in message(lambda: llama.get_str("whole"))
    assert "an array of 3" in message(lambda: llama.get_int("heads"))
    assert "expected an array of integers" in message(lambda: llama.get_ints("clamp"))
    assert "expected an array of integers" in message(lambda: llama.get_ints("pattern"))
    assert "expected an array of floats" in message(lambda: llama.get_floats("pattern"))
    assert "expected an array of bools" in message(lambda: llama.get_bools("heads"))
    assert "expected an array of strings" in message(lambda: llama.get_strs("heads"))
    assert "expected an array of integers" in message(lambda: metadata.get_ints("tokens"))
    assert "expected an array of integers" in message(lambda: llama.get_ints("whole"))
    assert "one of qwen35, lfm2" in message(
        lambda: metadata.get_str("general.architecture", choices=["qwen35", "lfm2"])
    )


def test_ranges_are_inclusive(llama: Metadata) -> None:
    assert llama.get_int("block_count", minimum=3, maximum=3) == 3
    assert "got 3, expected at least 4" in message(lambda: llama.get_int("block_count", minimum=4))
    assert "got 3, expected at most 2" in message(lambda: llama.get_int("block_count", maximum=2))
    assert "expected 4 to 5" in message(lambda: llama.get_int("block_count", minimum=4, maximum=5))
    assert "out of range" in message(lambda: llama.get_float("rope.freq_base", maximum=9999.0))
    assert llama.get_ints("heads", minimum=0, maximum=4).tolist() == [4, 0, 4]
    assert "'llama.heads[1]'" in message(lambda: llama.get_ints("heads", minimum=1))
    assert "'llama.clamp[2]'" in message(lambda: llama.get_floats("clamp", maximum=2.5))
    assert "at most 2**63 - 1" in message(lambda: llama.get_ints("huge"))


def test_floats_are_finite(llama: Metadata) -> None:
    assert "not finite" in message(lambda: llama.get_float("nan"))
    bad = Metadata({"a": np.array([1.0, np.inf], np.float32)})
    assert "element 1 is not finite" in message(lambda: bad.get_floats("a"))


def test_arrays(metadata: Metadata, llama: Metadata) -> None:
    heads = llama.get_ints("heads", length=3)
    assert heads.dtype == np.int64 and heads.tolist() == [4, 0, 4]
    assert llama.get_floats("clamp").tolist() == [1.0, 2.0, 3.0]
    assert llama.get_floats("heads").dtype == np.float64
    assert llama.get_bools("pattern").tolist() == [True, False, True]
    assert metadata.get_strs("tokens") == ("a", "b")
    for read in (llama.get_ints, llama.get_floats, llama.get_bools, llama.get_strs):
        assert len(read("empty")) == 0
    assert "got 3 elements, expected 4" in message(lambda: llama.get_ints("heads", length=4))
    assert "got 2 elements, expected 4" in message(lambda: metadata.get_strs("tokens", length=4))
    numbers = Metadata({"e": np.empty(0, np.int32)})
    assert numbers.get_strs("e") == ()


def test_one_value_or_one_per_layer(llama: Metadata) -> None:
    assert llama.get_ints_per_layer("heads", 3) == (4, 0, 4)
    assert llama.get_ints_per_layer("whole", 3) == (2, 2, 2)
    assert llama.get_floats_per_layer("clamp", 3) == (1.0, 2.0, 3.0)
    assert llama.get_bools_per_layer("pattern", 3) == (True, False, True)
    assert llama.get_bools_per_layer("flag", 2) == (True, True)
    assert all(type(n) is int for n in llama.get_ints_per_layer("heads", 3))
    assert "got 3 elements, expected 4" in message(lambda: llama.get_ints_per_layer("heads", 4))
    assert "'llama.heads[1]'" in message(lambda: llama.get_ints_per_layer("heads", 3, minimum=1))
    assert "expected an integer" in message(lambda: llama.get_ints_per_layer("pattern", 3))
    assert "missing" in message(lambda: llama.get_ints_per_layer("none", 3))


def test_views_and_unread_keys(metadata: Metadata, llama: Metadata) -> None:
    assert "block_count" in llama and "block_count" not in metadata and "tokens" not in llama
    assert "block_count" in list(llama) and len(metadata) == len(VALUES)
    assert llama.prefix == "llama." and metadata.prefix == ""
    metadata.get_str("general.architecture")
    llama.get_int("block_count")
    assert "llama.block_count" not in llama.unread_keys() and "llama.flag" in llama.unread_keys()
    assert "tokens" in metadata.unread_keys() and "tokens" not in llama.unread_keys()
    assert metadata.raw["tokens"] == ("a", "b")


def test_errors_to_raise_name_the_whole_key(llama: Metadata) -> None:
    wrong, other = llama.does_not_fit("heads", 3, "a divisor of 4"), llama.unsupported("kind", "odd", "even")
    assert isinstance(wrong, MetadataError) and isinstance(other, UnsupportedModelError)
    assert str(wrong) == "a metadata key does not fit in key 'llama.heads': got 3, expected a divisor of 4"
    assert str(other) == "models of this variant are not supported in key 'llama.kind': got odd, expected even"


def test_plain_values_are_copied_and_checked() -> None:
    array = np.array([1, 2], np.int32)
    metadata = Metadata({"a": array})
    array[0] = 9
    assert metadata.get_ints("a").tolist() == [1, 2]
    with pytest.raises(ValueError):
        metadata.raw["a"][0] = 9  # type: ignore[index]
    assert Metadata({"n": np.int32(5), "b": np.bool_(True)}).get_int("n") == 5
    for bad in (None, {}, [1, "a"], [1, True], np.zeros((2, 2)), 2**64, -(2**63) - 1, b"bytes"):
        assert "not a metadata value" in message(lambda bad=bad: Metadata({"bad": bad}))


def infos(*names: str) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, (1,), GGMLType.F32, 0, 4) for name in names}


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (100000, ["blk.0.attn_q.weight"]),
        (2**32 - 1, ["blk.0.attn_q.weight"]),
        (1, ["blk.0.a", "blk.1.a"]),
        (2, ["blk.0.a", "blk.2.a"]),
        (3, ["blk.0.a", "blk.2.a"]),
        (1, ["output.weight"]),
        (1, ["blk.99999999999999999999.a"]),
        (1, ["blk.1.a"]),
    ],
)
def test_g7_block_count(count: int, names: list[str]) -> None:
    metadata = Metadata({"llama.block_count": count}).prefixed("llama")
    text = message(lambda: check_block_count(metadata, infos(*names)))
    assert "block_count does not match the tensors found" in text and str(count) in text


def test_g7_block_count_that_matches() -> None:
    metadata = Metadata({"llama.block_count": 2}).prefixed("llama")
    assert check_block_count(metadata, infos("token_embd.weight", "blk.1.a", "blk.0.a", "blk.0.b")) == 2
    assert "at least 1" in message(lambda: check_block_count(Metadata({"llama.block_count": 0}).prefixed("llama"), {}))
