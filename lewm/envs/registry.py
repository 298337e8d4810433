"""Every environment by name: what lewm has to know about it before its simulator is imported.

Importing it registers them with Gymnasium too. Entry points are strings, so that this needs none of their packages.

Modules named in the environment variable ``LEWM_ENVS``, separated by commas, are imported when a name is looked up:
what they register is known to every command and its processes.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from lewm.envs.base import Expert, ObsType, WorldEnv
from lewm.envs.kinds import Kind
from lewm.errors import EnvError, unknown_name
from lewm.extras import import_extra
from lewm.types import Demonstration
from lewm.user_modules import import_user_modules


@dataclass(frozen=True)
class EnvEntry:
    """One environment and the policy that collects its data.

    entry_point, expert: "module:attribute", the latter called with a NumPy generator.
    episode_steps: a collected episode ends at the goal or after this many actions.
    extra: the pip extra that installs its simulator, None if lewm alone suffices.
    slow: stepping and drawing it takes so long that evaluation should spread it over processes.
    replay: "module:attribute" of an expert that is called with a generator and a demonstration; None: there is none.
    mistaken: "module:attribute" of one that is called with an expert, a generator and a share of the time; or None.
    kinds: "module:attribute" of a table as in ``lewm.envs.kinds``, of what tells its evaluation pairs apart; or None.
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
    replay: str | None = None
    mistaken: str | None = None
    kinds: str | None = None


ENTRIES: dict[str, EnvEntry] = {}
USER_MODULES = "LEWM_ENVS"  # the environment variable


def register_env(entry: EnvEntry) -> None:
    """Make an environment known to lewm by its name and to Gymnasium by its id. Doing it again changes nothing."""
    if ENTRIES.get(entry.name) == entry:  # a worker knows it already when it imports the module that registers it
        return
    if entry.name in ENTRIES or entry.gym_id in gymnasium.registry:
        raise EnvError(f"{entry.name!r} or {entry.gym_id!r} is registered already; choose another name.")
    gymnasium.register(entry.gym_id, entry_point=entry.entry_point, max_episode_steps=entry.episode_steps)
    ENTRIES[entry.name] = entry


def env_names() -> tuple[str, ...]:
    """The names of all environments, in alphabetical order."""
    import_user_modules(USER_MODULES, EnvError)
    return tuple(sorted(ENTRIES))


def env_entry(name: str) -> EnvEntry:
    """The entry of an environment, by its name ("tworoom") or Gymnasium id ("lewm/TwoRoom-v0")."""
    import_user_modules(USER_MODULES, EnvError)
    for entry in ENTRIES.values():
        if name in (entry.name, entry.gym_id):
            return entry
    own = f"One of your own has to be registered by a module that {USER_MODULES} names."
    raise EnvError(f"{unknown_name('environment', name, ENTRIES)} {own}")


def make_env(name: str, resolution: int = 224, obs_type: ObsType = "state") -> WorldEnv:
    """A new environment without Gymnasium's wrappers."""
    entry = env_entry(name)
    return _load(entry, entry.entry_point)(resolution=resolution, obs_type=obs_type)


def env_type(name: str) -> type[WorldEnv]:
    """The class of an environment."""
    entry = env_entry(name)
    made = _load(entry, entry.entry_point)
    if isinstance(made, type):
        return made
    with contextlib.closing(make_env(name)) as env:  # a function makes it
        return type(env)


def make_expert(name: str, rng: np.random.Generator, demonstration: Demonstration | None = None) -> Expert:
    """A new expert for one episode of an environment, or one that replays a demonstration; its noise is ``rng``'s."""
    entry = env_entry(name)
    if demonstration is None:
        return _load(entry, entry.expert)(rng)
    if entry.replay is None:
        raise EnvError(f"{entry.name} has no expert that replays demonstrations. Ask for one without.")
    return _load(entry, entry.replay)(rng, demonstration)


def make_mistaken(name: str, expert: Expert, rng: np.random.Generator, mistakes: float) -> Expert:
    """``expert``, which for up to ``mistakes`` of an episode takes things to be where they are not."""
    entry = env_entry(name)
    if entry.mistaken is None:
        raise EnvError(f"{entry.name} has no expert that makes mistakes. Collect it without --mistakes.")
    return _load(entry, entry.mistaken)(expert, rng, mistakes)


def pair_kinds(name: str) -> dict[str, Kind]:
    """What tells evaluation pairs of an environment apart, by name; empty if it does not say."""
    entry = env_entry(name)
    return {} if entry.kinds is None else dict(_load(entry, entry.kinds))


def _load(entry: EnvEntry, path: str) -> Any:
    """The object at "module:attribute"; a simulator that is not installed becomes an EnvError."""
    module, _, attribute = path.partition(":")
    if entry.extra is None:
        return getattr(importlib.import_module(module), attribute)
    return getattr(import_extra(module, entry.extra, f"Environment {entry.name!r} needs", EnvError), attribute)


for world in (
    EnvEntry(
        name="tworoom",
        gym_id="lewm/TwoRoom-v0",
        entry_point="lewm.envs.tworoom:TwoRoom",
        expert="lewm.envs.experts:TwoRoomExpert",
        # Ends four in ten of the expert's episodes, which so take 92 steps on average, as in the paper.
        episode_steps=113,
        action_dim=2,
        kinds="lewm.envs.kinds:TWOROOM",
        description="A dot in one of two rooms has to reach a place in the other, through the only door.",
    ),
    EnvEntry(
        name="pusht",
        gym_id="lewm/PushT-v0",
        entry_point="lewm.envs.pusht:PushT",
        expert="lewm.envs.pusht_experts:PushTExpert",
        replay="lewm.envs.pusht_experts:PushTReplay",
        # Enough for the expert to reach five goals in six, for all its noise, after 122 steps on average.
        episode_steps=200,
        action_dim=2,
        kinds="lewm.envs.kinds:PUSHT",
        description="A disc has to push a T-shaped block to a given pose.",
    ),
    EnvEntry(
        name="reacher",
        gym_id="lewm/Reacher-v0",
        entry_point="lewm.envs.reacher:Reacher",
        expert="lewm.envs.reacher_expert:ReacherExpert",
        episode_steps=200,
        action_dim=2,
        kinds="lewm.envs.kinds:REACHER",
        description="An arm with two joints has to take a given configuration, by torques on both.",
        extra="mujoco",
        slow=True,
    ),
    EnvEntry(
        name="cube",
        gym_id="lewm/Cube-v0",
        entry_point="lewm.envs.cube:Cube",
        expert="lewm.envs.cube_expert:CubeExpert",
        mistaken="lewm.envs.cube_expert:MistakenCubeExpert",
        episode_steps=200,
        action_dim=5,
        kinds="lewm.envs.kinds:CUBE",
        description="A robot arm with a gripper has to bring a cube to a given place.",
        extra="mujoco",
        slow=True,
    ),
):
    register_env(world)
