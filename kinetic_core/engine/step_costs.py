"""What a step of n answering rows costs on this machine and model, measured as it goes.

A step reads every weight once for all its rows, so a few rows more cost little; how little depends on the machine, the
formats of the weights, and with mixtures of experts on how many experts the rows choose between them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence

REMEMBERED = 31
"""A figure is the median of so many last steps: one that the system interrupted does not count."""
SPEED_STEPS = 5
"""The machine's speed is taken from so many last steps, whatever their rows were."""

PRIOR = ((1, 1.0), (2, 1.3), (4, 1.3), (8, 2.2), (16, 4.2))
"""Cost of n rows over that of one before anything is measured: two cores, 4-bit weights. Linear between and beyond."""

RENEWED_AFTER = 64
"""Answers without drafts are measured again after so many steps with drafts."""
FORGOTTEN_AFTER = 512
"""A figure so many steps old no longer says what the machine does now."""


class StepCosts:
    """Seconds of a step by its number of answering rows.

    Machines become slower and faster, by their neighbours and their heat. A figure that is old would then look better
    or worse than one of now, and rows be run, or not, for that alone. So figures are in units of the speed at their
    time, which all steps tell together: the median of the last ones' seconds over what their figures said.
    """

    def __init__(self) -> None:
        self._figures: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._n_steps = 0
        self._ratios: deque[float] = deque(maxlen=SPEED_STEPS)
        # (rows, median, step), by rows; with the speed replaced as one: another thread may ask while this one measures
        self._known: tuple[list[tuple[int, float, int]], float] = ([], 1.0)

    def measured(self, n_rows: int, seconds: float) -> None:
        """A step of `n_rows` rows, none of them a prompt's, took so long."""
        self._n_steps += 1
        known, speed = self._known
        others = [entry for entry in known if entry[0] != n_rows and self._n_steps - entry[2] <= FORGOTTEN_AFTER]
        if n_rows not in self._figures or self._age(n_rows) > FORGOTTEN_AFTER:
            self._figures[n_rows] = deque(maxlen=REMEMBERED)
        figures = self._figures[n_rows]
        if figures:
            self._ratios.append(seconds / _median(figures))
            speed = _median(self._ratios)
        figures.append(seconds / speed)
        insort(others, (n_rows, _median(figures), self._n_steps))
        self._measured_at[n_rows] = self._n_steps
        self._known = others, speed

    def _age(self, n_rows: int) -> int:
        return self._n_steps - self._measured_at.get(n_rows, -2 * FORGOTTEN_AFTER)

    @property
    def is_measured(self) -> bool:
        """Has any step been measured?"""
        return bool(self._known[0])

    def is_due(self, n_rows: int) -> bool:
        """Was no step of so many rows measured for long?"""
        return self._age(n_rows) >= RENEWED_AFTER

    def seconds(self, n_rows: int) -> float:
        """Expected seconds of a step; in units of a one-row step while nothing is measured.

        Between measured numbers of rows the curve has the shape of the prior, scaled to meet them.
        """
        known, speed = self._known
        if not known:
            return prior(n_rows)
        at = bisect_left(known, (n_rows,))
        low, low_s, _ = known[max(at - 1, 0)]
        high, high_s, _ = known[min(at, len(known) - 1)]
        if high == n_rows:
            return high_s * speed
        low_scale, high_scale = low_s / prior(low), high_s / prior(high)
        share = (n_rows - low) / (high - low) if high > low else 0.0
        return prior(n_rows) * speed * (low_scale + min(max(share, 0.0), 1.0) * (high_scale - low_scale))

    def curve(self, counts: Sequence[int] = (1, 2, 4, 8, 16)) -> dict[int, float]:
        """Cost of n rows over that of one, as it is believed now."""
        one = self.seconds(1)
        return {n: self.seconds(n) / one for n in counts}


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]


def prior(n_rows: int) -> float:
    """The cost of n rows over that of one before anything is measured."""
    at = max(1, min(bisect_left(PRIOR, (n_rows, 0.0)), len(PRIOR) - 1))
    (low, cost_low), (high, cost_high) = PRIOR[at - 1], PRIOR[at]
    return cost_low + (n_rows - low) * (cost_high - cost_low) / (high - low)
