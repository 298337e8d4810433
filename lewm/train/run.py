"""A run's folder: what it holds, and whether it may be continued.

RUN/config.json                    the run's configuration
RUN/metrics.jsonl, tensorboard/    its measurements
RUN/checkpoints/step_NNNNNNN/      a model folder (see ``lewm.checkpoint``) plus the optimiser's state

The model of a checkpoint is the one to evaluate. Where weights are averaged, that is the average, and the weights that
are being trained are with the optimiser's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lewm import checkpoint
from lewm.config import Config, from_dict, to_dict
from lewm.errors import TrainingError
from lewm.model.world_model import LeWM
from lewm.train.optim import WeightAverage, load_optimizer_tensors, optimizer_tensors

OPTIMIZER = "optimizer.safetensors"
TRAINED_WEIGHTS = "trained/"  # prefix of their names in OPTIMIZER, where the model is an average of them

# Settings that do not change which weights a run ends with, or only belong to later verbs.
_FREE_SETTINGS = (
    *("out", "data", "device", "collect", "plan", "eval", "loader.cache", "loader.threads"),
    *("train.log_every", "train.val_every", "train.val_batches", "train.checkpoint_every", "train.keep_checkpoints"),
    # Rounding at most:
    *("train.compile", "train.cuda_graph", "train.fused", "train.attention", "train.prefetch"),
)


def decisive_settings(config: Config) -> dict[str, Any]:
    """The settings that decide which weights a run ends with, by dotted name."""
    settings = _flatten(to_dict(config))
    return {name: value for name, value in settings.items() if not name.startswith(_FREE_SETTINGS)}


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes from step to step. average: of the model's weights, if the run keeps one."""

    model: LeWM
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None = None

    @property
    def result(self) -> LeWM:
        """The model to evaluate."""
        return self.average.model if self.average else self.model

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it takes to continue, besides ``result``."""
        trained = self.model.state_dict() if self.average else {}
        moments = optimizer_tensors(self.optimizer, self.model)
        return moments | {TRAINED_WEIGHTS + name: tensor for name, tensor in trained.items()}

    def load(self, result: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], source: Path) -> None:
        """Take over, in place, the weights of a ``result`` and what ``tensors`` returned with it."""
        moments = {name: t for name, t in tensors.items() if not name.startswith(TRAINED_WEIGHTS)}
        trained = {name.removeprefix(TRAINED_WEIGHTS): t for name, t in tensors.items() if name not in moments}
        for model, weights in ((self.result, result), (self.model, trained if self.average else result)):
            checkpoint.check_tensors(weights, model.state_dict(), source)
            model.load_state_dict(weights)
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
        # Through a Config: settings that did not exist when the run began had what is now their default.
        old, new = decisive_settings(from_dict(Config, saved)), decisive_settings(config)
        changed = [f"{name} ({old[name]!r} -> {new[name]!r})" for name in sorted(new) if old[name] != new[name]]
        if changed:
            raise TrainingError(
                f"{self.directory} holds another run: {', '.join(changed)}. Choose another folder with --out."
            )

    def save(self, step: int, state: TrainingState, progress: dict[str, Any], keep: int) -> Path:
        """Write the checkpoint of ``step`` completed steps; then keep so many of the newest, and remove the others."""
        target = _checkpoint_folder(self.checkpoints, step)
        training = {"step": step, **progress}
        run = checkpoint.read_json(self.directory / "config.json")

        def fill(folder: Path) -> None:
            checkpoint.write_tensors(folder / OPTIMIZER, state.tensors())
            state.result.save_pretrained(folder, extra={"training": training, "run": run})

        checkpoint.write_folder(target, fill)
        checkpoint.prune(self.checkpoints, keep)
        return target

    @staticmethod
    def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        """A checkpoint's model and other tensors, as ``TrainingState.load`` takes them, and its progress."""
        tensors, document = checkpoint.load_model(folder)
        return tensors, checkpoint.read_tensors(folder / OPTIMIZER), document["training"]


def _checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:07d}"


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
