"""The attention kernels by themselves, against float64, at sizes and places that models do not reach."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.tape import float_bits
from kinetic_core.backends.cpu.workers import _KERNEL_TYPE

POSITIONS, TILE = 256, 16


class Cache:
    """One layer's blocks, filled by hand, NaN where nothing was stored."""

    def __init__(self, n: int, kv_heads: int, head_dim: int, dtype: type, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.k = rng.standard_normal((n, kv_heads, head_dim)).astype(dtype)
        self.v = rng.standard_normal((n, kv_heads, head_dim)).astype(dtype)
        self.store()

    def store(self) -> None:
        """Fill the blocks with `k` and `v`."""
        n, kv_heads, head_dim = self.k.shape
        n_blocks = -(-n // POSITIONS)
        self.data = np.full((n_blocks + 1, kv_heads, 2, POSITIONS * head_dim), np.nan, self.k.dtype)
        self.table = np.arange(n_blocks, 0, -1).astype(np.int32)  # block 0 stays NaN
        for position in range(n):
            block, place = self.table[position // POSITIONS], position % POSITIONS
            keys = self.data[block, :, 0].reshape(kv_heads, POSITIONS // TILE, head_dim, TILE)
            keys[:, place // TILE, :, place % TILE] = self.k[position]
            self.data[block, :, 1].reshape(kv_heads, POSITIONS, head_dim)[:, place] = self.v[position]


def run(cache: Cache, q: np.ndarray, start: int, window: int = 0, tile_rows: int = 4, first: int = 0) -> np.ndarray:
    """Attention of rows at positions start … by the kernel. q: [rows, heads * head_dim]."""
    rows = len(q)
    table = cache.table.ctypes.data
    tiles = np.array(
        [(r, min(tile_rows, rows - r), start + r, table, 0, 0, 0, 0, 1 << 40, 0) for r in range(0, rows, tile_rows)],
        np.int64,
    )
    return run_tiles(cache, q, tiles, window, first)


def run_tiles(
    cache: Cache, q: np.ndarray, tiles: np.ndarray, window: int, first: int, drafts: tuple = ()
) -> np.ndarray:
    """drafts: their keys and values, f32[rows, kv_heads, head_dim] each."""
    _, kv_heads, head_dim = cache.k.shape
    out = np.full_like(q, np.nan)
    group = q.shape[1] // (kv_heads * head_dim)
    args = np.array(
        [
            *(q.ctypes.data, q.strides[0], out.ctypes.data, out.strides[0], kv_heads, group, head_dim),
            *(float_bits(head_dim**-0.5), window, tiles.ctypes.data, len(tiles)),
            *(cache.data.ctypes.data, cache.data.strides[0]),
            *([array.ctypes.data for array in drafts] if drafts else (0, 0)),
            first,
        ],
        np.int64,
    )
    name = "attention_f16" if cache.k.dtype == np.float16 else "attention_f32"
    _KERNEL_TYPE(kernel_compile.get(name).address)(args.ctypes.data, 0, len(tiles) * kv_heads)
    return out


def truth(cache: Cache, q: np.ndarray, start: int, window: int = 0, first: int = 0) -> np.ndarray:
    _, kv_heads, head_dim = cache.k.shape
    k, v = cache.k.astype(np.float64), cache.v.astype(np.float64)
    queries = q.astype(np.float64).reshape(len(q), kv_heads, -1, head_dim)
    out = np.empty_like(queries)
    for row in range(len(q)):
        high = start + row + 1
        low = max(first, high - window) if window else first
        scores = np.einsum("hgd,phd->hgp", queries[row], k[low:high]) * head_dim**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row] = np.einsum("hgp,phd->hgd", weights / weights.sum(-1, keepdims=True), v[low:high])
    return out.reshape(len(q), -1)


def queries(rows: int, width: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32) * 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize(("group", "rows", "start"), [(1, 7, 0), (3, 9, 250), (8, 1, 511), (4, 5, 600)])
def test_against_float64(dtype: type, head_dim: int, group: int, rows: int, start: int):
    cache = Cache(start + rows, 2, head_dim, dtype)
    q = queries(rows, 2 * group * head_dim)
    np.testing.assert_allclose(run(cache, q, start), truth(cache, q, start), atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 256, 257, 600])
def test_windows(window: int):
    """A window's edge inside a tile, at a chunk's edge, beyond the start; chunks outside may be anything."""
    cache = Cache(540, 1, 32, np.float16)
    q = queries(30, 3 * 32)
    expected = truth(cache, q, 510, window)
    first_seen = max(0, 511 - window)
    for chunk in range(first_seen // POSITIONS):
        cache.data[cache.table[chunk]] = np.nan
    np.testing.assert_allclose(run(cache, q, 510, window), expected, atol=2e-6)


@pytest.mark.parametrize("window", [0, 3, 400])
@pytest.mark.parametrize(("first", "start"), [(1, 1), (1, 254), (17, 20), (300, 301)])
def test_a_layer_that_begins_later(first: int, start: int, window: int):
    """Rows before its first position may be anything, in the same tile of 16 or in a chunk of their own."""
    cache = Cache(start + 9, 2, 32, np.float16)
    q = queries(9, 2 * 3 * 32)
    expected = truth(cache, q, start, window, first)
    for position in range(first):
        block, place = cache.table[position // POSITIONS], position % POSITIONS
        cache.data[block, :, 0].reshape(2, POSITIONS // TILE, 32, TILE)[:, place // TILE, :, place % TILE] = np.nan
        cache.data[block, :, 1].reshape(2, POSITIONS, 32)[:, place] = np.nan
    got = run(cache, q, start, window, first=first)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    for row in range(9):
        alone = run(cache, q[row : row + 1], start + row, window, first=first)
        assert alone.tobytes() == got[row].tobytes()


@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_a_row_has_its_bits_however_rows_are_grouped(group: int, window: int):
    cache = Cache(600, 2, 64, np.float16)
    q = queries(90, 2 * group * 64)
    together = run(cache, q, 500, window)
    for tile_rows in (1, 3, 16):
        assert run(cache, q, 500, window, tile_rows).tobytes() == together.tobytes()
    for row in (0, 11, 12, 89):
        assert run(cache, q[row : row + 1], 500 + row, window).tobytes() == together[row].tobytes()


PARENTS = (-1, 0, 1, 1, -1, 2, 5, 4, 6, 8, 9, 10, 3)
"""A tree of drafts, up to 9 deep: parent of each, -1 for the last committed row."""


@pytest.mark.parametrize("window", [0, 3, 12, 300])
@pytest.mark.parametrize("held", [1, 5, 250, 255, 256, 530])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_drafts_have_the_bits_of_their_path(group: int, held: int, window: int):
    """Any number of drafts in a tile, paths of any length, over a chunk's edge, against the path as committed rows."""
    n, kv_heads, head_dim = len(PARENTS), 2, 32
    cache = Cache(held, kv_heads, head_dim, np.float32)
    drafts = Cache(n, kv_heads, head_dim, np.float32, seed=9)
    q = queries(n, kv_heads * group * head_dim)
    paths: list[list[int]] = []
    for row, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    whole = Cache(held + 9, kv_heads, head_dim, np.float32)
    expected = np.empty_like(q)
    for row, path in enumerate(paths):
        whole.k[:held], whole.v[:held] = cache.k, cache.v
        whole.k[held : held + len(path)], whole.v[held : held + len(path)] = drafts.k[path], drafts.v[path]
        whole.store()
        expected[row] = run(whole, q[row : row + 1], held + len(path) - 1, window)[0]
    places = [np.array(path, np.int64) for path in paths]
    of_rows = np.array([(place.ctypes.data, len(place)) for place in places], np.int64)
    for tile_rows in (1, 2, 3, 4, n):
        tiles = np.array(
            [
                (r, min(tile_rows, n - r), -1, cache.table.ctypes.data, held, of_rows[r:].ctypes.data, 1, 0, 1 << 40, 0)
                for r in range(0, n, tile_rows)
            ],
            np.int64,
        )
        got = run_tiles(cache, q, tiles, window, 0, (drafts.k, drafts.v))
        assert got.tobytes() == expected.tobytes(), f"tiles of {tile_rows} rows"


def test_a_later_position_that_is_infinite_reaches_no_earlier_row():
    cache = Cache(20, 1, 32, np.float16)
    q = queries(10, 32)
    clean = run(cache, q, 0)
    values = cache.data[cache.table[0], 0, 1].reshape(POSITIONS, 32)
    values[10:20] = np.inf
    assert run(cache, q, 0).tobytes() == clean.tobytes()


def test_large_scores_do_not_overflow():
    cache = Cache(300, 1, 32, np.float32)
    cache.data *= 100
    cache.k *= 100
    cache.v *= 100
    q = queries(4, 32) * 50
    np.testing.assert_allclose(run(cache, q, 296), truth(cache, q, 296), rtol=1e-4, atol=1e-4)


def test_the_bits_are_the_recorded_ones():
    """Order of columns, positions and chunks, the exponential and the trees: a change of any changes saved states."""
    cache = Cache(900, 2, 64, np.float16)
    out = run(cache, queries(6, 2 * 3 * 64), 890)
    assert hashlib.sha256(out.tobytes()).hexdigest()[:16] == "c1a65fe169322773"
