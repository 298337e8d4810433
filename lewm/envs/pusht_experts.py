"""Push-T's experts: one that pushes the block to any pose, and one that replays demonstrations with noise."""

from __future__ import annotations

import math

import numpy as np

from lewm.envs.base import Expert
from lewm.envs.pusht import ACTION_SCALE
from lewm.envs.pusht_geometry import (
    AGENT_RADIUS,
    BAR,
    CENTRE_OF_GRAVITY,
    INERTIA,
    STEM,
    TARGET_POSE,
    WORLD_SIZE,
    away_from_tee,
    to_body,
    to_world,
    wrap_angle,
)
from lewm.errors import DataError
from lewm.types import Array, Demonstration

# How the scripted expert moves, in px unless said otherwise.
RADIANS_TO_PX = 45.0  # an angular error of 1 rad counts as much as this distance
TOUCHING = AGENT_RADIUS + 5.0  # nearer to the block than this, the agent backs off before it goes elsewhere
STANDOFF = AGENT_RADIUS + 9.0  # where a push begins, and how wide corners are taken
ARRIVED = 10.0  # this near to where a push begins, it begins
MAX_LEAD = 35.0  # how far ahead of the block's surface a push aims
CRUISE_LEAD = 80.0  # how far ahead of the agent a walk aims
WALK_SPEED, PUSH_SPEED = 30.0, 12.0  # px per step, to estimate what a push takes
PUSH_STEPS = 3.0  # what every push takes besides
MIN_PUSH = 2.0  # a push that would move the block by less is over
PLACED, DISPLACED = (7.0, 0.12), (13.0, 0.25)  # (px, rad): the block is placed below the one, until above the other


class TargetNoise:
    """Noise on the place that the agent is drawn to: a correlated part, of some memory, and a white one.

    std, white_std: of the two parts, px per axis. correlation: the former's correlation time in steps.
    """

    def __init__(self, rng: np.random.Generator, std: float, correlation: float, white_std: float) -> None:
        self._rng, self._std, self._white_std = rng, std, white_std
        self._memory = math.exp(-1.0 / correlation)
        self._value = rng.normal(0.0, 1.0, 2)

    def sample(self) -> Array:
        """The next step's noise (2,)."""
        fresh, white = self._rng.normal(0.0, 1.0, (2, 2))
        self._value = self._memory * self._value + math.sqrt(1.0 - self._memory**2) * fresh
        return self._std * self._value + self._white_std * white


def _action_towards(target: Array, agent: Array) -> Array:
    """The relative action, float32 (2,) in [-1, 1], that draws an agent at (2,) to ``target`` (2,).

    If that is out of reach, to the farthest place on the straight way there.
    """
    offset = (target - agent) / ACTION_SCALE
    return (offset / max(1.0, np.abs(offset).max())).astype(np.float32)


# Where the expert may push: points on the T's faces and the directions inwards, all in the body frame. A disc beside
# the stem or under the bar keeps clear of the other.
_PUSHES = np.array(
    [
        *[(x, 0.0, 0.0, 1.0) for x in (-52.0, -36.0, -20.0, -7.0, 7.0, 20.0, 36.0, 52.0)],
        *[(side * 60.0, y, -side, 0.0) for side in (-1.0, 1.0) for y in (7.0, 23.0)],
        *[(side * x, 30.0, 0.0, -1.0) for side in (-1.0, 1.0) for x in (41.0, 52.0)],
        *[(side * 15.0, y, -side, 0.0) for side in (-1.0, 1.0) for y in (57.0, 70.0, 85.0, 100.0, 113.0)],
        *[(x, 120.0, 0.0, -1.0) for x in (-8.0, 8.0)],
    ]
)
_POINTS, _INWARDS = _PUSHES[:, :2], _PUSHES[:, 2:]
_BEGINNINGS = _POINTS - STANDOFF * _INWARDS
# How far the block turns, in rad, while a push moves its centre of gravity by 1 px; and how far the agent gets by that.
_ARMS = _POINTS - CENTRE_OF_GRAVITY
_LEVERS = _ARMS[:, 0] * _INWARDS[:, 1] - _ARMS[:, 1] * _INWARDS[:, 0]
_TURNS = _LEVERS / INERTIA
_WAYS = 1.0 + _LEVERS * _TURNS

# The corners to walk around: the T's convex ones, moved outwards.
_BAR_X, _STEM_X = BAR[2] + STANDOFF, STEM[2] + STANDOFF
_BAR_TOP, _BAR_BOTTOM, _STEM_BOTTOM = BAR[1] - STANDOFF, BAR[3] + STANDOFF, STEM[3] + STANDOFF
_CORNERS = np.array(
    [(side * x, y) for side in (-1, 1) for x, y in ((_BAR_X, _BAR_TOP), (_BAR_X, _BAR_BOTTOM), (_STEM_X, _STEM_BOTTOM))]
)


def _clear(starts: Array, ends: Array) -> Array:
    """Whether straight walks from (..., 2) to (..., 2), body frame, keep off the block: bool (...)."""
    way = ends - starts
    way = np.where(np.abs(way) < 1e-9, 1e-9, way)
    clear = np.ones(way.shape[:-1], bool)
    for box in (BAR, STEM):
        low, high = np.subtract(box[:2], TOUCHING), np.add(box[2:], TOUCHING)
        first, second = (low - starts) / way, (high - starts) / way
        enters = np.minimum(first, second).max(-1)
        leaves = np.maximum(first, second).min(-1)
        clear &= (enters >= leaves) | (leaves <= 0) | (enters >= 1)
    return clear


def _lengths(starts: Array, ends: Array) -> Array:
    """Lengths of straight walks from (..., 2) to (..., 2); infinite where the block is in the way."""
    return np.where(_clear(starts, ends), np.linalg.norm(ends - starts, axis=-1), np.inf)


def _all_pairs(lengths: Array) -> Array:
    """Shortest ways (N, N) over edges of the given lengths (N, N)."""
    for middle in range(len(lengths)):
        lengths = np.minimum(lengths, lengths[:, middle, None] + lengths[None, middle])
    return lengths


# Shortest walks from each corner to each corner, and on to each push's beginning: (6, 6) and (6, pushes).
_CORNER_TO_CORNER = _all_pairs(_lengths(_CORNERS[:, None], _CORNERS[None]))
_FROM_CORNER = _lengths(_CORNERS[:, None], _BEGINNINGS[None])
_CORNER_TO_BEGINNING = (_CORNER_TO_CORNER[:, :, None] + _FROM_CORNER[None]).min(axis=1)


class PushTExpert(Expert):
    """Pushes the block to the goal's pose, contact by contact, then walks to the goal's place for the agent.

    It knows how the block answers to a push: without friction, one along a face's normal moves the centre of gravity
    that way and turns the block by lever over inertia. Of some thirty points of contact it takes the one that takes
    most off the block's distance from the goal's pose, per step; walks around the block to where that push begins; and
    pushes until nothing is left to gain there.

    Each episode draws the strength of its noise on where the agent is drawn to: a correlated part of up to
    ``max_noise`` px, of a correlation time of 1 to 8 steps.
    """

    def __init__(self, rng: np.random.Generator, max_noise: float = 30.0) -> None:
        self._noise = TargetNoise(rng, rng.uniform(0.0, max_noise), rng.uniform(1.0, 8.0), white_std=0.0)
        self._push: int | None = None  # which one is walked to or under way
        self._pushing = False
        self._placed = False

    def act(self, state: Array, goal: Array) -> Array:
        """A relative action (2,) in [-1, 1], float32, from ``state`` towards ``goal``, both (7,)."""
        pose = state[2:5]
        agent = to_body(state[:2], pose)
        target = self._aim(agent, pose, state, goal)
        noisy = np.clip(to_world(target, pose) + self._noise.sample(), 0.0, WORLD_SIZE)
        return _action_towards(noisy, state[:2])

    def _aim(self, agent: Array, pose: Array, state: Array, goal: Array) -> Array:
        """Where to draw the agent, body frame (2,)."""
        error = _pose_error(pose, goal[2:5])
        limits = DISPLACED if self._placed else PLACED
        distance = float(np.linalg.norm(goal[2:4] - state[2:4]))
        self._placed = distance < limits[0] and abs(error[2]) < limits[1]
        if self._placed:
            self._push, self._pushing = None, False
            return _walk(agent, to_body(goal[:2], pose))
        lengths = _push_lengths(error)
        if self._push is None or lengths[self._push] < MIN_PUSH or (self._pushing and _slipped(agent, self._push)):
            self._push, self._pushing = _best_push(agent, pose, error, lengths), False
        push = self._push
        if not self._pushing:
            self._pushing = bool(np.linalg.norm(_BEGINNINGS[push] - agent) < ARRIVED)
        if self._pushing:
            depth = min(lengths[push] * _WAYS[push], MAX_LEAD) - AGENT_RADIUS
            return _POINTS[push] + depth * _INWARDS[push]
        return _walk(agent, _BEGINNINGS[push])


def _pose_error(pose: Array, goal: Array) -> Array:
    """What leads from ``pose`` to ``goal``, (3,) each: the way of the centre of gravity, body frame, and the turn."""
    way = to_body(to_world(np.array(CENTRE_OF_GRAVITY), goal), pose) - CENTRE_OF_GRAVITY
    return np.array([*way, wrap_angle(goal[2] - pose[2])])


def _push_lengths(error: Array) -> Array:
    """How far each push (pushes,) should move the centre of gravity to leave the least of ``error`` (3,); px."""
    weight = RADIANS_TO_PX**2
    return (_INWARDS @ error[:2] + weight * error[2] * _TURNS) / (1.0 + weight * _TURNS**2)


def _best_push(agent: Array, pose: Array, error: Array, lengths: Array) -> int:
    """The push that takes most off the error per step, walking there included."""
    weight = RADIANS_TO_PX**2
    total = error[:2] @ error[:2] + weight * error[2] ** 2
    lengths = np.maximum(lengths, 0.0)
    left = total - lengths**2 * (1.0 + weight * _TURNS**2)
    gain = math.sqrt(total) - np.sqrt(np.maximum(left, 0.0))
    around = (_lengths(agent, _CORNERS)[:, None] + _CORNER_TO_BEGINNING).min(axis=0)
    walks = np.minimum(_lengths(agent, _BEGINNINGS), around)
    # From inside the margin everything is in the way; the straight line is as good a guess as any.
    walks = np.where(np.isinf(walks), np.linalg.norm(_BEGINNINGS - agent, axis=-1), walks)
    steps = walks / WALK_SPEED + lengths * _WAYS / PUSH_SPEED + PUSH_STEPS
    places = to_world(_BEGINNINGS, pose)
    inside = ((places > AGENT_RADIUS) & (places < WORLD_SIZE - AGENT_RADIUS)).all(axis=1)
    return int(np.argmax(np.where(inside, gain, 0.01 * gain) / steps))


def _slipped(agent: Array, push: int) -> bool:
    """Whether the agent has left the line of a push by so much that it pushes something else."""
    offset = agent - _POINTS[push]
    across = offset - (offset @ _INWARDS[push]) * _INWARDS[push]
    return float(np.abs(across).max()) > AGENT_RADIUS or float(np.linalg.norm(offset)) > 2.5 * STANDOFF


def _walk(agent: Array, goal: Array) -> Array:
    """Where to draw an agent at (2,) that shall walk to ``goal`` (2,) around the block, all body frame."""
    outwards = away_from_tee(agent)
    gap = float(np.linalg.norm(outwards))
    if 0 < gap < TOUCHING:
        return agent + outwards / gap * 2 * STANDOFF
    if not _clear(agent, goal):
        on = (_CORNER_TO_CORNER + _lengths(_CORNERS, goal)).min(axis=1)
        through = _lengths(agent, _CORNERS) + on
        if np.isfinite(through).any():
            # Aiming beyond a corner keeps the pace; straight at a goal comes to rest there.
            way = _CORNERS[np.argmin(through)] - agent
            return agent + way * (CRUISE_LEAD / max(float(np.linalg.norm(way)), 1e-9))
    return goal


def mirrored(demonstration: Demonstration) -> Demonstration:
    """A demonstration's mirror image about x + y = 512, which maps the target onto itself.

    (x, y) becomes (512 - y, 512 - x). The T is its own mirror image, so the block's angle becomes π/2 minus itself.
    """
    states = demonstration.states
    angle = (math.pi / 2 - states[:, 4:5]) % (2 * math.pi)
    mirrored_states = np.concatenate([_mirror(states[:, 0:2]), _mirror(states[:, 2:4]), angle], axis=1)
    return Demonstration(mirrored_states, _mirror(demonstration.actions))


def _mirror(points: Array) -> Array:
    """Points (..., 2) mirrored about x + y = 512."""
    return WORLD_SIZE - points[..., ::-1]


class PushTReplay(Expert):
    """Replays a demonstration with noise; an episode of as many actions, whether or not the block gets to the target.

    Half of the replays are mirrored. Each draws the strength of its noise: on the places that the agent is drawn to, up
    to ``max_noise`` px with a correlation time of 1 to 8 steps, and white up to ``max_white_noise`` px; on the initial
    state, ``start_noise`` px for agent and block, and as much of the angle as moves the stem's end by the like.

    Actions are relative and reach 100 px along each axis. Where the demonstration's target is farther away (29 times in
    the 25,650 steps of the public ones), the agent is drawn to the farthest place on the way there.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        demonstration: Demonstration,
        max_noise: float = 30.0,
        max_white_noise: float = 15.0,
        start_noise: float = 5.0,
        mirror: float = 0.5,
    ) -> None:
        shapes = demonstration.states.shape, demonstration.actions.shape
        if shapes != ((len(demonstration.actions), 5), (len(demonstration.actions), 2)) or not shapes[0][0]:
            expected = "states (L, 5) and actions (L, 2) with L at least 1"
            raise DataError(f"A demonstration of Push-T has {expected}, got {shapes[0]} and {shapes[1]}.")
        self._demonstration = mirrored(demonstration) if rng.random() < mirror else demonstration
        level, white_level = rng.uniform(0.0, max_noise), rng.uniform(0.0, max_white_noise)
        self._noise = TargetNoise(rng, level, rng.uniform(1.0, 8.0), white_level)
        self._start_noise = start_noise * rng.normal(0.0, 1.0, 5) * (1, 1, 1, 1, 1 / STEM[3])
        self._next = 0
        self.steps = len(demonstration.actions)

    def begin(self, state: Array, goal: Array) -> tuple[Array, Array]:
        """The recording's first state, perturbed, at rest; and the target, with the agent where the recording ends."""
        del state, goal  # what the environment has drawn
        first, last = self._demonstration.states[0], self._demonstration.states[-1]
        start = first + self._start_noise
        start[:4] = np.clip(start[:4], 0.0, WORLD_SIZE)
        start[4] %= 2 * math.pi
        rest = (0.0, 0.0)
        return np.concatenate([start, rest]), np.concatenate([last[:2], TARGET_POSE, rest])

    def act(self, state: Array, goal: Array) -> Array:
        """The next relative action (2,) in [-1, 1], float32, for an agent where ``state`` (7,) says."""
        del goal
        index = min(self._next, len(self._demonstration.actions) - 1)  # after its end, the last target stays
        self._next += 1
        target = np.clip(self._demonstration.actions[index] + self._noise.sample(), 0.0, WORLD_SIZE)
        return _action_towards(target, state[:2])
