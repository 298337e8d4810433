"""Frozen evaluation problems: pairs of a start state and a goal state, one JSON file per environment.

They were cut once from expert episodes that no dataset contains (the goal is the state some steps after the start),
so every evaluation everywhere faces the same problems and needs no dataset. ``runs/manifests.sh`` made them.
"""

from __future__ import annotations

import importlib.resources
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lewm.checkpoint import write_json
from lewm.data.collect import HELD_OUT_SEED, generate_episode
from lewm.envs.registry import env_entry
from lewm.errors import ConfigError
from lewm.rng import stream
from lewm.types import EpisodeSpec


@dataclass(frozen=True)
class Manifest:
    """The evaluation pairs of one environment. goal_offset: environment steps between start and goal."""

    environment: str
    goal_offset: int
    pairs: tuple[EpisodeSpec, ...]

    def first(self, count: int) -> tuple[EpisodeSpec, ...]:
        """The first ``count`` pairs."""
        if count > len(self.pairs):
            raise ConfigError(f"eval.episodes is {count}, but {self.environment} has {len(self.pairs)} pairs to solve.")
        return self.pairs[:count]


def load_manifest(env_name: str, path: Path | None = None) -> Manifest:
    """The manifest in a file, or the one that comes with the package."""
    entry = env_entry(env_name)
    source = path or importlib.resources.files("lewm.evaluate") / "manifests" / f"{entry.name}.json"
    if not source.is_file():
        missing = f"There is no manifest at {path}" if path else f"lewm has no evaluation manifest for {entry.gym_id}"
        raise ConfigError(f"{missing}; `lewm.evaluate.manifest.build_manifest` makes one.")
    try:
        manifest = _from_document(json.loads(source.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        expected = 'a JSON object {"environment": ID, "goal_offset": STEPS, "pairs": [{"start": STATE, "goal": STATE}]}'
        raise ConfigError(f"{source} is no manifest ({error!r}). Expected {expected}.") from error
    if manifest.environment != entry.gym_id:
        remedy = f"Evaluate with --env {manifest.environment}, or choose another manifest"
        raise ConfigError(f"{source} has pairs of {manifest.environment}, not of {entry.gym_id}. {remedy}.")
    return manifest


def build_manifest(env_name: str, count: int, goal_offset: int, path: Path) -> Manifest:
    """Cut one pair from each of ``count`` held-out expert episodes, and write them to ``path``."""
    pairs = list(itertools.islice(_held_out_pairs(env_name, goal_offset), count))
    settings = {"environment": env_entry(env_name).gym_id, "goal_offset": goal_offset, "held_out_seed": HELD_OUT_SEED}
    document = {**settings, "pairs": pairs}
    write_json(path, document)
    return _from_document(document)


def _held_out_pairs(env_name: str, goal_offset: int) -> Iterator[dict[str, list[float]]]:
    for episode in itertools.count():
        states = generate_episode(env_name, resolution=8, seed=HELD_OUT_SEED, index=episode)["state"]
        if len(states) > goal_offset:
            start = int(stream(HELD_OUT_SEED, episode, 2).integers(len(states) - goal_offset))
            yield {"start": states[start].tolist(), "goal": states[start + goal_offset].tolist()}


def _from_document(document: dict[str, Any]) -> Manifest:
    pairs = tuple(
        EpisodeSpec(index, tuple(map(float, pair["start"])), tuple(map(float, pair["goal"])))
        for index, pair in enumerate(document["pairs"])
    )
    return Manifest(str(document["environment"]), int(document["goal_offset"]), pairs)
