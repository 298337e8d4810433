"""When to replan, and how far to look."""

from __future__ import annotations

import numpy as np
import pytest

from lewm.config import PlanConfig
from lewm.plan.schedule import Turn, next_turn, soonest


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("whole", [(5, 5), (5, 5), (5, 5)]),
        ("receding", [(5, 1), (5, 1), (5, 1)]),
        ("shrinking", [(5, 1), (4, 1), (3, 1), (2, 1), (1, 1), (5, 1), (4, 1)]),
        ("soonest", [(5, 1), (5, 1)]),
    ],
)
def test_turns_of_an_episode(schedule: str, expected: list[tuple[int, int]]):
    config, done, turns = PlanConfig(horizon=5, schedule=schedule), 0, []
    for _ in expected:
        turns.append(next_turn(config, done))
        done += turns[-1].execute
    assert turns == [Turn(*turn) for turn in expected]


@pytest.mark.parametrize(
    ("distances", "chosen"),
    [
        ([1.0], 1),
        ([9.0, 4.0, 2.0, 1.0], 4),
        # Half as far again as the best counts as good, and the first that is good is chosen.
        ([9.0, 1.5, 1.2, 1.0], 2),
        ([9.0, 1.51, 1.2, 1.0], 3),
        # Waiting would come no nearer, nor would overshooting.
        ([1.0, 1.0, 1.0, 1.0], 1),
        ([0.1, 3.0, 5.0, 9.0], 1),
        ([0.0, 0.0, 1.0, 1.0], 1),
    ],
)
def test_soonest_is_the_shortest_plan_that_is_nearly_the_best(distances: list[float], chosen: int):
    assert soonest(np.array(distances, np.float32)) == chosen
