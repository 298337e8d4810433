"""Runs: those that a method makes of the worlds that lewm knows by name, and those that files describe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lewm.checked import from_dict, to_dict
from lewm.config import CollectConfig, Config, EvalConfig, LoaderConfig, PlanConfig, Preset
from lewm.errors import ConfigError, unknown_name
from lewm.methods.registry import method_config, read_settings
from lewm.retired import current, leaves, put

# Enough to read frames from disk as fast as a GPU wants them.
_GPU_LOADER = LoaderConfig(threads=8)

# What moves covers at most 12, 22, 14 and 78 of a frame's 256 patches (benchmarks/background.py).
# Drivers draw the lines of MuJoCo's floors a little differently, hence the noise.
_WORLDS = (
    Preset(
        name="debug",  # the smallest run that still exercises every part; for tests and for trying out changes
        env="lewm/TwoRoom-v0",
        action_dim=2,
        size="debug",
        image_size=28,
        collect=CollectConfig(episodes=8, resolution=28, workers=1),
        plan=PlanConfig(horizon=2, samples=8, iterations=3, elites=2),
        eval=EvalConfig(episodes=2, budget=10),
    ),
    Preset(
        name="demo",
        env="lewm/TwoRoom-v0",
        action_dim=2,
        size="compact",
        image_size=56,
        collect=CollectConfig(episodes=400, resolution=56),
        plan=PlanConfig(samples=128, iterations=10, elites=16),
    ),
    Preset("tworoom", "lewm/TwoRoom-v0", 2, "full", moving_patches=16, loader=_GPU_LOADER),
    Preset("pusht", "lewm/PushT-v0", 2, "full", moving_patches=32, loader=_GPU_LOADER),
    Preset("reacher", "lewm/Reacher-v0", 2, "full", moving_patches=16, line_noise=1.0, loader=_GPU_LOADER),
    Preset("cube", "lewm/Cube-v0", 5, "full", moving_patches=64, line_noise=1.0, loader=_GPU_LOADER),
)
PRESETS = {world.name: world for world in _WORLDS}


def preset(name: str, method: str = "lewm") -> Config:
    """The run of a method in a named world; an unknown name raises with the nearest one."""
    if name not in PRESETS:
        raise ConfigError(unknown_name("preset", name, PRESETS))
    world = PRESETS[name]
    settings, train = method_config(method).for_preset(world)
    config = Config(settings, env=world.env, loader=world.loader, train=train)
    return replace(config, collect=world.collect, plan=world.plan, eval=world.eval)


def read_config(document: Any, lost: list[str] | None = None) -> Config:
    """A run's settings from JSON that this or an earlier version wrote.

    lost: takes a sentence for each choice that cannot be kept; without it, such a choice raises.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"The configuration must be an object of settings, got {document!r}.")
    sentences: list[str] = []
    settings = current(document, sentences)
    config = from_dict(Config, settings | {"method": read_settings(settings.get("method", {}))})
    if sentences and lost is None:
        raise ConfigError(" ".join(sentences))
    if lost is not None:
        lost += sentences
    return config


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """``config`` with other settings, by dotted names of this or of an earlier version."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        put(nested, name, value)
    document, sentences = to_dict(config), list[str]()
    for name, value in leaves(current(nested, sentences)):
        put(document, name, value)
    if sentences:
        raise ConfigError(" ".join(sentences))
    return read_config(document)
