"""The environments of evaluation episodes. Nothing here knows of models or plans, nor imports torch.

A runner submits orders for some of the episodes and collects what happened, first come first served. In between it can
plan for others: ``worker.py`` offers the same over several processes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lewm.envs.base import WorldEnv
from lewm.envs.registry import EnvEntry, make_env
from lewm.errors import EnvError, LewmError
from lewm.types import Array, EpisodeSpec


@dataclass(frozen=True)
class Setting:
    """What all episodes share. history: the frames that a policy looks at, 0: none."""

    entry: EnvEntry
    resolution: int
    frame_skip: int
    history: int


@dataclass(frozen=True)
class Opening:
    """How an episode begins. frame, goal_image: uint8 (R, R, 3).  low, high: bounds of an action (action_dim,)."""

    state: Array
    solved: bool
    frame: Array
    goal_image: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Order:
    """Raw actions (n*K, action_dim) for episode ``number``, of which at most ``budget`` are executed."""

    number: int
    actions: Array
    budget: int


@dataclass(frozen=True)
class Effect:
    """What n actions did: states (n, state_dim) and whether each counts as the goal, bool (n,).

    executed: the actions themselves, (n, action_dim).  frames: (m, R, R, 3), after the last m <= history blocks of
    them; none at the end of the budget, where nobody looks any more.

    failure: what the simulator said when it gave up, None: it did not. Then there are fewer states, no frames, and
    nothing is reached until the end of the budget.
    """

    states: Array
    reached: Array
    executed: Array
    frames: Array
    failure: str | None = None


class Worlds(Protocol):
    """Environments of several episodes, numbered from 0, that execute orders."""

    openings: list[Opening]

    def submit(self, orders: Sequence[Order]) -> None:
        """Have orders executed, one per episode."""
        ...

    def collect(self) -> list[Effect]:
        """What the orders did that were submitted first of those not collected yet."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class World:
    """The environment of one episode."""

    setting: Setting
    env: WorldEnv

    def open(self, spec: EpisodeSpec) -> Opening:
        """Go to the start of the episode. A policy that looks at nothing is shown black, and no renderer is made."""
        env = self.env
        env.reset(seed=spec.index)
        env.set_state(np.array(spec.start))
        env.set_goal(np.array(spec.goal))
        frame = goal_image = np.zeros((env.resolution, env.resolution, 3), np.uint8)
        if self.setting.history:
            frame, goal_image = env.render_states(np.stack([env.state, env.goal]))
        space = env.action_space
        return Opening(env.state, env.goal_reached(), frame, goal_image, space.low, space.high)

    def execute(self, order: Order) -> Effect:
        """Execute actions. Frames are drawn after the blocks that a policy will look back to, and nowhere else."""
        env, skip = self.env, self.setting.frame_skip
        # Clipped here, as the environment would: a plan's context is what was done, not what was wished.
        actions = np.clip(order.actions[: order.budget], env.action_space.low, env.action_space.high)
        if not np.isfinite(actions).all():  # for which the simulator is not to blame
            raise EnvError(f"An action must be finite, got {actions[~np.isfinite(actions).all(axis=1)][0]}.")
        goes_on = len(actions) < order.budget
        first_seen = max(0, len(actions) - self.setting.history * skip) if goes_on else len(actions)
        states, reached, frames = [], [], []
        try:
            for done, action in enumerate(actions, start=1):
                env.step(action)
                state = env.state
                if not np.isfinite(state).all():
                    raise EnvError(f"its state is {state}")
                states.append(state)
                reached.append(env.goal_reached())
                if done > first_seen and done % skip == 0:
                    frames.append(env.render())
        except MemoryError:
            raise
        except Exception as error:  # one episode that cannot go on is no reason to lose the others
            what = str(error) if isinstance(error, LewmError) else repr(error)
            nothing = np.zeros(order.budget, bool)
            return Effect(np.array(states), nothing, actions, np.array([]), failure=" ".join(what.split()))
        return Effect(np.stack(states), np.array(reached), actions, np.array(frames))


class LocalWorlds:
    """Environments in this process: orders are executed when they are submitted."""

    def __init__(self, setting: Setting, specs: Sequence[EpisodeSpec]) -> None:
        with contextlib.ExitStack() as stack:
            made = (make_env(setting.entry.name, setting.resolution) for _ in specs)
            self._worlds = [World(setting, stack.enter_context(contextlib.closing(env))) for env in made]
            self.openings = [world.open(spec) for world, spec in zip(self._worlds, specs, strict=True)]
            self._stack = stack.pop_all()
        self._done: deque[list[Effect]] = deque()

    def submit(self, orders: Sequence[Order]) -> None:
        self._done.append([self._worlds[order.number].execute(order) for order in orders])

    def collect(self) -> list[Effect]:
        return self._done.popleft()

    def close(self) -> None:
        self._stack.close()
