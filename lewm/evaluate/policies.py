"""Episodes as policies see them, and the policies: planning with a world model, and acting at random."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lewm.evaluate.journal import Note, Notes
from lewm.evaluate.worlds import Happened, Opening
from lewm.plan.inputs import Request
from lewm.plan.planner import Memory, Planner
from lewm.plan.schedule import Turn, next_turn
from lewm.rng import derive_seed, stream
from lewm.types import Array, EpisodeResult, EpisodeSpec, Plan

# Second element of the keys below: what a random stream is for.
_PLANNING, _RANDOM_POLICY = 1, 2


class Episode:
    """The record of one episode in progress; its environment may live in another process."""

    def __init__(self, number: int, spec: EpisodeSpec, opening: Opening, history: int, frame_skip: int) -> None:
        self.number, self.spec, self.opening, self.frame_skip = number, spec, opening, frame_skip
        self.memory = Memory(opening.frame, max(1, history))
        self.states = [opening.state]
        self.reached: list[bool] = []
        self.plans: list[Plan] = []
        self.last_executed = 0

    @property
    def steps(self) -> int:
        """Primitive actions executed so far."""
        return len(self.reached)

    def add(self, happened: Happened) -> None:
        """Write down what the last actions did."""
        self.last_executed = len(happened.states)
        self.states.extend(happened.states)
        self.reached.extend(happened.reached)
        for block, frame in zip(happened.blocks, happened.frames, strict=True):
            self.memory.add(block, frame)

    def result(self) -> EpisodeResult:
        """What happened so far."""
        return EpisodeResult(
            self.spec.index,
            np.array(self.spec.goal),
            self.opening.solved,
            np.array(self.reached),
            np.stack(self.states),
            tuple(self.plans),
        )


class Policy(Protocol):
    """Chooses what to execute next in each of several episodes. history: the frames it looks at, 0: none."""

    history: int

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        """Raw actions (n*K, action_dim) for each episode."""
        ...


class PlanningPolicy:
    """Model-predictive control with a world model.

    notes: the plans that it has made, and those that it need not make again.
    """

    def __init__(self, planner: Planner, seed: int, notes: Notes | None = None) -> None:
        self.planner, self.seed = planner, seed
        self.history = planner.model.history
        self.notes = notes or Notes()

    @property
    def plan_seconds(self) -> list[float]:
        """The time each plan took; where several were made together, their share of it."""
        return self.notes.seconds

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        turns = [next_turn(self.planner.config, e.steps // e.frame_skip) for e in episodes]
        places = [(episode.spec.index, len(episode.plans)) for episode in episodes]
        missing = [i for i, place in enumerate(places) if place not in self.notes.by_place]
        if missing:
            started = time.perf_counter()
            plans = self.planner.plan_many([self._request(episodes[i], turns[i]) for i in missing])
            seconds = (time.perf_counter() - started) / len(plans)
            self.notes.add({places[i]: Note(plan, seconds) for i, plan in zip(missing, plans, strict=True)})
        actions = []
        for episode, turn, place in zip(episodes, turns, places, strict=True):
            plan = self.notes.by_place[place].plan
            episode.plans.append(plan)
            actions.append(plan.actions[: turn.execute * episode.frame_skip])
        return actions

    def _request(self, episode: Episode, turn: Turn) -> Request:
        key = derive_seed(self.seed, _PLANNING, episode.spec.index, len(episode.plans))
        start = None
        if self.planner.config.warm_start and episode.plans:
            start = episode.plans[-1].actions[episode.last_executed :]
        return Request(episode.memory.context(), episode.opening.goal_image, key, turn.horizon, start)


class RandomPolicy:
    """Uniform actions: the floor that any method has to leave behind."""

    history = 0

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        actions = []
        for episode in episodes:
            rng = stream(self.seed, _RANDOM_POLICY, episode.spec.index, episode.steps)
            low, high = episode.opening.low, episode.opening.high
            actions.append(rng.uniform(low, high, (episode.frame_skip, *low.shape)))
        return actions
