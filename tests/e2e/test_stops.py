"""Every verb that writes, stopped at random moments by SIGKILL, SIGTERM and SIGINT, and asked again.

The same command then ends with the very files of one that nobody has stopped, but for what says how long it took, and
with no others. What is asked to stop says so, and has stopped within seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from lewm import checkpoint, cli, starting
from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.train.run import KEPT_CHECKPOINTS

# Processes that begin with everything imported, so that their life is the work.
CONTEXT = multiprocessing.get_context("forkserver")
LIBRARIES = ("torch", "h5py", "av", "pyarrow.parquet", "scipy.stats", "matplotlib.pyplot", "sklearn.manifold")
MODULES = ("eval", "train", "collect", "data", "export", "understand.probe", "understand.decode", "understand.surprise")
PARTS = ("train.loop", "evaluate.runner", "data.formats.convert", "understand.surprise", "understand.probe_findings")
CONTEXT.set_forkserver_preload(
    [*LIBRARIES, *(f"lewm.cli.{name}" for name in MODULES), *(f"lewm.{name}" for name in PARTS), __name__]
)
STOPS = 50  # of each kind
IN_A_ROW = 5  # at most so many, before the command may end
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE = 5.0  # seconds from a request to the end
TIMES = {"times", "seconds", "minutes", "seconds_per_plan", "steps_per_second", "eta", "ms"}
DIGESTS = {"digest", "checksum"}


@dataclass(frozen=True)
class Work:
    """A command that is given in a folder.

    needs: what of the whole files is there before.  repeats: whether it may be given again when all is done.
    """

    command: str
    needs: tuple[str, ...] = ("d.h5",)
    processes: int = 1
    repeats: bool = True


def training(method: str, more: str = "") -> str:
    pace = "--train.steps 12 --train.checkpoint-every 3 --train.val-every 6 --train.log-every 1"
    pace += " --train.calibration-batches 1"
    return f"train debug --method {method} --data d.h5 --out run --device cpu {pace} {more}"


ON_CPU = "--device cpu --data d.h5"
WORKS = {
    "collect": Work("collect tworoom --out new.h5 --episodes 64 --resolution 28 --workers 1", ()),
    "collect with workers": Work(
        "collect tworoom --out new.h5 --episodes 64 --resolution 28 --workers 2 --frame-stride 2", ()
    ),
    "train lewm": Work(training("lewm")),
    "train pldm": Work(training("pldm")),
    "train gcivl": Work(training("gcivl")),
    "train with two processes": Work(training("lewm"), processes=2),
    "features": Work(training("gcbc", "--method.features model"), ("d.h5", "model")),
    "eval": Work("eval model --device cpu --out results.json --eval.episodes 8", ("model",)),
    "convert to lerobot": Work("data convert long.h5 new --to lerobot", ("long.h5",), repeats=False),
    "convert to a folder": Work("data convert long.h5 new --to folder", ("long.h5",), repeats=False),
    "convert to hdf5": Work("data convert long.h5 new.h5 --resolution 20", ("long.h5",), repeats=False),
    "export": Work("export model toy", ("model", "d.h5")),
    "probe": Work(f"understand probe model {ON_CPU} --probe.splits 2 --probe.epochs 5", ("model", "d.h5")),
    "surprise": Work("understand surprise model --device cpu --episodes 20 --trajectories 4", ("model",)),
    "map": Work("understand map model --device cpu --grid 5", ("model",)),
    "decode": Work(
        f"understand decode model {ON_CPU} --train --steps 30 --width 16 --windows 20 --blocks 3", ("model", "d.h5")
    ),
}


@pytest.fixture(scope="module")
def whole(debug_config: Any, debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands may need: a dataset and a model."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(debug_config.data, folder / "d.h5")
    collect("tworoom", folder / "long.h5", CollectConfig(60, resolution=28, workers=1))
    shutil.copytree(debug_run / "checkpoints" / "step_0000008", folder / "model")
    return folder


# -- processes ---------------------------------------------------------------------------------------------------------


def live(folder: Path, command: str, environment: dict[str, str], begun: Any, said: Path) -> None:
    """Give a command in a folder, and end as it does."""
    starting.interrupt_on_signals()
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment, LEWM_CACHE=str(folder / "cache"))
    os.chdir(folder)
    starting.hear_lost_interrupts()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    status = 130
    try:
        begun.send(True)
        status = cli.run(command.split())
    except KeyboardInterrupt:  # before it knew that it is a command, or after
        pass
    except SystemExit as end:
        status = int(end.code or 0)
    os._exit(status)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


class Trial:
    """Commands in a folder that is new, as they are stopped and given again."""

    def __init__(self, work: Work, folder: Path, whole: Path) -> None:
        self.work, self.folder = work, folder
        folder.mkdir()
        for name in work.needs:
            source = whole / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        self.said = [folder.with_name(f"{folder.name} said {rank}") for rank in range(work.processes)]
        self.running: list[ForkServerProcess] = []

    def start(self) -> None:
        """Have the commands begin; they have begun when this returns."""
        count, port = self.work.processes, free_port()
        together = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        self.running = []
        for rank, said in enumerate(self.said):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            mine, theirs = CONTEXT.Pipe()
            environment = together | own if count > 1 else {}
            process = CONTEXT.Process(target=live, args=(self.folder, self.work.command, environment, theirs, said))
            process.start()
            self.running.append(process)
            theirs.close()
            assert mine.poll(60)
            mine.recv()

    def wait(self, seconds: float) -> list[int | None]:
        """How the processes have ended; None: not within so many seconds."""
        deadline = time.monotonic() + seconds
        for process in self.running:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.running]

    def kill(self) -> None:
        for process in self.running:
            process.kill()
            process.join()

    def output(self) -> str:
        return "\n".join(said.read_text(errors="replace") for said in self.said if said.exists())

    def finish(self) -> float:
        """Let the commands end, undisturbed; returns the seconds that they took."""
        self.start()
        began = time.monotonic()
        codes = self.wait(120)
        self.kill()
        assert set(codes) == {0}, (codes, self.output())
        return time.monotonic() - began

    def stop(self, number: signal.Signals, moment: float, rng: random.Random) -> list[int | None]:
        """Stop them a moment after they begin; returns how they ended, nothing if they had ended before."""
        self.start()
        if None not in self.wait(moment):
            assert {process.exitcode for process in self.running} == {0}, self.output()
            return []
        victims = self.running
        if number == signal.SIGKILL and rng.random() < 0.5:  # one process is lost; what started them ends the others
            victims = [rng.choice(self.running)]
        for process in victims:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)
        if number == signal.SIGKILL:
            for process in victims:
                process.join()
            for process in self.running:
                if process.exitcode is None:
                    process.terminate()
        codes = self.wait(PATIENCE)
        for process in self.running:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # say where it hangs
                process.join(1)
        self.kill()
        return codes


# -- what is left ------------------------------------------------------------------------------------------------------


def without_times(value: Any) -> Any:
    """JSON without what says how long something took, or is a digest over that."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES | DIGESTS}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def contents(folder: Path) -> dict[str, Any]:
    """Every file and folder, but for the record that is kept for TensorBoard, whose files have the time as name.

    Of a run's checkpoints, the newest: which one is the oldest that is kept depends on where the run was stopped.
    """
    found: dict[str, Any] = {}
    *older, _newest = checkpoint.of_run(folder / "run" / "checkpoints") or [folder]
    assert len(older) < KEPT_CHECKPOINTS
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.parent.name == "tensorboard" or {path, *path.parents} & {*older}:
            continue
        if path.is_dir():
            found[name] = None
        elif path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            found[name] = path.read_bytes()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*one, *other}) if one.get(name, "absent") != other.get(name, "absent")]


def check_stops(work: Work, tmp_path: Path, whole: Path, stops: int, seed: int = 0) -> dict[str, int]:
    """Stop a command so many times in each way; returns how many of them were too late to stop anything."""
    first, calm = Trial(work, tmp_path / "first", whole), Trial(work, tmp_path / "calm", whole)
    seconds = min(first.finish(), calm.finish())
    wanted = contents(calm.folder)
    assert differences(contents(first.folder), wanted) == [], "or nothing can be compared"
    rng, late = random.Random(seed), dict.fromkeys((number.name for number in SIGNALS), 0)
    for number in SIGNALS:
        left = stops
        while left:
            trial = Trial(work, tmp_path / f"{number.name} {left}", whole)
            for _ in range(min(left, rng.randint(1, IN_A_ROW))):
                codes = trial.stop(number, rng.uniform(0, seconds), rng)
                left -= bool(codes)
                check_end(number, codes, trial.output())
                if set(codes) <= {0}:
                    late[number.name] += bool(codes)
                    assert differences(contents(trial.folder), wanted) == []
                    break
            if work.repeats or differences(contents(trial.folder), wanted):
                trial.finish()
            assert differences(contents(trial.folder), wanted) == []
            shutil.rmtree(trial.folder)
    return late


def check_end(number: signal.Signals, codes: list[int | None], output: str) -> None:
    """Whoever is asked says so and ends in time; of several processes, one may say that it has lost another."""
    if number == signal.SIGKILL:
        assert set(codes) <= {0, -signal.SIGKILL, 130, 1}, (codes, output)
        return
    assert set(codes) in (set(), {0}, {130}) or (len(codes) > 1 and set(codes) == {1, 130}), (number, codes, output)
    assert "Traceback" not in output, output


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_what_is_stopped_fifty_times_ends_as_if_it_had_not_been(name: str, whole: Path, tmp_path: Path) -> None:
    late = check_stops(WORKS[name], tmp_path, whole, STOPS)
    assert max(late.values()) <= 0.6 * STOPS, (late, "most stops come in time")


@pytest.mark.parametrize("name", ["train lewm", "convert to hdf5"])
def test_what_is_stopped_ends_as_if_it_had_not_been(name: str, whole: Path, tmp_path: Path) -> None:
    check_stops(WORKS[name], tmp_path, whole, stops=1)
