"""Cube: OGBench's robot arm, which moves a cube. The richest world here: three dimensions, contact, occlusion."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import numpy as np

from lewm.envs.base import ObsType
from lewm.envs.mujoco import MujocoEnv, advance, drawing_model, import_simulator, mujoco, physics_model
from lewm.envs.quantities import Quantity
from lewm.errors import EnvError
from lewm.types import Array

import_simulator("ogbench.manipspace.envs.cube_env")  # loads what GL there is, before these do
from ogbench.manipspace import mjcf_utils  # noqa: E402
from ogbench.manipspace.controllers import DiffIKController  # noqa: E402
from ogbench.manipspace.envs.cube_env import CubeEnv  # noqa: E402
from ogbench.manipspace.lie import SO3  # noqa: E402

SUCCESS_DISTANCE = 0.04
# Where the oracle's targets and the arm's resting places are drawn from, in m, as OGBench does.
TARGET_LOW, TARGET_HIGH = (0.30, -0.30), (0.55, 0.30)
ARM_LOW, ARM_HIGH = (0.25, -0.35, 0.20), (0.60, 0.35, 0.35)
FULL_CONTACT_FORCE = 50.0  # norm of the force and torque on the right pad at which `gripper_contact` is 1
CLOSED_ANGLE = 0.8  # of the gripper's driver joint, at which `gripper_closed` is 1
# Arm and gripper are drawn with their vertices merged on a grid of this size, in m. A pixel of a 224 px frame is 3 to
# 5 mm wide there, so that the shapes stay, while four fifths of the faces go, and with them speckle finer than a pixel.
MESH_GRID = 0.003

ARM_JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
GRIPPER_JOINTS = tuple(f"{s}_{j}" for s in ("right", "left") for j in ("driver", "coupler", "spring_link", "follower"))
JOINTS = (*ARM_JOINTS, *GRIPPER_JOINTS)
MOTIONS = (*JOINTS, "cube_x", "cube_y", "cube_z", "cube_roll", "cube_pitch", "cube_yaw")
_ORIENTATION = ("cube_qw", "cube_qx", "cube_qy", "cube_qz")
# Where things are in the state.
CUBE_POSITION = slice(14, 17)
CUBE_QUATERNION = slice(17, 21)
VELOCITIES = slice(21, 41)
EFFECTOR_POSITION = slice(41, 44)
EFFECTOR_YAW = 44
GRIPPER_CLOSED = 45
GRIPPER_CONTACT = 46


class Cube(MujocoEnv):
    """A robot arm with a gripper has to bring a cube to a given place.

    ## Description
    OGBench's `cube-single`: a UR5e arm with a Robotiq 2F-85 gripper, and a red cube of 4 cm on the floor before it,
    seen by OGBench's camera for pixels, `front_pixels`, which stands opposite the arm. The arm is opaque and the
    gripper purple; neither OGBench's transparent target nor the goal is drawn, and colours do not tell of success.

    ## Action space
    `Box(-1, 1, (5,), float32)`: the change of the gripper's pose from where it is. Larger values are clipped. An action
    lasts 0.05 s, 25 physics steps, in which a position controller follows OGBench's inverse kinematics.

    | index | meaning             | unit                                          |
    | ----- | ------------------- | --------------------------------------------- |
    | 0–2   | step along x, y, z  | 0.05 m, within the workspace                   |
    | 3     | turn about z        | 0.3 rad                                       |
    | 4     | closing the gripper | all of its way: 1 closes it, -1 opens it       |

    ## Observation space
    * `obs_type="pixels"`: `Box(0, 255, (resolution, resolution, 3), uint8)`, the frame.
    * `obs_type="state"`: `Box(-1e6, 1e6, (47,), float64)`, the state.

    ## State
    | index | names                          | meaning                                                             |
    | ----- | ------------------------------ | ------------------------------------------------------------------- |
    | 0–5   | `shoulder_pan` … `wrist_3`     | angles of the arm's joints, rad                                     |
    | 6–13  | `right_driver` … `left_follower` | angles of the gripper's joints, rad                               |
    | 14–16 | `cube_x`, `cube_y`, `cube_z`   | centre of the cube, m: x away from the arm's base, z up             |
    | 17–20 | `cube_qw` … `cube_qz`          | orientation of the cube, a quaternion                               |
    | 21–40 | `…_velocity`                   | of the same 14 joints, rad/s; of the cube, m/s and rad/s            |
    | 41–43 | `effector_x` …                 | the point between the finger tips, m                                |
    | 44    | `effector_yaw`                 | its turn about z, rad                                               |
    | 45    | `gripper_closed`               | 0: open, 1: closed                                                  |
    | 46    | `gripper_contact`              | force on the right finger in the last physics step, 0 to 1          |

    Indices 0–40 determine what happens next, exactly: see `lewm.envs.mujoco.advance`. Indices 41–45 follow from them,
    whatever a state that is set says. 46 cannot be known from one state, and is kept for who wants to know whether the
    gripper holds something.

    ## Success
    The cube's centre is within 0.04 m of the goal's; nothing else matters. This ends the episode with a reward of 1;
    any other step earns 0. The environment itself never truncates.

    ## Reset
    As in OGBench's data collection: the open gripper at rest anywhere above the floor, with any yaw; the cube on the
    floor in x 0.3 to 0.55, y -0.3 to 0.3, with any yaw. The goal is drawn in the same way, until it is elsewhere.
    `reset(options={"state": state, "goal": state})` sets either or both.

    ## Interventions
    `cube`: any colour; a position (x, y, z) in m. Its orientation and velocities stay as they are.

    ## Arguments
    Those of `lewm.envs.WorldEnv`; frames have 224 pixels a side unless told otherwise.

    ```python
    import gymnasium, lewm
    env = gymnasium.make("lewm/Cube-v0", resolution=112)
    ```
    """

    state_names = (
        *(*JOINTS, "cube_x", "cube_y", "cube_z", "cube_qw", "cube_qx", "cube_qy", "cube_qz"),
        *(f"{name}_velocity" for name in MOTIONS),
        *("effector_x", "effector_y", "effector_z", "effector_yaw", "gripper_closed", "gripper_contact"),
    )
    # Without the contact, which a state that is set cannot bring back: an episode's first frame would not have it.
    proprio_names = (
        *(*JOINTS, *(f"{name}_velocity" for name in JOINTS)),
        *("effector_x", "effector_y", "effector_z", "effector_yaw", "gripper_closed"),
    )
    objects = ("cube",)
    quantities = (
        Quantity("joint positions", ARM_JOINTS, unit="rad"),
        Quantity("joint velocities", tuple(f"{name}_velocity" for name in ARM_JOINTS), unit="rad/s"),
        Quantity("effector position", ("effector_x", "effector_y", "effector_z"), "length", unit="m"),
        Quantity("effector yaw", ("effector_yaw",), "angle", seam=-math.pi),
        Quantity("gripper", ("gripper_closed",), "opening"),
        Quantity("block position", ("cube_x", "cube_y", "cube_z"), "length", unit="m"),
        Quantity("block quaternion", _ORIENTATION, "quaternion"),
        Quantity("block yaw", _ORIENTATION, "yaw", seam=-math.pi),
        # A cube of one colour looks the same after a quarter turn.
        Quantity("block yaw, of its shape", _ORIENTATION, "yaw", period=math.pi / 2, seam=-math.pi / 4),
    )
    camera = "front_pixels"
    object_geoms = {"cube": ("object_0",)}  # noqa: RUF012

    def __init__(
        self, resolution: int = 224, obs_type: ObsType = "pixels", render_mode: str | None = "rgb_array"
    ) -> None:
        super().__init__(5, resolution, obs_type, render_mode)
        self._robot = _robot().twin()
        self._contact = 0.0

    @property
    def state(self) -> Array:
        return np.concatenate([self._robot.data.qpos, self._robot.data.qvel, *self._robot.effector(), [self._contact]])

    def is_success(self, state: Array, goal: Array) -> Array:
        way = np.asarray(state)[..., CUBE_POSITION] - np.asarray(goal)[..., CUBE_POSITION]
        return np.linalg.norm(way, axis=-1) <= SUCCESS_DISTANCE

    def _scene(self) -> Any:
        return fixed_scene()

    def _moved(self, state: Array, name: str, position: Array) -> Array:
        if position.shape != (3,):
            raise EnvError(f"Cube's {name} is put to a position (x, y, z) in m, got {position}.")
        moved = state.copy()
        moved[CUBE_POSITION] = position
        return moved

    def _restore(self, state: Array) -> None:
        model, data = self._robot.model, self._robot.data
        data.qpos[:], data.qvel[:] = state[: model.nq], state[VELOCITIES]
        self._contact = float(state[GRIPPER_CONTACT])
        mujoco.mj_kinematics(model, data)

    def _advance(self, action: Array) -> None:
        self._contact = self._robot.act(action)

    def _sample_start(self) -> Array:
        self._robot.np_random = self.np_random
        self._robot.reset()
        self._restore(self._at_rest(self._robot.data.qpos))
        return self.state

    def _at_rest(self, qpos: Array) -> Array:
        """The state with these joint positions (21,), without motion or contact."""
        state = np.zeros(len(self.state_names))
        state[: len(qpos)] = qpos
        return state


class _Robot(CubeEnv):
    """OGBench's scene and arm controller, without its observations, targets and renderer."""

    substeps = 25

    def __init__(self) -> None:
        # The colours are those of its pixels, the starts those of its data.
        looks = {"ob_type": "pixels", "pixel_transparent_arm": False, "visualize_info": False}
        super().__init__("single", mode="data_collection", **looks)
        self.reset(seed=0)  # compiles; the state before a first reset is the same in every process
        physics_model(self.model)

    def compute_observation(self) -> None:
        """Nothing: OGBench would draw a frame."""

    def twin(self) -> _Robot:
        """A robot of its own in the same scene, without the seconds that compiling takes."""
        twin = copy.copy(self)
        twin._data = copy.copy(self.data)
        twin._ik = DiffIKController(model=self._ik._model, sites=["attachment_site"])
        return twin

    def act(self, action: Array) -> float:
        """Execute an action (5,) and return how strongly the right finger is pressed then, 0 to 1.

        The kinematics must be those of the current position. (OGBench plans from those of a physics step before.)
        """
        self.set_control(action)
        advance(self.model, self.data, self.substeps)
        mujoco.mj_rnePostConstraint(self.model, self.data)
        contact = np.linalg.norm(self.data.body("ur5e/robotiq/right_pad").cfrc_ext) / FULL_CONTACT_FORCE
        mujoco.mj_kinematics(self.model, self.data)
        return min(float(contact), 1.0)

    def effector(self) -> tuple[Array, Array]:
        """Its position (3,), and (yaw, share by which the gripper is closed)."""
        pinch = self.data.site("ur5e/robotiq/pinch")
        yaw = SO3.from_matrix(pinch.xmat.reshape(3, 3)).compute_yaw_radians()
        driver = self.data.joint("ur5e/robotiq/right_driver_joint").qpos[0]
        return pinch.xpos, np.array([yaw, np.clip(driver / CLOSED_ANGLE, 0, 1)])


@functools.cache
def _robot() -> _Robot:
    return _Robot()


@functools.cache
def fixed_scene() -> Any:
    """The same scene for drawing, with meshes as fine as a frame can show."""
    robot = _robot()
    assets = mjcf_utils.get_assets(robot.mjcf_model)
    spec = mujoco.MjSpec.from_string(mjcf_utils.to_string(robot.mjcf_model), assets=assets)
    spec.compiler.balanceinertia = True  # nothing here ever moves by forces, so that any inertia will do
    for mesh in spec.meshes:
        vertices, faces = merge_vertices(*_mesh(robot.model, mesh.name), MESH_GRID)
        mesh.file, mesh.scale = "", [1, 1, 1]
        mesh.uservert, mesh.userface = vertices.ravel(), faces.ravel()
        mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    return drawing_model(spec, hidden=("target_object_0",))


def _mesh(model: Any, name: str) -> tuple[Array, Array]:
    """Vertices (V, 3) in the coordinates of the mesh's file, and faces (F, 3) of a compiled mesh."""
    mesh = model.mesh(name)
    first_vertex, first_face = mesh.vertadr[0], mesh.faceadr[0]
    vertices = model.mesh_vert[first_vertex : first_vertex + mesh.vertnum[0]].astype(np.float64)
    faces = model.mesh_face[first_face : first_face + mesh.facenum[0]]
    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, model.mesh_quat[mesh.id])  # undoes the compiler's alignment with the inertia
    return vertices @ rotation.reshape(3, 3).T + model.mesh_pos[mesh.id], faces


def merge_vertices(vertices: Array, faces: Array, grid: float) -> tuple[Array, Array]:
    """A coarser mesh: the vertices (V, 3) of each cell of a grid become their mean; faces (F, 3) that collapse go."""
    cells, members = np.unique(np.rint(vertices / grid), axis=0, return_inverse=True)
    members = members.reshape(-1)
    sums = np.stack([np.bincount(members, weights=axis, minlength=len(cells)) for axis in vertices.T], axis=1)
    merged = members[faces]
    a, b, c = merged.T
    merged = merged[(a != b) & (b != c) & (c != a)]
    _, first = np.unique(np.sort(merged, axis=1), axis=0, return_index=True)
    return sums / np.bincount(members)[:, None], merged[np.sort(first)]
