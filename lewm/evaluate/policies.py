"""What evaluation adds to an agent: plans that are noted; and the floor and the ceiling of every figure.

The floor is acting at random. The ceiling is doing what was once done: it led from the start to the goal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lewm.evaluate.episodes import Episode
from lewm.evaluate.journal import Note, Notes
from lewm.plan.agent import Agent
from lewm.plan.inputs import Request
from lewm.plan.policy import PlanMaker
from lewm.rng import stream
from lewm.types import Array, Plan

_RANDOM_POLICY = 2  # second element of a random stream's key; ``lewm.plan.policy`` has the first
RANDOM_BLOCK = 5  # actions that are drawn together


class AgentPolicy:
    """An agent in the worlds of an evaluation.

    sense: what it senses of itself in states (n, state_dim): (n, P); only for policies that read it.
    """

    def __init__(self, agent: Agent, sense: Callable[[Array], Array] | None = None) -> None:
        self.agent = agent
        self._sense = sense if agent.policy.proprio_dim else None
        self.history, self.frame_skip = agent.policy.history, agent.policy.frame_skip
        self.image_size = agent.policy.image_size

    def begin(self, episodes: Sequence[Episode]) -> None:
        openings = [episode.opening for episode in episodes]
        numbers = [episode.spec.index for episode in episodes]
        goals = np.stack([opening.goal_image for opening in openings])
        self.agent.reset(goals, numbers, self._sensed([episode.spec.goal for episode in episodes]))
        for episode in episodes:
            opening = episode.opening
            self.agent.observe(episode.number, opening.frame[None], proprio=self._sensed([opening.state]))

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        for episode in episodes:
            if effect := episode.effect:
                blocks = effect.executed.reshape(-1, self.frame_skip, self.agent.policy.action_dim)
                seen = effect.states[self.frame_skip - 1 :: self.frame_skip][-len(effect.frames) :]
                self.agent.observe(episode.number, effect.frames, blocks, self._sensed(seen))
        actions = self.agent.decide([episode.number for episode in episodes])
        for episode in episodes:
            if plan := self.agent.plan_of(episode.number):
                episode.plans.append(plan)
        return actions

    def _sensed(self, states: Sequence[Any] | Array) -> Array | None:
        return None if self._sense is None else self._sense(np.array(states))


class NotedPlanner:
    """A planner that makes no plan twice. notes: the plans that it has made, and those that it need not make again."""

    def __init__(self, planner: PlanMaker, notes: Notes) -> None:
        self.planner, self.notes = planner, notes
        self.model, self.config = planner.model, planner.config

    @property
    def batch_size(self) -> int:
        return self.planner.batch_size

    def plan_many(self, requests: Sequence[Request]) -> list[Plan]:
        """The plans of these requests, by their places. Those that are made together share their time equally."""
        if missing := [request for request in requests if request.place not in self.notes.by_place]:
            started = time.perf_counter()
            plans = self.planner.plan_many(missing)
            seconds = (time.perf_counter() - started) / len(plans)
            made = zip(missing, plans, strict=True)
            self.notes.add({request.place: Note(plan, seconds) for request, plan in made})
        return [self.notes.by_place[request.place].plan for request in requests]


class RandomPolicy:
    """Uniform actions. It looks at nothing, and draws blocks of its own size, whatever it is compared with."""

    history, frame_skip, image_size = 0, RANDOM_BLOCK, 8

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def begin(self, episodes: Sequence[Episode]) -> None:
        """It remembers nothing."""

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        actions = []
        for episode in episodes:
            rng = stream(self.seed, _RANDOM_POLICY, episode.spec.index, episode.steps)
            low, high = episode.opening.low, episode.opening.high
            actions.append(rng.uniform(low, high, (self.frame_skip, *low.shape)))
        return actions


class RecordedPolicy:
    """The actions that were once executed, and nothing after them. It looks at nothing.

    actions: raw, (pairs, T, action_dim), by the index of a pair.
    """

    history, frame_skip, image_size = 0, 1, 8

    def __init__(self, actions: Array, budget: int) -> None:
        padding = ((0, 0), (0, max(0, budget - actions.shape[1])), (0, 0))
        self._actions = np.pad(actions, padding)

    def begin(self, episodes: Sequence[Episode]) -> None:
        """It remembers everything."""

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        return [self._actions[episode.spec.index] for episode in episodes]
