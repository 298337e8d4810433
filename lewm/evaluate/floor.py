"""Floor and ceiling of every figure, simulated once for each set of pairs.

The floor is what uniform random actions reach, the ceiling what the actions do that once led from start to goal.

What is remembered is a small file in a folder for such things: ``LEWM_CACHE``, or else ``lewm`` in the user's cache. It
holds the question that it answers; a file that is damaged or answers another one is not believed, and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from lewm.envs.registry import env_entry
from lewm.errors import FileError
from lewm.evaluate.episodes import Policy, Task, run_episodes
from lewm.evaluate.manifest import pairs_digest
from lewm.evaluate.policies import RANDOM_BLOCK, RandomPolicy, RecordedPolicy
from lewm.evaluate.question import environment_identity, simulator_versions
from lewm.files import json_digest, read_json, write_json
from lewm.types import Array, Outcome

CACHE = "LEWM_CACHE"  # the environment variable


def random_outcomes(task: Task, seed: int) -> tuple[Outcome, ...]:
    """How the task's episodes go with random actions."""
    return _remembered("random_policy", RandomPolicy(seed), task, {"seed": seed, "block": RANDOM_BLOCK})


def recorded_outcomes(task: Task, actions: Array) -> tuple[Outcome, ...]:
    """How they go with the actions that were recorded between their starts and goals, (pairs, T, action_dim)."""
    digest = hashlib.sha256(actions[: len(task.specs)].tobytes()).hexdigest()
    return _remembered("recorded_actions", RecordedPolicy(actions, task.budget), task, {"actions": digest})


def _remembered(name: str, policy: Policy, task: Task, asked: dict[str, Any]) -> tuple[Outcome, ...]:
    """How the task's episodes go with a policy that ``asked`` tells from all others of this name."""
    question = _question(task) | asked
    path = cache_folder() / f"{name}_{json_digest(question)[:16]}.json"
    known = _read(path, question, task)
    if known is not None:
        return known
    results = run_episodes(policy, task)
    outcomes = tuple(
        Outcome(result.index, result.solved_at_start, result.reached, failure=result.failure) for result in results
    )
    if not any(outcome.failure for outcome in outcomes):  # a simulator may have better days
        _remember(path, question, outcomes)
    return outcomes


def cache_folder() -> Path:
    """Where lewm keeps what it can make again."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lewm"


def _question(task: Task) -> dict[str, Any]:
    """All that the outcomes of a policy depend on."""
    return {
        "environment": environment_identity(env_entry(task.env)),
        "pairs": pairs_digest(task.specs),
        "budget": task.budget,
        "versions": simulator_versions(),
    }


def _read(path: Path, question: dict[str, Any], task: Task) -> tuple[Outcome, ...] | None:
    """What is remembered of this question, None if that is nothing."""
    try:
        document = read_json(path)
        if document["question"] != question:
            return None
        outcomes = [Outcome(index, solved, np.array(reached, bool)) for index, solved, reached in document["episodes"]]
    except (FileError, KeyError, TypeError, ValueError):
        return None
    whole = all(outcome.reached.shape == (task.budget,) for outcome in outcomes)
    fits = [outcome.index for outcome in outcomes] == [spec.index for spec in task.specs]
    return tuple(outcomes) if whole and fits else None


def _remember(path: Path, question: dict[str, Any], outcomes: tuple[Outcome, ...]) -> None:
    if question["environment"][1] is None:  # what cannot be told apart from what it was before is not kept
        return
    episodes = [[each.index, each.solved_at_start, each.reached.astype(int).tolist()] for each in outcomes]
    with contextlib.suppress(FileError):  # nowhere to keep it: it is simulated again
        write_json(path, {"question": question, "episodes": episodes}, checked=True)
