"""From float32 to the stored types: F32, F16, BF16, Q8_0, K-quants. Plain vectorised NumPy; ties to even.

`stored_type` decides which type a tensor gets, `quantize` makes its bytes; the layouts are those of
`kinetic_core.gguf.BLOCK_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kinetic_core.convert.k_quants import q4_k, q5_k, q6_k
from kinetic_core.errors import TensorError, describe
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, RawTensor

_FLOATS = npt.NDArray[np.float32]
_SMALLER = MappingProxyType(dict.fromkeys((GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K), (GGMLType.Q8_0,)))
_ROWS = 4096 * 256
"""Elements that are worked on at once, so that temporaries stay small."""
_KEPT = ("norm", "conv.weight", "conv1d", "ffn_gate_inp", "ssm_dt", "exp_probs_b", "rope_freqs")


def stored_type(name: str, shape: tuple[int, ...], wanted: GGMLType) -> GGMLType:
    """The type of a tensor that should be of type `wanted`.

    Vectors, norms, convolution kernels, routers and the small tensors of recurrences stay F32, as the kernels read
    them. A row that is no whole number of blocks is stored as Q8_0 in place of a K-quant, or else as F16.
    """
    if len(shape) < 2 or shape[-1] == 1 or any(part in name for part in _KEPT):
        return GGMLType.F32
    for type_ in (wanted, GGMLType.Q8_0):
        if shape[-1] % BLOCK_FORMATS[type_].block_size == 0 and type_ in (wanted, *_SMALLER.get(wanted, ())):
            return type_
    return GGMLType.F16


def q4_k_m_type(name: str, n_blocks: int, tied: bool) -> GGMLType:
    """The usual choice of a q4_k_m file: Q4_K, and more bits where errors cost most.

    Q6_K: the output layer (the embeddings where it is tied to them), and values and down projections in the first and
    last eighth of the blocks and in every third between. Q5_K: projections to q, k and v in one.
    """
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return GGMLType.Q6_K
    _, _, rest = name.partition("blk.")
    number, _, kind = rest.partition(".")
    if kind.startswith("attn_qkv"):
        return GGMLType.Q5_K
    if kind.startswith(("attn_v.", "ffn_down")):
        block, eighth = int(number), n_blocks // 8
        if block < eighth or block >= 7 * n_blocks // 8 or (block - eighth) % 3 == 2:
            return GGMLType.Q6_K
    return GGMLType.Q4_K


def quantize(name: str, array: _FLOATS, type_: GGMLType) -> RawTensor:
    """The stored form of f32[...]; TensorError names a tensor that holds no finite number or one too large."""
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    format_ = BLOCK_FORMATS[type_]
    data = np.empty(format_.n_bytes(array.shape), np.uint8)
    step = max(_ROWS // format_.block_size, 1) * format_.block_size
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        largest = np.abs(part).max()
        if not largest <= _LARGEST[type_]:
            expected = f"finite numbers of at most {_LARGEST[type_]:g} in {type_.name}"
            raise TensorError(describe(f"the tensor {name!r} cannot be stored", got=largest, expected=expected))
        first = start // format_.block_size * format_.block_bytes
        raw = _ENCODERS[type_](part)
        data[first : first + raw.size] = raw
    return RawTensor(data, type_, tuple(array.shape))


def _f32(x: _FLOATS) -> npt.NDArray[np.uint8]:
    return x.astype("<f4").view(np.uint8)


def _f16(x: _FLOATS) -> npt.NDArray[np.uint8]:
    return x.astype("<f2").view(np.uint8)


def _bf16(x: _FLOATS) -> npt.NDArray[np.uint8]:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)


def _q8_0(x: _FLOATS) -> npt.NDArray[np.uint8]:
    """Per block of 32: the scale that takes the largest to 127, as f16, and numbers rounded against what is stored."""
    blocks = x.reshape(-1, 32)
    out = np.empty(len(blocks), BLOCK_FORMATS[GGMLType.Q8_0].block_dtype)
    out["d"] = np.abs(blocks).max(1) / np.float32(127)
    scale = out["d"].astype(np.float32)[:, None]
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    out["qs"] = np.clip(np.rint(blocks * inverse), -127, 127)
    return out.view(np.uint8)


_ENCODERS: Mapping[GGMLType, Callable[[_FLOATS], npt.NDArray[np.uint8]]] = MappingProxyType(
    {
        GGMLType.F32: _f32,
        GGMLType.F16: _f16,
        GGMLType.BF16: _bf16,
        GGMLType.Q8_0: _q8_0,
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
        GGMLType.Q4_K: 65504.0,
        GGMLType.Q5_K: 65504.0,
        GGMLType.Q6_K: 65504.0,
    }
)
