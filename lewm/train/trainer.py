"""The loop over steps: train, measure, validate, save, and stop when asked to or when something is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from lewm.config import Config
from lewm.data.windows import Windows, batch_indices
from lewm.errors import TrainingError
from lewm.model.sigreg import SIGReg
from lewm.rng import derive_seed
from lewm.train.batchnorm import measure_batchnorm
from lewm.train.diagnostics import collapse_warning, diagnose
from lewm.train.distributed import Processes
from lewm.train.inputs import TrainingData
from lewm.train.logs import MetricsLog
from lewm.train.objective import Losses, lewm_loss
from lewm.train.optim import learning_rate, set_learning_rate
from lewm.train.prefetch import Batches
from lewm.train.run import Run, TrainingState
from lewm.train.step import StepFunction, StepResult, step_precision
from lewm.types import Batch

# Second element of the keys from which random streams are derived: what the stream is for.
INITIAL_WEIGHTS, DROPOUT, WINDOWS, VALIDATION, DIRECTIONS, CALIBRATION = range(6)


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


class Trainer:
    """One training run, given its parts.

    Args:
        config: the run's settings.
        state: model and optimiser.
        take_step: trains on this process's part of a batch.
        batches: that part, by step.
        data: its windows, for what is not a step.
        run: the folder; only the first process writes to it.
        processes: who takes part.
        monitor: is told what happens.
    """

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        take_step: StepFunction,
        batches: Batches,
        data: TrainingData,
        run: Run,
        processes: Processes,
        monitor: TrainingMonitor,
    ) -> None:
        self.config, self.state, self.data, self.run, self.monitor = config, state, data, run, monitor
        self.processes = processes
        self._take_step, self.batches = take_step, batches
        self.device = state.model.device
        self.sigreg = make_sigreg(config)
        self.step = 0
        self.last_checkpoint: Path | None = None
        self.stop_requested = False
        # The first step whose loss or gradient was not finite; on the device, so that watching it costs no waiting.
        self._first_bad_step = torch.full((), math.inf, device=self.device)
        self._calibrated_at = -1  # the step whose weights BatchNorm's statistics were last measured for
        self._latest: dict[str, float] = {}
        self._warned_of_collapse = False

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint of this run, which the first process reads for all."""
        read = self.processes.together(lambda: Run.read(folder) if self.processes.is_first else None)
        content = self.processes.from_first(read)
        assert content is not None
        weights, tensors, progress = content
        if progress["windows"] != len(self.data.training):
            self.processes.fail(
                TrainingError(
                    f"{folder} was trained on {progress['windows']} windows, this dataset has "
                    f"{len(self.data.training)}. Continue with the dataset the run began with, or start another run "
                    "with --out."
                )
            )
        self.state.load(weights, tensors, folder)
        self.step, self.last_checkpoint = progress["step"], folder
        self.monitor.note(f"Continuing {self.run.directory} at step {self.step}.")

    def fit(self) -> None:
        """Train up to config.train.steps, or until a stop is requested anywhere; ends with a checkpoint."""
        settings = self.config.train
        log = MetricsLog(self.run.directory, first_step=self.step + 1) if self.processes.is_first else None
        started, first_step = time.perf_counter(), self.step
        self.state.model.train()
        try:
            while self.step < settings.steps and not self._everyone_stops():
                result = self.train_step()
                self.step += 1
                last = self.step == settings.steps
                if last or self.step % settings.log_every == 0:
                    speed = (self.step - first_step) / (time.perf_counter() - started)
                    self._log(log, result.losses, speed)
                if log and (last or self.step % settings.val_every == 0):
                    log.write(self.step, self._validate())
                if last or self.step % settings.checkpoint_every == 0:
                    self._checkpoint()
                self.monitor.step(self.step, settings.steps, self._latest)
            if self.step < settings.steps or self.last_checkpoint is None:
                self._checkpoint()
        finally:
            if log:
                log.close()

    def _everyone_stops(self) -> bool:
        """Whether to stop before this step: a signal to one process stops all of them at the same step."""
        self.stop_requested = self.processes.any(self.stop_requested)
        return self.stop_requested

    def train_step(self) -> StepResult:
        """Train on the batch of this step; ``step`` is for the caller to count."""
        batch = self.batches(self.step)
        directions_DM = self.sigreg.directions(self.config.model.embed_dim, self.step, self.device)
        # Processes hold different windows and must not drop the same units of them.
        process = (self.processes.rank,) if self.processes.rank else ()
        torch.manual_seed(derive_seed(self.config.seed, DROPOUT, self.step, *process))
        set_learning_rate(self.state.optimizer, learning_rate(self.config.train, self.step))
        result = self._take_step(batch, directions_DM)
        bad_here = torch.where(result.finite, math.inf, float(self.step + 1))
        self._first_bad_step = torch.minimum(self._first_bad_step, bad_here)
        return result

    def _log(self, log: MetricsLog | None, losses: Losses, steps_per_second: float) -> None:
        self._stop_if_not_finite()
        total, prediction = self.processes.mean(torch.stack([losses.total, losses.prediction])).tolist()
        diagnostics = diagnose(self.processes.concatenate(losses.z_BTD))
        self._latest = {
            "loss": total,
            "prediction_loss": prediction,
            "sigreg_loss": losses.sigreg.item(),
            "learning_rate": learning_rate(self.config.train, self.step - 1),
            **diagnostics,
        }
        if log:
            log.write(self.step, {**self._latest, "steps_per_second": steps_per_second})
        warning = collapse_warning(diagnostics, self.config.model.embed_dim)
        # An untrained encoder looks collapsed too; give the regulariser the warm-up to spread it.
        if warning and self.step > self.config.train.warmup_steps and not self._warned_of_collapse:
            self.monitor.note(f"Step {self.step}: {warning}")
            self._warned_of_collapse = True

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """The losses on held-out windows; by one process, on whole batches."""
        settings = self.config.train
        self._calibrate()
        model = self.state.model.eval()
        totals = torch.zeros(3, device=self.device)
        for i, batch in enumerate(self._whole_batches(self.data.validation, settings.val_batches, VALIDATION)):
            # The same directions for each validation: its curve shows the model, not the draw.
            directions_DM = self.sigreg.directions(self.config.model.embed_dim, i, self.device)
            with step_precision(settings, self.device):
                losses = lewm_loss(model, self.sigreg, batch, directions_DM)
            totals += torch.stack([losses.total, losses.prediction, losses.sigreg]).float()
        self.state.model.train()
        names = ("val/loss", "val/prediction_loss", "val/sigreg_loss")
        return dict(zip(names, (totals / settings.val_batches).tolist(), strict=True))

    def _calibrate(self) -> None:
        """Give the model to evaluate the statistics of its weights; by the first process, whose model that is."""
        settings = self.config.train
        if settings.calibration_batches == 0 or self._calibrated_at == self.step:
            return
        torch.manual_seed(derive_seed(self.config.seed, CALIBRATION))  # of dropout
        with step_precision(settings, self.device):
            batches = self._whole_batches(self.data.training, settings.calibration_batches, CALIBRATION)
            measure_batchnorm(self.state.model, batches)
        self.state.model.train()
        self._calibrated_at = self.step

    def _whole_batches(self, windows: Windows, count: int, purpose: int) -> Iterator[Batch]:
        """The same ``count`` batches of windows each time, on the device."""
        size = min(self.config.train.batch_size, len(windows))
        seed = derive_seed(self.config.seed, purpose)
        for i in range(count):
            batch = windows.batch(batch_indices(len(windows), size, i, seed), (seed, i))
            yield batch.map(lambda tensor: tensor.to(self.device))

    def _checkpoint(self) -> None:
        self._stop_if_not_finite()
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        device = f"{self.processes.count} × {kind}, torch {torch.__version__}"
        progress = {"windows": len(self.data.training), "env": self.config.env, "device": device}
        if self.processes.is_first:
            self._calibrate()
            self.last_checkpoint = self.run.save(self.step, self.state, progress)
        self.last_checkpoint = self.processes.from_first(self.last_checkpoint)

    def _stop_if_not_finite(self) -> None:
        first_bad = min(self.processes.gather(self._first_bad_step.item()))
        if first_bad == math.inf:
            return
        kept = f"The last good checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "No checkpoint yet"
        self.processes.fail(
            TrainingError(
                f"The loss of step {int(first_bad)} or its gradient is not finite. {kept}. Lower train.lr, or check "
                "the data with `lewm info`."
            )
        )


def make_sigreg(config: Config, processes: Processes | None = None) -> SIGReg:
    """The regulariser of a run: of one process's batch, or of the batch that ``processes`` share."""
    seed = derive_seed(config.seed, DIRECTIONS) >> 32
    if processes is None or processes.count == 1:
        return SIGReg(config.sigreg, seed)
    return SIGReg(config.sigreg, seed, processes.mean, processes.count)
