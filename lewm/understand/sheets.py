"""Sheets of states that differ in two numbers only, for maps of the latent space: which, of what world, how far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lewm.envs.base import WorldEnv
from lewm.envs.registry import EnvEntry
from lewm.errors import ConfigError, unknown_name
from lewm.types import Array

_Ends = tuple[float, float] | None


@dataclass(frozen=True)
class Axis:
    """A direction of a sheet: what is varied, from where to where; several numbers go together.

    offsets: of each number from the value of the axis.  periodic: the ends are the same.
    """

    label: str
    numbers: tuple[str, ...]
    low: float
    high: float
    offsets: tuple[float, ...] = ()
    periodic: bool = False

    def values(self, count: int) -> Array:
        """So many places, evenly from end to end, float64 (count,)."""
        return np.linspace(self.low, self.high, count, endpoint=not self.periodic)


@dataclass(frozen=True)
class Sheet:
    """States on a grid of two axes. fixed: values of other numbers.  possible: of which states (N, S), bool (N,)."""

    name: str
    x: Axis
    y: Axis
    fixed: tuple[tuple[str, float], ...] = ()
    possible: Callable[[Array], Array] | None = None


@dataclass(frozen=True)
class Grid:
    """A sheet's states (N, S), with the step that each has on both axes, int (N, 2)."""

    sheet: Sheet
    size: int
    states: Array
    steps: Array

    def between(self) -> Array:
        """The steps on each axis from each state to each other (N, N, 2), the shorter way where it is periodic."""
        apart = np.abs(self.steps[:, None] - self.steps[None])
        periodic = np.array([self.sheet.x.periodic, self.sheet.y.periodic])
        return np.where(periodic, np.minimum(apart, self.size - apart), apart)


def make_grid(env: WorldEnv, sheet: Sheet, size: int, seed: int) -> Grid:
    """size x size states of a sheet, less the impossible; what it does not say is as after a reset with ``seed``."""
    for name in (*sheet.x.numbers, *sheet.y.numbers, *(name for name, _ in sheet.fixed)):
        if name not in env.state_names:
            raise ConfigError(unknown_name(f"number of {type(env).__name__}'s state", name, env.state_names))
    env.reset(seed=seed)
    steps = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), axis=-1).reshape(-1, 2)
    states = np.repeat(env.state[None], len(steps), axis=0)
    for name, value in sheet.fixed:
        states[:, env.state_names.index(name)] = value
    for axis, step in ((sheet.x, steps[:, 0]), (sheet.y, steps[:, 1])):
        for name, offset in zip(axis.numbers, axis.offsets or (0.0,) * len(axis.numbers), strict=True):
            states[:, env.state_names.index(name)] = axis.values(size)[step] + offset
    possible = np.ones(len(states), bool) if sheet.possible is None else sheet.possible(states)
    return Grid(sheet, size, states[possible], steps[possible])


def sheets_of(world: EnvEntry) -> tuple[Sheet, ...]:
    """What is mapped of a world; nothing of a user's own, of which two numbers of the state have to be named."""
    return _SHEETS.get(world.name, ())


def own_sheet(env: WorldEnv, x: str, y: str, x_range: _Ends, y_range: _Ends) -> Sheet:
    """Two numbers of a state by name, over ranges or all that the state's space allows."""
    return Sheet(f"{x}, {y}", _own_axis(env, x, x_range), _own_axis(env, y, y_range))


def _own_axis(env: WorldEnv, name: str, ends: _Ends) -> Axis:
    if name not in env.state_names:
        raise ConfigError(unknown_name(f"number of {type(env).__name__}'s state", name, env.state_names))
    index = env.state_names.index(name)
    least, most = float(env.state_space.low[index]), float(env.state_space.high[index])
    low, high = ends or (least, most)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        problem = f"{name} needs a range with a low and a high end, got {low} and {high}"
        raise ConfigError(f"{problem}. Give one with --x-range or --y-range.")
    if not (least <= low and high <= most):
        raise ConfigError(f"{name} lies between {least:g} and {most:g}, the range is {low:g} to {high:g}. Narrow it.")
    return Axis(name, (name,), low, high)


# -- the worlds ----------------------------------------------------------------------------------------------------


def _out_of_the_wall(states: Array) -> Array:
    """Of TwoRoom's: where the agent's disc can be."""
    from lewm.envs.tworoom import DOOR_HALF_EXTENT, DOOR_MARGIN, DOOR_Y, WALL_LEFT, WALL_RIGHT

    x, y = states[:, 0], states[:, 1]
    return (x <= WALL_LEFT) | (x >= WALL_RIGHT) | (np.abs(y - DOOR_Y) <= DOOR_HALF_EXTENT + DOOR_MARGIN)


def _clear_of_the_block(states: Array) -> Array:
    """Of Push-T's: where the agent is not inside the block."""
    from lewm.envs.pusht_geometry import AGENT_RADIUS, away_from_tee, to_body

    away = [np.linalg.norm(away_from_tee(to_body(state[:2], state[2:5]))) for state in states]
    return np.array(away) >= AGENT_RADIUS


_AGENT = Sheet(
    "agent",
    Axis("agent x, px", ("agent_x",), 30, 482),
    Axis("agent y, px", ("agent_y",), 30, 482),
    (("block_x", 256.0), ("block_y", 226.0), ("block_angle", math.pi / 4), ("agent_vx", 0.0), ("agent_vy", 0.0)),
    _clear_of_the_block,
)
_BLOCK = replace(
    _AGENT,
    name="block",
    x=Axis("block x, px", ("block_x",), 120, 392),
    y=Axis("block y, px", ("block_y",), 80, 340),
    fixed=(("agent_x", 40.0), ("agent_y", 472.0), ("block_angle", 0.0), ("agent_vx", 0.0), ("agent_vy", 0.0)),
)
_SHEETS = {
    "tworoom": (
        Sheet(
            "agent",
            Axis("agent x, px", ("agent_x",), 21, 203),
            Axis("agent y, px", ("agent_y",), 21, 203),
            possible=_out_of_the_wall,
        ),
    ),
    "pusht": (
        # The paper's: agent and block go together, the agent above the bar.
        Sheet(
            "agent and block together",
            Axis("x, px", ("block_x", "agent_x"), 120, 392, (0.0, 0.0)),
            Axis("y, px", ("block_y", "agent_y"), 100, 360, (0.0, -40.0)),
            (("block_angle", 0.0), ("agent_vx", 0.0), ("agent_vy", 0.0)),
        ),
        _AGENT,
        _BLOCK,
    ),
    "reacher": (
        Sheet(
            "joints",
            Axis("shoulder, rad", ("shoulder",), -math.pi, math.pi, periodic=True),
            Axis("wrist, rad", ("wrist",), -2.7, 2.7),
            (("shoulder_velocity", 0.0), ("wrist_velocity", 0.0)),
        ),
    ),
    "cube": (Sheet("cube", Axis("cube x, m", ("cube_x",), 0.30, 0.55), Axis("cube y, m", ("cube_y",), -0.30, 0.30)),),
}
