"""Push-T: a disc has to push a T-shaped block to a pose. Contacts, rotation, and nothing to hold on to."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pymunk
from gymnasium.spaces import Box

from lewm.envs.base import Colour, ObsType, WorldEnv
from lewm.envs.pusht_drawing import PushTDrawing
from lewm.envs.pusht_geometry import (
    AGENT_RADIUS,
    BAR,
    CENTRE_OF_GRAVITY,
    INERTIA,
    MASS,
    STEM,
    TEE_CORNERS,
    WALL_HIGH,
    WALL_LOW,
    WALL_RADIUS,
    WORLD_SIZE,
    away_from_tee,
    corners,
    to_body,
    to_world,
    wrap_angle,
)
from lewm.envs.quantities import Quantity
from lewm.errors import EnvError
from lewm.types import Array

ACTION_SCALE = 100.0  # px
STIFFNESS, DAMPING = 100.0, 20.0  # of the agent's controller, per s² and per s
TIME_STEP = 0.01  # s
SUBSTEPS = 10  # per action

SUCCESS_DISTANCE = 20.0  # px
SUCCESS_ANGLE = math.pi / 9

# The walls stop the block but not the agent, which may swing a little beyond its target; a block that is squeezed
# between agent and wall may be thrown out of the picture.
STATE_LOW = np.array([-100.0, -100.0, -256.0, -256.0, -2 * math.pi, -2000.0, -2000.0])
STATE_HIGH = np.array([612.0, 612.0, 768.0, 768.0, 2 * math.pi, 2000.0, 2000.0])

APART = np.array([256.0, 400.0, 256.0, 300.0, 0.0, 0.0, 0.0])

# Random poses leave the agent room between the block and the walls, and keep the agent clear of the block.
WALL_CLEARANCE = 45.0
AGENT_MARGIN = 25.0
AGENT_CLEARANCE = 40.0


class PushTPhysics:
    """Push-T's dynamics as a pure function of the state.

    pymunk keeps more than positions and velocities: it remembers the impulses of contacts, even for three steps after
    they have ended, to start its solver from, and the correction of a penetration that it has still to make. To make
    seven numbers a state that restores exactly, each action begins with a new space, and with one solution of the
    contacts at the very positions of the state, which finds again how the block is moving. A block with one contact
    then moves as it would have moved, but for rounding errors. With several, remembered impulses count: ``PushT`` says
    how much.
    """

    def __init__(self) -> None:
        self._ground = pymunk.Body(body_type=pymunk.Body.STATIC)
        low, high = WALL_LOW, WALL_HIGH
        around = [(low, high), (low, low), (high, low), (high, high), (low, high)]
        walls = [pymunk.Segment(self._ground, a, b, WALL_RADIUS) for a, b in pairwise(around)]
        self._agent = pymunk.Body(body_type=pymunk.Body.KINEMATIC)
        self._block = pymunk.Body(MASS, INERTIA)
        self._block.center_of_gravity = CENTRE_OF_GRAVITY
        boxes = [pymunk.Poly(self._block, corners(box)) for box in (BAR, STEM)]
        disc = pymunk.Circle(self._agent, AGENT_RADIUS)
        self._parts: tuple[pymunk.Body | pymunk.Shape, ...]
        self._parts = (self._ground, self._agent, self._block, *walls, disc, *boxes)

    def advance(self, state: Array, target: Array) -> Array:
        """The state (7,) one action after ``state`` (7,), with the agent drawn to ``target`` (2,) in the world."""
        space = pymunk.Space()
        space.damping = 0.0  # a body that nothing pushes stands still
        # Added while they are apart, and where the public environment adds them: the order in which contacts are found,
        # and so solved, depends on it.
        self._place(APART)
        space.add(*self._parts)
        self._place(state)
        try:
            self._run(space, state, (float(target[0]), float(target[1])))
        finally:
            space.remove(*self._parts)
        agent, block = self._agent, self._block
        after = [*agent.position, *block.position, block.angle % (2 * math.pi), *agent.velocity]
        return np.clip(after, STATE_LOW, STATE_HIGH)

    def _place(self, state: Array) -> None:
        """Put the bodies where they are one time step before ``state``, if the block stands still."""
        x, y, block_x, block_y, angle, velocity_x, velocity_y = state.tolist()
        self._agent.position = x - velocity_x * TIME_STEP, y - velocity_y * TIME_STEP
        self._agent.velocity = velocity_x, velocity_y
        block = self._block
        block.velocity, block.angular_velocity = (0.0, 0.0), 0.0
        pymunk.Body.update_position(block, 0.0)  # forgets the correction that it has still to make
        block.angle = angle  # turns the body about its centre of gravity, so the position comes after it
        block.position = block_x, block_y

    def _run(self, space: pymunk.Space, state: Array, target: tuple[float, float]) -> None:
        agent = self._agent
        space.step(TIME_STEP)
        # Exactly: subtracting and adding a step's way has rounded.
        agent.position = x, y = float(state[0]), float(state[1])
        vx, vy = float(state[5]), float(state[6])
        for _ in range(SUBSTEPS):
            vx += (STIFFNESS * (target[0] - x) - DAMPING * vx) * TIME_STEP
            vy += (STIFFNESS * (target[1] - y) - DAMPING * vy) * TIME_STEP
            agent.velocity = vx, vy
            space.step(TIME_STEP)
            x, y = agent.position


class PushT(WorldEnv):
    """A blue disc pushes a grey T over a table, to any pose.

    ## Description
    The world is a square of 512 × 512 px with y down, drawn at that size and scaled bilinearly to the resolution. The
    agent is a disc of radius 15 px, the block a T: a bar of 120 × 30 px and, from the middle of its lower edge, a stem
    of 30 × 90 px. A light-green T marks the pose (256, 256, π/4), the target of the human demonstrations; it is part of
    the background and is where the goal lies only if the goal says so. Grey walls, 2 px to either side of a line 5 px
    from the edge, stop the block, but not the agent. Physics, geometry and drawing are those of `gym-pusht`.

    ## Action space
    `Box(-1, 1, (2,), float32)`: where the agent is drawn to for the next 0.1 s, as an offset from where it is, in units
    of 100 px. Larger values are clipped, and so is the resulting place, to the world. A spring and a damper
    (100 /s², 20 /s: critically damped) draw it there in 10 steps of 0.01 s. The block moves only while it is pushed.

    ## Observation space
    * `obs_type="pixels"`: `Box(0, 255, (resolution, resolution, 3), uint8)`, the frame.
    * `obs_type="state"`: `Box((7,), float64)`, the state.

    ## State
    | index | name             | meaning                                                        | range        |
    | ----- | ---------------- | -------------------------------------------------------------- | ------------ |
    | 0, 1  | `agent_x`, `_y`  | the agent's centre, px                                         | [-100, 612]  |
    | 2, 3  | `block_x`, `_y`  | the middle of the bar's upper edge, px                         | [-256, 768]  |
    | 4     | `block_angle`    | radians, clockwise; 0: stem down. [0, 2π) after an action      | [-2π, 2π]    |
    | 5, 6  | `agent_vx`, `_vy`| the agent's velocity, px/s                                     | [-2000, 2000]|

    These seven numbers determine what follows, bit by bit. `gym-pusht` also remembers the impulses of its last
    contacts, which no such vector could hold. From the same state to the same absolute targets both go the same way:
    within 1e-12 px an action while the block has one contact, and within 1e-6 px over 204 of the 206 public
    demonstrations (0.02 and 0.00001 px in the others). They differ where the agent, which nothing stops, squeezes the
    block against a wall: there is no solution then to agree on.

    ## Success
    The four numbers (agent x, y, block x, y) are, as one vector, less than 20 px from the goal's, and the block's angle
    is within π/9 of it. This ends the episode with a reward of 1; any other step earns 0. The environment itself never
    truncates.

    ## Reset
    Start and goal have the block anywhere at any angle, 45 px clear of the edges, and the agent anywhere clear of
    the block, at rest. `reset(options={"state": ..., "goal": ...})` sets either or both.

    ## Interventions
    * `agent`: any colour; a position (x, y).
    * `block`: any colour; a position (x, y) or a pose (x, y, angle).
    * `target`: any colour. It cannot be moved.

    ## Arguments
    Those of `lewm.envs.WorldEnv`; frames have 224 pixels a side unless told otherwise.

    ```python
    import gymnasium, lewm
    env = gymnasium.make("lewm/PushT-v0")
    ```
    """

    state_names = ("agent_x", "agent_y", "block_x", "block_y", "block_angle", "agent_vx", "agent_vy")
    proprio_names = ("agent_x", "agent_y")
    objects = ("agent", "block", "target")
    quantities = (
        Quantity("agent position", ("agent_x", "agent_y"), "length", unit="px"),
        Quantity("block position", ("block_x", "block_y"), "length", unit="px"),
        Quantity("block angle", ("block_angle",), "angle"),
        Quantity("agent velocity", ("agent_vx", "agent_vy"), unit="px/s"),
    )

    def __init__(
        self, resolution: int = 224, obs_type: ObsType = "pixels", render_mode: str | None = "rgb_array"
    ) -> None:
        states, actions = Box(STATE_LOW, STATE_HIGH, dtype=np.float64), Box(-1.0, 1.0, (2,), np.float32)
        super().__init__(states, actions, resolution, obs_type, render_mode)
        self._physics = PushTPhysics()
        self._drawing = PushTDrawing(resolution)
        self._state = np.array([128.0, 128.0, 256.0, 256.0, 0.0, 0.0, 0.0])  # somewhere valid until the first reset

    @property
    def state(self) -> Array:
        return self._state.copy()

    def is_success(self, state: Array, goal: Array) -> Array:
        difference = np.subtract(state, goal)
        near = np.linalg.norm(difference[..., :4], axis=-1) < SUCCESS_DISTANCE
        return near & (np.abs(wrap_angle(difference[..., 4])) < SUCCESS_ANGLE)

    def render(self) -> Array:
        return self._drawing.draw(self._state[None])[0]

    def _draw_states(self, states: Array) -> Array:
        return self._drawing.draw(states)

    def _paint(self, name: str, colour: Colour | None) -> None:
        self._drawing.paint(name, colour)

    def _moved(self, state: Array, name: str, position: Array) -> Array:
        if name == "target":
            raise EnvError("Push-T's target belongs to the background and stays where it is. Move the block instead.")
        places = {"agent": {2: slice(0, 2)}, "block": {2: slice(2, 4), 3: slice(2, 5)}}[name]
        if position.ndim != 1 or position.size not in places:
            form = "position (x, y)" if name == "agent" else "position (x, y) or a pose (x, y, angle)"
            raise EnvError(f"Push-T's {name} is put to a {form}, got {position}.")
        moved = state.copy()
        moved[places[position.size]] = position
        return moved

    @classmethod
    def visible(cls, states: Array) -> Array:
        """Whether the agent's centre and the T's lie in the picture: a block can be squeezed through the walls."""
        states = np.asarray(states)
        angle, (_, down) = states[..., 4], CENTRE_OF_GRAVITY
        centre = states[..., 2:4] + down * np.stack([-np.sin(angle), np.cos(angle)], axis=-1)
        places = np.concatenate([states[..., :2], centre], axis=-1)
        return np.asarray(((places >= 0) & (places <= WORLD_SIZE)).all(axis=-1))

    def _restore(self, state: Array) -> None:
        self._state = state.copy()

    def _advance(self, action: Array) -> None:
        target = np.clip(self._state[:2] + ACTION_SCALE * action, 0, WORLD_SIZE)
        self._state = self._physics.advance(self._state, target)

    def _sample_start(self) -> Array:
        block = self._sample_block()
        return np.concatenate([self._sample_agent(block), block, (0.0, 0.0)])

    def _sample_goal(self, start: Array) -> Array:
        del start  # any pose can be reached from any other
        return self._sample_start()

    def _sample_block(self) -> Array:
        """A pose (3,) that keeps the block clear of the walls, uniform among those."""
        low, high = WALL_CLEARANCE, WORLD_SIZE - WALL_CLEARANCE
        while True:
            pose = self.np_random.uniform((low, low, 0.0), (high, high, 2 * math.pi))
            points = to_world(TEE_CORNERS, pose)
            if low <= points.min() and points.max() <= high:
                return pose

    def _sample_agent(self, block: Array) -> Array:
        """A position (2,) clear of a block at pose (3,), uniform among those."""
        while True:
            position = self.np_random.uniform(AGENT_MARGIN, WORLD_SIZE - AGENT_MARGIN, 2)
            if np.linalg.norm(away_from_tee(to_body(position, block))) >= AGENT_CLEARANCE:
                return position
