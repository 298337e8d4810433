"""A training run, from its dataset to its checkpoints.

Everything random about step s is a pure function of (seed, s): which windows, which SIGReg directions, which units
drop out. So a run needs no random state in its checkpoints, and an interrupted run that continues ends, on the CPU,
with the very weights of an undisturbed one. On a GPU it sees the same windows, directions and dropout; the weights then
agree as far as two runs on that GPU agree, whose attention sums gradients in no fixed order.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from lewm.config import Config
from lewm.data.stats import BACKGROUND_FRAMES, background, changed_patches, spread_frames
from lewm.data.windows import Windows, batch_indices
from lewm.errors import TrainingError
from lewm.model.world_model import LeWM
from lewm.rng import derive_seed
from lewm.train.compiled import Compilation, compile_parts, wants_compiling
from lewm.train.distributed import Processes, join_processes, restarts, share_batchnorm
from lewm.train.inputs import Dataset, TrainingData, load_windows, open_dataset
from lewm.train.optim import make_optimizer
from lewm.train.prefetch import Batches
from lewm.train.run import Run, TrainingState, decisive_settings
from lewm.train.step import CapturedStep, PlainStep, StepFunction
from lewm.train.trainer import INITIAL_WEIGHTS, WINDOWS, SilentMonitor, Trainer, TrainingMonitor, make_sigreg
from lewm.types import Batch


@dataclass(frozen=True)
class TrainResult:
    """How a call of ``train`` ended. steps: completed in all."""

    directory: Path
    checkpoint: Path
    model: LeWM
    steps: int
    interrupted: bool


@contextlib.contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM ask the trainer to save and stop; a second one interrupts at once."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        # torchrun passes on the signals that a terminal has sent to its processes already: there, two mean one.
        if trainer.stop_requested and trainer.processes.count == 1:
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


@contextlib.contextmanager
def explain_out_of_memory(config: Config) -> Iterator[None]:
    """Turn the device's running out of memory into advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"The device ran out of memory: {str(error).splitlines()[0]} Lower train.batch-size (now "
            f"{config.train.batch_size}), or keep the frames off the device with --loader.cache disk."
        ) from error


def train(config: Config, resume: str = "auto", monitor: TrainingMonitor | None = None) -> TrainResult:
    """Train a model as ``config`` says, from its dataset to its run folder.

    resume: "auto" continues the run that config.out holds, if any; "never" refuses a folder that holds one.
    Under torchrun this is a process of many, each of which calls it: see ``lewm.train.distributed``.
    """
    with join_processes(config.device) as (processes, device), explain_out_of_memory(config):
        monitor = monitor if monitor and processes.is_first else SilentMonitor()
        trainer = prepare(config, "auto" if restarts() else resume, processes, device, monitor)
        with stop_on_signals(trainer), contextlib.closing(trainer.batches):
            trainer.fit()
        assert trainer.last_checkpoint is not None  # fit() always ends with one
        interrupted = trainer.step < config.train.steps
        model = trainer.state.model.eval()
        return TrainResult(trainer.run.directory, trainer.last_checkpoint, model, trainer.step, interrupted)


def prepare(
    config: Config, resume: str, processes: Processes, device: torch.device, monitor: TrainingMonitor
) -> Trainer:
    """Everything before the first step: data, model, folder; compiles while the data is read."""
    started = time.perf_counter()
    part = processes.together(lambda: processes.part_of(config.train.batch_size))
    dataset = processes.together(lambda: open_dataset(config))
    if processes.count > 1:
        processes.check_agreement("settings", decisive_settings(config))
        processes.check_agreement("dataset", dataset.facts())
    state = _initial_state(config, dataset, device, processes)
    model, sigreg, compilation = state.model, make_sigreg(config, processes), None
    run = Run(config.out or Path("runs/train"))
    if wants_compiling(config.train, device) and not run.is_finished(config.train.steps):
        model, sigreg = compile_parts(model, sigreg)
        # Several processes compile in their first step instead: they cannot take it before all have come so far.
        compilation = Compilation(model, sigreg, config) if processes.count == 1 else None
    data = processes.together(lambda: load_windows(config, dataset, device))
    newest = processes.from_first(processes.together(lambda: run.open(config, resume) if processes.is_first else None))
    _describe(data, monitor)
    if config.model.encoder.kept_patches and processes.is_first:
        _check_kept_patches(state.model, dataset, monitor)
    if compilation:
        compiling, waited = compilation.wait(), time.perf_counter() - started
        monitor.note(f"Compiled in {compiling:.0f} s while the data was read; {waited:.0f} s in all before the start.")
    batches = Batches(_batch_of(config, data.training, part), config.train.steps, device)
    take_step: StepFunction = PlainStep(model, sigreg, state.optimizer, config.train, processes)
    # What processes say to one another cannot be captured.
    if config.train.cuda_graph and device.type == "cuda" and processes.count == 1:
        take_step = CapturedStep(take_step, quiet=batches.wait)
    trainer = Trainer(config, state, take_step, batches, data, run, processes, monitor)
    if newest is not None:
        trainer.resume(newest)
    return trainer


def _describe(data: TrainingData, monitor: TrainingMonitor) -> None:
    monitor.note(f"{len(data.training)} training windows; {data.cache}.")
    if data.training.skipped:
        monitor.note(f"{data.training.skipped} training episodes are shorter than a window and were left out.")


def _check_kept_patches(model: LeWM, dataset: Dataset, monitor: TrainingMonitor) -> None:
    """Say so if frames show more than the encoder will look at."""
    encoder = model.config.encoder
    frames = spread_frames(dataset.store, dataset.train_ids, BACKGROUND_FRAMES)
    counts = changed_patches(frames, model.encoder.background.cpu().numpy(), encoder.patch_size)
    crowded = int((counts > encoder.kept_patches).sum())
    if crowded:
        monitor.note(
            f"{crowded} of {len(frames)} frames differ from the background in more patches (up to {counts.max()}) than "
            f"the {encoder.kept_patches} that are looked at. Consider a larger model.encoder.kept-patches."
        )


def _initial_state(config: Config, dataset: Dataset, device: torch.device, processes: Processes) -> TrainingState:
    torch.manual_seed(derive_seed(config.seed, INITIAL_WEIGHTS))
    model = LeWM(config.model, dataset.action_stats, torch.from_numpy(dataset.recorded_actions))
    model.encoder.use_kernels(attention=config.train.fused, mlp=config.train.fused)
    if config.model.encoder.kept_patches:
        seen = processes.together(lambda: background(dataset.store, dataset.train_ids))
        model.encoder.background.copy_(torch.from_numpy(seen))
    share_batchnorm(model, processes)
    model.to(device)
    return TrainingState(model, make_optimizer(model, config.train))


def _batch_of(config: Config, windows: Windows, part: slice) -> Callable[[int], Batch]:
    """This process's part of the batch of each step, which does not depend on how many share it."""
    seed, size = derive_seed(config.seed, WINDOWS), config.train.batch_size
    return lambda step: windows.batch(batch_indices(len(windows), size, step, seed), (seed, step), part)
