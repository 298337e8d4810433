"""Matched trajectories: one recorded episode lived through again and again, and each time another thing is changed.

    undisturbed   o ─ o ─ o ─ o ─ o ─ o      the same start, the same actions
    colour        o ─ o ─ o ─ ● ─ ● ─ ●      an object is drawn in another colour from the changed frame on
    far           o ─ o ─ o ─ □ ─ □ ─ □      an object is elsewhere at once, far from where it was
    near          o ─ o ─ o ─ ◦ ─ ◦ ─ ◦      only a little: less than it moves by itself in one block

Up to the changed frame all of them are equal bit by bit. ``CHANGES`` has the changes and their sizes for each world, in
the world's own units; a module with a world of its own adds to it with ``register_changes``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.envs.base import Colour, Intervention, WorldEnv
from lewm.envs.registry import EnvEntry, env_type, make_env
from lewm.errors import ConfigError, DataError, EnvError
from lewm.rng import stream
from lewm.types import Array

Kind = Literal["colour", "far", "near"]
UNDISTURBED = "undisturbed"
_START, _DIRECTION = 31, 32  # what random streams are for
STARTS = 8  # tried in an episode until every change has room
DIRECTIONS = 64  # tried for one teleport


def _anywhere(state: Array) -> bool:
    del state
    return True


@dataclass(frozen=True)
class Change:
    """Something that a world's physics cannot explain.

    colour: that ``object`` is drawn in.  Or it is moved by ``distance``, in ``unit``, in a random direction:
    place: the names of the state's numbers that a teleport takes.  free: how many of them, the first ones, change.
    fits: whether a state (state_dim,) could be met in the world; directions are drawn until it does.
    """

    kind: Kind
    object: str
    colour: Colour | None = None
    distance: float = 0.0
    unit: str = ""
    place: tuple[str, ...] = ()
    free: int = 0
    fits: Callable[[Array], bool] = _anywhere

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"{self.object}: colour" if self.kind == "colour" else f"{self.object}: {self.distance:g} {self.unit}"

    def intervention(self, env: WorldEnv, state: Array, step: int, rng: np.random.Generator) -> Intervention | None:
        """What is to be scheduled, given the state at ``step``; None if there is no room for it."""
        if self.colour is not None:
            return Intervention(step, self.object, colour=self.colour)
        places = [env.state_names.index(name) for name in self.place]
        for _ in range(DIRECTIONS):
            direction = rng.normal(size=self.free)
            moved = state.copy()
            moved[places[: self.free]] += self.distance * direction / np.linalg.norm(direction)
            possible = (moved >= env.state_space.low).all() and (moved <= env.state_space.high).all()
            if possible and self.fits(moved):
                return Intervention(step, self.object, position=tuple(moved[places].tolist()))
        return None


def moves(
    name: str,
    place: tuple[str, ...],
    unit: str,
    far: float,
    near: tuple[float, ...],
    fits: Callable[[Array], bool] = _anywhere,
    free: int | None = None,
) -> tuple[Change, ...]:
    """A far teleport of an object, and near ones. free: None: all numbers of its place change."""
    free = len(place) if free is None else free
    distances = [("far", far), *(("near", distance) for distance in near)]
    return tuple(Change(kind, name, None, distance, unit, place, free, fits) for kind, distance in distances)  # type: ignore[arg-type]


# -- what each world can do ----------------------------------------------------------------------------------------


def _in_a_room(state: Array) -> bool:
    from lewm.envs import tworoom

    x, y = state
    inside = bool((state >= tworoom.ARENA_LOW).all() and (state <= tworoom.ARENA_HIGH).all())
    in_the_door = abs(y - tworoom.DOOR_Y) <= tworoom.DOOR_HALF_EXTENT
    return inside and (x <= tworoom.WALL_LEFT or x >= tworoom.WALL_RIGHT or in_the_door)


def _on_the_table(state: Array) -> bool:
    """Push-T: block and agent lie within the walls, and not in one another."""
    from lewm.envs import pusht_geometry as geometry

    agent, block = state[:2], state[2:5]
    corners, low, high = geometry.to_world(geometry.TEE_CORNERS, block), geometry.WALL_LOW, geometry.WALL_HIGH
    inside = low < min(corners.min(), agent.min()) and max(corners.max(), agent.max()) < high
    apart = math.hypot(*geometry.away_from_tee(geometry.to_body(agent, block))) >= geometry.AGENT_RADIUS
    return bool(inside and apart)


def _within_reach(state: Array) -> bool:
    """Cube: where the arm can bring it, and as the floor of its data goes."""
    x, y = state[14:16]
    return bool(0.25 <= x <= 0.6 and abs(y) <= 0.35)


_CUBE = ("cube_x", "cube_y", "cube_z")  # z stays as it is

CHANGES: dict[str, tuple[Change, ...]] = {
    # A block of five actions moves the agent by up to 25 px; the picture has 224.
    "tworoom": (
        Change("colour", "agent", (0, 0, 255)),
        *moves("agent", ("agent_x", "agent_y"), "px", 90.0, (5.0, 10.0, 20.0), _in_a_room),
    ),
    # Of 512 px: a block of actions moves the agent by up to 250 px, and the T by some ten while it is pushed.
    "pusht": (
        Change("colour", "block", (200, 40, 40)),
        *moves("block", ("block_x", "block_y"), "px", 150.0, (5.0, 10.0, 20.0), _on_the_table),
        Change("colour", "agent", (230, 120, 0)),
        *moves("agent", ("agent_x", "agent_y"), "px", 150.0, (10.0, 20.0), _on_the_table),
    ),
    # The shoulder is turned; the wrist stays. A block of actions turns it by up to a third of a radian.
    "reacher": (
        Change("colour", "arm", (40, 90, 230)),
        *moves("arm", ("shoulder", "wrist"), "rad", 1.5, (0.05, 0.1, 0.2), free=1),
    ),
    # The cube has edges of 0.04 m. It is moved level: one that the gripper holds stays as high, and falls.
    "cube": (
        Change("colour", "cube", (40, 90, 230)),
        *moves("cube", _CUBE, "m", 0.15, (0.01, 0.02, 0.04), _within_reach, free=2),
    ),
}


def register_changes(world: str, changes: Sequence[Change]) -> None:
    """Say what can be changed in a world of one's own, by the name that it is registered with."""
    CHANGES[world] = tuple(changes)


def changes_of(entry: EnvEntry) -> tuple[Change, ...]:
    """The changes of a world; of one that names no sizes its objects' colours. A world without objects is refused."""
    objects = env_type(entry.name).objects
    if not objects:
        raise ConfigError(f"{entry.name} has no objects that could be changed. Give its class `objects` (lewm.envs).")
    changes = CHANGES.get(entry.name) or tuple(Change("colour", name, (40, 90, 230)) for name in objects)
    if unknown := {change.object for change in changes} - set(objects):
        raise ConfigError(f"{entry.name} has no object {sorted(unknown)[0]!r}, only {', '.join(objects)}.")
    return changes


# -- trajectories --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excerpt:
    """Where trajectories begin, how long they are and where they part.

    blocks: of ``frame_skip`` actions each.  changed: the number of the first frame that differs; there are blocks + 1.
    """

    frame_skip: int
    blocks: int
    changed: int

    @property
    def steps(self) -> int:
        return self.frame_skip * self.blocks


@dataclass(frozen=True)
class Matched:
    """An episode lived through several times, all equal until frame ``changed``.

    episode, row: where it begins in the dataset.  actions: raw, float32 (steps, action_dim).
    frames: by the name of what was done, uint8 (blocks + 1, R, R, 3), the first ``UNDISTURBED``.
    states: likewise, float64 (steps + 1, state_dim).
    """

    episode: int
    row: int
    actions: Array
    frames: dict[str, Array]
    states: dict[str, Array]


@contextlib.contextmanager
def simulator(entry: EnvEntry, resolution: int) -> Iterator[WorldEnv]:
    """The world, to live through episodes in."""
    with contextlib.closing(make_env(entry.name, resolution)) as env:
        yield env


def replay(
    env: WorldEnv, start: Array, actions: Array, frame_skip: int, change: Intervention | None = None, draw: bool = True
) -> tuple[Array, Array]:
    """Live through actions (steps, action_dim) from a state: the states (steps + 1, state_dim), and the frames.

    Frames, uint8 (blocks + 1, R, R, 3), are drawn every ``frame_skip`` steps, or none if not ``draw``.
    """
    env.reset(seed=0, options={"state": start, "goal": start})
    env.schedule(*([] if change is None else [change]))
    states, frames = [env.state], [env.render()] if draw else []
    for step, action in enumerate(actions, 1):
        env.step(action)
        states.append(env.state)
        if draw and step % frame_skip == 0:
            frames.append(env.render())
    return np.stack(states), np.array(frames, np.uint8)


def episodes_long_enough(store: EpisodeStore, excerpt: Excerpt) -> list[int]:
    """The numbers of the episodes that have so many actions."""
    return [number for number, length in enumerate(store.lengths.tolist()) if length > excerpt.steps]


def matched(
    env: WorldEnv,
    store: EpisodeStore,
    states: Array,
    episode: int,
    excerpt: Excerpt,
    changes: Sequence[Change],
    seed: int,
) -> Matched | None:
    """One episode with every change, at the same frame; None if the changes find no room in it, or do not show.

    states: as ``recorded_states`` gives them.  All is a pure function of the dataset, the episode and the seed.
    """
    offset, length = int(store.offsets[episode]), int(store.lengths[episode])
    rows = stream(seed, _START, episode).integers(offset, offset + length - excerpt.steps, STARTS)
    for row in rows.tolist():
        actions = store.actions[row : row + excerpt.steps]
        try:
            undisturbed, _ = replay(env, states[row], actions, excerpt.frame_skip, draw=False)
        except EnvError as error:
            raise DataError(f"{store.path} has at row {row} what the world cannot go on from: {error}") from error
        step = excerpt.frame_skip * excerpt.changed
        planned = [
            change.intervention(env, undisturbed[step], step, stream(seed, _DIRECTION, episode, number))
            for number, change in enumerate(changes)
        ]
        if None not in planned:
            named = {UNDISTURBED: None} | {change.name: what for change, what in zip(changes, planned, strict=True)}
            lived = {name: replay(env, states[row], actions, excerpt.frame_skip, what) for name, what in named.items()}
            seen = {name: frames for name, (_, frames) in lived.items()}
            if all(_shows(seen, change, excerpt.changed) for change in changes):
                return Matched(episode, row, actions, seen, {name: each for name, (each, _) in lived.items()})
    return None


def _shows(frames: dict[str, Array], change: Change, changed: int) -> bool:
    """Whether anybody could see it: an object may be hidden behind another. A near one may be less than a pixel."""
    return change.kind == "near" or not np.array_equal(frames[change.name][changed], frames[UNDISTURBED][changed])
