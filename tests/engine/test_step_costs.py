"""The cost of n rows: medians of what was measured, the prior's shape between."""

from __future__ import annotations

import pytest

from kinetic_core.engine.step_costs import (
    FORGOTTEN_AFTER,
    RENEWED_AFTER,
    RUN_SMOOTHING,
    SPEED_STEPS,
    RunCost,
    StepCosts,
    prior,
)


def test_the_prior_is_linear_between_its_points_and_beyond() -> None:
    assert [prior(n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24)] == pytest.approx(
        [1.0, 1.3, 1.3, 1.3, 1.75, 2.2, 3.2, 4.2, 6.2]
    )


def test_without_measurements_the_prior_counts() -> None:
    costs = StepCosts()
    assert not costs.is_measured
    assert costs.curve() == {1: 1.0, 2: 1.3, 4: 1.3, 8: 2.2, 16: pytest.approx(4.2)}


def test_one_figure_scales_the_prior() -> None:
    costs = StepCosts()
    costs.measured(1, 0.01)
    assert costs.is_measured
    assert costs.seconds(1) == 0.01
    assert costs.seconds(8) == pytest.approx(0.022)


def test_between_figures_the_scale_moves_from_one_to_the_other() -> None:
    costs = StepCosts()
    costs.measured(4, 1.3)
    costs.measured(8, 2 * 2.2)
    assert costs.seconds(2) == pytest.approx(1.3)
    assert costs.seconds(6) == pytest.approx(1.5 * 1.75)
    assert costs.seconds(16) == pytest.approx(2 * 4.2)


def test_a_figure_is_a_median_of_the_last() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.0, 9.0, 1.1, 1.1):
        costs.measured(1, seconds)
    assert costs.seconds(1) == 1.1
    for _ in range(9):
        costs.measured(1, 3.0)
    assert costs.seconds(1) == 3.0


def test_figures_that_are_old_follow_the_speed_of_the_machine() -> None:
    """A machine that became slower must not make rows look free whose figures are of faster times, nor the reverse."""
    costs = StepCosts()
    true = {1: 1.0, 2: 1.25, 4: 1.3, 8: 2.1}
    for n_rows, seconds in true.items():
        for _ in range(20):
            costs.measured(n_rows, seconds)
    for factor in (1.2, 0.8, 1.0):
        for step in range(40):
            costs.measured(1, factor)
            if step >= SPEED_STEPS // 2:
                for n_rows, seconds in true.items():
                    assert costs.seconds(n_rows) == pytest.approx(factor * seconds, rel=0.01), (factor, step)
    for step in range(100):
        costs.measured(1, 20.0 if step % 7 == 0 else 1.0)  # steps that the system interrupted
        assert costs.seconds(8) == pytest.approx(2.1)
    for _ in range(200):  # what changes for few rows alone is no matter of the machine's speed, in the end
        costs.measured(1, 1.1)
        costs.measured(2, 1.25)
        costs.measured(8, 2.1)
    assert costs.seconds(2) / costs.seconds(1) == pytest.approx(1.25 / 1.1)
    assert costs.seconds(8) / costs.seconds(1) == pytest.approx(2.1 / 1.1)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    costs = StepCosts()
    costs.measured(1, 0.0)
    costs.measured(1, 0.0)
    costs.measured(2, 1.0)
    assert 0 < costs.seconds(1) < costs.seconds(2)


def test_what_is_forgotten_is_not_held() -> None:
    costs = StepCosts()
    for n_rows in range(1, 3 * FORGOTTEN_AFTER):
        costs.measured(n_rows, 1.0)
    assert len(costs._known[0]) == FORGOTTEN_AFTER + 1


def test_figures_fall_due_and_are_forgotten() -> None:
    costs = StepCosts()
    assert costs.is_due(1)
    costs.measured(1, 1.0)
    assert not costs.is_due(1)
    for _ in range(RENEWED_AFTER - 1):
        costs.measured(4, 50.0)
    assert not costs.is_due(1)
    costs.measured(4, 50.0)
    assert costs.is_due(1)
    assert costs.seconds(1) == 1.0
    for _ in range(FORGOTTEN_AFTER):
        costs.measured(1, 2.0)
    assert costs.seconds(4) == pytest.approx(50.0)
    costs.measured(1, 2.0)
    assert costs.seconds(4) == pytest.approx(2.6)  # the old figure is gone, the prior counts
    costs.measured(4, 3.0)
    assert costs.seconds(4) == 3.0  # and does not come back


def test_the_cost_of_a_run_is_that_of_sequences_that_were_asked_before() -> None:
    run = RunCost()
    assert run.seconds == 0.0
    run.measured(0.0, 0, [1])
    assert run.seconds == 0.0
    run.measured(0.3, 3, [1, 2])
    assert run.seconds == pytest.approx(0.1)  # better than nothing
    run.measured(1.2, 3, [1, 2])
    assert run.seconds == pytest.approx(0.1 + RUN_SMOOTHING * 0.3)
    run.measured(9.0, 1, [1, 2, 3])  # the third has a prompt to make up for
    assert run.seconds == pytest.approx(0.16)
    run.measured(0.1, 1, [1, 4])
    assert run.seconds == pytest.approx(0.1)  # and still it took no longer
    run.measured(0.0, 0, [])
    run.measured(9.0, 1, [1, 4])  # after a pause there is something to make up for
    assert run.seconds == pytest.approx(0.1)
    run.measured(0.2, 1, [4])
    assert run.seconds == pytest.approx(0.1 + RUN_SMOOTHING * 0.1)
    run.measured(9.0, 1, [1])
    assert run.seconds == pytest.approx(0.12)
