"""Run a policy through evaluation episodes and record what happened.

From each pair's start a policy has ``budget`` primitive actions, and uses them all: the strict protocol asks what it
does after reaching the goal (docs/evaluation.md). Episodes advance in groups so that a planner can serve a group in one
batch, but each draws from random streams of its own: its outcome does not depend on its companions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lewm import checkpoint
from lewm.checked import to_dict
from lewm.config import Config
from lewm.envs.registry import EnvEntry, env_entry
from lewm.errors import PlanningError
from lewm.evaluate.journal import Journal, Notes
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.policies import Episode, PlanningPolicy, Policy, RandomPolicy
from lewm.evaluate.results import Evaluation, Times, versions
from lewm.evaluate.worker import ProcessWorlds
from lewm.evaluate.worlds import LocalWorlds, Order, Setting, Worlds
from lewm.model.world_model import LeWM
from lewm.plan.planner import Planner
from lewm.types import EpisodeResult, EpisodeSpec, ProgressCallback


def run_episodes(
    policy: Policy,
    env_name: str,
    specs: Sequence[EpisodeSpec],
    *,
    resolution: int,
    frame_skip: int,
    budget: int,
    workers: int = 1,
    group_size: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> list[EpisodeResult]:
    """Run every episode to the end of its budget; results in the order of ``specs``.

    workers: processes that hold the environments, 1: this one.  group_size: episodes that are decided upon together,
    None: all. While one group is decided upon, the worker processes execute what was decided for the others.
    """
    setting = Setting(env_entry(env_name), resolution, frame_skip, policy.history)
    executing: deque[list[Episode]] = deque()
    decided: list[int] = []  # actions

    def decide(worlds: Worlds, group: Sequence[Episode]) -> None:
        if active := [episode for episode in group if episode.steps < budget]:
            actions = policy.decide(active)
            orders = [Order(e.number, a, budget - e.steps) for e, a in zip(active, actions, strict=True)]
            worlds.submit(orders)
            executing.append(active)
            decided.extend(min(len(order.actions), order.budget) for order in orders)
            if (
                on_progress
            ):  # deciding is what takes the time, and the first decisions come before anything is collected
                on_progress(sum(decided), budget * len(specs))

    with contextlib.closing(_open_worlds(setting, specs, workers)) as worlds:
        episodes = [
            Episode(number, spec, opening, policy.history, frame_skip)
            for number, (spec, opening) in enumerate(zip(specs, worlds.openings, strict=True))
        ]
        size = group_size or len(episodes)
        for first in range(0, len(episodes), size):
            decide(worlds, episodes[first : first + size])
        while executing:
            group = executing.popleft()
            for episode, happened in zip(group, worlds.collect(), strict=True):
                episode.add(happened)
            decide(worlds, group)
    return [episode.result() for episode in episodes]


def evaluate(
    model: LeWM, config: Config, on_progress: ProgressCallback | None = None, notes: Notes | None = None
) -> Evaluation:
    """Evaluate a model on its environment's manifest with the settings of ``config``.

    Uses config.env, .seed, .plan and .eval; frames are rendered at the model's resolution. What cannot work is refused
    before anything starts. notes: what ``open_journal`` gives, for an evaluation that may be interrupted.
    """
    entry = env_entry(config.env)
    _check_fit(model, config, entry)
    manifest = load_manifest(config.env, config.eval.manifest)
    specs = manifest.first(config.eval.episodes)
    planner = Planner(model, config=config.plan)
    policy = PlanningPolicy(planner, config.seed, notes)
    shared = {
        "resolution": model.image_size,
        "frame_skip": model.frame_skip,
        "budget": config.eval.budget,
        "workers": _worker_count(config.eval.workers, entry, len(specs)),
        "group_size": _group_size(planner.batch_size, entry, len(specs)),
    }
    known, earlier = len(policy.plan_seconds), sum(policy.plan_seconds)

    def report(done: int, total: int) -> None:
        if on_progress and len(policy.plan_seconds) > known:  # what was known already would make time look short
            on_progress(done, total)

    started = time.perf_counter()
    results = run_episodes(policy, config.env, specs, on_progress=report, **shared)
    times = Times(earlier + time.perf_counter() - started, tuple(policy.plan_seconds))
    random_results = run_episodes(RandomPolicy(config.seed), config.env, specs, **shared)
    return Evaluation(config, manifest.goal_offset, tuple(results), tuple(random_results), times, _device_name(model))


def open_journal(out: Path, model: LeWM, config: Config) -> Journal:
    """The notes of an evaluation whose results will be the file ``out``: OUT.partial, beside it.

    Close it whatever happens, and remove it when ``out`` is written.
    """
    specs = load_manifest(config.env, config.eval.manifest).first(config.eval.episodes)
    pairs = json.dumps([[spec.index, spec.start, spec.goal] for spec in specs])
    weights = model.state_dict() | ({} if model.recorded_actions is None else {"recorded": model.recorded_actions})
    question = {
        "versions": versions(),
        "device": _device_name(model),
        "weights": checkpoint.weights_digest(weights),
        "environment": env_entry(config.env).gym_id,
        "pairs": hashlib.sha256(pairs.encode()).hexdigest(),
        "seed": config.seed,
        "plan": to_dict(config.plan),
        "eval": to_dict(replace(config.eval, workers=0)),  # their number changes nothing
    }
    return Journal(out.with_name(f"{out.name}.partial"), question)


def _device_name(model: LeWM) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)


def _open_worlds(setting: Setting, specs: Sequence[EpisodeSpec], workers: int) -> Worlds:
    return LocalWorlds(setting, specs) if workers == 1 else ProcessWorlds(setting, specs, workers)


def _worker_count(asked: int, entry: EnvEntry, episodes: int) -> int:
    """Processes to use: as many as asked for; unasked, only a slow simulator is worth the talking between them."""
    unasked = (os.cpu_count() or 1) if entry.slow else 1
    return min(asked or unasked, episodes)


def _group_size(batch_size: int, entry: EnvEntry, episodes: int) -> int:
    """Episodes to plan together: a batch; of a slow simulator at most half of them, so that the others can move.

    Never a function of the number of workers: on a GPU, results depend on the batch in their last digits.
    """
    return min(batch_size, -(-episodes // 2)) if entry.slow else batch_size


def _check_fit(model: LeWM, config: Config, entry: EnvEntry) -> None:
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
