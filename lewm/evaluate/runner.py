"""Run a policy through evaluation episodes and record what happened.

Protocol (paper): from each pair's start, at most ``budget`` primitive actions; the episode succeeds when the goal is
reached after any of them. All episodes advance together so that a planner can serve them in one batch, but each
draws from random streams of its own: the outcome of an episode does not depend on its companions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from lewm.checkpoint import write_json
from lewm.config import Config, to_dict
from lewm.envs.base import WorldEnv
from lewm.envs.registry import env_entry, make_env
from lewm.errors import PlanningError
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.stats import Rate
from lewm.model.world_model import LeWM
from lewm.plan.mpc import Memory, Planner
from lewm.rng import derive_seed, stream
from lewm.types import Array, EpisodeResult, EpisodeSpec, Plan, ProgressCallback
from lewm.version import __version__

# Second element of the keys below: what a random stream is for.
_PLANNING, _RANDOM_POLICY = 1, 2


class Episode:
    """One episode in progress. Frames are rendered at block boundaries only, where a plan may need them."""

    def __init__(self, spec: EpisodeSpec, env: WorldEnv, history: int, frame_skip: int) -> None:
        self.spec, self.env, self.frame_skip = spec, env, frame_skip
        env.reset(seed=spec.index)
        env.set_state(np.array(spec.start))
        env.set_goal(np.array(spec.goal))
        self.solved_at_start = env.goal_reached()
        self.goal_image = env.render_states(np.array([spec.goal]))[0]
        self.memory = Memory(env.render(), history)
        self.states = [env.state]
        self.first_success: int | None = None
        self.plans: list[Plan] = []

    @property
    def steps(self) -> int:
        """Primitive actions executed so far."""
        return len(self.states) - 1

    def execute(self, actions: Array, budget: int) -> None:
        """Execute raw actions (n*K, action_dim), block by block, until done or out of budget."""
        # Clipped here, as the environment would: a plan's context is what was done, not what was wished.
        space = self.env.action_space
        blocks = np.clip(actions, space.low, space.high).reshape(-1, self.frame_skip, *space.shape)
        for block in blocks:
            for action in block[: budget - self.steps]:
                self.env.step(action)
                self.states.append(self.env.state)
                if self.env.goal_reached():
                    self.first_success = self.steps
                    return
            if self.steps == budget:
                return
            self.memory.add(block, self.env.render())

    def result(self) -> EpisodeResult:
        """What happened so far."""
        return EpisodeResult(
            self.spec.index,
            np.array(self.spec.goal),
            self.solved_at_start,
            self.first_success,
            np.stack(self.states),
            tuple(self.plans),
        )


class Policy(Protocol):
    """Chooses what to execute next in each of several episodes."""

    history: int

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        """Raw actions (n*K, action_dim) for each episode."""
        ...


class PlanningPolicy:
    """Model-predictive control with a world model."""

    def __init__(self, planner: Planner, seed: int) -> None:
        self.planner, self.seed = planner, seed
        self.history = planner.model.history
        config = planner.config
        self._executed_steps = (config.execute or config.horizon) * planner.model.frame_skip

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        contexts = [episode.memory.context() for episode in episodes]
        goals = [episode.goal_image for episode in episodes]
        keys = [derive_seed(self.seed, _PLANNING, e.spec.index, len(e.plans)) for e in episodes]
        plans = self.planner.plan_many(contexts, goals, keys)
        for episode, plan in zip(episodes, plans, strict=True):
            episode.plans.append(plan)
        return [plan.actions[: self._executed_steps] for plan in plans]


class RandomPolicy:
    """Uniform actions: the floor that any method has to leave behind."""

    history = 1

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        actions = []
        for episode in episodes:
            rng = stream(self.seed, _RANDOM_POLICY, episode.spec.index, episode.steps)
            space = episode.env.action_space
            actions.append(rng.uniform(space.low, space.high, (episode.frame_skip, *space.shape)))
        return actions


def run_episodes(
    policy: Policy,
    env_name: str,
    specs: Sequence[EpisodeSpec],
    *,
    resolution: int,
    frame_skip: int,
    budget: int,
    on_progress: ProgressCallback | None = None,
) -> list[EpisodeResult]:
    """Run every episode to its end; results in the order of ``specs``."""
    episodes = [Episode(s, make_env(env_name, resolution), policy.history, frame_skip) for s in specs]
    try:
        while active := [e for e in episodes if e.first_success is None and e.steps < budget]:
            for episode, actions in zip(active, policy.decide(active), strict=True):
                episode.execute(actions, budget)
            if on_progress:
                done = sum(budget if e.first_success is not None else e.steps for e in episodes)
                on_progress(done, budget * len(episodes))
    finally:
        for episode in episodes:
            episode.env.close()
    return [episode.result() for episode in episodes]


@dataclass(frozen=True)
class Evaluation:
    """A model's results on a manifest, beside the random policy's on the same pairs."""

    config: Config
    goal_offset: int
    results: tuple[EpisodeResult, ...]
    random_results: tuple[EpisodeResult, ...]

    def rates(self) -> dict[str, Rate]:
        """The figures of the final table, by their labels."""
        total = len(self.results)
        return {
            "planning with the world model": Rate(sum(r.success for r in self.results), total),
            "random policy": Rate(sum(r.success for r in self.random_results), total),
            "already solved at the start": Rate(sum(r.solved_at_start for r in self.results), total),
        }

    def save(self, path: Path) -> None:
        """Write everything but the states as JSON, atomically."""
        document = {
            "lewm_version": __version__,
            "torch_version": torch.__version__,
            "goal_offset": self.goal_offset,
            "rates": {name: rate.to_dict() for name, rate in self.rates().items()},
            "episodes": [
                {
                    "index": result.index,
                    "success": result.success,
                    "first_success": result.first_success,
                    "solved_at_start": result.solved_at_start,
                    "random_policy_success": random.success,
                    "plan_costs": [plan.cost for plan in result.plans],
                }
                for result, random in zip(self.results, self.random_results, strict=True)
            ],
            "config": to_dict(self.config),
        }
        write_json(path, document)


def evaluate(model: LeWM, config: Config, on_progress: ProgressCallback | None = None) -> Evaluation:
    """Evaluate a model on its environment's manifest with the settings of ``config``.

    Uses config.env, .seed, .plan and .eval; frames are rendered at the model's resolution.
    """
    entry = env_entry(config.env)
    if entry.action_dim != model.action_dim:
        raise PlanningError(
            f"{entry.gym_id} has {entry.action_dim}-dimensional actions, but the model was trained with "
            f"{model.action_dim}-dimensional ones. Choose the model's own environment with --env."
        )
    if config.plan.horizon * model.frame_skip > config.eval.budget:
        raise PlanningError(
            f"A plan of {config.plan.horizon} blocks of {model.frame_skip} steps does not fit into a budget of "
            f"{config.eval.budget} steps. Lower plan.horizon or raise eval.budget."
        )
    manifest = load_manifest(config.env)
    specs = manifest.first(config.eval.episodes)
    shared = {"resolution": model.image_size, "frame_skip": model.frame_skip, "budget": config.eval.budget}
    policy = PlanningPolicy(Planner(model, config=config.plan), config.seed)
    results = run_episodes(policy, config.env, specs, on_progress=on_progress, **shared)
    random_results = run_episodes(RandomPolicy(config.seed), config.env, specs, **shared)
    return Evaluation(config, manifest.goal_offset, tuple(results), tuple(random_results))
