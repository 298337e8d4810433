"""What an evaluation found: rates by both protocols, and a JSON file that says everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lewm import checkpoint
from lewm.checked import of_kind, to_dict
from lewm.config import Config
from lewm.envs.registry import env_entry
from lewm.errors import DataError
from lewm.evaluate.journal import finite
from lewm.evaluate.question import Question, versions
from lewm.evaluate.stats import Rate
from lewm.files import read_json, write_json
from lewm.types import EpisodeResult, Outcome

T = TypeVar("T")
# The figures of an evaluation by name, the first the headline, and how people are told of them.
LABELS = {
    "policy": "policy",
    "policy_strict": "policy, strict",
    "random": "random policy",
    "random_strict": "random policy, strict",
    "recorded": "recorded actions",
    "recorded_strict": "recorded actions, strict",
    "solved_at_start": "already solved at the start",
}
# Those that not every file has: its pairs may be without recorded actions, or an earlier version wrote it.
_SOMETIMES = {"recorded", "recorded_strict"}
# What files of earlier versions call them.
_EARLIER = {label: name for name, label in LABELS.items()} | {
    "planning with the world model": "policy",
    "planning with the world model, strict": "policy_strict",
}


def by_name(figures: Mapping[str, T]) -> dict[str, T]:
    """The figures of a file of this or an earlier version, by their names."""
    return {_EARLIER.get(name, name): figure for name, figure in figures.items()}


def read_rates(path: Path) -> dict[str, Rate]:
    """The rates in a results file, by name."""
    try:
        rates = by_name(read_json(path)["rates"])
        there = [name for name in LABELS if name in rates or name not in _SOMETIMES]
        return {name: _rate(rates[name], name) for name in there}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise not_results(path, error) from error


def _rate(figures: Mapping[str, Any], name: str) -> Rate:
    successes, episodes = (of_kind(int, figures[part], f"rates.{name}.{part}") for part in ("successes", "episodes"))
    if not 0 <= successes <= episodes:
        raise ValueError(f"rates.{name} has {successes} successes of {episodes} episodes")
    return Rate(successes, episodes)


def not_results(path: Path, error: Exception) -> DataError:
    """What to raise for a file that is not as ``Evaluation.save`` writes it."""
    what = f"no {error}" if isinstance(error, KeyError) else str(error)
    return DataError(f"{path} does not hold the results of `lewm eval` ({what}). Evaluate again.")


def read_failures(path: Path) -> list[str]:
    """A sentence for each episode in a results file that was lost to its simulator, and not to the policy."""
    who = {"failure": "", "random_policy_failure": " with random actions", "recorded_failure": " with recorded actions"}
    try:
        return [
            f"Episode {row['index']}{whose} counts as not reached: {row[name]}"
            for row in read_json(path)["episodes"]
            for name, whose in who.items()
            if name in row
        ]
    except (KeyError, TypeError) as error:
        raise not_results(path, error) from error


@dataclass(frozen=True)
class Times:
    """Wall-clock seconds of an evaluation in all, and of each of its plans."""

    total: float = 0.0
    plans: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, float]:
        """As plain JSON values; what overlaps with planning does not count as the environments' time."""
        p50, p99 = np.percentile(self.plans or (0.0,), (50, 99))
        return {
            "planning_seconds": sum(self.plans),
            "environment_seconds": self.total - sum(self.plans),
            "plans": len(self.plans),
            "seconds_per_plan_p50": float(p50),
            "seconds_per_plan_p99": float(p99),
        }


@dataclass(frozen=True)
class Evaluation:
    """A method's results on a manifest, beside those of random and of recorded actions on the same pairs.

    recorded_results: None if the pairs are without recorded actions.  flops_per_plan: None of a method that acts.
    """

    config: Config
    goal_offset: int
    results: tuple[EpisodeResult, ...]
    random_results: tuple[Outcome, ...]
    times: Times = field(default_factory=Times)
    device: str = "cpu"
    recorded_results: tuple[Outcome, ...] | None = None
    flops_per_plan: float | None = None

    def rates(self) -> dict[str, Rate]:
        """The figures of the final table, by their names (``LABELS``); the first is the headline."""
        of = {"policy": self.results, "random": self.random_results, "recorded": self.recorded_results}
        found = {}
        for name, outcomes in of.items():
            if outcomes is not None:
                found[name] = Rate.of(outcome.success for outcome in outcomes)
                found[f"{name}_strict"] = Rate.of(outcome.strict_success for outcome in outcomes)
        found["solved_at_start"] = Rate.of(result.solved_at_start for result in self.results)
        return found

    def save(
        self,
        path: Path,
        files: dict[str, Any] | None = None,
        question: Question | None = None,
        command: str | None = None,
    ) -> None:
        """Write everything but the states as JSON, atomically. files: ``model_files`` of the model's, if it has any.

        question: what was asked, if the file is to be known as its answer.  command: that asks it again.
        """
        document = {
            "question": question and question.digest,
            "command": command,
            "versions": versions(),
            "device": self.device,
            "checkpoint": files,
            "environment": env_entry(self.config.env).gym_id,
            "goal_offset": self.goal_offset,
            "rates": {name: rate.to_dict() for name, rate in self.rates().items()},
            "times": self.times.to_dict(),
            "flops_per_plan": self.flops_per_plan,
            "episodes": self._episodes(),
            "config": to_dict(self.config),
        }
        write_json(path, document, checked=True)

    def _episodes(self) -> list[dict[str, Any]]:
        """What happened with each pair; nothing is said of recorded actions where there are none."""
        rows = list(map(_episode, self.results, self.random_results))
        for row, recorded in zip(rows, self.recorded_results or (), strict=False):
            row |= {"recorded_success": recorded.success, "recorded_strict_success": recorded.strict_success}
            row |= {"recorded_failure": recorded.failure} if recorded.failure else {}
        return rows


def model_files(folder: Path) -> dict[str, Any]:
    """Which files a model is from. To be asked before it is evaluated: a run that goes on removes checkpoints."""
    files = checkpoint.load_document(folder)["files"]
    return {"path": str(folder), "weights_sha256": files.get(checkpoint.WEIGHTS)}


def _episode(result: EpisodeResult, random: Outcome) -> dict[str, Any]:
    failures = {"failure": result.failure, "random_policy_failure": random.failure}
    row = {
        "index": result.index,
        "start": result.states[0].tolist(),
        "goal": result.goal.tolist(),
        "solved_at_start": result.solved_at_start,
        "success": result.success,
        "strict_success": result.strict_success,
        "first_success": result.first_success,
        "random_policy_success": random.success,
        "random_policy_strict_success": random.strict_success,
        "plan_costs": [finite(plan.cost) for plan in result.plans],
    }
    return row | {name: failure for name, failure in failures.items() if failure}
