"""The policy that collects Cube's data: OGBench's oracle, with its noise, carries the cube from place to place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ogbench.manipspace.lie import SO3
from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle

from lewm.envs.base import Expert
from lewm.envs.cube import (
    ARM_HIGH,
    ARM_LOW,
    CUBE_POSITION,
    CUBE_QUATERNION,
    EFFECTOR_POSITION,
    EFFECTOR_YAW,
    GRIPPER_CLOSED,
    GRIPPER_CONTACT,
    TARGET_HIGH,
    TARGET_LOW,
)
from lewm.types import Array

CUBE_HALF = 0.02  # height of the centre of a cube that lies on the floor
NOISE_SHAPE = (1.0, 1.0, 1.0, 3.0, 10.0)  # how much more of the noise goes to each action: OGBench's


class CubeExpert(Expert):
    """Picks the cube up, places it at the goal, withdraws, and goes on to random targets until the episode ends.

    The oracle and its noise are those of OGBench's "noisy" data. Gaussian noise is added to every action, of a standard
    deviation that is drawn once per episode from [0, ``noise``]; three times of it for the yaw, ten times for the
    gripper. With ``random_probability`` an action is uniformly random instead. ``min_norm``: the oracle moves by at
    least so much, in m before its gain, so that it does not slow down near its target.
    """

    steps = 200

    def __init__(
        self, rng: np.random.Generator, noise: float = 0.1, min_norm: float = 0.4, random_probability: float = 0.1
    ) -> None:
        self._rng, self._random_probability = rng, random_probability
        self._noise_std = rng.uniform(0, noise) * np.array(NOISE_SHAPE)
        self._oracle = _Oracle(rng, min_norm)
        self._target: tuple[Array, float] | None = None  # position (3,) and yaw; None before the first action

    def act(self, state: Array, goal: Array) -> Array:
        """An action (5,) in [-1, 1], float32, that brings the cube nearer to ``goal``, and later to other places."""
        if self._target is None:
            self._begin(goal[CUBE_POSITION], _yaw(goal))
        elif self._oracle.done:
            place = self._rng.uniform(TARGET_LOW, TARGET_HIGH)
            self._begin(np.array([*place, CUBE_HALF]), self._rng.uniform(0, 2 * math.pi))
        if self._rng.random() < self._random_probability:
            return self._rng.uniform(-1.0, 1.0, 5).astype(np.float32)
        action = self._oracle.select_action(None, self._oracle_info(state))
        return np.clip(action + self._rng.normal(0, self._noise_std), -1.0, 1.0).astype(np.float32)

    def _begin(self, position: Array, yaw: float) -> None:
        self._target = (position, yaw)
        self._oracle.reset(None, {})

    def _oracle_info(self, state: Array) -> dict[str, Any]:
        """What OGBench's environment would tell its oracle about ``state`` (state_dim,)."""
        assert self._target is not None
        position, yaw = self._target
        return {
            "proprio/effector_pos": state[EFFECTOR_POSITION],
            "proprio/effector_yaw": [state[EFFECTOR_YAW]],
            "proprio/gripper_opening": state[GRIPPER_CLOSED],
            "proprio/gripper_contact": state[GRIPPER_CONTACT],
            "privileged/target_block": 0,
            "privileged/block_0_pos": state[CUBE_POSITION],
            "privileged/block_0_yaw": [_yaw(state)],
            "privileged/target_block_pos": position,
            "privileged/target_block_yaw": [yaw],
        }


class _Oracle(CubeMarkovOracle):
    """OGBench's, with random numbers of the episode in place of NumPy's global ones."""

    def __init__(self, rng: np.random.Generator, min_norm: float) -> None:
        super().__init__(env=None, min_norm=min_norm)
        self._rng = rng

    def reset(self, ob: None, info: dict[str, Any]) -> None:
        """Begin with another target, and draw where the arm withdraws to."""
        del ob, info
        self._done, self._step = False, 0
        self._final_pos = self._rng.uniform(ARM_LOW, ARM_HIGH)
        self._final_yaw = self._rng.uniform(-math.pi, math.pi)


def _yaw(state: Array) -> float:
    return float(SO3(wxyz=state[CUBE_QUATERNION]).compute_yaw_radians())
