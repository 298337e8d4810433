"""What an evaluation asks: which model, on which pairs, planning how, computed by what. One question has one answer.

Its results have a place of their own, named by the question, so that another question never takes their place.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lewm.checked import flat
from lewm.config import Config
from lewm.envs.registry import EnvEntry, env_entry
from lewm.evaluate.manifest import load_manifest, pairs_digest
from lewm.files import file_digest, json_digest
from lewm.methods.base import Method
from lewm.methods.files import identity
from lewm.plan.futures import can_plan
from lewm.version import __version__

EVALUATIONS = "evaluations"  # the folder of results, in a run's or where the command is given
# Packages of simulators, and what they are called here.
SIMULATORS = ("gymnasium", "pymunk", "opencv-python-headless", "opencv-python", "mujoco", "dm_control", "ogbench")


@dataclass(frozen=True)
class Question:
    """name: readable, and no other question's.  facts: all that its answer may depend on, as plain JSON values."""

    name: str
    facts: dict[str, Any]

    @property
    def digest(self) -> str:
        """What tells it from all others."""
        return json_digest(self.facts)

    def place(self, source: str, folder: Path) -> Path:
        """Where results go unless somebody says otherwise. source: how the model was named.  folder: of its files.

        Those of a run's checkpoint are kept in the run, beside its checkpoints, which come and go.
        """
        step = folder if folder.parent.name == "checkpoints" else folder.resolve()
        if step.parent.name == "checkpoints" and step.name.startswith("step_"):
            home = step.parent.parent / EVALUATIONS / step.name
        else:
            name = Path(source).name
            home = Path(EVALUATIONS) / (step.name if name in ("", "..") else name)
        return home / f"{self.name}.json"


def ask(model: Method, config: Config) -> Question:
    """The question that ``evaluate(model, config)`` answers."""
    manifest, entry = load_manifest(config.env, config.eval.manifest), env_entry(config.env)
    plans = can_plan(model)
    settings = flat(config.eval, free_too=False)
    del settings["manifest"]  # a name; its pairs count
    facts = {
        "model": identity(model),
        "environment": environment_identity(entry),
        "pairs": pairs_digest(manifest.first(config.eval.episodes)),
        "goal_offset": manifest.goal_offset,
        "seed": config.seed,
        "plan": flat(config.plan, free_too=False) if plans else None,
        "eval": settings,
        "device": device_name(model),
        "versions": versions(),
    }
    pairs = re.sub(r"[^\w.-]+", "_", Path(config.eval.manifest or "paper").stem)
    how = f"{config.plan.solver}_{config.plan.schedule}" if plans else model.settings.NAME
    return Question(f"{pairs}_{how}_{config.eval.episodes}_{json_digest(facts)[:8]}", facts)


def environment_identity(entry: EnvEntry) -> list[str | None]:
    """An environment's id, and the digest of its source: of one that its user is writing, versions say nothing."""
    module = entry.entry_point.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # made in a script, whose name is no module's
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return [entry.gym_id, None]
    source = Path(found.origin)
    files = sorted(source.parent.glob("*.py")) if module.startswith("lewm.") else [source]  # ours share theirs
    return [entry.gym_id, json_digest([[path.name, file_digest(path)] for path in files])]


def device_name(model: Any) -> str:
    """What a model computes on: the name of its GPU, or "cpu"."""
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)


def versions() -> dict[str, str]:
    """Of what results may depend on."""
    known = {"lewm": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return known | _installed("numpy") | simulator_versions()


def simulator_versions() -> dict[str, str]:
    """Of the packages that simulate and draw, as far as they are installed."""
    return _installed(*SIMULATORS)


def _installed(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
