"""A run's folder: what it holds, and whether it may be continued.

RUN/config.json                    the run's configuration
RUN/metrics.jsonl, tensorboard/    its measurements
RUN/checkpoints/step_NNNNNNN/      a model folder (see ``lewm.checkpoint``) plus the optimiser's state
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lewm import checkpoint
from lewm.config import Config, to_dict
from lewm.errors import TrainingError
from lewm.model.world_model import LeWM
from lewm.train.optim import load_optimizer_tensors, optimizer_tensors

OPTIMIZER = "optimizer.safetensors"
KEEP_CHECKPOINTS = 2

# Settings that do not change which weights a run ends with, or only belong to later verbs.
_FREE_SETTINGS = (
    *("out", "data", "device", "collect", "plan", "eval", "loader.cache", "loader.threads"),
    *("train.log_every", "train.val_every", "train.val_batches", "train.checkpoint_every"),
)


@dataclass(frozen=True)
class Run:
    """The folder of one training run."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def open(self, config: Config, resume: str) -> Path | None:
        """Claim the folder for this run; returns the checkpoint to continue from, if any.

        Raises when the folder holds something else: nothing of it is touched.
        """
        path = self.directory / "config.json"
        if path.is_file():
            self._check_same_run(checkpoint.read_json(path), config, resume)
            return checkpoint.latest(self.checkpoints)
        if self.directory.exists() and any(self.directory.iterdir()):
            raise TrainingError(
                f"{self.directory} is not empty and is not a training run. Choose another folder with --out."
            )
        with checkpoint.disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            checkpoint.write_json(path, to_dict(config))
        return None

    def _check_same_run(self, saved: dict[str, Any], config: Config, resume: str) -> None:
        if resume == "never":
            raise TrainingError(
                f"{self.directory} already holds a run. Continue it with --resume auto, or choose another --out."
            )
        old, new = _flatten(saved), _flatten(to_dict(config))
        changed = [
            f"{name} ({old.get(name)!r} -> {new.get(name)!r})"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name) and not name.startswith(_FREE_SETTINGS)
        ]
        if changed:
            raise TrainingError(
                f"{self.directory} holds another run: {', '.join(changed)}. Choose another folder with --out."
            )

    def save(self, step: int, model: LeWM, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
        """Write the checkpoint of ``step`` completed steps; older ones but the last are removed afterwards."""
        target = self.checkpoints / f"step_{step:07d}"

        training = {"step": step, **progress}
        run = checkpoint.read_json(self.directory / "config.json")

        def fill(folder: Path) -> None:
            checkpoint.write_tensors(folder / OPTIMIZER, optimizer_tensors(optimizer, model))
            model.save_pretrained(folder, extra={"training": training, "run": run})

        checkpoint.write_folder(target, fill)
        checkpoint.prune(self.checkpoints, KEEP_CHECKPOINTS)
        return target

    @staticmethod
    def load(folder: Path, model: LeWM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restore model and optimiser in place; returns what ``save`` was given as progress, with the step."""
        tensors, document = checkpoint.load_model(folder)
        checkpoint.check_tensors(tensors, model.state_dict(), folder)
        model.load_state_dict(tensors)
        load_optimizer_tensors(optimizer, model, checkpoint.read_tensors(folder / OPTIMIZER))
        progress: dict[str, Any] = document["training"]
        return progress


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
