"""Frozen evaluation problems: pairs of a start state and a goal state, two JSON files per environment.

They were cut once from expert episodes that no dataset contains (the goal is the state some steps after the start),
so every evaluation everywhere faces the same problems and needs no dataset. "paper" has a pair of each episode, as it
comes; "strict" only those that are not solved before anything was done. ``runs/manifests.sh`` made them.

Beside a manifest lies NAME_actions.npz, with the actions that once led from each start to its goal: what they reach is
the ceiling over every figure.
"""

from __future__ import annotations

import importlib.resources
import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lewm.checked import of_kind
from lewm.data.formats.demonstrations import demonstrations_digest
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.envs.registry import EnvEntry, env_entry, make_env
from lewm.errors import ConfigError, FileError, unknown_name
from lewm.files import json_digest, read_json, replacing
from lewm.rng import stream
from lewm.types import Array, Demonstration, EpisodeSpec

Replayed: TypeAlias = "Sequence[Demonstration] | None"  # None: experts act by themselves
# What the packaged manifests are called, and how the names of their files end.
PACKAGED = {"paper": "", "strict": "_strict"}
# Pairs to choose settings on are cut from this held-out episode on: the frozen ones stop before the 300th.
TUNING_EPISODE = 10_000
PATIENCE = 1000  # episodes in a row that give no pair, after which none is to be expected
_CUT = 2  # what a random stream of a held-out episode is for: where its pair begins


@dataclass(frozen=True)
class Manifest:
    """The evaluation pairs of one environment. goal_offset: environment steps between start and goal.

    actions: those that were recorded between them, float32 (pairs, goal_offset, action_dim); None: they are not known.
    """

    environment: str
    goal_offset: int
    pairs: tuple[EpisodeSpec, ...]
    actions: Array | None = field(default=None, compare=False, repr=False)

    def first(self, count: int) -> tuple[EpisodeSpec, ...]:
        """The first ``count`` pairs."""
        if not 1 <= count <= len(self.pairs):
            raise ConfigError(f"eval.episodes is {count}, but {self.environment} has {len(self.pairs)} pairs to solve.")
        return self.pairs[:count]


def load_manifest(env_name: str, manifest: str | Path | None = None) -> Manifest:
    """A manifest that comes with the package, "paper" (None: this) or "strict", or the one in a file."""
    entry = env_entry(env_name)
    source = _locate(entry, "paper" if manifest is None else str(manifest))
    try:
        loaded = _from_document(read_json(source))
        loaded = replace(loaded, actions=_read_actions(_beside(source), loaded, entry.action_dim))
    except (FileError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = 'a JSON object {"environment": ID, "goal_offset": STEPS, "pairs": [{"start": STATE, "goal": STATE}]}'
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{source} is no manifest ({what}). Expected {expected}.") from error
    if loaded.environment != entry.gym_id:
        remedy = f"Evaluate with --env {loaded.environment}, or choose another manifest"
        raise ConfigError(f"{source} has pairs of {loaded.environment}, not of {entry.gym_id}. {remedy}.")
    return loaded


def pairs_digest(specs: Sequence[EpisodeSpec]) -> str:
    """SHA-256 of pairs of start and goal."""
    return json_digest([[spec.index, spec.start, spec.goal] for spec in specs])


def _beside(source: Path) -> Path:
    """Where the recorded actions of a manifest's pairs are."""
    return source.with_name(f"{source.stem}_actions.npz")


def _read_actions(path: Path, manifest: Manifest, action_dim: int) -> Array | None:
    """The actions in a file, if they are those of the manifest's pairs, which may have been changed since."""
    try:
        with np.load(path, allow_pickle=False) as file:
            actions, pairs = file["actions"], str(file["pairs"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    fits = actions.shape == (len(manifest.pairs), manifest.goal_offset, action_dim)
    return actions if fits and pairs == pairs_digest(manifest.pairs) else None


def _locate(entry: EnvEntry, manifest: str) -> Path:
    """The file of a manifest that is given by a packaged one's name, or by its path."""
    make_one = "`lewm.evaluate.manifest.build_manifest` makes one"
    if manifest in PACKAGED:
        folder = Path(str(importlib.resources.files("lewm.evaluate"))) / "manifests"
        packaged = folder / f"{entry.name}{PACKAGED[manifest]}.json"
        if not packaged.is_file():
            raise ConfigError(f"lewm has no evaluation manifest {manifest!r} for {entry.gym_id}; {make_one}.")
        return packaged
    path = Path(manifest)
    if path.is_file():
        return path
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"There is no manifest at {path}; {make_one}.")
    raise ConfigError(f"{unknown_name('manifest', manifest, PACKAGED)} Nor is there a file of that name.")


def build_manifest(
    env_name: str,
    count: int,
    goal_offset: int,
    path: Path,
    unsolved_only: bool = False,
    demonstrations: Replayed = None,
    first_episode: int = 0,
) -> Manifest:
    """Cut one pair from each of ``count`` held-out expert episodes; write them to ``path``, and the actions beside it.

    unsolved_only: go on to further episodes for each pair whose start already counts as its goal.
    demonstrations: the episodes are replays of those among them that are held out.
    first_episode: where to begin; from ``TUNING_EPISODE`` on, no episode is one of the frozen pairs'.
    """
    if count < 1 or goal_offset < 1:
        raise ConfigError(f"count and goal_offset must be at least 1, got {count} and {goal_offset}.")
    if first_episode < 0:
        raise ConfigError(f"first_episode must be at least 0, got {first_episode}.")
    environment = env_entry(env_name).gym_id
    settings = {"environment": environment, "goal_offset": goal_offset, "held_out_seed": HELD_OUT_SEED}
    if first_episode:
        settings["first_episode"] = first_episode
    if unsolved_only:
        settings["unsolved_only"] = True
    if demonstrations is not None:
        settings["demonstrations"] = demonstrations_digest(demonstrations)
    cuts = _held_out_cuts(env_name, goal_offset, unsolved_only, demonstrations, first_episode)
    found = list(itertools.islice(cuts, count))
    pairs = [{"start": states[0].tolist(), "goal": states[-1].tolist()} for states, _ in found]
    actions = np.stack([recorded for _, recorded in found])
    made = replace(_from_document({**settings, "pairs": pairs}), actions=actions)
    with replacing(path, _beside(path)) as (text, recorded):
        text.write_text(_as_text(settings, pairs))
        with recorded.open("wb") as file:  # given a name, NumPy would add to it
            np.savez_compressed(file, actions=actions, pairs=np.array(pairs_digest(made.pairs)))
    return made


def _held_out_cuts(
    env_name: str, goal_offset: int, unsolved_only: bool, demonstrations: Replayed, first_episode: int
) -> Iterator[tuple[Array, Array]]:
    """From start to goal, in the held-out episodes that are long enough, one after the other.

    goal_offset + 1 states, and the goal_offset actions between them.
    """
    fruitless, longest = 0, 0
    with make_env(env_name, resolution=8) as env:
        for episode in itertools.count(first_episode):
            what = (env_name, env.resolution, HELD_OUT_SEED, episode)
            columns = generate_episode(*what, demonstrations=demonstrations, draw=False)
            states, actions = columns["state"], columns["action"]
            fruitless, longest = fruitless + 1, max(longest, len(states) - 1)
            if len(states) > goal_offset:
                first = int(stream(HELD_OUT_SEED, episode, _CUT).integers(len(states) - goal_offset))
                last = first + goal_offset
                if not (unsolved_only and env.is_success(states[first], states[last])):
                    fruitless = 0
                    yield states[first : last + 1], actions[first:last]
            if fruitless == PATIENCE:
                found = f"{PATIENCE} held-out episodes of {env_name} in a row, of at most {longest} steps, give no pair"
                wanted = f"a goal {goal_offset} steps after the start" + ", unsolved there" * unsolved_only
                raise ConfigError(f"{found} of {wanted}. Choose another goal_offset.")


def _as_text(settings: dict[str, Any], pairs: Sequence[dict[str, list[float]]]) -> str:
    """A manifest as JSON with a line for each setting and each pair, so that a difference of pairs reads as one."""
    head = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in settings.items()]
    lines = ",\n".join(f"    {json.dumps(pair)}" for pair in pairs)
    return "\n".join(["{", *head, '  "pairs": [', lines, "  ]", "}"]) + "\n"


def _from_document(document: dict[str, Any]) -> Manifest:
    environment = of_kind(str, document["environment"], "environment")
    goal_offset = of_kind(int, document["goal_offset"], "goal_offset")
    pairs = [
        EpisodeSpec(index, _state(pair, "start"), _state(pair, "goal"))
        for index, pair in enumerate(of_kind(list, document["pairs"], "pairs"))
    ]
    if goal_offset < 1 or not pairs:
        raise ValueError("goal_offset must be at least 1, and there must be a pair")
    return Manifest(environment, goal_offset, tuple(pairs))


def _state(pair: dict[str, Any], name: str) -> tuple[float, ...]:
    return tuple(float(of_kind(float, number, name)) for number in of_kind(list, pair[name], name))
