"""Run a policy through evaluation episodes and record what happened.

From each pair's start a policy has ``budget`` primitive actions, and uses them all: the strict protocol asks what it
does after reaching the goal (docs/guide/evaluate.md). Episodes advance in groups so that a planner can serve a group in
one batch, but each draws from random streams of its own: its outcome does not depend on its companions.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lewm.envs.registry import env_entry
from lewm.evaluate.worker import ProcessWorlds
from lewm.evaluate.worlds import Effect, LocalWorlds, Opening, Order, Setting, Worlds
from lewm.types import Array, EpisodeResult, EpisodeSpec, Plan, ProgressCallback


@dataclass(frozen=True)
class Task:
    """Episodes to run in one environment, and how the work is divided, on which no outcome depends.

    budget: primitive actions of each.  workers: processes that hold the environments, 1: this one.
    group_size: episodes that are decided upon together, None: all. While one group is decided upon, the worker
    processes execute what was decided for the others.
    """

    env: str
    specs: Sequence[EpisodeSpec]
    budget: int
    workers: int = 1
    group_size: int | None = None


class Episode:
    """The record of one episode in progress; its environment may live in another process.

    plans: of a policy that plans.  effect: what the last actions did, None before the first.
    failure: of its simulator, which ends the episode.
    """

    def __init__(self, number: int, spec: EpisodeSpec, opening: Opening) -> None:
        self.number, self.spec, self.opening = number, spec, opening
        self.states = [opening.state]
        self.reached: list[bool] = []
        self.plans: list[Plan] = []
        self.effect: Effect | None = None
        self.failure: str | None = None

    @property
    def steps(self) -> int:
        """Primitive actions executed so far; all of them, if the simulator has failed."""
        return len(self.reached)

    @property
    def given_up(self) -> int:
        """Of the last effect: primitive actions that nobody will decide upon, as the simulator has failed."""
        return len(self.effect.reached) - len(self.effect.executed) if self.effect else 0

    def add(self, effect: Effect) -> None:
        """Write down what the last actions did."""
        self.effect = effect
        self.states.extend(effect.states)
        self.reached.extend(effect.reached)
        if effect.failure is not None:
            self.failure = f"its simulator failed after {len(self.states) - 1} steps: {effect.failure}"
            self.reached = [False] * len(self.reached)

    def result(self) -> EpisodeResult:
        """What happened so far."""
        index, start_solved, reached = self.spec.index, self.opening.solved, np.array(self.reached)
        goal, states = np.array(self.spec.goal), np.stack(self.states)
        return EpisodeResult(index, start_solved, reached, goal, states, tuple(self.plans), failure=self.failure)


class Policy(Protocol):
    """Chooses what to execute next in each of several episodes.

    history: the frames that it looks at, 0: none.  frame_skip: actions from one to the next.  image_size: of a frame.
    """

    history: int
    frame_skip: int
    image_size: int

    def begin(self, episodes: Sequence[Episode]) -> None:
        """All episodes of a run, before anything is decided."""
        ...

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        """Raw actions (n*K, action_dim) for each of some of them."""
        ...


def run_episodes(policy: Policy, task: Task, on_progress: ProgressCallback | None = None) -> list[EpisodeResult]:
    """Run every episode to the end of its budget; results in the order of the task's specs."""
    setting = Setting(env_entry(task.env), policy.image_size, policy.frame_skip, policy.history)
    local = task.workers == 1
    opened = LocalWorlds(setting, task.specs) if local else ProcessWorlds(setting, task.specs, task.workers)
    with contextlib.closing(opened) as worlds:
        pairs = zip(task.specs, worlds.openings, strict=True)
        episodes = [Episode(number, spec, opening) for number, (spec, opening) in enumerate(pairs)]
        policy.begin(episodes)
        size = task.group_size or len(episodes)
        fresh = deque(episodes[first : first + size] for first in range(0, len(episodes), size))
        executing: deque[list[Episode]] = deque()
        decided = 0
        while fresh or executing:
            group = fresh.popleft() if fresh else _collected(worlds, executing.popleft())
            decided += sum(episode.given_up for episode in group)
            if active := [episode for episode in group if episode.steps < task.budget]:
                decided += _submit(policy, worlds, active, task.budget)
                executing.append(active)
                if on_progress:  # now: deciding takes the time, and comes before anything is collected
                    on_progress(decided, task.budget * len(episodes))
    return [episode.result() for episode in episodes]


def _submit(policy: Policy, worlds: Worlds, active: Sequence[Episode], budget: int) -> int:
    """Decide what some episodes do next, and have it executed; returns how many actions that are."""
    actions = policy.decide(active)
    orders = [Order(e.number, chunk, budget - e.steps) for e, chunk in zip(active, actions, strict=True)]
    worlds.submit(orders)
    return sum(min(len(order.actions), order.budget) for order in orders)


def _collected(worlds: Worlds, group: list[Episode]) -> list[Episode]:
    """The group whose orders were submitted first, with what they did."""
    for episode, effect in zip(group, worlds.collect(), strict=True):
        episode.add(effect)
    return group
