"""Q4_K, Q5_K and Q6_K from float32: for each sub-block a search over grids, then the super-block's rounded scales.

A grid is tried with its range stretched or squeezed; the numbers on it fix scale and minimum by least squares, and the
pair with the smallest squared error is kept. Scales (and minimums) of a super-block are then rounded to what the format
stores, and the numbers once more against the stored ones. Plain vectorised NumPy over many blocks at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kinetic_core.gguf import BLOCK_FORMATS, GGMLType

_FLOATS = npt.NDArray[np.float32]
_BYTES = npt.NDArray[np.uint8]
_STRETCHES = np.arange(-1.0, 1.01, 0.1)
"""By how many steps a grid with a minimum is stretched."""
_SIGNED_STRETCHES = np.arange(-0.9, 0.91, 0.1)
"""By how many steps a grid around 0 is stretched."""


def q4_k(x: _FLOATS) -> _BYTES:
    """Blocks of 256 as Q4_K; x: f32[256 n]."""
    out = np.zeros(x.size // 256, BLOCK_FORMATS[GGMLType.Q4_K].block_dtype)
    q = _with_minimum(x.reshape(-1, 8, 32), 15, out)
    out["qs"] = _nibbles(q)
    return out.view(np.uint8)


def q5_k(x: _FLOATS) -> _BYTES:
    """Blocks of 256 as Q5_K; x: f32[256 n]."""
    out = np.zeros(x.size // 256, BLOCK_FORMATS[GGMLType.Q5_K].block_dtype)
    q = _with_minimum(x.reshape(-1, 8, 32), 31, out)
    out["qs"] = _nibbles(q & np.uint8(15))
    out["qh"] = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], 1)
    return out.view(np.uint8)


def q6_k(x: _FLOATS) -> _BYTES:
    """Blocks of 256 as Q6_K; x: f32[256 n]."""
    blocks = x.reshape(-1, 16, 16)
    out = np.zeros(len(blocks), BLOCK_FORMATS[GGMLType.Q6_K].block_dtype)
    scales = _signed_scales(blocks)
    at = np.abs(scales).argmax(1)
    out["d"] = np.take_along_axis(scales, at[:, None], 1)[:, 0] / np.float32(-128)
    d = out["d"].astype(np.float32)[:, None]
    out["scales"] = np.clip(np.rint(_divide(scales, d)), -128, 127)
    steps = (d * out["scales"])[:, :, None]
    q = (np.clip(np.rint(_divide(blocks, steps)), -32, 31) + 32).astype(np.uint8)
    halves = q.reshape(-1, 2, 2, 64)
    out["ql"] = (halves[:, :, 0] & 15 | (halves[:, :, 1] & 15) << 4).reshape(-1, 128)
    quarters = q.reshape(-1, 2, 4, 32) >> 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out["qh"] = np.bitwise_or.reduce(quarters << shifts, 2).reshape(-1, 64)
    return out.view(np.uint8)


def _with_minimum(x: _FLOATS, levels: int, out: npt.NDArray[np.void]) -> _BYTES:
    """Fill d, dmin and scales of `out`; the numbers 0..levels as u8[n, 8, 32]."""
    scales, minimums = _scales_and_minimums(x, levels)
    out["d"], out["dmin"] = scales.max(1) / np.float32(63), minimums.max(1) / np.float32(63)
    d, dmin = (out[name].astype(np.float32)[:, None] for name in ("d", "dmin"))
    s = np.clip(np.rint(_divide(scales, d)), 0, 63).astype(np.uint8)
    m = np.clip(np.rint(_divide(minimums, dmin)), 0, 63).astype(np.uint8)
    out["scales"][:, 0:4] = s[:, :4] | (s[:, 4:] >> 4) << 6
    out["scales"][:, 4:8] = m[:, :4] | (m[:, 4:] >> 4) << 6
    out["scales"][:, 8:12] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    steps, offsets = (d * s)[:, :, None], (dmin * m)[:, :, None]
    return np.clip(np.rint(_divide(x + offsets, steps)), 0, levels).astype(np.uint8)


def _scales_and_minimums(x: _FLOATS, levels: int) -> tuple[_FLOATS, _FLOATS]:
    """Per sub-block the scale s and minimum m, both at least 0, with the smallest error of s q - m; f32[n, 8] each."""
    n = np.float32(x.shape[-1])
    low = np.minimum(x.min(-1), 0)
    span = x.max(-1) - low
    scale, minimum = span / np.float32(levels), -low
    best = np.full(span.shape, np.inf, np.float32)
    sum_x = x.sum(-1)
    for stretch in _STRETCHES:
        inverse = _divide(np.full_like(span, levels + stretch), span)
        q = np.clip(np.rint((x - low[..., None]) * inverse[..., None]), 0, levels)
        sum_q, sum_qq, sum_qx = q.sum(-1), (q * q).sum(-1), (q * x).sum(-1)
        determinant = n * sum_qq - sum_q * sum_q
        s = _divide(n * sum_qx - sum_x * sum_q, determinant)
        m = -_divide(sum_qq * sum_x - sum_q * sum_qx, determinant)
        free = m >= 0
        s, m = np.where(free, s, _divide(sum_qx, sum_qq)), np.where(free, m, np.float32(0))
        error = ((s[..., None] * q - m[..., None] - x) ** 2).sum(-1)
        better = (error < best) & (determinant > 0) & (s > 0)
        scale, minimum, best = (np.where(better, new, old) for new, old in ((s, scale), (m, minimum), (error, best)))
    return scale.astype(np.float32), minimum.astype(np.float32)


def _signed_scales(x: _FLOATS) -> _FLOATS:
    """Per sub-block of 16 the scale s with the smallest error of s q, q from -32 to 31; f32[n, 16]."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    scale, best = np.zeros_like(largest), np.zeros_like(largest)
    for stretch in _SIGNED_STRETCHES:
        inverse = _divide(np.full_like(largest, -(32 + stretch)), largest)
        q = np.clip(np.rint(x * inverse[..., None]), -32, 31)
        sum_qq, sum_qx = (q * q).sum(-1), (q * x).sum(-1)
        explained = _divide(sum_qx * sum_qx, sum_qq)
        better = explained > best
        scale = np.where(better, _divide(sum_qx, sum_qq), scale)
        best = np.where(better, explained, best)
    return scale.astype(np.float32)


def _nibbles(q: _BYTES) -> _BYTES:
    """Sub-block 2 j in the low and 2 j + 1 in the high nibbles: u8[n, 128]."""
    pairs = q.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(-1, 128)


def _divide(a: _FLOATS, b: _FLOATS) -> _FLOATS:
    """a / b, 0 where b is 0."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape, np.float32), where=b != 0)
