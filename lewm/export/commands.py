"""The command lines that repeat what a model's files record."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lewm.checked import flat
from lewm.config import Config
from lewm.envs.registry import env_entry
from lewm.presets import PRESETS, preset


def collect_command(data: Mapping[str, Any], out: Path | None) -> str:
    """`lewm collect` for a dataset, given its facts. Demonstrations are known by their content, not their place."""
    name = env_entry(data["environment"]).name
    sizes = ("episodes", "resolution", "frame_stride", "seed")
    options = [part for size in sizes for part in _option(size, data[size])]
    demos = ["--demos", "DEMOS"] if data["demonstrations"] else []
    # Facts of earlier versions do not have these.
    shares = [part for share in ("exploration", "mistakes") if data.get(share) for part in _option(share, data[share])]
    return shlex.join(["lewm", "collect", name, *options, *demos, *shares, "--out", str(out or f"data/{name}.h5")])


def train_command(config: Config) -> str:
    """`lewm train` for a run: the preset that it is nearest to, and what differs."""
    files = {"--data": config.data, "--out": config.out}
    method = config.method.NAME
    presets = {name: preset(name, method) for name in PRESETS}
    changed = {name: _changes(start, _for_training(config, start)) for name, start in presets.items()}
    nearest = min(changed, key=lambda name: len(changed[name]))
    given = [] if method == "lewm" else ["--method", method]
    places = [part for option, path in files.items() if path for part in (option, str(path))]
    return shlex.join(["lewm", "train", nearest, *given, *places, *_options(changed[nearest])])


def _for_training(config: Config, start: Config) -> Config:
    """``config`` as `lewm train` takes it: what belongs to other verbs is that of the preset ``start``."""
    others = replace(config, collect=start.collect, plan=start.plan, eval=start.eval)
    return replace(others, data=None, out=None, device="auto")


def eval_command(name: str, run: Config, config: Config) -> str:
    """`lewm eval` for an evaluation with ``config`` of the model ``name``, whose run's settings are the defaults."""
    return shlex.join(["lewm", "eval", name, *_options(asked_for(run, config))])


def asked_for(run: Config, config: Config) -> dict[str, Any]:
    """The settings of an evaluation with ``config`` that are not those of the model's run, by dotted name."""
    return _changes(run, replace(run, env=config.env, seed=config.seed, plan=config.plan, eval=config.eval))


def portable(config: Config) -> Config:
    """A run's settings without the places of its files on one machine."""
    data, out = config.data and Path("data") / config.data.name, config.out and Path("runs") / config.out.name
    return replace(config, data=data, out=out)


def _changes(old: Config, new: Config) -> dict[str, Any]:
    """The settings of ``new`` that differ from those of ``old``, by dotted name."""
    before = flat(old)
    return {name: value for name, value in flat(new).items() if value != before[name]}


def _options(settings: Mapping[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in _option(name, value)]


def _option(name: str, value: Any) -> list[str]:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        section, _, field = name.rpartition(".")
        return [f"--{section}.{field}" if value else f"--{section}.no-{field}"]
    return [f"--{name}", str(value)]
