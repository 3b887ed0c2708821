"""What a step of n answering rows costs on this machine and model, measured as it goes.

A step reads every weight once for all its rows, so a few rows more cost little; how little depends on the machine, the
formats of the weights, and with mixtures of experts on how many experts the rows choose between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

REMEMBERED = 9
"""A figure is the median of so many last steps: one that the system interrupted does not count."""

PRIOR = ((1, 1.0), (2, 1.3), (4, 1.3), (8, 2.2), (16, 4.2))
"""Cost of n rows over that of one before anything is measured: two cores, 4-bit weights. Linear between and beyond."""

RENEWED_AFTER = 64
"""Answers without drafts are measured again after so many steps with drafts."""
FORGOTTEN_AFTER = 512
"""A figure so many steps old no longer says what the machine does now."""


class StepCosts:
    """Seconds of a step by its number of answering rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._n_steps = 0
        self._known: list[tuple[int, float]] | None = None

    def measured(self, n_rows: int, seconds: float) -> None:
        """A step of `n_rows` rows, none of them a prompt's, took so long."""
        self._n_steps += 1
        if n_rows not in self._seconds or self._age(n_rows) > FORGOTTEN_AFTER:
            self._seconds[n_rows] = deque(maxlen=REMEMBERED)
        values = self._seconds[n_rows]
        values.append(seconds)
        self._medians[n_rows] = sorted(values)[len(values) // 2]
        self._measured_at[n_rows] = self._n_steps
        self._known = None

    def _age(self, n_rows: int) -> int:
        return self._n_steps - self._measured_at.get(n_rows, -2 * FORGOTTEN_AFTER)

    @property
    def is_measured(self) -> bool:
        """Has any step been measured?"""
        return bool(self._seconds)

    def is_due(self, n_rows: int) -> bool:
        """Was no step of so many rows measured for long?"""
        return self._age(n_rows) >= RENEWED_AFTER

    def seconds(self, n_rows: int) -> float:
        """Expected seconds of a step; in units of a one-row step while nothing is measured.

        Between measured numbers of rows the curve has the shape of the prior, scaled to meet them.
        """
        known = self._known  # held here: another thread may ask while the engine's measures
        if known is None:
            medians = sorted(self._medians.items())
            known = self._known = [(n, median) for n, median in medians if self._age(n) <= FORGOTTEN_AFTER]
        if not known:
            return prior(n_rows)
        at = bisect_left(known, (n_rows, 0.0))
        low, low_s = known[max(at - 1, 0)]
        high, high_s = known[min(at, len(known) - 1)]
        if high == n_rows:
            return high_s
        low_scale, high_scale = low_s / prior(low), high_s / prior(high)
        share = (n_rows - low) / (high - low) if high > low else 0.0
        return prior(n_rows) * (low_scale + min(max(share, 0.0), 1.0) * (high_scale - low_scale))

    def curve(self, counts: Sequence[int] = (1, 2, 4, 8, 16)) -> dict[int, float]:
        """Cost of n rows over that of one, as it is believed now."""
        one = self.seconds(1)
        return {n: self.seconds(n) / one for n in counts}


def prior(n_rows: int) -> float:
    """The cost of n rows over that of one before anything is measured."""
    at = max(1, min(bisect_left(PRIOR, (n_rows, 0.0)), len(PRIOR) - 1))
    (low, cost_low), (high, cost_high) = PRIOR[at - 1], PRIOR[at]
    return cost_low + (n_rows - low) * (cost_high - cost_low) / (high - low)
