"""What an evaluation found: rates by both protocols, a JSON file that says everything, and the comparison of two."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lewm import checkpoint
from lewm.checked import to_dict
from lewm.config import Config
from lewm.envs.registry import env_entry
from lewm.errors import DataError
from lewm.evaluate.stats import Comparison, Rate
from lewm.files import read_json, write_json
from lewm.types import EpisodeResult
from lewm.version import __version__

# The name of each protocol, and where an episode of the JSON file has its outcome.
PROTOCOLS = {"paper": "success", "strict": "strict_success"}


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
    """A model's results on a manifest, beside the random policy's on the same pairs."""

    config: Config
    goal_offset: int
    results: tuple[EpisodeResult, ...]
    random_results: tuple[EpisodeResult, ...]
    times: Times = field(default_factory=Times)
    device: str = "cpu"

    def rates(self) -> dict[str, Rate]:
        """The figures of the final table, by their labels; the first is the headline."""
        planned, random = self.results, self.random_results
        return {
            "planning with the world model": Rate.of(result.success for result in planned),
            "planning with the world model, strict": Rate.of(result.strict_success for result in planned),
            "random policy": Rate.of(result.success for result in random),
            "random policy, strict": Rate.of(result.strict_success for result in random),
            "already solved at the start": Rate.of(result.solved_at_start for result in planned),
        }

    def save(self, path: Path, folder: Path | None = None) -> None:
        """Write everything but the states as JSON, atomically. folder: of the model's files, if it has any."""
        model = folder and {
            "path": str(folder),
            "weights_sha256": checkpoint.load_document(folder)["files"].get(checkpoint.WEIGHTS),
        }
        document = {
            "versions": versions(),
            "device": self.device,
            "checkpoint": model,
            "environment": env_entry(self.config.env).gym_id,
            "goal_offset": self.goal_offset,
            "rates": {name: rate.to_dict() for name, rate in self.rates().items()},
            "times": self.times.to_dict(),
            "episodes": list(map(_episode, self.results, self.random_results)),
            "config": to_dict(self.config),
        }
        write_json(path, document)


def versions() -> dict[str, str]:
    """Of what results may depend on."""
    known = {"lewm": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return known | {"python": platform.python_version()}


def _episode(result: EpisodeResult, random: EpisodeResult) -> dict[str, Any]:
    return {
        "index": result.index,
        "start": result.states[0].tolist(),
        "goal": result.goal.tolist(),
        "solved_at_start": result.solved_at_start,
        "success": result.success,
        "strict_success": result.strict_success,
        "first_success": result.first_success,
        "random_policy_success": random.success,
        "random_policy_strict_success": random.strict_success,
        "plan_costs": [plan.cost for plan in result.plans],
    }


def compare(first: Path, second: Path) -> dict[str, Comparison]:
    """Two evaluations of the same pairs, episode by episode: a comparison for each protocol."""
    one, other = _Outcomes.read(first), _Outcomes.read(second)
    if one.environment != other.environment:
        raise DataError(f"{first} is about {one.environment}, {second} about {other.environment}: nothing to compare.")
    if one.pairs != other.pairs:
        found = f"{len(one.pairs)} and {len(other.pairs)}, not the same"
        remedy = "Evaluate both with the same --manifest and --eval.episodes"
        raise DataError(f"The pairs of start and goal in {first} and {second} differ ({found}). {remedy}.")
    return {name: Comparison.of(one.by_protocol[name], other.by_protocol[name]) for name in PROTOCOLS}


@dataclass(frozen=True)
class _Outcomes:
    """What a comparison needs of a results file: the problems, and by each protocol the outcomes that count."""

    environment: str
    pairs: list[tuple[Any, ...]]
    by_protocol: dict[str, list[bool]]

    @staticmethod
    def read(path: Path) -> _Outcomes:
        document = read_json(path)
        try:
            episodes = document["episodes"]
            pairs = [(episode["index"], episode["start"], episode["goal"]) for episode in episodes]
            # Whether an episode counts depends on its pair alone, so what is left out here is left out in both files.
            by_protocol = {
                name: [episode[key] for episode in episodes if episode[key] is not None]
                for name, key in PROTOCOLS.items()
            }
            return _Outcomes(document["environment"], pairs, by_protocol)
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} does not hold the results of `lewm eval` (no {error}). Evaluate again.") from error
