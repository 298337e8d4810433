"""Gymnasium environments with a state that can be set and drawn, and the experts that collect their data."""

from lewm.envs.base import Expert, Intervention, WorldEnv
from lewm.envs.quantities import Quantity
from lewm.envs.registry import EnvEntry, env_entry, env_names, make_env, make_expert, register_env

__all__ = [
    "EnvEntry",
    "Expert",
    "Intervention",
    "Quantity",
    "WorldEnv",
    "env_entry",
    "env_names",
    "make_env",
    "make_expert",
    "register_env",
]
