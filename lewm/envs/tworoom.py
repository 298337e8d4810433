"""TwoRoom: a dot, a wall, a door. The smallest world in which the straight way to a goal is the wrong one."""

from __future__ import annotations

import math

import numpy as np
from gymnasium.spaces import Box

from lewm.envs.base import Colour, ObsType, WorldEnv
from lewm.envs.quantities import Quantity
from lewm.errors import EnvError
from lewm.types import Array

# The geometry, in pixels of a 224 px frame: x to the right, y down. It is the same at every resolution.
WORLD_SIZE = 224.0
BORDER = 14.0
WALL_X = 112.0
WALL_THICKNESS = 10.0
DOOR_Y = 49.0
DOOR_HALF_EXTENT = 14.0
DOOR_MARGIN = 1.75
AGENT_RADIUS = 7.0
SPEED = 5.0
SUCCESS_DISTANCE = 16.0

# Where the agent's centre can be: inside the border, and in the wall's zone only at the height of the door.
ARENA_LOW = BORDER + AGENT_RADIUS
ARENA_HIGH = WORLD_SIZE - BORDER - AGENT_RADIUS
WALL_LEFT = WALL_X - WALL_THICKNESS / 2 - AGENT_RADIUS
WALL_RIGHT = WALL_X + WALL_THICKNESS / 2 + AGENT_RADIUS

DOT_STD = 7.0
DOT_COLOUR = (255, 0, 0)
# Farther from its centre the dot changes no channel by half a grey level: 255 exp(-d²/2σ²) < 1/2.
DOT_EXTENT = DOT_STD * math.sqrt(2 * math.log(2 * 255))


class TwoRoom(WorldEnv):
    """A red dot in one of two rooms has to reach a place in the other, through the only door.

    ## Description
    The world is a square of 224 × 224 px, white, with a black border of 14 px. A black wall, 10 px thick and
    centred at x = 112, parts it into a left and a right room. The door in it is 28 px high, centred at
    y = 49. The agent is a disc of radius 7 px, drawn as a red Gaussian dot of standard deviation 7 px. These
    lengths hold at every resolution: only the drawing is scaled. The goal is not drawn.

    ## Action space
    `Box(-1, 1, (2,), float32)`: the step to the right and down, in units of 5 px. Larger values are clipped.

    The agent's disc stays out of the border. It also stays out of the wall: where the agent's centre would
    be less than 7 px from the wall, and higher or lower than the door (with 1.75 px of margin), x is set
    back to 7 px from the wall, on the side of x = 112 that the agent came from.

    ## Observation space
    * `obs_type="pixels"`: `Box(0, 255, (resolution, resolution, 3), uint8)`, the frame.
    * `obs_type="state"`: `Box(21, 203, (2,), float64)`, the state.

    ## State
    | index | name      | meaning                                   | range     |
    | ----- | --------- | ----------------------------------------- | --------- |
    | 0     | `agent_x` | the agent's centre, px from the left edge | [21, 203] |
    | 1     | `agent_y` | the agent's centre, px from the top edge  | [21, 203] |

    ## Success
    The agent is less than 16 px from the goal. This ends the episode with a reward of 1; any other step
    earns 0. The environment itself never truncates.

    ## Reset
    The agent starts anywhere in a random room, the goal lies anywhere in the other room, both uniformly and
    clear of the wall. `reset(options={"state": (x, y), "goal": (x, y)})` sets either or both.

    ## Interventions
    `agent`: any colour; a position (x, y).

    ## Arguments
    Those of `lewm.envs.WorldEnv`; frames have 224 pixels a side unless told otherwise.

    ```python
    import gymnasium, lewm
    env = gymnasium.make("lewm/TwoRoom-v0", resolution=56)
    ```
    """

    state_names = ("agent_x", "agent_y")
    proprio_names = state_names
    objects = ("agent",)
    quantities = (Quantity("agent position", ("agent_x", "agent_y"), "length", unit="px"),)

    def __init__(
        self, resolution: int = 224, obs_type: ObsType = "pixels", render_mode: str | None = "rgb_array"
    ) -> None:
        positions, steps = Box(ARENA_LOW, ARENA_HIGH, (2,), np.float64), Box(-1.0, 1.0, (2,), np.float32)
        super().__init__(positions, steps, resolution, obs_type, render_mode)
        self._position = np.array([ARENA_LOW, ARENA_LOW])  # somewhere valid until the first reset
        self._background = _draw_background(resolution)
        self._colour: Colour = DOT_COLOUR

    @property
    def state(self) -> Array:
        return self._position.copy()

    def is_success(self, state: Array, goal: Array) -> Array:
        return np.linalg.norm(np.subtract(state, goal), axis=-1) < SUCCESS_DISTANCE

    def render(self) -> Array:
        return self._draw_states(self._position[None])[0]

    def _draw_states(self, states: Array) -> Array:
        frames = np.repeat(self._background[None], len(states), axis=0)
        for frame, (x, y) in zip(frames, states, strict=True):
            _draw_dot(frame, x, y, self._colour)
        return frames

    def _paint(self, name: str, colour: Colour | None) -> None:
        del name  # the agent is all there is
        self._colour = colour or DOT_COLOUR

    def _moved(self, state: Array, name: str, position: Array) -> Array:
        if position.shape != state.shape:
            raise EnvError(f"TwoRoom's {name} is put to a position (x, y), got {position}.")
        return position

    def _restore(self, state: Array) -> None:
        self._position = state.copy()

    def _advance(self, action: Array) -> None:
        x, y = np.clip(self._position + SPEED * action, ARENA_LOW, ARENA_HIGH)
        if abs(y - DOOR_Y) > DOOR_HALF_EXTENT + DOOR_MARGIN:
            x = min(x, WALL_LEFT) if self._position[0] < WALL_X else max(x, WALL_RIGHT)
        self._position = np.array([x, y])

    def _sample_start(self) -> Array:
        return self._sample_position(in_left_room=self.np_random.random() < 0.5)

    def _sample_goal(self, start: Array) -> Array:
        return self._sample_position(in_left_room=start[0] >= WALL_X)

    def _sample_position(self, in_left_room: bool) -> Array:
        x_low, x_high = (ARENA_LOW, WALL_LEFT) if in_left_room else (WALL_RIGHT, ARENA_HIGH)
        return self.np_random.uniform((x_low, ARENA_LOW), (x_high, ARENA_HIGH))


def _coverage(low: float, high: float, resolution: int) -> Array:
    """Share of each pixel that the interval [low, high) of the 224 px world covers, float64 (R,)."""
    edges = np.linspace(0, WORLD_SIZE, resolution + 1)
    covered = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
    return np.maximum(covered, 0) * resolution / WORLD_SIZE


def _draw_background(resolution: int) -> Array:
    """The rooms without the agent, uint8 (R, R, 3): means over each pixel's area, so that even a thin wall shows."""
    inside = _coverage(BORDER, WORLD_SIZE - BORDER, resolution)
    wall = _coverage(WALL_X - WALL_THICKNESS / 2, WALL_X + WALL_THICKNESS / 2, resolution)
    door = _coverage(DOOR_Y - DOOR_HALF_EXTENT, DOOR_Y + DOOR_HALF_EXTENT, resolution)
    white = np.outer(inside, inside) - np.outer(inside - door, wall)
    return np.repeat(np.rint(255 * white[:, :, None]).astype(np.uint8), 3, axis=2)


def _draw_dot(frame: Array, x: float, y: float, colour: Colour) -> None:
    """Blend the agent at (x, y) into ``frame`` (R, R, 3), which is grey so far, touching only what it covers."""
    columns, alpha_x = _dot_profile(x, len(frame))
    rows, alpha_y = _dot_profile(y, len(frame))
    alpha = np.outer(alpha_y, alpha_x)  # a Gaussian is separable
    patch = frame[rows, columns]
    grey = patch[:, :, 0] * (1 - alpha)
    for channel, value in enumerate(colour):
        patch[:, :, channel] = grey + (value * alpha + 0.5)  # Adding a half makes the truncation to uint8 round.


def _dot_profile(centre: float, resolution: int) -> tuple[slice, Array]:
    """The pixels along one axis that the dot reaches, and its opacity at their centres, float32."""
    pixel = WORLD_SIZE / resolution
    first = max(0, math.floor((centre - DOT_EXTENT) / pixel))
    last = min(resolution, math.ceil((centre + DOT_EXTENT) / pixel))
    offset = (np.arange(first, last) + 0.5) * pixel - centre
    return slice(first, last), np.exp(-0.5 * (offset / DOT_STD) ** 2).astype(np.float32)
