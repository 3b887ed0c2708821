"""The block quantizers as plainly as NumPy can say them, sums one element at a time: twins of the compiled ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kinetic_core.gguf import BLOCK_FORMATS, GGMLType

F32 = np.float32


def in_order(terms: Iterable[np.ndarray]) -> np.ndarray:
    """The float32 sum in the order given."""
    total = F32(0)
    for term in terms:
        total = total + term
    return np.asarray(total)


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is 0."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape, F32), where=b != 0)


def fit_with_minimum(x: np.ndarray, levels: int, any_sign: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of each block; x: f32[blocks, size]."""
    columns = list(x.T)
    count = F32(len(columns))
    low = x.min(1) if any_sign else np.minimum(x.min(1), F32(0))
    span = x.max(1) - low
    scale, minimum = span / F32(levels), -low
    best = np.full(len(x), np.inf, F32)
    sum_x = in_order(columns)
    for tenths in range(-10, 11):
        inverse = divided(F32(levels + tenths / 10), span)
        q = [np.clip(np.rint((c - low) * inverse), F32(0), F32(levels)) for c in columns]
        sum_q, sum_qq = in_order(q), in_order(n * n for n in q)
        sum_qx = in_order(n * c for n, c in zip(q, columns, strict=True))
        determinant = count * sum_qq - sum_q * sum_q
        s = divided(count * sum_qx - sum_x * sum_q, determinant)
        m = -divided(sum_qq * sum_x - sum_q * sum_qx, determinant)
        if not any_sign:
            bound = m < 0
            s = np.where(bound, divided(sum_qx, sum_qq), s)
            m = np.where(bound, F32(0), m)
        error = in_order((s * n - m - c) ** 2 for n, c in zip(q, columns, strict=True))
        better = (determinant > 0) & (s > 0) & (error < best)
        scale, minimum, best = np.where(better, (s, m, error), (scale, minimum, best))
    return scale, minimum


def fit_signed(x: np.ndarray, levels: int) -> np.ndarray:
    """Scale of each block for numbers -levels..levels - 1."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    scale, best = np.zeros(len(x), F32), np.zeros(len(x), F32)
    for tenths in range(-9, 10):
        inverse = divided(F32(-levels - tenths / 10), largest)
        q = [np.clip(np.rint(c * inverse), F32(-levels), F32(levels - 1)) for c in x.T]
        sum_qq = in_order(n * n for n in q)
        sum_qx = in_order(n * c for n, c in zip(q, x.T, strict=True))
        explained = divided(sum_qx * sum_qx, sum_qq)
        better = explained > best
        scale = np.where(better, divided(sum_qx, sum_qq), scale)
        best = np.where(better, explained, best)
    return scale


def on_grid(x: np.ndarray, step: np.ndarray, offset: np.ndarray | float, lowest: int, highest: int) -> np.ndarray:
    """(x + offset) / step as the nearest whole numbers."""
    return np.clip(np.rint(divided(x + offset, step)), lowest, highest).astype(np.int64)


def quantized(x: np.ndarray, type_: GGMLType) -> bytes:
    """The blocks of f32[n]; every field of every block by itself."""
    format_ = BLOCK_FORMATS[type_]
    blocks = x.reshape(-1, format_.block_size)
    out = np.zeros(len(blocks), format_.block_dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # spans below the normal range have no inverse
        TWINS[type_](blocks, out)
    return out.tobytes()


def q8_0(x: np.ndarray, out: np.ndarray) -> None:
    out["d"] = np.abs(x).max(1) / F32(127)
    out["qs"] = on_grid(x, out["d"].astype(F32)[:, None], F32(0), -127, 127)


def q5_0(x: np.ndarray, out: np.ndarray) -> None:
    out["d"] = fit_signed(x, 16)
    five_bits(on_grid(x, out["d"].astype(F32)[:, None], F32(0), -16, 15) + 16, out)


def q5_1(x: np.ndarray, out: np.ndarray) -> None:
    out["d"], minimum = fit_with_minimum(x, 31, any_sign=True)
    out["m"] = -minimum
    d, m = (out[name].astype(F32)[:, None] for name in ("d", "m"))
    five_bits(on_grid(x, d, -m, 0, 31), out)


def five_bits(q: np.ndarray, out: np.ndarray) -> None:
    for j in range(16):
        out["qs"][:, j] = q[:, j] % 16 + 16 * (q[:, j + 16] % 16)
    for j in range(32):
        out["qh"] += (q[:, j] // 16 * 2**j).astype(np.uint32)


def with_minimum(x: np.ndarray, out: np.ndarray, levels: int) -> np.ndarray:
    """d, dmin and scales; the numbers i64[blocks, 8, 32]."""
    x = x.reshape(-1, 8, 32)
    scale, minimum = (part.reshape(-1, 8) for part in fit_with_minimum(x.reshape(-1, 32), levels, any_sign=False))
    out["d"], out["dmin"] = scale.max(1) / F32(63), minimum.max(1) / F32(63)
    d, dmin = (out[name].astype(F32)[:, None] for name in ("d", "dmin"))
    s, m = on_grid(scale, d, F32(0), 0, 63), on_grid(minimum, dmin, F32(0), 0, 63)
    for j in range(4):
        out["scales"][:, j] = s[:, j] + 64 * (s[:, j + 4] // 16)
        out["scales"][:, j + 4] = m[:, j] + 64 * (m[:, j + 4] // 16)
        out["scales"][:, j + 8] = s[:, j + 4] % 16 + 16 * (m[:, j + 4] % 16)
    return on_grid(x, (d * s.astype(F32))[:, :, None], (dmin * m.astype(F32))[:, :, None], 0, levels)


def q4_k(x: np.ndarray, out: np.ndarray, levels: int = 15) -> None:
    q = with_minimum(x, out, levels)
    for pair in range(4):
        out["qs"][:, 32 * pair : 32 * pair + 32] = q[:, 2 * pair] % 16 + 16 * (q[:, 2 * pair + 1] % 16)
    if levels == 31:
        out["qh"] = sum(q[:, j] // 16 * 2**j for j in range(8))


def q5_k(x: np.ndarray, out: np.ndarray) -> None:
    q4_k(x, out, 31)


def q6_k(x: np.ndarray, out: np.ndarray) -> None:
    x = x.reshape(-1, 16, 16)
    scale = fit_signed(x.reshape(-1, 16), 32).reshape(-1, 16)
    out["d"] = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)[:, 0] / F32(-128)
    d = out["d"].astype(F32)[:, None]
    out["scales"] = on_grid(scale, d, F32(0), -128, 127)
    q = (on_grid(x, (d * out["scales"].astype(F32))[:, :, None], F32(0), -32, 31) + 32).reshape(-1, 2, 4, 32)
    for half in range(2):
        for quarter in range(4):
            numbers, at = q[:, half, quarter], 64 * half + 32 * (quarter % 2)
            out["ql"][:, at : at + 32] += (numbers % 16 * 16 ** (quarter // 2)).astype(np.uint8)
            out["qh"][:, 32 * half : 32 * half + 32] += (numbers // 16 * 4**quarter).astype(np.uint8)


TWINS = {
    GGMLType.Q8_0: q8_0,
    GGMLType.Q5_0: q5_0,
    GGMLType.Q5_1: q5_1,
    GGMLType.Q4_K: q4_k,
    GGMLType.Q5_K: q5_k,
    GGMLType.Q6_K: q6_k,
}
