"""From float32 to the stored types: F32, F16, BF16, Q8_0, Q5_0, Q5_1, K-quants. Ties to even.

`stored_types` decides which type each tensor gets, `quantize` makes its bytes; the layouts are those of
`kinetic_core.gguf.BLOCK_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kinetic_core.convert import fits_loader
from kinetic_core.convert.block_quantizers import q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from kinetic_core.errors import TensorError, describe
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, RawTensor

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress

_FLOATS = npt.NDArray[np.float32]
_SMALLER: Mapping[GGMLType, GGMLType] = MappingProxyType(
    {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q5_K: GGMLType.Q5_1, GGMLType.Q6_K: GGMLType.Q8_0}
)
"""What takes the place of a K-quant where rows are no multiple of 256: the next type up, in blocks of 32."""
_LOOPS: Mapping[GGMLType, tuple[str, ...]] = MappingProxyType(
    {
        GGMLType.Q8_0: ("numbers",),
        GGMLType.Q5_0: ("fit_signed", "numbers"),
        GGMLType.Q5_1: ("fit_with_minimum", "numbers"),
        GGMLType.Q4_K: ("fit_with_minimum", "numbers"),
        GGMLType.Q5_K: ("fit_with_minimum", "numbers"),
        GGMLType.Q6_K: ("fit_signed", "numbers"),
    }
)
_ELEMENTS = 4096 * 256
"""Elements that one thread works on at once, so that temporaries stay small."""
_KEPT = ("norm", "conv.weight", "conv1d", "ffn_gate_inp", "ssm_dt", "exp_probs_b", "rope_freqs")


def stored_types(
    shapes: Mapping[str, tuple[int, ...]], wanted: GGMLType, *, mixed: bool = False, n_blocks: int, n_experts: int = 0
) -> dict[str, GGMLType]:
    """The type of each tensor of a file whose matrices should be of type `wanted`.

    mixed: with more bits where errors cost most, as in q4_k_m and q5_k_m files. Vectors, norms, convolution kernels,
    routers and the small tensors of recurrences stay F32, as the kernels read them. A row that is no whole number of
    blocks is stored in a type with smaller ones, or else as F16.
    """
    chosen = _with_more_bits(shapes, wanted, n_blocks, n_experts) if mixed else dict.fromkeys(shapes, wanted)
    return {name: _stored(name, shape, chosen[name]) for name, shape in shapes.items()}


def _stored(name: str, shape: tuple[int, ...], wanted: GGMLType) -> GGMLType:
    if len(shape) < 2 or shape[-1] == 1 or any(part in name for part in _KEPT):
        return GGMLType.F32
    for type_ in (wanted, _SMALLER.get(wanted, wanted)):
        if shape[-1] % BLOCK_FORMATS[type_].block_size == 0:
            return type_
    return GGMLType.F16


def _with_more_bits(names: Iterable[str], wanted: GGMLType, n_blocks: int, n_experts: int) -> dict[str, GGMLType]:
    """The usual choice of q4_k_m and q5_k_m files: Q4_K or Q5_K, and more bits where errors cost most.

    Q6_K: the output layer (the embeddings where it is tied to them), and values (or q, k and v in one) and down
    projections in the first and last eighth of their number and in every third between. With eight experts, whose
    attention is a small part of the file, Q8_0 for keys and values and Q5_K for attention's output.
    """
    names = tuple(names)
    values = [name for name in names if _kind(name) in ("attn_v", "attn_qkv")]
    chosen = dict.fromkeys(names, wanted)
    chosen["output.weight" if "output.weight" in chosen else "token_embd.weight"] = GGMLType.Q6_K
    for name in names:
        kind = _kind(name)
        down = kind.startswith("ffn_down") and _costs_most(int(name.split(".")[1]), n_blocks)
        if down or (name in values and _costs_most(values.index(name), len(values))):
            chosen[name] = GGMLType.Q6_K
        if n_experts == 8 and kind in ("attn_k", "attn_v", "attn_qkv"):
            chosen[name] = GGMLType.Q8_0
        if n_experts == 8 and kind == "attn_output":
            chosen[name] = GGMLType.Q5_K
    return chosen


def _kind(name: str) -> str:
    """``attn_v`` of ``blk.3.attn_v.weight``."""
    return name.split(".")[2] if name.startswith("blk.") else ""


def _costs_most(index: int, count: int) -> bool:
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def prepare(types: Iterable[GGMLType], progress: Progress | None = None) -> None:
    """Compile what storing these types needs, or load it from the cache."""
    fits_loader.prepare(sorted({loop for type_ in types for loop in _LOOPS.get(type_, ())}), progress)


def quantize(name: str, array: _FLOATS, type_: GGMLType, threads: Executor | None = None) -> RawTensor:
    """The stored form of f32[...]; TensorError names a tensor that holds no finite number or one too large."""
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    format_ = BLOCK_FORMATS[type_]
    data = np.empty(format_.n_bytes(array.shape), np.uint8)
    step = max(_ELEMENTS // format_.block_size, 1) * format_.block_size

    def store(start: int) -> None:
        part = flat[start : start + step]
        # A NaN comes through both.
        largest = max(float(part.max()), -float(part.min()))
        if not largest <= _LARGEST[type_]:
            expected = f"finite numbers of at most {_LARGEST[type_]:g} in {type_.name}"
            raise TensorError(describe(f"the tensor {name!r} cannot be stored", got=largest, expected=expected))
        first = start // format_.block_size * format_.block_bytes
        raw = _ENCODERS[type_](part)
        data[first : first + raw.size] = raw

    # list: an error is raised here.
    list((map if threads is None else threads.map)(store, range(0, flat.size, step)))
    return RawTensor(data, type_, tuple(array.shape))


def _f32(x: _FLOATS) -> npt.NDArray[np.uint8]:
    return x.astype("<f4").view(np.uint8)


def _f16(x: _FLOATS) -> npt.NDArray[np.uint8]:
    return x.astype("<f2").view(np.uint8)


def _bf16(x: _FLOATS) -> npt.NDArray[np.uint8]:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)


_ENCODERS: Mapping[GGMLType, Callable[[_FLOATS], npt.NDArray[np.uint8]]] = MappingProxyType(
    {
        GGMLType.F32: _f32,
        GGMLType.F16: _f16,
        GGMLType.BF16: _bf16,
        GGMLType.Q8_0: q8_0,
        GGMLType.Q5_0: q5_0,
        GGMLType.Q5_1: q5_1,
        GGMLType.Q4_K: q4_k,
        GGMLType.Q5_K: q5_k,
        GGMLType.Q6_K: q6_k,
    }
)
_LARGEST = MappingProxyType(
    {
        GGMLType.F32: float(np.finfo(np.float32).max),
        GGMLType.F16: 65504.0,
        GGMLType.BF16: 3.38e38,
        GGMLType.Q8_0: 65504.0 * 127,
        GGMLType.Q5_0: 65504.0,
        GGMLType.Q5_1: 65504.0,
        GGMLType.Q4_K: 65504.0,
        GGMLType.Q5_K: 65504.0,
        GGMLType.Q6_K: 65504.0,
    }
)
