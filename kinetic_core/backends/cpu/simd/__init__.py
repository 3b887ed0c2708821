"""The SIMD vocabulary of the CPU kernels: vector values, memory by address, and exact integer dot products.

Addresses are int64 byte addresses and need no alignment. `VF`, `VI` and `VM` vectors have 16 lanes in every lowering
(the code generator splits them where registers are narrower), so a reduction over lanes has the same bits everywhere.
`WF` and `WI` vectors of the linear kernels have `LANES` lanes, one output row each, and are never reduced over lanes.

Every function here means the same to the bit in every lowering: rounding is to nearest even, no multiplication and
addition are contracted unless `fma` says so, `max_` and `min_` return their second argument when the first compares
neither greater nor less (NaN included). NaN payloads are the one thing left open.
"""

from kinetic_core.backends.cpu.simd import columns, dot, half, memory, nibbles, rows, vector
from kinetic_core.backends.cpu.simd.columns import *  # noqa: F403
from kinetic_core.backends.cpu.simd.dot import *  # noqa: F403
from kinetic_core.backends.cpu.simd.half import *  # noqa: F403
from kinetic_core.backends.cpu.simd.lowering import LANES, LOWERING
from kinetic_core.backends.cpu.simd.memory import *  # noqa: F403
from kinetic_core.backends.cpu.simd.nibbles import *  # noqa: F403
from kinetic_core.backends.cpu.simd.rows import *  # noqa: F403
from kinetic_core.backends.cpu.simd.types import VF, VI, VM, WB, WF, WI, WS, Rows, Static, Vec
from kinetic_core.backends.cpu.simd.vector import *  # noqa: F403

__all__ = ["LANES", "LOWERING", "VF", "VI", "VM", "WB", "WF", "WI", "WS", "Rows", "Static", "Vec"]
__all__ += columns.__all__
__all__ += dot.__all__
__all__ += half.__all__
__all__ += memory.__all__
__all__ += nibbles.__all__
__all__ += rows.__all__
__all__ += vector.__all__
