"""Kinds of evaluation pairs: what leads from a start to its goal, so that success can be looked at by it.

A world's table has functions by what they tell apart: (start, goal, actions) -> kind. Start and goal are states
(state_dim,); actions are those recorded between them, (T, action_dim), or None if they are not known. None is the
answer where a kind cannot be told. No simulator is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from lewm.types import Array

Kind: TypeAlias = Callable[[Array, Array, Array | None], str | None]


def _room(start: Array, goal: Array, actions: Array | None) -> str:
    """TwoRoom: whether the way leads through the door. x is first in the state, and the wall is at 112."""
    del actions
    return "same room" if (start[0] < 112.0) == (goal[0] < 112.0) else "other room"


def _block(start: Array, goal: Array, actions: Array | None) -> str:
    """Push-T: whether the block has to be moved, by more than a pixel. Its place is third and fourth in the state."""
    del actions
    return "block moves" if np.linalg.norm((goal - start)[2:4]) > 1.0 else "block stays"


# A block of five steps takes 0.1 s: slower joints do not turn in it by the 0.05 rad that count as reached.
_SLOW = 0.5  # rad/s


def _velocity(start: Array, goal: Array, actions: Array | None) -> str:
    """Reacher: whether the arm moves at the start, which no first frame shows."""
    del goal, actions
    return "starts at rest" if np.abs(start[2:4]).max() < _SLOW else "starts moving"


def _torques(start: Array, goal: Array, actions: Array | None) -> str | None:
    """Reacher: whether recorded torques are rough, as in the released data, or smooth: go on as they were."""
    del start, goal
    if actions is None:
        return None
    follows = (actions[:-1] * actions[1:]).sum() / max(float((actions**2).sum()), 1e-9)
    return "smooth torques" if follows > 0.36 else "rough torques"  # no frozen pair is between 0.30 and 0.42


_CUBE, _EFFECTOR, _CLOSED = slice(14, 17), slice(41, 44), 45  # in Cube's state
_HELD_DISTANCE, _HELD_CLOSED = 0.03, 0.3  # the gripper holds the cube if it is nearer, in m, and closed further


def _grasp(start: Array, goal: Array, actions: Array | None) -> str:
    """Cube: whether the gripper holds the cube at the start, and whether it has to at the goal."""
    del actions
    if _is_held(start):
        return "held, stays held" if _is_held(goal) else "held, to be released"
    return "free, to be grasped" if _is_held(goal) else "free, stays free"


def _is_held(state: Array) -> bool:
    distance = np.linalg.norm(state[_EFFECTOR] - state[_CUBE])
    return bool(distance < _HELD_DISTANCE and state[_CLOSED] > _HELD_CLOSED)


TWOROOM: dict[str, Kind] = {"room": _room}
PUSHT: dict[str, Kind] = {"block": _block}
REACHER: dict[str, Kind] = {"velocity": _velocity, "torques": _torques}
CUBE: dict[str, Kind] = {"grasp": _grasp}
