"""Every environment by name: what lewm has to know about it before its simulator is imported.

Importing it registers them with Gymnasium too. Entry points are strings, so that this needs none of their packages.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from lewm.envs.base import ObsType, WorldEnv
from lewm.errors import EnvError, unknown_name

if TYPE_CHECKING:
    from lewm.envs.experts import Expert


@dataclass(frozen=True)
class EnvEntry:
    """One environment and the policy that collects its data.

    entry_point, expert: "module:attribute", the latter called with a NumPy generator.
    episode_steps: a collected episode ends at the goal or after this many actions.
    extra: the pip extra that installs its simulator, None if lewm alone suffices.
    slow: stepping and drawing it takes so long that evaluation should spread it over processes.
    """

    name: str
    gym_id: str
    entry_point: str
    expert: str
    episode_steps: int
    action_dim: int
    description: str
    extra: str | None = None
    slow: bool = False


_ENTRIES: dict[str, EnvEntry] = {}


def register_env(entry: EnvEntry) -> None:
    """Make an environment known to lewm by its name and to Gymnasium by its id."""
    if entry.name in _ENTRIES or entry.gym_id in gymnasium.registry:
        raise EnvError(f"{entry.name!r} or {entry.gym_id!r} is registered already; choose another name.")
    gymnasium.register(entry.gym_id, entry_point=entry.entry_point, max_episode_steps=entry.episode_steps)
    _ENTRIES[entry.name] = entry


def env_names() -> tuple[str, ...]:
    """The names of all environments, in alphabetical order."""
    return tuple(sorted(_ENTRIES))


def env_entry(name: str) -> EnvEntry:
    """The entry of an environment, by its name ("tworoom") or Gymnasium id ("lewm/TwoRoom-v0")."""
    for entry in _ENTRIES.values():
        if name in (entry.name, entry.gym_id):
            return entry
    raise EnvError(unknown_name("environment", name, _ENTRIES))


def make_env(name: str, resolution: int = 224, obs_type: ObsType = "state") -> WorldEnv:
    """A new environment without Gymnasium's wrappers."""
    entry = env_entry(name)
    return _load(entry, entry.entry_point)(resolution=resolution, obs_type=obs_type)


def make_expert(name: str, rng: np.random.Generator) -> Expert:
    """A new expert for one episode of an environment; its noise comes from ``rng``."""
    entry = env_entry(name)
    return _load(entry, entry.expert)(rng)


def _load(entry: EnvEntry, path: str) -> Any:
    """The object at "module:attribute"; a simulator that is not installed becomes an EnvError."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if entry.extra is None:
            raise
        remedy = f"Install it with: pip install 'lewm[{entry.extra}]'"
        raise EnvError(f"Environment {entry.name!r} needs the package {error.name!r}. {remedy}") from error


register_env(
    EnvEntry(
        name="tworoom",
        gym_id="lewm/TwoRoom-v0",
        entry_point="lewm.envs.tworoom:TwoRoom",
        expert="lewm.envs.experts:TwoRoomExpert",
        # Ends four in ten of the expert's episodes, which so take 92 steps on average, as in the paper.
        episode_steps=113,
        action_dim=2,
        description="A dot in one of two rooms has to reach a place in the other, through the only door.",
    )
)
