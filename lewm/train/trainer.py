"""The loop over steps: train, measure, validate, save, and stop when asked to or when something is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from lewm.config import Config
from lewm.data.windows import Windows, batch_indices
from lewm.errors import TrainingError
from lewm.rng import derive_seed
from lewm.train.diagnostics import collapse_warning, diagnose
from lewm.train.distributed import Processes
from lewm.train.inputs import TrainingData
from lewm.train.logs import MetricsLog
from lewm.train.optim import learning_rate, set_learning_rate
from lewm.train.prefetch import Batches
from lewm.train.run import Run, TrainingState
from lewm.train.step import StepFunction, StepResult, step_precision
from lewm.types import ALONE, Batch, DataFacts, Losses

# Second element of the keys from which random streams are derived: what the stream is for.
INITIAL_WEIGHTS, DROPOUT, WINDOWS, VALIDATION, DRAWS, CALIBRATION = range(6)


class TrainingMonitor(Protocol):
    """Told about a run as it goes; the command line has one."""

    def note(self, message: str) -> None:
        """Something the user should read, once."""

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """Called after every step, with the newest measurements."""


class SilentMonitor:
    """Says nothing."""

    def note(self, message: str) -> None: ...

    def step(self, step: int, total: int, values: dict[str, float]) -> None: ...


_OTHER_DATA = "Continue with the dataset the run began with, or start another run with --out"


def check_same_data(then: DataFacts, now: DataFacts, folder: Path) -> None:
    """Raise when a checkpoint in ``folder`` learned from other data than a run does now."""
    if then.digest not in (None, now.digest):
        what, remedy = "another dataset", _OTHER_DATA
        here = f"its digest was {str(then.digest)[:12]}, here it is {str(now.digest)[:12]}"
    elif then.encoder != now.encoder:
        what, remedy = (
            "features of another encoder than its settings name now",
            "Put that one there again, or start another run with --out",
        )
        here = f"its digest was {str(then.encoder)[:12]}, here it is {str(now.encoder)[:12]}"
    else:
        return
    raise TrainingError(f"{folder} was trained on {what}; {here}. {remedy}.")


class Trainer:
    """One training run, given its parts.

    Args:
        config: the run's settings.
        state: method and optimiser.
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
        self.take_step, self.batches = take_step, batches
        self.device = state.method.device
        self.step = 0
        self.last_checkpoint: Path | None = None
        self.stop_requested = False
        self._draws_seed = derive_seed(config.seed, DRAWS) >> 32
        # The first step whose loss or gradient was not finite; on the device, so that watching it costs no waiting.
        self._first_bad_step = torch.full((), math.inf, device=self.device)
        self._calibrated_at = self._saved_at = -1  # the steps whose weights were last calibrated, and saved
        self._latest: dict[str, float] = {}
        self._warned_of_collapse = False

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint of this run, which the first process reads for all."""
        read = self.processes.together(lambda: Run.read(folder) if self.processes.is_first else None)
        saved = self.processes.from_first(read)
        assert saved is not None
        self.processes.together(lambda: self._check_same_data(saved.facts, saved.progress["windows"], folder))
        self.processes.together(lambda: self.state.load(saved.weights, saved.moments, folder))
        self.step = self._saved_at = saved.progress["step"]
        self.last_checkpoint = folder
        self.monitor.note(f"Continuing {self.run.directory} at step {self.step}.")

    def _check_same_data(self, then: DataFacts, windows: int, folder: Path) -> None:
        check_same_data(then, self.state.method.facts, folder)
        if windows != len(self.data.training):  # all that earlier versions wrote
            here = f"this dataset has {len(self.data.training)}"
            raise TrainingError(f"{folder} was trained on {windows} windows; {here}. {_OTHER_DATA}.")

    def fit(self) -> None:
        """Train up to config.train.steps, or until a stop is requested anywhere; ends with a checkpoint."""
        settings = self.config.train
        log = MetricsLog(self.run.directory, first_step=self.step + 1) if self.processes.is_first else None
        started, first_step = time.perf_counter(), self.step
        if settings.keep_every:
            self.monitor.note(self.run.series_note(self.state.method, settings))
        self.state.method.train()
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
                if settings.keep_every and (last or self.step % settings.keep_every == 0):
                    self._keep()
                self.monitor.step(self.step, settings.steps, self._latest)
            if self._saved_at != self.step:
                self._checkpoint()
        finally:
            if log:
                log.close()

    def _everyone_stops(self) -> bool:
        """Whether to stop before this step: a signal to one process stops all of them at the same step."""
        # Only ever set: a signal that arrives during the vote came too late for it, and counts in the next.
        if self.processes.any(self.stop_requested):
            self.stop_requested = True
            return True
        return False

    def train_step(self) -> StepResult:
        """Train on the batch of this step; ``step`` is for the caller to count."""
        batch = self.batches(self.step)
        draws = self.state.method.draws(self._draws_seed, self.step, self.device)
        # Processes hold different windows and must not drop the same units of them.
        process = (self.processes.rank,) if self.processes.rank else ()
        torch.manual_seed(derive_seed(self.config.seed, DROPOUT, self.step, *process))
        set_learning_rate(self.state.optimizer, learning_rate(self.config.train, self.step))
        result = self.take_step(batch, draws)
        bad_here = torch.where(result.finite, math.inf, float(self.step + 1))
        self._first_bad_step = torch.minimum(self._first_bad_step, bad_here)
        return result

    def _log(self, log: MetricsLog | None, losses: Losses, steps_per_second: float) -> None:
        self._stop_if_not_finite()
        names = ("loss", *(f"{name}_loss" for name in losses.terms))
        values = self.processes.mean(torch.stack([losses.total, *losses.terms.values()]).float()).tolist()
        self._latest = dict(zip(names, values, strict=True))
        self._latest["learning_rate"] = learning_rate(self.config.train, self.step - 1)
        if losses.embeddings is not None:
            diagnostics = diagnose(self.processes.concatenate(losses.embeddings))
            self._latest |= diagnostics
            self._warn_of_collapse(diagnostics, losses.embeddings.shape[-1])
        if log:
            log.write(self.step, {**self._latest, "steps_per_second": steps_per_second})

    def _warn_of_collapse(self, diagnostics: dict[str, float], embed_dim: int) -> None:
        remedy = self.state.method.COLLAPSE_REMEDY
        warning = collapse_warning(diagnostics, embed_dim, remedy) if remedy else None
        # An untrained encoder looks collapsed too; give the regulariser the warm-up to spread it.
        if warning and self.step > self.config.train.warmup_steps and not self._warned_of_collapse:
            self.monitor.note(f"Step {self.step}: {warning}")
            self._warned_of_collapse = True

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """The losses and diagnostics of held-out windows; by one process, on whole batches."""
        settings = self.config.train
        self._calibrate()
        method = self.state.method.eval()
        sums: dict[str, torch.Tensor] = {}
        embedded: list[torch.Tensor] = []
        for i, batch in enumerate(self._whole_batches(self.data.validation, settings.val_batches, VALIDATION)):
            # The same draws for each validation: its curve shows the model, not the draw.
            draws = method.draws(self._draws_seed, i, self.device)
            with step_precision(settings, self.device):
                losses = method.losses(batch, draws, ALONE)
            terms = {"loss": losses.total} | {f"{name}_loss": term for name, term in losses.terms.items()}
            sums = {name: sums.get(name, 0) + term.float() for name, term in terms.items()}
            embedded += [] if losses.embeddings is None else [losses.embeddings]
        method.train()
        means = {name: (total / settings.val_batches).item() for name, total in sums.items()}
        if embedded and all(z_BTD.isfinite().all() for z_BTD in embedded):  # else the run is about to stop
            means |= diagnose(torch.cat(embedded))
        return {f"val/{name}": value for name, value in means.items()}

    def _calibrate(self) -> None:
        """Give the method statistics that fit its weights; by the first process, whose model is saved."""
        settings = self.config.train
        if settings.calibration_batches == 0 or self._calibrated_at == self.step:
            return
        torch.manual_seed(derive_seed(self.config.seed, CALIBRATION))  # of dropout
        with step_precision(settings, self.device):
            batches = self._whole_batches(self.data.training, settings.calibration_batches, CALIBRATION)
            self.state.method.calibrate(batches)
        self.state.method.train()
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
        if self.processes.is_first:
            self._calibrate()
            self.last_checkpoint, problems = self.run.save(self.step, self.state, self._progress())
            for problem in problems:
                self.monitor.note(problem)
        self._saved_at = self.step
        self.last_checkpoint = self.processes.from_first(self.last_checkpoint)

    def _keep(self) -> None:
        """Keep the weights of this step for those who look back at the training; without the optimiser's state."""
        self._stop_if_not_finite()
        if self.processes.is_first:
            self._calibrate()
            self.run.keep(self.step, self.state.method, self._progress())

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint says of the training so far."""
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        device = f"{self.processes.count} × {kind}, torch {torch.__version__}"
        return {"windows": len(self.data.training), "env": self.config.env, "device": device}

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
