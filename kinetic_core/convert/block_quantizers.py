"""Q8_0, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K from float32: for each block the scale with the smallest squared error.

A grid is tried with its range stretched or squeezed; the numbers on it fix scale and minimum by least squares, and the
pair with the smallest squared error is kept (`fits`, compiled). Scales are then rounded to what the format stores, and
the numbers once more against the stored ones. Q8_0 takes the scale that makes its largest number 127.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kinetic_core.convert.fits_loader import load
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType

_FLOATS = npt.NDArray[np.float32]
_BYTES = npt.NDArray[np.uint8]
_SIGNED = npt.NDArray[np.int8]
_STRETCHES = np.arange(-10, 11) / 10
"""By how many steps a grid with a minimum is stretched."""
_SIGNED_STRETCHES = np.arange(-9, 10) / 10
"""By how many steps a grid around 0 is stretched."""


def q8_0(x: _FLOATS) -> _BYTES:
    """Blocks of 32 as Q8_0; x: f32[32 n]."""
    blocks = x.reshape(-1, 32)
    out = np.empty(len(blocks), BLOCK_FORMATS[GGMLType.Q8_0].block_dtype)
    out["d"] = np.abs(np.maximum(blocks.max(1), -blocks.min(1))) / np.float32(127)  # abs: no -0
    out["qs"] = _numbers(blocks, out["d"].astype(np.float32), None, -127, 127)
    return out.view(np.uint8)


def q5_0(x: _FLOATS) -> _BYTES:
    """Blocks of 32 as Q5_0; x: f32[32 n]."""
    blocks = x.reshape(-1, 32)
    out = np.empty(len(blocks), BLOCK_FORMATS[GGMLType.Q5_0].block_dtype)
    out["d"] = _signed_scales(blocks, 16)
    q = _numbers(blocks, out["d"].astype(np.float32), None, -16, 15)
    out["qs"], out["qh"] = _five_bits((q + 16).view(np.uint8))
    return out.view(np.uint8)


def q5_1(x: _FLOATS) -> _BYTES:
    """Blocks of 32 as Q5_1; x: f32[32 n]."""
    blocks = x.reshape(-1, 32)
    out = np.empty(len(blocks), BLOCK_FORMATS[GGMLType.Q5_1].block_dtype)
    out["d"], minimums = _scales_and_minimums(blocks, 31, any_sign=True)
    out["m"] = -minimums
    q = _numbers(blocks, out["d"].astype(np.float32), -out["m"].astype(np.float32), 0, 31)
    out["qs"], out["qh"] = _five_bits(q.view(np.uint8))
    return out.view(np.uint8)


def q4_k(x: _FLOATS) -> _BYTES:
    """Blocks of 256 as Q4_K; x: f32[256 n]."""
    out = np.empty(x.size // 256, BLOCK_FORMATS[GGMLType.Q4_K].block_dtype)
    out["qs"] = _nibbles(_with_minimum(x, 15, out))
    return out.view(np.uint8)


def q5_k(x: _FLOATS) -> _BYTES:
    """Blocks of 256 as Q5_K; x: f32[256 n]."""
    out = np.empty(x.size // 256, BLOCK_FORMATS[GGMLType.Q5_K].block_dtype)
    q = _with_minimum(x, 31, out)
    out["qs"] = _nibbles(q & np.uint8(15))
    out["qh"] = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], 1)
    return out.view(np.uint8)


def q6_k(x: _FLOATS) -> _BYTES:
    """Blocks of 256 as Q6_K; x: f32[256 n]."""
    blocks = x.reshape(-1, 16)
    out = np.empty(x.size // 256, BLOCK_FORMATS[GGMLType.Q6_K].block_dtype)
    scales = _signed_scales(blocks, 32).reshape(-1, 16)
    at = np.abs(scales).argmax(1)
    out["d"] = np.take_along_axis(scales, at[:, None], 1)[:, 0] / np.float32(-128)
    d = out["d"].astype(np.float32)
    out["scales"] = _numbers(scales, d, None, -128, 127)
    steps = d[:, None] * out["scales"]
    q = (_numbers(blocks, steps.reshape(-1), None, -32, 31) + 32).view(np.uint8)
    halves = q.reshape(-1, 2, 2, 64)
    out["ql"] = (halves[:, :, 0] & 15 | (halves[:, :, 1] & 15) << 4).reshape(-1, 128)
    quarters = q.reshape(-1, 2, 4, 32) >> 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out["qh"] = np.bitwise_or.reduce(quarters << shifts, 2).reshape(-1, 64)
    return out.view(np.uint8)


def _with_minimum(x: _FLOATS, levels: int, out: npt.NDArray[np.void]) -> _BYTES:
    """Fill d, dmin and scales of `out`; the numbers 0..levels as u8[n, 8, 32]."""
    blocks = x.reshape(-1, 32)
    scales, minimums = (part.reshape(-1, 8) for part in _scales_and_minimums(blocks, levels))
    out["d"], out["dmin"] = scales.max(1) / np.float32(63), minimums.max(1) / np.float32(63)
    d, dmin = (out[name].astype(np.float32) for name in ("d", "dmin"))
    s = _numbers(scales, d, None, 0, 63).view(np.uint8)
    m = _numbers(minimums, dmin, None, 0, 63).view(np.uint8)
    out["scales"][:, 0:4] = s[:, :4] | (s[:, 4:] >> 4) << 6
    out["scales"][:, 4:8] = m[:, :4] | (m[:, 4:] >> 4) << 6
    out["scales"][:, 8:12] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    steps, offsets = (d[:, None] * s).reshape(-1), (dmin[:, None] * m).reshape(-1)
    return _numbers(blocks, steps, offsets, 0, levels).view(np.uint8).reshape(-1, 8, 32)


def _scales_and_minimums(blocks: _FLOATS, levels: int, *, any_sign: bool = False) -> tuple[_FLOATS, _FLOATS]:
    scale, minimum = np.empty((2, len(blocks)), np.float32)
    tops = (levels + _STRETCHES).astype(np.float32)
    load().fit_with_minimum(blocks, tops, np.float32(levels), any_sign, scale, minimum)
    return scale, minimum


def _signed_scales(blocks: _FLOATS, levels: int) -> _FLOATS:
    scale = np.empty(len(blocks), np.float32)
    tops = (-levels - _SIGNED_STRETCHES).astype(np.float32)
    load().fit_signed(blocks, tops, np.float32(-levels), np.float32(levels - 1), scale)
    return scale


def _numbers(blocks: _FLOATS, step: _FLOATS, offset: _FLOATS | None, lowest: int, highest: int) -> _SIGNED:
    out = np.empty(blocks.shape, np.int8)
    offset = np.zeros_like(step) if offset is None else offset
    load().numbers(blocks, step, offset, np.float32(lowest), np.float32(highest), out)
    return out


def _five_bits(q: _BYTES) -> tuple[_BYTES, npt.NDArray[np.uint32]]:
    """Numbers 0..31 u8[n, 32] as nibbles u8[n, 16] (element j low, 16 + j high) and fifth bits u32[n]."""
    low = q & np.uint8(15)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little").view("<u4")[:, 0]
    return low[:, :16] | low[:, 16:] << np.uint8(4), fifth


def _nibbles(q: _BYTES) -> _BYTES:
    """Sub-block 2 j in the low and 2 j + 1 in the high nibbles: u8[n, 128]."""
    pairs = q.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(-1, 128)
