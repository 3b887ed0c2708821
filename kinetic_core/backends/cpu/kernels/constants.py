"""What kernels and the code that calls them agree on: sizes of records, operations by number, limits of scratch.

No numba here: a program whose machine code is on disk is loaded without importing a kernel module. So what is read
outside of kernels is defined in this module, and kernel modules import it.
"""

from __future__ import annotations

#: Output rows that packed weights interleave: one work item of a linear kernel.
GROUP = 16

# `elementwise` and `gate`: operations.
ADD, MULTIPLY, SCALE, SIGMOID, DECAY, SOFTPLUS = range(6)
SILU_GATE, SIGMOID_GATE = range(2)

# Quantized activations, see `quantize`: bytes of a block of one row, rows of a tile, bytes of one block of a tile.
BLOCK_256_BYTES, BLOCK_32_BYTES = 384, 52
TILE_ROWS = 16
TILE_256_BYTES, TILE_32_BYTES = TILE_ROWS * BLOCK_256_BYTES + 64, TILE_ROWS * BLOCK_32_BYTES + 64

# Attention: words of a tile's record and of a merge's, header of a part in bytes, "every chunk", limit of scratch.
TILE_WORDS = 10
MERGE_WORDS = 4
PART_HEADER = 16
ALL_CHUNKS = 1 << 40
MAX_HEAD_DIM = 256

# Recurrences: words of a sequence's record, columns of an item of `short_conv` and of the others, limits of scratch.
SEQUENCE_WORDS = 8
CONV_STRIP = 128
WIDE_STRIP = 64
MAX_TAPS = 16
MAX_STATE_DIM = 512
MAX_PATH = 1024

# Experts: how a router scores, words of an active expert's record, limits of scratch. An expert's weights cost as much
# as so many rows, when the work of a step is shared out.
SOFTMAX, SIGMOID_SCORES = range(2)
EXPERT_WORDS = 4
MAX_EXPERTS = 1024
MAX_EXPERTS_USED = 64
UNITS_OF_WEIGHTS = 4

#: Longest list of best tokens that `merge_slices` makes.
MAX_TOP_K = 128

# The tape: words of a call; int64 words of a cache line; where the counters of the synchronisation block lie.
CALL_WORDS = 8
LINE = 8
STATE, DONE, STOP, ASLEEP = 0, LINE, 2 * LINE, 3 * LINE
#: STATE is a step's number times TICKETS plus the next ticket; that is CLOSED between steps.
TICKETS = 1 << 32
CLOSED = TICKETS - 1


def n_groups(n_out: int) -> int:
    """Work items of a linear kernel."""
    return -(-n_out // GROUP)


def quantized_bytes(kind: str, n_in: int, max_rows: int) -> int:
    """Bytes of a buffer for up to `max_rows` rows of `n_in` inputs, of kind `q8_256`, `q8_32`, or `f32` as it is."""
    if kind == "f32":
        return 4 * n_in * max_rows
    block, n_bytes = {"q8_256": (256, TILE_256_BYTES), "q8_32": (32, TILE_32_BYTES)}[kind]
    if n_in % block:
        raise ValueError(f"{kind} rows need a multiple of {block} inputs, got {n_in}")
    return -(-max_rows // TILE_ROWS) * (n_in // block) * n_bytes
