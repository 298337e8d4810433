"""A training run, from its dataset to its checkpoints.

Everything random about step s is a pure function of (seed, s): which windows, which draws of the method, which units
drop out. So a run needs no random state in its checkpoints, and an interrupted run that continues ends, on the CPU,
with the very weights of an undisturbed one. On a GPU it sees the same windows, draws and dropout; the weights then
agree as far as two runs on that GPU agree, whose attention sums gradients in no fixed order.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from lewm import checkpoint
from lewm.checked import flat
from lewm.config import Config
from lewm.data.windows import Windows, batch_indices
from lewm.errors import LewmError, TrainingError
from lewm.methods.base import Method
from lewm.methods.files import read_facts
from lewm.rng import derive_seed
from lewm.train.compiled import Compilation, compile_parts, wants_compiling
from lewm.train.distributed import Processes, join_processes, restarts, share_batchnorm
from lewm.train.inputs import Dataset, TrainingData, compute_features, load_windows, open_dataset
from lewm.train.optim import make_optimizer
from lewm.train.prefetch import Batches
from lewm.train.run import Run, TrainingState, decisive_settings
from lewm.train.step import CapturedStep, PlainStep, StepFunction, step_arithmetic
from lewm.train.trainer import INITIAL_WEIGHTS, WINDOWS, SilentMonitor, Trainer, TrainingMonitor, check_same_data
from lewm.types import Batch, DataFacts, Peers


@dataclass(frozen=True)
class TrainResult:
    """What a call of ``train`` made. steps: completed in all."""

    directory: Path
    checkpoint: Path
    model: Method
    steps: int


class Stoppable(Protocol):
    """What trains, alone or as one of several processes, and looks now and then whether it is to stop."""

    stop_requested: bool

    @property
    def processes(self) -> Peers: ...


@contextlib.contextmanager
def stop_on_signals(trainer: Stoppable) -> Iterator[None]:
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
    """Turn running out of memory, the device's or the machine's, into advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not of_memory:
            raise
        raise TrainingError(
            f"Out of memory on the device: {(str(error) or 'no more').splitlines()[0]} Lower train.batch-size (now "
            f"{config.train.batch_size}) or the method's sizes, or keep the frames off with --loader.cache disk."
        ) from error


def train(config: Config, resume: str = "auto", monitor: TrainingMonitor | None = None) -> TrainResult:
    """Train a model as ``config`` says, from its dataset to its run folder.

    resume: "auto" continues the run that config.out holds, if any; "never" refuses a folder that holds one.
    Ctrl-C and SIGTERM end it with KeyboardInterrupt, after what was learned is on disk: the same call continues.
    Under torchrun this is a process of many, each of which calls it: see ``lewm.train.distributed``.
    """
    with join_processes(config.device) as (processes, device), explain_out_of_memory(config):
        monitor = monitor if monitor and processes.is_first else SilentMonitor()
        resume = "auto" if restarts() else resume
        with prepared(config, resume, processes, device, monitor) as trainer, stop_on_signals(trainer):
            trainer.fit()
        assert trainer.last_checkpoint is not None  # fit() always ends with one
        # By a signal to this process, perhaps at the very last step, or to another one of the run.
        if trainer.stop_requested or trainer.step < config.train.steps:
            monitor.note(f"Stopped after {trainer.step} steps; checkpoint: {trainer.last_checkpoint}")
            raise KeyboardInterrupt
        model = trainer.state.method.eval()
        return TrainResult(trainer.run.directory, trainer.last_checkpoint, model, trainer.step)


@contextlib.contextmanager
def prepared(
    config: Config, resume: str, processes: Processes, device: torch.device, monitor: TrainingMonitor
) -> Iterator[Trainer]:
    """Everything before the first step: data, method, folder; compiles while the data is read.

    The folder is this run's alone while the context lasts.
    """
    part = processes.together(lambda: processes.part_of(config.train.batch_size))
    dataset = _agreed_dataset(config, processes)
    config = replace(config, collect=processes.together(dataset.collected))
    state = _initial_state(config, dataset, device, processes)
    run = Run(config.out or Path("runs/train"), dataset.record())
    with contextlib.ExitStack() as stack:
        # Before the work: whoever may not write there need not wait for it.
        processes.together(
            lambda: _claim(run, config, resume, state.method.facts, stack) if processes.is_first else None
        )
        processes.together(lambda: dataset.windows(config))  # as do those whose dataset has too few
        fast, compilation = _compiled(state.method, config, device, processes, run)
        processes.together(lambda: compute_features(dataset, device, monitor.note) if processes.is_first else None)
        data = processes.together(lambda: load_windows(config, dataset, device))
        opened = processes.together(lambda: run.open(config) if processes.is_first else (None, []))
        newest, problems = processes.from_first(opened)
        for note in (*_notes(data), *problems, *_remarks(state.method, dataset, processes)):
            monitor.note(note)
        if compilation:
            compilation.report(monitor.note)
        batches = Batches(_batch_of(config, data.training, part), config.train.steps, device)
        stack.callback(batches.close)
        take_step: StepFunction = PlainStep(fast, state.optimizer, config.train, processes)
        # What processes say to one another cannot be captured.
        if config.train.cuda_graph and device.type == "cuda" and processes.count == 1:
            take_step = CapturedStep(take_step, quiet=batches.wait)
        trainer = Trainer(config, state, take_step, batches, data, run, processes, monitor)
        if newest is not None:
            trainer.resume(newest)
            for note in _other_arithmetic(newest, config, device):
                monitor.note(note)
        yield trainer


def _agreed_dataset(config: Config, processes: Processes) -> Dataset:
    """The dataset, which must be the same for all processes, as must be their settings."""
    dataset = processes.together(lambda: open_dataset(config))
    if processes.count > 1:
        # All that has to do with steps: a process that measures more often than others would wait for them for ever.
        processes.check_agreement("settings", decisive_settings(config) | flat(config.train, "train."))
        processes.check_agreement("dataset", dataset.summary())
    return dataset


def _initial_state(config: Config, dataset: Dataset, device: torch.device, processes: Processes) -> TrainingState:
    facts = processes.together(lambda: dataset.facts(config))
    torch.manual_seed(derive_seed(config.seed, INITIAL_WEIGHTS))
    method = processes.together(lambda: config.method.build(facts))
    method.use_kernels(config.train.fused)
    share_batchnorm(method, processes)
    method.to(device)
    return TrainingState(method, make_optimizer(method, config.train))


def _compiled(
    method: Method, config: Config, device: torch.device, processes: Processes, run: Run
) -> tuple[Method, Compilation | None]:
    """A view of the method with compiled parts, if they are wanted, and their compilation that has begun."""
    if not wants_compiling(config.train, device) or run.is_finished(config.train.steps):
        return method, None
    fast = compile_parts(method)
    # Several processes compile in their first step instead: they cannot take it before all have come so far. And what
    # features look like is not known before there are any.
    early = processes.count == 1 and method.inputs.features is None and not method.inputs.proprio
    return fast, Compilation(fast, config) if early else None


def _claim(run: Run, config: Config, resume: str, facts: DataFacts, stack: contextlib.ExitStack) -> None:
    """Make the run's folder ours for as long as ``stack`` lasts, unless it holds something else."""
    stack.enter_context(run.writing())
    run.check(config, resume)
    if newest := checkpoint.latest(run.checkpoints):
        then = None
        with contextlib.suppress(LewmError):  # a damaged one is passed over later
            then = read_facts(checkpoint.load_document(newest), newest)
        if then is not None:
            check_same_data(then, facts, newest)


def _notes(data: TrainingData) -> Iterator[str]:
    yield f"{len(data.training)} training windows; {data.cache}."
    if data.training.skipped:
        yield f"{data.training.skipped} training episodes are shorter than a window and were left out."


def _other_arithmetic(newest: Path, config: Config, device: torch.device) -> list[str]:
    """A sentence if steps are computed in another precision from here on than the checkpoint's were."""
    then = str(checkpoint.load_document(newest)["training"].get("device", ""))
    # As checkpoints say it: "1 × NVIDIA H200, torch 2.11.0". What is neither of these two is a GPU of CUDA.
    kind = re.split(r"[,:]", then.partition(" × ")[2])[0]
    before = step_arithmetic(config.train, kind if kind in ("cpu", "mps") else "cuda")
    now = step_arithmetic(config.train, device.type)
    if not kind or before == now:
        return []
    remedy = f"For the arithmetic that it began in, continue on {'CUDA' if before == 'bf16' else 'the device of then'}"
    return [f"Until here steps were computed in {before} ({then}), from here on in {now} ({device}). {remedy}."]


def _remarks(method: Method, dataset: Dataset, processes: Processes) -> list[str]:
    """What the method says of the data's frames, if it looks at them without background."""
    if not (method.settings.needs_background and processes.is_first):
        return []
    return method.remarks(dataset.spread_frames())


def _batch_of(config: Config, windows: Windows, part: slice) -> Callable[[int], Batch]:
    """This process's part of the batch of each step, which does not depend on how many share it."""
    seed, size = derive_seed(config.seed, WINDOWS), config.train.batch_size
    return lambda step: windows.batch(batch_indices(len(windows), size, step, seed), (seed, step), part)
