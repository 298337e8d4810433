"""When to replan, and how far to look."""

from __future__ import annotations

import pytest

from lewm.config import PlanConfig
from lewm.plan.schedule import Turn, next_turn


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
