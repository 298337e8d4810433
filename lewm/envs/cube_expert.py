"""The policies that collect Cube's data: OGBench's oracle, with its noise, carries the cube from place to place."""

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
from lewm.envs.exploration import start_probability
from lewm.types import Array

CUBE_HALF = 0.02  # height of the centre of a cube that lies on the floor
NOISE_SHAPE = (1.0, 1.0, 1.0, 3.0, 10.0)  # how much more of the noise goes to each action: OGBench's
MISTAKE_SHORTEST, MISTAKE_LONGEST = 15, 60  # actions; in 25 the oracle picks the cube up
MISTAKE_FARTHEST = 0.12  # m between the cube and where it is taken to be
IN_HAND = 0.03  # m from the gripper to a cube that it closes on
CLOSED = 0.5  # of GRIPPER_CLOSED; it is 0.56 around a cube


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


class MistakenCubeExpert(Expert):
    """``expert``, which at times takes the cube to be where it is not, and goes through the motions without it.

    It then closes the gripper beside the cube or in the air, lifts and carries nothing, and lets go of it; a cube that
    it holds when the mistake begins, it drops. An expert that sees always closes its gripper around the cube, so a
    model of its data takes closing for grasping, wherever the cube is. The share of an episode that is spent so is
    drawn from [0, ``mistakes``].
    """

    def __init__(self, expert: Expert, rng: np.random.Generator, mistakes: float) -> None:
        self._expert, self._rng = expert, rng
        self.steps = expert.steps
        self._probability = start_probability(rng.uniform(0, mistakes), MISTAKE_SHORTEST, MISTAKE_LONGEST)
        self._left = 0
        self._place = np.zeros(3)  # where the cube is taken to be
        self._carrying = False

    def begin(self, state: Array, goal: Array) -> tuple[Array, Array]:
        """As the expert's."""
        return self._expert.begin(state, goal)

    def act(self, state: Array, goal: Array) -> Array:
        """The expert's action (5,) for ``state``, or for what it takes it for."""
        if self._left == 0 and self._rng.random() < self._probability:
            self._left = int(self._rng.integers(MISTAKE_SHORTEST, MISTAKE_LONGEST + 1))
            self._place, self._carrying = self._wrong_place(state[CUBE_POSITION]), False
        if self._left == 0:
            return self._expert.act(state, goal)
        self._left -= 1
        return self._expert.act(self._taken_for(state), goal)

    def _wrong_place(self, cube: Array) -> Array:
        """On the floor, at most MISTAKE_FARTHEST from the cube, within reach."""
        angle, distance = self._rng.uniform(0, 2 * math.pi), self._rng.uniform(0, MISTAKE_FARTHEST)
        place = cube[:2] + distance * np.array([math.cos(angle), math.sin(angle)])
        return np.array([*np.clip(place, TARGET_LOW, TARGET_HIGH), CUBE_HALF])

    def _taken_for(self, state: Array) -> Array:
        """``state`` with the cube at the wrong place, or in the gripper that has closed there."""
        closed = state[GRIPPER_CLOSED] > CLOSED
        at_hand = np.linalg.norm(state[EFFECTOR_POSITION] - self._place) <= IN_HAND
        self._carrying = closed and bool(self._carrying or at_hand)
        if self._carrying:
            self._place = state[EFFECTOR_POSITION].copy()
        seen = state.copy()
        seen[CUBE_POSITION], seen[GRIPPER_CONTACT] = self._place, float(closed)
        return seen


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
