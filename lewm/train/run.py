"""A run's folder: what it holds, who may write to it, and whether it may be continued.

RUN/config.json                    the run's configuration
RUN/metrics.jsonl, tensorboard/    its measurements
RUN/checkpoints/step_NNNNNNN/      a model folder (see ``lewm.checkpoint``) plus the optimiser's state
RUN/series/step_NNNNNNN/           a small model folder (bf16, no optimiser) every ``train.keep_every`` steps
RUN/evaluations/step_NNNNNNN/      results of `lewm eval`
RUN/.lock                          while a process trains
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lewm import checkpoint
from lewm.checked import flat, to_dict
from lewm.config import Config, TrainConfig
from lewm.errors import TrainingError
from lewm.files import check_place, leaving_no_empty_folders, only_writer, read_json, write_json
from lewm.methods.base import Method
from lewm.methods.files import bf16_tensors, describe, read_facts, save
from lewm.presets import read_config
from lewm.train.optim import load_optimizer_tensors, optimizer_tensors
from lewm.types import DataFacts

KEPT_CHECKPOINTS = 2  # of the newest
LOCK = ".lock"


def decisive_settings(config: Config) -> dict[str, Any]:
    """The settings that decide which weights a run ends with, by dotted name."""
    return flat(config, free_too=False)


def _is_beginning(path: Path) -> bool:
    """Whether it is what a run that was killed at its first word leaves."""
    return path.name == LOCK or (path.name.startswith(".config.json.") and path.suffix == ".tmp")


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes from step to step."""

    method: Method
    optimizer: torch.optim.Optimizer

    def load(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], source: Path) -> None:
        """Take over, in place, a checkpoint's weights and its optimiser's state."""
        checkpoint.check_tensors(weights, self.method.own_state(), source)
        self.method.load_own_state(weights)
        load_optimizer_tensors(self.optimizer, self.method, moments, source)


@dataclass(frozen=True)
class Saved:
    """What a run continues from. progress: its ``training`` section.  facts: what the method learned of its data."""

    folder: Path
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    progress: dict[str, Any]
    facts: DataFacts


@dataclass(frozen=True)
class Run:
    """The folder of one training run. data: what its models say of the dataset (``lewm.data.record``)."""

    directory: Path
    data: Mapping[str, Any] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def series(self) -> Path:
        """Where small models from all along the training are, for ``checkpoint.of_run`` to list."""
        return self.directory / "series"

    def is_finished(self, steps: int) -> bool:
        """Whether the folder holds the checkpoint of the last of ``steps`` steps."""
        return self._place(steps).is_dir()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only process that trains into the folder; without one, nothing stays if nothing was written."""
        check_place(self.directory)
        busy = f"Another process is training into {self.directory}. Wait for it, or choose another folder with --out."
        with leaving_no_empty_folders(self.directory), only_writer(self.directory / LOCK, busy):
            yield

    def open(self, config: Config) -> tuple[Path | None, list[str]]:
        """Begin or continue: the checkpoint to continue from, if any, and what is wrong with newer ones."""
        earlier = self._earlier()
        if earlier is None:
            write_json(self._description, to_dict(config), checked=True)
            return None, []
        # What is free may have changed, and an earlier version's description becomes one of this version.
        write_json(self._description, to_dict(config), checked=True)
        checkpoint.recover(self.checkpoints)
        checkpoint.recover(self.series)
        return checkpoint.newest_whole(self.checkpoints)

    def check(self, config: Config, resume: str) -> None:
        """Raise when the folder holds something else than this run. Nothing is touched."""
        earlier = self._earlier()
        if earlier is not None:
            self._check_same_run(earlier, config, resume)
            return
        if self.directory.exists() and not all(map(_is_beginning, self.directory.iterdir())):
            raise TrainingError(
                f"{self.directory} is not empty and is not a training run. Choose another folder with --out."
            )
        config.train.check_schedule()  # what began before it was checked may end

    @property
    def _description(self) -> Path:
        return self.directory / "config.json"

    def _earlier(self) -> Config | None:
        """The settings of the run that is here, if one is."""
        if not self._description.is_file():
            return None
        saved = read_json(self._description)
        if isinstance(saved, dict) and saved.get("format") == "lewm":
            raise TrainingError(f"{self.directory} holds a model, not a run. Choose another folder with --out.")
        # Through a Config: settings that did not exist when the run began had what is now their default.
        return read_config(saved)

    def _check_same_run(self, earlier: Config, config: Config, resume: str) -> None:
        if resume == "never":
            raise TrainingError(
                f"{self.directory} already holds a run. Continue it with --resume auto, or choose another --out."
            )
        if earlier.method.NAME != config.method.NAME:
            raise TrainingError(
                f"{self.directory} holds a run of the method {earlier.method.NAME}, not of {config.method.NAME}. "
                "Choose another folder with --out."
            )
        old, new = decisive_settings(earlier), decisive_settings(config)
        differing = [f"{name} ({old[name]!r} -> {new[name]!r})" for name in sorted(new) if old[name] != new[name]]
        if differing:
            raise TrainingError(
                f"{self.directory} holds another run: {', '.join(differing)}. Choose another folder with --out."
            )

    def save(self, step: int, state: TrainingState, progress: dict[str, Any]) -> tuple[Path, list[str]]:
        """Write the checkpoint of ``step`` completed steps, and remove all but the newest; says what did not go."""
        target = self._place(step)
        extra = self._origin(step, progress)
        moments = optimizer_tensors(state.optimizer, state.method)
        checkpoint.write_folder(target, lambda folder: save(state.method, folder, extra, moments))
        return target, checkpoint.prune(self.checkpoints, KEPT_CHECKPOINTS, step)

    def keep(self, step: int, method: Method, progress: dict[str, Any]) -> None:
        """Write the small model of ``step`` completed steps, which stays."""
        target = self.series / self._place(step).name
        extra = self._origin(step, progress)
        tensors = {checkpoint.WEIGHTS: bf16_tensors(method)}
        checkpoint.write_folder(target, lambda folder: checkpoint.save_model(folder, tensors, describe(method) | extra))

    def _origin(self, step: int, progress: dict[str, Any]) -> dict[str, Any]:
        """What a model of the run says of where it comes from."""
        training, run = {"step": step, **progress}, read_json(self._description)
        return {"training": training, "run": run, "data": self.data and dict(self.data)}

    def series_note(self, method: Method, settings: TrainConfig) -> str:
        """How much disk the series of small models takes in the end."""
        size = sum(tensor.nbytes for tensor in bf16_tensors(method).values()) / 1e6
        count = -(-settings.steps // settings.keep_every)
        return f"Series: {count} models of {size:,.1f} MB, {count * size:,.0f} MB in all, go to {self.series}."

    @staticmethod
    def read(folder: Path) -> Saved:
        """What a checkpoint continues with."""
        document = checkpoint.load_document(folder)
        weights, moments = (
            checkpoint.load_tensors(folder, document, name) for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)
        )
        return Saved(folder, weights, moments, document["training"], read_facts(document, folder))

    def _place(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:07d}"
