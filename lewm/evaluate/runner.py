"""Evaluate a method on its environment's frozen pairs, beside the random policy."""

from __future__ import annotations

import time

from lewm.config import Config
from lewm.envs.registry import EnvEntry, env_entry, env_type
from lewm.errors import EnvError, PlanningError
from lewm.evaluate.episodes import Task, run_episodes
from lewm.evaluate.floor import random_outcomes, recorded_outcomes
from lewm.evaluate.flops import plan_flops
from lewm.evaluate.journal import Notes
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.policies import AgentPolicy, NotedPlanner
from lewm.evaluate.question import device_name
from lewm.evaluate.results import Evaluation, Times
from lewm.machine import cores
from lewm.methods.base import Method
from lewm.plan.agent import Agent
from lewm.plan.policy import PlanningPolicy, policy_for
from lewm.types import Actor, ProgressCallback, WorldModel


def evaluate(
    method: Method | WorldModel | Actor,
    config: Config,
    on_progress: ProgressCallback | None = None,
    notes: Notes | None = None,
    elsewhere: bool = False,
) -> Evaluation:
    """Evaluate a method on its environment's manifest with the settings of ``config``.

    Uses config.env, .seed, .plan and .eval; frames are rendered at the method's resolution. What cannot work is refused
    before anything starts. notes: plans that need not be made again, and where new ones go. elsewhere: whether
    ``config.env`` may be another world than the one that the method was trained in.
    """
    entry, notes = env_entry(config.env), notes or Notes()
    _check_world(method, entry, elsewhere)
    _check_proprio(method, entry)
    manifest = load_manifest(config.env, config.eval.manifest)
    specs = manifest.first(config.eval.episodes)
    agent = _agent(method, config, notes)
    workers = _worker_count(config.eval.workers, entry, len(specs))
    group_size = _group_size(agent.policy.batch_size, entry, len(specs))
    task = Task(config.env, specs, config.eval.budget, workers, group_size)
    known, earlier, started = len(notes.by_place), sum(notes.seconds), time.perf_counter()

    def report(done: int, total: int) -> None:
        if on_progress and (not known or len(notes.by_place) > known):  # known plans would make time look short
            on_progress(done, total)

    policy = AgentPolicy(agent, lambda states: env_type(config.env).proprio(states))
    results = run_episodes(policy, task, report)
    if all(result.failure for result in results):  # not bad luck
        raise EnvError(f"Every episode failed. The first: {results[0].failure}")
    times = Times(earlier + time.perf_counter() - started, tuple(notes.seconds))
    floor = random_outcomes(task, config.seed)
    ceiling = None if manifest.actions is None else recorded_outcomes(task, manifest.actions)
    what = config, manifest.goal_offset, tuple(results), floor, times, device_name(method)
    return Evaluation(*what, recorded_results=ceiling, flops_per_plan=_flops(agent))


def _agent(method: Method | WorldModel | Actor, config: Config, notes: Notes) -> Agent:
    """The agent that is evaluated, whose plans are noted."""
    policy = policy_for(method, config.plan)
    if not isinstance(policy, PlanningPolicy):
        return Agent(policy)
    if config.plan.horizon * policy.frame_skip > config.eval.budget:
        raise PlanningError(
            f"A plan of {config.plan.horizon} blocks of {policy.frame_skip} steps does not fit into a budget of "
            f"{config.eval.budget} steps. Lower plan.horizon or raise eval.budget."
        )
    return Agent(NotedPlanner(policy.planner, notes), seed=config.seed)


def _flops(agent: Agent) -> float | None:
    """What a plan of the agent costs; None if it makes none, or if a clock stops its searches."""
    if not isinstance(agent.policy, PlanningPolicy) or agent.policy.planner.config.budget_ms is not None:
        return None
    return plan_flops(agent.policy.planner.model, agent.policy.planner.config)


def _worker_count(asked: int, entry: EnvEntry, episodes: int) -> int:
    """Processes to use: as many as asked for; unasked, only a slow simulator is worth the talking between them."""
    unasked = cores() if entry.slow else 1
    return min(asked or unasked, episodes)


def _group_size(batch_size: int, entry: EnvEntry, episodes: int) -> int:
    """Episodes to plan together: a batch; of a slow simulator at most half of them, so that the others can move.

    Never a function of the number of workers: on a GPU, results depend on the batch in their last digits.
    """
    return min(batch_size, -(-episodes // 2)) if entry.slow else batch_size


def _check_world(method: Method | WorldModel | Actor, entry: EnvEntry, elsewhere: bool) -> None:
    world = method.facts.environment if isinstance(method, Method) else None
    if world is not None and not elsewhere and env_entry(world) != entry:
        remedy = "Say so with elsewhere=True (--env on the command line) if that is what you mean"
        raise PlanningError(f"The model was trained in {world}, and {entry.gym_id} is another world. {remedy}.")
    if entry.action_dim != method.action_dim:
        raise PlanningError(
            f"{entry.gym_id} has {entry.action_dim}-dimensional actions, but the model was trained with "
            f"{method.action_dim}-dimensional ones. Choose the model's own environment with --env."
        )


def _check_proprio(method: Method | WorldModel | Actor, entry: EnvEntry) -> None:
    """What the model reads of the agent's own is what the agent senses there, as far as their numbers tell."""
    wanted: int = getattr(method, "proprio_dim", 0)
    given = env_type(entry.gym_id).proprio_names if wanted else ()
    if wanted != len(given):
        there = f"{len(given)}: {', '.join(given)}" if given else "none"
        raise PlanningError(
            f"The model reads {wanted} numbers of what the agent senses of itself, and {entry.gym_id} gives {there}. "
            "Train on a dataset that was collected there, or without proprioception."
        )
