"""When to replan, and how far to look: the choice that decides success (measured: docs/notebook/schedules.md).

whole      plan H blocks, execute all of them, replan. The paper's way. Errors of the first plan are corrected late.
receding   plan H blocks, execute one, plan H blocks again. The goal is always H blocks away, so arriving can be put off
           for ever: each plan may come as near to the goal at its end as it likes, and its end is never executed.
shrinking  like receding, but the horizon counts down to the expected arrival: H, H-1, ... and then starts again.
           It needs to know that goals are H blocks away.
soonest    plan for every horizon from 1 to H at once, and follow the shortest plan that comes about as near to the goal
           as the best of them (``soonest.py``). Needs no knowledge of when the goal can be reached; costs searches of
           1 to H blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lewm.config import PlanConfig


@dataclass(frozen=True)
class Turn:
    """One replanning: how many blocks to plan, and how many of them to execute."""

    horizon: int
    execute: int


def next_turn(config: PlanConfig, blocks_done: int) -> Turn:
    """The turn after ``blocks_done`` blocks of an episode have been executed."""
    horizon = config.horizon
    if config.schedule == "whole":
        return Turn(horizon, horizon)
    if config.schedule == "shrinking":
        horizon -= blocks_done % horizon
    return Turn(horizon, 1)
