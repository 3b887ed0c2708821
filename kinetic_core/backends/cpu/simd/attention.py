"""The two inner loops of attention, for 1 to 4 query vectors at a time.

Both take tokens (`static`) for what is fixed when the code is compiled: the number of query vectors, how many
vectors wide a strip is, and the bytes of a cached number (2: float16, 4: float32). Each query vector's arithmetic is
the same whatever stands beside it: one accumulator per lane, one fused multiply-add per step, steps in order.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from kinetic_core.backends.cpu.simd.half import emit_from_f16
from kinetic_core.backends.cpu.simd.lowering import LOWERING
from kinetic_core.backends.cpu.simd.types import F32, I8, I16, I64, VF, pointer, splat
from kinetic_core.backends.cpu.simd.vector import emit_fma

F16_CACHE, F32_CACHE = 2, 4

#: Vectors side by side in a strip for 4, 3, 2 and 1 query vectors: the accumulators must fit the registers.
STRIP: int = 4 if LOWERING == "avx512vnni" else 1


class Fixed(types.Type):
    """A number that is known when code is compiled; its value carries nothing."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Fixed({count})")


@register_model(Fixed)
class _TokenModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, I8)


@intrinsic(prefer_literal=True)
def fixed(typingctx, count):
    """The token of `count`, a literal."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        return ir.Constant(I8, 0)

    return Fixed(count.literal_value)(count), codegen


@intrinsic
def element_bytes(typingctx, cache):
    """Bytes of one cached number, from the cache's token."""
    if not isinstance(cache, Fixed):
        return None

    def codegen(context, builder, signature, args):
        return ir.Constant(I64, cache.count)

    return types.int64(cache), codegen


def _load_lanes(builder, address, cache):
    """16 cached numbers as float32 lanes."""
    if cache.count == F32_CACHE:
        return builder.load(pointer(builder, address, VF.ir), align=1, typ=VF.ir)
    narrow = ir.VectorType(I16, 16)
    return emit_from_f16(builder, builder.load(pointer(builder, address, narrow), align=1, typ=narrow))


def _broadcast(builder, address):
    return splat(builder, builder.load(pointer(builder, address, F32), align=1, typ=F32), VF.ir)


def _at(builder, base, offset):
    return builder.add(base, offset if isinstance(offset, ir.Value) else ir.Constant(I64, offset))


def _slots(builder, initial):
    slots = [cgutils.alloca_once(builder, VF.ir) for _ in initial]
    for slot, value in zip(slots, initial, strict=True):
        builder.store(value, slot)
    return slots


def _accumulate(builder, slots, index, factor, lanes):
    value = emit_fma(builder, factor, lanes, builder.load(slots[index], typ=VF.ir))
    builder.store(value, slots[index])


@intrinsic
def score_tiles(typingctx, rows, tiles, cache, queries, keys, head_dim, scores, row_bytes):
    """Scores of `rows` query vectors against `tiles` adjacent tiles of 16 positions.

    queries: address of int64[rows], the vectors' addresses. keys: the first tile, [head_dim][16] each. scores: where
    the first vector's go; the next vector's are row_bytes further.
    """
    if not all(isinstance(token, Fixed) for token in (rows, tiles, cache)):
        return None

    def codegen(context, builder, signature, args):
        queries, keys, head_dim, scores, row_bytes = args[3:]
        n_rows, n_tiles, size = rows.count, tiles.count, cache.count
        zero = ir.Constant(VF.ir, [0.0] * 16)
        slots = _slots(builder, [zero] * (n_rows * n_tiles))
        sources = [
            builder.load(pointer(builder, _at(builder, queries, 8 * row), I64), typ=I64) for row in range(n_rows)
        ]
        tile_bytes = builder.mul(head_dim, ir.Constant(I64, 16 * size))
        bases = [keys]
        for _ in range(n_tiles - 1):
            bases.append(builder.add(bases[-1], tile_bytes))
        with cgutils.for_range(builder, head_dim) as loop:
            step = builder.mul(loop.index, ir.Constant(I64, 16 * size))
            lanes = [_load_lanes(builder, builder.add(base, step), cache) for base in bases]
            column = builder.shl(loop.index, ir.Constant(I64, 2))
            for row in range(n_rows):
                factor = _broadcast(builder, builder.add(sources[row], column))
                for tile in range(n_tiles):
                    _accumulate(builder, slots, row * n_tiles + tile, factor, lanes[tile])
        target = scores
        for row in range(n_rows):
            for tile in range(n_tiles):
                value = builder.load(slots[row * n_tiles + tile], typ=VF.ir)
                builder.store(value, pointer(builder, _at(builder, target, 64 * tile), VF.ir), align=1)
            target = builder.add(target, row_bytes)
        return context.get_dummy_value()

    return types.void(rows, tiles, cache, *(types.int64,) * 5), codegen


@intrinsic
def weigh_values(typingctx, rows, strip, cache, weights, weight_bytes, values, value_bytes, count, out, out_bytes):
    """out[row] += sum over `count` positions of weights[row] * values, for a strip of 16 * `strip` columns.

    weights: the first vector's weight of the first position, f32; the next vector's are weight_bytes further. values:
    the strip in the first position's row, value_bytes to the next position. out: f32, out_bytes to the next vector.
    """
    if not all(isinstance(token, Fixed) for token in (rows, strip, cache)):
        return None

    def codegen(context, builder, signature, args):
        weights, weight_bytes, values, value_bytes, count, out, out_bytes = args[3:]
        n_rows, width, size = rows.count, strip.count, cache.count
        targets = [out]
        sources = [weights]
        for _ in range(n_rows - 1):
            targets.append(builder.add(targets[-1], out_bytes))
            sources.append(builder.add(sources[-1], weight_bytes))
        places = [pointer(builder, _at(builder, target, 64 * k), VF.ir) for target in targets for k in range(width)]
        slots = _slots(builder, [builder.load(place, align=1, typ=VF.ir) for place in places])
        with cgutils.for_range(builder, count) as loop:
            row_at = builder.add(values, builder.mul(loop.index, value_bytes))
            lanes = [_load_lanes(builder, _at(builder, row_at, 16 * size * k), cache) for k in range(width)]
            column = builder.shl(loop.index, ir.Constant(I64, 2))
            for row in range(n_rows):
                factor = _broadcast(builder, builder.add(sources[row], column))
                for k in range(width):
                    _accumulate(builder, slots, row * width + k, factor, lanes[k])
        for slot, place in zip(slots, places, strict=True):
            builder.store(builder.load(slot, typ=VF.ir), place, align=1)
        return context.get_dummy_value()

    return types.void(rows, strip, cache, *(types.int64,) * 7), codegen
