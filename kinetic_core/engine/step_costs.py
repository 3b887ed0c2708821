"""What a step of n answering rows costs on this machine and model, measured as it goes.

A step reads every weight once for all its rows, so a few rows more cost little; how little depends on the machine, the
formats of the weights, and with mixtures of experts on how many experts the rows choose between them.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

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

RUN_SMOOTHING = 0.2
"""Weight of the last measurement in the cost of a run."""
LEAST_SECONDS = 1e-9
"""A clock may be too coarse to see a step; nothing is free."""


class _Figure(NamedTuple):
    """What is known of steps of n rows. seconds: the median of `values`, the last ones, in units of the speed.

    step: when such a step was last measured.
    """

    n_rows: int
    seconds: float
    step: int
    values: deque[float]


class StepCosts:
    """Seconds of a step by its number of answering rows.

    Machines become slower and faster, by their neighbours and their heat. A figure that is old would then look better
    or worse than one of now, and rows be run, or not, for that alone. So figures are in units of the speed at their
    time, which all steps tell together: the median of the last ones' seconds over what their figures said.
    """

    def __init__(self) -> None:
        self._n_steps = 0
        self._ratios: deque[float] = deque(maxlen=SPEED_STEPS)
        # By rows, the speed, and answers given since: replaced together, as another thread may ask meanwhile.
        self._known: tuple[list[_Figure], float, dict[int, float]] = ([], 1.0, {})

    def measured(self, n_rows: int, seconds: float) -> None:
        """A step of `n_rows` rows, none of them a prompt's, took so long."""
        self._n_steps += 1
        seconds = max(seconds, LEAST_SECONDS)
        figures, speed, _ = self._known
        figures = [figure for figure in figures if self._n_steps - figure.step <= FORGOTTEN_AFTER]
        values: deque[float] = deque(maxlen=REMEMBERED)
        at = bisect_left(figures, (n_rows,))
        if at < len(figures) and figures[at].n_rows == n_rows:
            values = figures.pop(at).values
            self._ratios.append(seconds / _median(values))
            speed = _median(self._ratios)
        values.append(seconds / speed)
        figures.insert(at, _Figure(n_rows, _median(values), self._n_steps, values))
        self._known = figures, speed, {}

    @property
    def is_measured(self) -> bool:
        """Has any step been measured?"""
        return bool(self._known[0])

    def is_due(self, n_rows: int) -> bool:
        """Was no step of so many rows measured for long?"""
        figures = self._known[0]
        at = bisect_left(figures, (n_rows,))
        measured = at < len(figures) and figures[at].n_rows == n_rows
        return not measured or self._n_steps - figures[at].step >= RENEWED_AFTER

    def seconds(self, n_rows: int) -> float:
        """Expected seconds of a step; in units of a one-row step while nothing is measured.

        Between measured numbers of rows the curve has the shape of the prior, scaled to meet them.
        """
        figures, speed, answers = self._known
        if n_rows not in answers:
            answers[n_rows] = _interpolated(figures, n_rows) * speed
        return answers[n_rows]

    def curve(self, counts: Sequence[int] = (1, 2, 4, 8, 16)) -> dict[int, float]:
        """Cost of n rows over that of one, as it is believed now."""
        one = self.seconds(1)
        return {n: self.seconds(n) / one for n in counts}


class RunCost:
    """Seconds of a run of a part of the model that guesses one token more for all sequences asked at the same step.

    seconds: 0 until one was measured.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._up_to_date: frozenset[int] = frozenset()

    def measured(self, seconds: float, n_runs: int, numbers: Collection[int]) -> None:
        """So many runs for these sequences took so long; to be called, with none, where nobody is asked, too."""
        asked, before = frozenset(numbers), self._up_to_date
        self._up_to_date = asked
        if n_runs == 0:
            return
        each = seconds / n_runs
        if not self.seconds:
            self.seconds = each
        elif asked <= before:
            self.seconds += RUN_SMOOTHING * (each - self.seconds)
        else:  # it had to make up for the steps, or the prompt, before as well
            self.seconds = min(self.seconds, each)


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]


def _interpolated(figures: Sequence[_Figure], n_rows: int) -> float:
    if not figures:
        return prior(n_rows)
    at = bisect_left(figures, (n_rows,))
    low, high = figures[max(at - 1, 0)], figures[min(at, len(figures) - 1)]
    if high.n_rows == n_rows:
        return high.seconds
    low_scale, high_scale = low.seconds / prior(low.n_rows), high.seconds / prior(high.n_rows)
    share = (n_rows - low.n_rows) / (high.n_rows - low.n_rows) if high.n_rows > low.n_rows else 0.0
    return prior(n_rows) * (low_scale + min(max(share, 0.0), 1.0) * (high_scale - low_scale))


@functools.lru_cache(maxsize=1024)
def prior(n_rows: int) -> float:
    """The cost of n rows over that of one before anything is measured."""
    at = max(1, min(bisect_left(PRIOR, (n_rows, 0.0)), len(PRIOR) - 1))
    (low, cost_low), (high, cost_high) = PRIOR[at - 1], PRIOR[at]
    return cost_low + (n_rows - low) * (cost_high - cost_low) / (high - low)
