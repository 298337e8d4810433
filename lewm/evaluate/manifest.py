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


def load_manifest(env_name: str) -> Manifest:
    """The manifest that comes with the package."""
    entry = env_entry(env_name)
    resource = importlib.resources.files("lewm.evaluate") / "manifests" / f"{entry.name}.json"
    if not resource.is_file():
        raise ConfigError(f"There is no evaluation manifest for {entry.gym_id}; `build_manifest` makes one.")
    return _from_document(json.loads(resource.read_text()))


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
    pairs = tuple(EpisodeSpec(i, tuple(pair["start"]), tuple(pair["goal"])) for i, pair in enumerate(document["pairs"]))
    return Manifest(document["environment"], document["goal_offset"], pairs)
