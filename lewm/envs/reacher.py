"""Reacher: a planar arm of two links, moved by torques. The smallest world in which velocity matters."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import dm_control
import numpy as np

from lewm.envs.base import ObsType
from lewm.envs.mujoco import MujocoEnv, advance, drawing_model, mujoco, physics_model
from lewm.envs.quantities import Quantity
from lewm.errors import EnvError
from lewm.types import Array

# Only this file of dm_control is used: importing its suite would take longer than everything else here.
MODEL_FILE = Path(dm_control.__file__).parent / "suite" / "reacher.xml"
LINK_LENGTH = 0.12  # of both links, from joint to joint and from the wrist to the finger
SUCCESS_ANGLE = 0.05
WRIST = 1  # its index among the joints


class Reacher(MujocoEnv):
    """An arm with two joints has to take a given configuration, by torques on both.

    ## Description
    The `reacher` of dm_control's suite, seen from above: a square arena of 0.6 m, in its centre the shoulder of an arm
    of two links of 0.12 m each, with an orange finger at its end. There are no collisions. The suite's target is not
    drawn, and neither is the goal.

    ## Action space
    `Box(-1, 1, (2,), float32)`: the torques of shoulder and wrist, in units of 0.05 N m. Larger values are clipped. An
    action lasts one physics step of 0.02 s, the suite's control step.

    ## Observation space
    * `obs_type="pixels"`: `Box(0, 255, (resolution, resolution, 3), uint8)`, the frame.
    * `obs_type="state"`: `Box(-1e6, 1e6, (4,), float64)`, the state.

    ## State
    | index | name                | meaning                                                         |
    | ----- | ------------------- | --------------------------------------------------------------- |
    | 0     | `shoulder`          | angle of the shoulder, rad; turns freely and is not wrapped      |
    | 1     | `wrist`             | angle of the wrist, rad; limited, softly, to [-2.79, 2.79]       |
    | 2     | `shoulder_velocity` | rad/s                                                           |
    | 3     | `wrist_velocity`    | rad/s                                                           |

    The next state is a function of state and action alone: see `lewm.envs.mujoco.advance`.

    ## Success
    Both joint angles are within 0.05 rad of the goal's, modulo full turns; velocities do not matter. This ends the
    episode with a reward of 1; any other step earns 0. The environment itself never truncates.

    ## Reset
    As in the suite, both angles are uniform over all the joint can reach, and the arm is at rest; the goal is drawn in
    the same way, until it is another. `reset(options={"state": state, "goal": state})` sets either or both.

    ## Interventions
    * `arm`: any colour, for both links; a position (shoulder, wrist) in rad.
    * `finger`: any colour; a position (x, y) in m from the shoulder, x to the right and y up, to which the arm bends on
      the side to which it is bent.
    Velocities stay as they are.

    ## Arguments
    Those of `lewm.envs.WorldEnv`; frames have 224 pixels a side unless told otherwise.

    ```python
    import gymnasium, lewm
    env = gymnasium.make("lewm/Reacher-v0", resolution=112)
    ```
    """

    state_names = ("shoulder", "wrist", "shoulder_velocity", "wrist_velocity")
    proprio_names = state_names
    objects = ("arm", "finger")
    quantities = (
        Quantity("shoulder angle", ("shoulder",), "angle", seam=-math.pi),
        Quantity("wrist angle", ("wrist",), "angle", seam=-math.pi),
        Quantity("joint velocities", ("shoulder_velocity", "wrist_velocity"), unit="rad/s"),
    )
    camera = "fixed"
    object_geoms = {"arm": ("arm", "hand"), "finger": ("finger",)}  # noqa: RUF012

    def __init__(
        self, resolution: int = 224, obs_type: ObsType = "pixels", render_mode: str | None = "rgb_array"
    ) -> None:
        super().__init__(2, resolution, obs_type, render_mode)
        self._model = _physics()
        self._data = mujoco.MjData(self._model)

    @property
    def state(self) -> Array:
        return np.concatenate([self._data.qpos, self._data.qvel])

    def is_success(self, state: Array, goal: Array) -> Array:
        turn = np.subtract(state, goal)[..., :2]
        wrapped = (turn + math.pi) % (2 * math.pi) - math.pi
        return (np.abs(wrapped) <= SUCCESS_ANGLE).all(axis=-1)

    def _scene(self) -> Any:
        return _scene()

    def _moved(self, state: Array, name: str, position: Array) -> Array:
        if position.shape != (2,):
            units = "(shoulder, wrist) in rad" if name == "arm" else "(x, y) in m"
            raise EnvError(f"Reacher's {name} is put to a position {units}, got {position}.")
        angles = position if name == "arm" else _angles_for(position, bend=-1 if state[WRIST] < 0 else 1)
        return np.concatenate([angles, state[2:]])

    def _restore(self, state: Array) -> None:
        self._data.qpos[:], self._data.qvel[:] = state[:2], state[2:]

    def _advance(self, action: Array) -> None:
        self._data.ctrl[:] = action
        advance(self._model, self._data, substeps=1)

    def _sample_start(self) -> Array:
        wrist_range = self._model.jnt_range[WRIST]
        return np.array([self.np_random.uniform(-math.pi, math.pi), self.np_random.uniform(*wrist_range), 0.0, 0.0])


@functools.cache
def _physics() -> Any:
    return physics_model(mujoco.MjModel.from_xml_path(str(MODEL_FILE)))


@functools.cache
def _scene() -> Any:
    return drawing_model(mujoco.MjSpec.from_file(str(MODEL_FILE)), hidden=("target",))


def _angles_for(position: Array, bend: int) -> Array:
    """The joint angles (2,) that put the finger to (x, y); the wrist's has the sign of ``bend``."""
    x, y = position
    cosine = (x * x + y * y) / (2 * LINK_LENGTH**2) - 1
    wrist = bend * math.acos(min(cosine, 1.0))
    limit = _physics().jnt_range[WRIST, 1]
    if cosine > 1 or abs(wrist) > limit:
        nearest, farthest = 2 * LINK_LENGTH * math.cos(limit / 2), 2 * LINK_LENGTH
        raise EnvError(f"Reacher's finger reaches {nearest:.3f} to {farthest} m from the shoulder, got {position}.")
    # Both links have the same length, so that the shoulder's angle is off the finger's by half of the wrist's.
    return np.array([math.atan2(y, x) - wrist / 2, wrist])
