"""The training loop: batches in, checkpoints out.

Everything random about step s is a pure function of (seed, s): which windows, which SIGReg directions, which units
drop out. So a run needs no random state in its checkpoints, and an interrupted run that continues ends, on the CPU,
with the very weights of an undisturbed one.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import numpy as np
import torch

from lewm.config import Config
from lewm.data.frames import open_frames
from lewm.data.stats import action_stats
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows, batch_indices, split_episodes
from lewm.errors import DataError, TrainingError
from lewm.model.sigreg import SIGReg
from lewm.model.world_model import LeWM, resolve_device
from lewm.rng import derive_seed
from lewm.train.diagnostics import collapse_warning, diagnose
from lewm.train.logs import MetricsLog
from lewm.train.objective import Losses, lewm_loss
from lewm.train.optim import learning_rate, make_optimizer
from lewm.train.run import Run
from lewm.types import ActionStats, Batch

# Second element of the keys from which random streams are derived: what the stream is for.
_INITIAL_WEIGHTS, _DROPOUT, _WINDOWS, _VALIDATION, _DIRECTIONS = range(5)


class TrainingMonitor(Protocol):
    """Told about a run as it goes; ``lewm.progress`` has the one for the command line."""

    def note(self, message: str) -> None:
        """Something the user should read, once."""

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """Called after every step, with the newest measurements."""


class SilentMonitor:
    """Says nothing."""

    def note(self, message: str) -> None: ...

    def step(self, step: int, total: int, values: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class TrainResult:
    """How a call of ``train`` ended. steps: completed in all."""

    directory: Path
    checkpoint: Path
    model: LeWM
    steps: int
    interrupted: bool


@dataclass(frozen=True)
class TrainingData:
    """A dataset, cut into windows of training and of held-out episodes.

    action_stats: of the training episodes.  cache: a sentence on where the frames are.
    """

    training: Windows
    validation: Windows
    action_stats: ActionStats
    cache: str


def load_training_data(config: Config, device: torch.device) -> TrainingData:
    """Open config.data, check that it fits the rest of the config, and cut it into windows."""
    if config.data is None:
        raise DataError("No dataset: pass --data FILE, made by `lewm collect` or downloaded from the authors.")
    store = EpisodeStore(config.data)
    store.check_environment(config.env, config.model.action_dim)
    model, loader = config.model, config.loader
    if store.resolution != model.encoder.image_size:
        raise DataError(
            f"{config.data} has frames of {store.resolution} pixels, but the model takes "
            f"{model.encoder.image_size}. Collect at that resolution or set model.encoder.image-size."
        )
    train_ids, val_ids = split_episodes(store.num_episodes, loader.val_fraction, loader.split_seed)
    frames = open_frames(store, loader.cache, loader.threads, device=device)
    training, validation = (
        Windows(store, frames, ids, model.history, model.frame_skip) for ids in (train_ids, val_ids)
    )
    if len(training) < config.train.batch_size:
        raise DataError(
            f"{config.data} gives {len(training)} training windows, fewer than one batch of "
            f"{config.train.batch_size}. Collect more episodes or lower train.batch-size."
        )
    in_training = np.isin(np.repeat(np.arange(store.num_episodes), store.lengths), train_ids)
    return TrainingData(training, validation, action_stats(store.actions[in_training]), frames.description)


class Trainer:
    """One training run, given its parts."""

    def __init__(self, config: Config, model: LeWM, data: TrainingData, run: Run, monitor: TrainingMonitor) -> None:
        self.config, self.model, self.data, self.run, self.monitor = config, model, data, run, monitor
        self.device = model.device
        self.optimizer = make_optimizer(model, config.train)
        self.sigreg = SIGReg(config.sigreg, seed=derive_seed(config.seed, _DIRECTIONS) >> 32)
        self.step = 0
        self.last_checkpoint: Path | None = None
        self.stop_requested = False
        # The first step whose loss or gradient was not finite; on the device, so that watching it costs no waiting.
        self._first_bad_step = torch.full((), math.inf, device=self.device)
        self._latest: dict[str, float] = {}
        self._warned_of_collapse = False

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint of this run."""
        progress = self.run.load(folder, self.model, self.optimizer)
        if progress["windows"] != len(self.data.training):
            raise TrainingError(
                f"{folder} was trained on {progress['windows']} windows, this dataset has {len(self.data.training)}. "
                "Continue with the dataset the run began with, or start another run with --out."
            )
        self.step, self.last_checkpoint = progress["step"], folder
        self.monitor.note(f"Continuing {self.run.directory} at step {self.step}.")

    def fit(self) -> None:
        """Train up to config.train.steps, or until a stop is requested; ends with a checkpoint."""
        settings = self.config.train
        log = MetricsLog(self.run.directory, first_step=self.step + 1)
        started, first_step = time.perf_counter(), self.step
        try:
            while self.step < settings.steps and not self.stop_requested:
                losses = self._train_step()
                self.step += 1
                last = self.step == settings.steps
                if last or self.step % settings.log_every == 0:
                    speed = (self.step - first_step) / (time.perf_counter() - started)
                    self._log(log, losses, speed)
                if last or self.step % settings.val_every == 0:
                    log.write(self.step, self._validate())
                if last or self.step % settings.checkpoint_every == 0:
                    self._checkpoint()
                self.monitor.step(self.step, settings.steps, self._latest)
            if self.stop_requested or self.last_checkpoint is None:
                self._checkpoint()
        finally:
            log.close()

    def _train_step(self) -> Losses:
        settings = self.config.train
        indices = batch_indices(
            len(self.data.training), settings.batch_size, self.step, derive_seed(self.config.seed, _WINDOWS)
        )
        batch = self._to_device(self.data.training.batch(indices))
        torch.manual_seed(derive_seed(self.config.seed, _DROPOUT, self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, self.step)
        self.model.train()
        with self._autocast():
            losses = lewm_loss(self.model, self.sigreg, batch, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self.optimizer.step()
        # The gradient too: a finite loss can have one that is not, and its step ruins every weight.
        finite = losses.total.detach().isfinite() & norm.isfinite()
        bad_here = torch.where(finite, math.inf, float(self.step + 1))
        self._first_bad_step = torch.minimum(self._first_bad_step, bad_here)
        return losses

    def _log(self, log: MetricsLog, losses: Losses, steps_per_second: float) -> None:
        self._stop_if_not_finite()
        diagnostics = diagnose(losses.z_BTD)
        self._latest = {
            "loss": losses.total.item(),
            "prediction_loss": losses.prediction.item(),
            "sigreg_loss": losses.sigreg.item(),
            "learning_rate": learning_rate(self.config.train, self.step - 1),
            **diagnostics,
        }
        log.write(self.step, {**self._latest, "steps_per_second": steps_per_second})
        warning = collapse_warning(diagnostics, self.config.model.embed_dim)
        # An untrained encoder looks collapsed too; give the regulariser the warm-up to spread it.
        if warning and self.step > self.config.train.warmup_steps and not self._warned_of_collapse:
            self.monitor.note(f"Step {self.step}: {warning}")
            self._warned_of_collapse = True

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        settings, windows = self.config.train, self.data.validation
        size = min(settings.batch_size, len(windows))
        seed = derive_seed(self.config.seed, _VALIDATION)
        self.model.eval()
        totals = torch.zeros(3, device=self.device)
        for i in range(settings.val_batches):
            batch = self._to_device(windows.batch(batch_indices(len(windows), size, i, seed)))
            with self._autocast():
                # The same directions for each validation: its curve shows the model, not the draw.
                losses = lewm_loss(self.model, self.sigreg, batch, step=i)
            totals += torch.stack([losses.total, losses.prediction, losses.sigreg]).float()
        names = ("val/loss", "val/prediction_loss", "val/sigreg_loss")
        return dict(zip(names, (totals / settings.val_batches).tolist(), strict=True))

    def _checkpoint(self) -> None:
        self._stop_if_not_finite()
        progress = {"windows": len(self.data.training), "env": self.config.env}
        self.last_checkpoint = self.run.save(self.step, self.model, self.optimizer, progress)

    def _stop_if_not_finite(self) -> None:
        first_bad = self._first_bad_step.item()
        if first_bad == math.inf:
            return
        kept = f"The last good checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "No checkpoint yet"
        raise TrainingError(
            f"The loss of step {int(first_bad)} or its gradient is not finite. {kept}. Lower train.lr, or check the "
            "data with `lewm info`."
        )

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(batch.pixels.to(self.device, non_blocking=True), batch.actions.to(self.device, non_blocking=True))

    def _autocast(self) -> torch.autocast:
        wanted = self.config.train.precision
        enabled = wanted == "bf16" or (wanted == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


@contextlib.contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM ask the trainer to save and stop; a second one interrupts at once."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        if trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = True

    # Only the main thread may set handlers; elsewhere signals keep the meaning they have.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train(config: Config, resume: str = "auto", monitor: TrainingMonitor | None = None) -> TrainResult:
    """Train a model as ``config`` says, from its dataset to its run folder.

    resume: "auto" continues the run that config.out holds, if any; "never" refuses a folder that holds one.
    """
    monitor = monitor or SilentMonitor()
    device = resolve_device(config.device)
    data = load_training_data(config, device)
    run = Run(config.out or Path("runs/train"))
    newest = run.open(config, resume)
    monitor.note(f"{len(data.training)} training windows; {data.cache}.")
    if data.training.skipped:
        monitor.note(f"{data.training.skipped} training episodes are shorter than a window and were left out.")
    torch.manual_seed(derive_seed(config.seed, _INITIAL_WEIGHTS))
    model = LeWM(config.model, data.action_stats).to(device)
    trainer = Trainer(config, model, data, run, monitor)
    if newest is not None:
        trainer.resume(newest)
    with stop_on_signals(trainer):
        trainer.fit()
    assert trainer.last_checkpoint is not None  # fit() always ends with one
    interrupted = trainer.step < config.train.steps
    return TrainResult(run.directory, trainer.last_checkpoint, model.eval(), trainer.step, interrupted)
