"""An agent: a trained method in the loop with one world or several, from frames and a goal image to actions.

    agent = lewm.Agent(model, settings, bounds=env.action_space)
    agent.reset(goal)
    while True:
        env.step(agent.act(env.render()))

It keeps the context that plans start from, replans as the schedule says, and begins searches from the last plan where
that is asked for. `lewm eval` drives this very object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.frames import resized
from lewm.plan.inputs import checked_proprio
from lewm.plan.policy import Memory, Policy, policy_for
from lewm.types import Array, Plan


@dataclass
class _World:
    """One world: what is known of it, what was decided and is not handed out yet, what was since its last block."""

    memory: Memory
    ahead: deque[Array] = field(default_factory=deque)
    done: list[Array] = field(default_factory=list)


class Agent:
    """Acts towards goal images, in one world or in N of them that move together.

    Args:
        method: a world model, which plans; an actor; or a ``Planner`` with a solver or objectives of your own.
        settings: of planning, None: the paper's. An actor has no use for them.
        bounds: an action space, or (low, high): actions are clipped to it, and remembered so. Worlds clip what they
            are told to do, and a plan's context is what was done, not what was wished. None: no bounds.
        seed: of the random streams.

    Some models read what the agent senses of itself, too: ``policy.proprio_dim`` numbers, which they are given as
    ``proprio`` with each frame and with the goal. Others have no use for it.

    ``act`` is for a plain loop, with a frame after every action. A loop whose frames are expensive uses ``decide``,
    executes all that it returns, and tells ``observe`` what happened.
    """

    def __init__(self, method: Any, settings: PlanConfig | None = None, *, bounds: Any = None, seed: int = 0) -> None:
        self.policy: Policy = policy_for(method, settings, seed)
        self._bounds = None if bounds is None else _checked_bounds(bounds, self.policy.action_dim)
        self._worlds: list[_World] = []
        self._is_batch, self._resets = False, 0

    def reset(self, goal: Array, episode: int | Sequence[int] | None = None, proprio: Array | None = None) -> None:
        """Begin an episode in each world. goal: uint8 (S, S, 3), or (N, S, S, 3) for N worlds, of any size S.

        episode: selects the random stream of each world, a number or N of them; None: as resets are counted, 0, 1, ...
        The same frames, goal, seed and number give the same actions, whatever happened before.
        proprio: what the agent senses of itself at the goal, (P,), or (N, P).
        """
        goals = self._fitted(goal, "goal")
        after = range(self._resets, self._resets + len(goals))
        numbers = list(after) if episode is None else np.atleast_1d(episode).tolist()
        if len(numbers) != len(goals) or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise PlanningError(f"{len(goals)} goals need as many episode numbers, from 0 up; got {episode}.")
        is_batch = np.ndim(goal) == 4
        sensed = self._sensed(proprio if is_batch else _alone(proprio), len(goals), "goal")
        self._is_batch, self._resets = is_batch, after.stop
        each = zip(goals, numbers, [None] * len(goals) if sensed is None else sensed, strict=True)
        self._worlds = [_World(Memory(image, own, self.policy.history, there)) for image, own, there in each]

    def act(self, frame: Array, proprio: Array | None = None) -> Array:
        """The next action, float32 (action_dim,), given the newest frame, uint8 (S, S, 3); of N worlds (N, ...) both.

        proprio: what the agent senses of itself now, (P,); of N worlds (N, P).  Call it once for every action that is
        executed.
        """
        self._check_begun()
        frames = _checked_images(frame, "frame")
        if self._is_batch != (np.ndim(frame) == 4) or len(frames) != len(self._worlds):
            wanted = f"{len(self._worlds)} worlds, (N, S, S, 3)" if self._is_batch else "one world, (S, S, 3)"
            raise PlanningError(f"The agent was reset for {wanted}; the frame has shape {np.shape(frame)}.")
        sensed = self._sensed(proprio if self._is_batch else _alone(proprio), len(frames), "frame")
        for number, world in enumerate(self._worlds):
            if world.memory.is_empty or len(world.done) == self.policy.frame_skip:
                executed = None if world.memory.is_empty else np.stack(world.done)[None]
                here = slice(number, number + 1)
                self.observe(number, frames[here], executed, None if sensed is None else sensed[here])
                world.done.clear()
        waiting = [number for number, world in enumerate(self._worlds) if not world.ahead]
        for number, actions in zip(waiting, self.decide(waiting), strict=True):
            self._worlds[number].ahead.extend(actions)
        for world in self._worlds:
            world.done.append(world.ahead.popleft())
        chosen = np.stack([world.done[-1] for world in self._worlds])
        return chosen if self._is_batch else chosen[0]

    @property
    def plan(self) -> Plan | list[Plan | None] | None:
        """What is left of the current plan, or of each world's: see ``plan_of``."""
        plans = [self.plan_of(number) for number in range(len(self._worlds))]
        return plans if self._is_batch else plans[0] if plans else None

    def plan_of(self, world: int) -> Plan | None:
        """What is left of a world's plan: the actions that are to come, and the distances after those blocks.

        None before the first action, and for a method that does not plan.
        """
        memory, done = self._worlds[world].memory, self._worlds[world].done
        if memory.plan is None:
            return None
        past = memory.followed + len(done)
        plan, blocks = memory.plan, past // self.policy.frame_skip
        return replace(plan, actions=plan.actions[past:], distances=plan.distances[blocks:])

    # -- for loops that look only where they must --------------------------------------------------------------------

    def decide(self, worlds: Sequence[int]) -> list[Array]:
        """What to do in these worlds next: raw actions (n*K, action_dim) for each, to be executed to the end."""
        self._check_begun()
        chunks = self.policy.decide([self._worlds[number].memory for number in worlds]) if worlds else []
        return chunks if self._bounds is None else [np.clip(chunk, *self._bounds) for chunk in chunks]

    def observe(self, world: int, frames: Array, executed: Array | None = None, proprio: Array | None = None) -> None:
        """What happened in a world since the last frame that was given.

        executed: the action blocks that were executed, (n, K, action_dim); None at the start of an episode.
        frames: uint8 (m, S, S, 3), after the last m <= n of them; at the start the first frame. A method looks at the
        last ``policy.history`` frames in a row: more are of no use, and with fewer it knows less.
        proprio: what the agent sensed of itself at these frames, (m, P).
        """
        self._check_begun()
        memory, sizes = self._worlds[world].memory, (self.policy.frame_skip, self.policy.action_dim)
        blocks = np.zeros((0, *sizes), np.float32) if executed is None else executed
        most = len(blocks) + memory.is_empty
        if blocks.shape[1:] != sizes or not 1 <= len(frames) <= most:
            raise PlanningError(
                f"Expected blocks of shape (n, {sizes[0]}, {sizes[1]}) and 1 to {most} frames after them; got blocks "
                f"{blocks.shape} and {len(frames)} frames. An episode begins with a frame and no block."
            )
        memory.add(self._fitted(frames, "frame"), blocks, self._sensed(proprio, len(frames), "frame"))

    def _check_begun(self) -> None:
        if not self._worlds:
            raise PlanningError("The agent has no goal yet. Call reset(goal) first.")

    def _sensed(self, proprio: Array | None, count: int, what: str) -> Array | None:
        """What the agent senses of itself with each of ``count`` images, (count, P); None if nobody reads it."""
        size = self.policy.proprio_dim
        return checked_proprio(proprio, (count, size), what) if size else None

    def _fitted(self, images: Array, what: str) -> Array:
        """Images (S, S, 3) or (N, S, S, 3) as a copy of the method's size, (N, R, R, 3): the caller's may change."""
        return resized(_checked_images(images, what), self.policy.image_size).copy()


def _alone(proprio: Array | None) -> Array | None:
    """(P,) -> (1, P)."""
    return None if proprio is None else np.asarray(proprio)[None]


def _checked_images(images: Array, what: str) -> Array:
    """Images (S, S, 3) or (N, S, S, 3) -> (N, S, S, 3)."""
    pixels = np.asarray(images)
    square = pixels.ndim in (3, 4) and pixels.shape[-3] == pixels.shape[-2] and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not square or 0 in pixels.shape:
        raise PlanningError(
            f"The {what} must be an image of uint8, square and with colours last, (S, S, 3), or one for each of N "
            f"worlds, (N, S, S, 3); got {pixels.dtype} of shape {pixels.shape}."
        )
    return pixels if pixels.ndim == 4 else pixels[None]


def _checked_bounds(bounds: Any, action_dim: int) -> tuple[Array, Array]:
    """The bounds (action_dim,) of an action space, or of a pair."""
    low, high = (bounds.low, bounds.high) if hasattr(bounds, "low") else bounds
    low, high = (np.asarray(bound, np.float32) for bound in (low, high))
    if any(bound.shape not in ((), (action_dim,)) for bound in (low, high)) or not (low <= high).all():
        raise PlanningError(
            f"bounds must be an action space of {action_dim} numbers, or (low, high) of that size, low <= high; got "
            f"{low} and {high}."
        )
    return low, high
