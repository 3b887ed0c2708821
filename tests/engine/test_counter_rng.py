from __future__ import annotations

import numpy as np
import pytest

from kinetic_core.engine.counter_rng import SEED_LIMIT, draw_seed, philox4x32, uniform

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # the published known answers of philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected  # type: ignore[arg-type]


def test_uniform_takes_the_top_53_bits() -> None:
    words = philox4x32((7, 1, 3, 0), (0x89ABCDEF, 0x01234567))
    value = uniform(0x0123456789ABCDEF, 3, 2**32 + 7)
    assert value == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def test_uniform_is_flat() -> None:
    values = np.array([uniform(seed, 0, index) for seed in range(4) for index in range(5000)])
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert float(((counts - 1000.0) ** 2 / 1000.0).sum()) < 43.8  # 19 degrees of freedom, 0.1 %


def test_every_seed_counts() -> None:
    seeds = [0, 1, 2**32, 2**53, SEED_LIMIT - 1]
    assert len({uniform(seed, 0, 0) for seed in seeds}) == len(seeds)
    assert 0 <= draw_seed() < 2**53
    assert draw_seed() != draw_seed()
