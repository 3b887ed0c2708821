"""One random number per emitted token: a pure function of (seed, choice index, index of the token).

Philox4x32 with 10 rounds: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011, section 3.3. Being counter-based, it needs no state that a draft, a preempted sequence or a second
request could disturb.
"""

from __future__ import annotations

import secrets

SEED_LIMIT = 2**64

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, token_index: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, for the token `token_index` of the answer of choice `choice`.

    The key is the seed; the counter's words are the token index (low, high), the choice and 0.
    """
    w0, w1, _, _ = philox4x32(
        (token_index & _MASK, token_index >> 32 & _MASK, choice & _MASK, 0), (seed & _MASK, seed >> 32 & _MASK)
    )
    return ((w0 >> 5) * 67108864 + (w1 >> 6)) * 2.0**-53


def draw_seed() -> int:
    """A seed for a request that brought none: 0 … 2**53 - 1, so that it survives a JSON reader with float numbers."""
    return secrets.randbelow(2**53)
