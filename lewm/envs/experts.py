"""Scripted policies that know the true state; they make the data that a model learns from."""

from __future__ import annotations

import numpy as np

from lewm.envs.base import Expert
from lewm.envs.tworoom import DOOR_Y, WALL_X
from lewm.types import Array

# So near to the door's centre the agent turns to the goal. Less than the door's half-extent: one that turns
# too early, while the wall is still beside it, heads back to the centre before it could be stuck.
DOOR_REACHED_DISTANCE = 10.5


class TwoRoomExpert(Expert):
    """To the door, then to the goal; with much noise and the occasional repeated action.

    ``noise_std`` is that of a Gaussian added per axis to the unit direction *before* clipping. At the default most
    actions are clipped, so the data covers far more than the way from start to goal.
    """

    def __init__(self, rng: np.random.Generator, noise_std: float = 2.0, repeat_probability: float = 0.05) -> None:
        self._rng, self._noise_std, self._repeat_probability = rng, noise_std, repeat_probability
        self._last_action: Array | None = None

    def act(self, state: Array, goal: Array) -> Array:
        """A 2-D action in [-1, 1], float32, from position ``state`` towards position ``goal``, both (2,)."""
        repeat = self._rng.random() < self._repeat_probability
        if self._last_action is None or not repeat:
            door = np.array([WALL_X, DOOR_Y])
            same_room = (state[0] < WALL_X) == (goal[0] < WALL_X)
            in_door = np.linalg.norm(state - door) < DOOR_REACHED_DISTANCE
            way = (goal if same_room or in_door else door) - state
            direction = way / max(np.linalg.norm(way), 1e-9)  # zero where there is no way to go
            noise = self._rng.normal(0.0, self._noise_std, size=2)
            self._last_action = np.clip(direction + noise, -1.0, 1.0).astype(np.float32)
        return self._last_action.copy()
