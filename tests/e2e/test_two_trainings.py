"""Two trainings into one folder: the second is refused, and the first ends as if nobody had tried."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lewm import checkpoint, cli
from lewm.config import Config
from lewm.train.logs import read_metrics
from lewm.train.loop import train

STEPS = 150


def training(config: Config, run: Path) -> list[str]:
    options = f"--train.steps={STEPS} --train.checkpoint-every=20 --train.log-every=1 --train.val-every=50 --device=cpu"
    return ["train", "debug", *options.split(), f"--data={config.data}", f"--out={run}"]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    # One thread, as in this process: sums over several round differently.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lewm", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_metrics(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.002)


def saved_tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step_{STEPS:07d}"
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


@pytest.fixture(scope="module")
def calm(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What an undisturbed run ends with."""
    out = tmp_path_factory.mktemp("calm") / "run"
    settings = replace(debug_config.train, steps=STEPS, checkpoint_every=STEPS, val_every=STEPS)
    train(replace(debug_config, out=out, train=settings))
    return saved_tensors(out)


@pytest.fixture
def verbs_here() -> Iterator[None]:
    """Commands may be run in this process, which keeps its handlers."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def assert_calm(run: Path, calm: dict[str, torch.Tensor]) -> None:
    """The run has ended, with the weights of an undisturbed one and every step once."""
    ended = saved_tensors(run)
    assert [name for name in calm if not torch.equal(calm[name], ended[name])] == []
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.json", "metrics.jsonl", "tensorboard"]


@pytest.mark.usefixtures("verbs_here")
def test_the_second_is_refused_and_the_first_ends_undisturbed(
    debug_config: Config, calm: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    first = start(training(debug_config, run))
    wait_for_step(first, run, 5)
    assert (run / ".lock").exists()
    first.send_signal(signal.SIGSTOP)  # so that it is still there, however slow the second one is
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.run(training(debug_config, run)) == 1
    answer = capsys.readouterr().err.strip()
    assert answer.startswith(f"Error: Another process is training into {run}. Wait for it")
    assert len(answer.splitlines()) == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    first.send_signal(signal.SIGCONT)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, (out, err)
    assert_calm(run, calm)


@pytest.mark.usefixtures("verbs_here")
def test_one_that_was_killed_blocks_nobody(debug_config: Config, calm: dict[str, torch.Tensor], tmp_path: Path):
    run = tmp_path / "run"
    first = start(training(debug_config, run))
    wait_for_step(first, run, 30)
    first.kill()
    first.communicate()
    assert (run / ".lock").exists(), "it could not clear up"
    assert cli.run(training(debug_config, run)) == 0
    assert_calm(run, calm)


@pytest.mark.slow
def test_of_many_that_start_together_each_trains_alone_or_is_refused(
    debug_config: Config, calm: dict[str, torch.Tensor], tmp_path: Path
):
    """Whoever comes when the run has ended finds nothing left to do."""
    run = tmp_path / "run"
    processes = [start(training(debug_config, run)) for _ in range(4)]
    answers = [process.communicate(timeout=200) for process in processes]
    statuses = [process.returncode for process in processes]
    assert statuses.count(0) >= 1
    for status, (out, err) in zip(statuses, answers, strict=True):
        assert status == 0 or "Another process is training into" in err, (out, err)
        assert "Traceback" not in err
    assert_calm(run, calm)
