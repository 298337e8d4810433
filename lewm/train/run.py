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
from lewm.checked import flat, to_dict
from lewm.config import Config
from lewm.errors import TrainingError
from lewm.files import read_json, write_json
from lewm.model.world_model import LeWM
from lewm.retired import read_config
from lewm.train.optim import load_optimizer_tensors, optimizer_tensors

OPTIMIZER = "optimizer.safetensors"
KEPT_CHECKPOINTS = 2  # of the newest


def decisive_settings(config: Config) -> dict[str, Any]:
    """The settings that decide which weights a run ends with, by dotted name."""
    return flat(config, free_too=False)


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes from step to step."""

    model: LeWM
    optimizer: torch.optim.Optimizer

    def load(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], source: Path) -> None:
        """Take over, in place, a checkpoint's weights and its optimiser's state."""
        checkpoint.check_tensors(weights, self.model.state_dict(), source)
        self.model.load_state_dict(weights)
        load_optimizer_tensors(self.optimizer, self.model, moments)


@dataclass(frozen=True)
class Run:
    """The folder of one training run."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def is_finished(self, steps: int) -> bool:
        """Whether the folder holds the checkpoint of the last of ``steps`` steps."""
        return _checkpoint_folder(self.checkpoints, steps).is_dir()

    def open(self, config: Config, resume: str) -> Path | None:
        """Claim the folder for this run; returns the checkpoint to continue from, if any.

        Raises when the folder holds something else: nothing of it is touched.
        """
        path = self.directory / "config.json"
        if path.is_file():
            self._check_same_run(read_json(path), config, resume)
            return checkpoint.latest(self.checkpoints)
        if self.directory.exists() and any(self.directory.iterdir()):
            raise TrainingError(
                f"{self.directory} is not empty and is not a training run. Choose another folder with --out."
            )
        write_json(path, to_dict(config))
        return None

    def _check_same_run(self, saved: dict[str, Any], config: Config, resume: str) -> None:
        if resume == "never":
            raise TrainingError(
                f"{self.directory} already holds a run. Continue it with --resume auto, or choose another --out."
            )
        # Through a Config: settings that did not exist when the run began had what is now their default.
        old, new = decisive_settings(read_config(saved)), decisive_settings(config)
        changed = [f"{name} ({old[name]!r} -> {new[name]!r})" for name in sorted(new) if old[name] != new[name]]
        if changed:
            raise TrainingError(
                f"{self.directory} holds another run: {', '.join(changed)}. Choose another folder with --out."
            )

    def save(self, step: int, state: TrainingState, progress: dict[str, Any]) -> Path:
        """Write the checkpoint of ``step`` completed steps, and remove all but the newest."""
        target = _checkpoint_folder(self.checkpoints, step)
        training = {"step": step, **progress}
        run = read_json(self.directory / "config.json")

        def fill(folder: Path) -> None:
            checkpoint.write_tensors(folder / OPTIMIZER, optimizer_tensors(state.optimizer, state.model))
            state.model.save_pretrained(folder, extra={"training": training, "run": run})

        checkpoint.write_folder(target, fill)
        checkpoint.prune(self.checkpoints, KEPT_CHECKPOINTS)
        return target

    @staticmethod
    def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        """A checkpoint's weights and optimiser state, as ``TrainingState.load`` takes them, and its progress."""
        tensors, document = checkpoint.load_model(folder)
        return tensors, checkpoint.read_tensors(folder / OPTIMIZER), document["training"]


def _checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:07d}"
