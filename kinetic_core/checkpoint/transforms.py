"""What files store otherwise than checkpoints: orders of rows, halves of shared tensors, factors, functions of values.

Each function here is, or returns, a map from the checkpoint's f32 array to the file's. All but `scaled`, `plus_one` and
`negative_exp` only move elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.float32]
    Make: TypeAlias = Callable[[Array], Array]
else:
    Array = Make = object


def unchanged(array: Array) -> Array:
    """The array itself."""
    return array


def chain(*makes: Make) -> Make:
    """One after the other, the first first."""

    def made(array: Array) -> Array:
        for make in makes:
            array = make(array)
        return array

    return made


def adjacent_pairs(head_dim: int) -> Make:
    """Rows of each head: half-split rope pairs (i, i + d/2) become adjacent ones (2i, 2i + 1)."""

    def made(array: Array) -> Array:
        return array.reshape(-1, 2, head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return made


def first_half(array: Array) -> Array:
    """The first half of the rows, of each expert's where there are experts; a vector's first half."""
    return _half(array, 0)


def second_half(array: Array) -> Array:
    """The other half of `first_half`."""
    return _half(array, 1)


def _half(array: Array, which: int) -> Array:
    axis = max(array.ndim - 2, 0)
    half, rest = divmod(array.shape[axis], 2)
    if rest:
        raise ValueError("an odd number of rows has no halves")
    return array[(slice(None),) * axis + (slice(which * half, (which + 1) * half),)]


def without_middle_axis(array: Array) -> Array:
    """A convolution's kernel [channels, 1, taps] without the axis of length 1."""
    return array.squeeze(1) if array.ndim == 3 else array


def as_column(array: Array) -> Array:
    """A vector as [n, 1]."""
    return array.reshape(-1, 1)


def in_groups(groups: int) -> Make:
    """A vector as [groups, n / groups]."""
    return lambda array: array.reshape(groups, -1)


def plus_one(array: Array) -> Array:
    """Norm weights that are stored as offsets from 1."""
    return array + 1


def negative_exp(array: Array) -> Array:
    """-exp, as in a = -exp(A_log), in float64 and rounded once: the same bits on every machine but for ties."""
    import numpy as np

    return -np.exp(array.astype(np.float64)).astype(np.float32)


def scaled(factor: float | Array) -> Make:
    """Times a number, or row by row times a vector's elements, one for each row, in float32."""
    import numpy as np

    factors = np.asarray(factor, np.float32)

    def made(array: Array) -> Array:
        if not factors.ndim:
            return array if factors == 1 else array * factors
        if len(array) != factors.size:
            raise ValueError(f"{factors.size} rows, one for each factor")
        return array * factors.reshape(-1, *(1,) * (array.ndim - 1))

    return made
