"""LeWorldModel: learn a latent world model from pixels and actions, and plan in it.

    model = lewm.load("runs/demo/training")
    agent = lewm.Agent(model, lewm.PlanConfig(schedule="shrinking"), bounds=env.action_space)
    agent.reset(goal)
    action = agent.act(frame)

Names are imported on first use, so that ``import lewm`` stays quick and pulls in no simulator.
"""

from __future__ import annotations

from lewm import starting

if starting.is_command():  # before anything that takes its time
    starting.leave_on_signals()

import importlib
from typing import TYPE_CHECKING, Any

import lewm.envs  # noqa: F401  (registers the Gymnasium ids; imports no simulator)
from lewm.version import __version__

if TYPE_CHECKING:
    from lewm.config import CollectConfig, Config, PlanConfig
    from lewm.data.collect import collect
    from lewm.envs.registry import make_env, register_env
    from lewm.methods.files import load
    from lewm.methods.lewm import LeWM
    from lewm.methods.registry import register_method
    from lewm.plan.agent import Agent
    from lewm.plan.planner import Planner
    from lewm.plan.tuned import tuned_plan
    from lewm.presets import preset
    from lewm.understand.monitor import SurpriseMonitor

_HOMES = {
    "Agent": "lewm.plan.agent",
    "CollectConfig": "lewm.config",
    "Config": "lewm.config",
    "LeWM": "lewm.methods.lewm",
    "PlanConfig": "lewm.config",
    "Planner": "lewm.plan.planner",
    "SurpriseMonitor": "lewm.understand.monitor",
    "collect": "lewm.data.collect",
    "load": "lewm.methods.files",
    "make_env": "lewm.envs.registry",
    "preset": "lewm.presets",
    "register_env": "lewm.envs.registry",
    "register_method": "lewm.methods.registry",
    "tuned_plan": "lewm.plan.tuned",
}

__all__ = [
    "Agent",
    "CollectConfig",
    "Config",
    "LeWM",
    "PlanConfig",
    "Planner",
    "SurpriseMonitor",
    "__version__",
    "collect",
    "load",
    "make_env",
    "preset",
    "register_env",
    "register_method",
    "tuned_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lewm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
