"""A real `lewm train` process, interrupted in every way there is, still ends with the weights of a calm one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lewm import checkpoint, cli
from lewm.config import Config
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.run import OPTIMIZER

STEPS, CHECKPOINT_EVERY = 120, 15


def arguments(config: Config, run: Path) -> list[str]:
    options = f"--train.steps {STEPS} --train.checkpoint-every {CHECKPOINT_EVERY} --train.log-every 1"
    options += " --train.val-every 50 --device cpu"
    return ["train", "debug", *options.split(), f"--data={config.data}", f"--out={run}"]


def start(config: Config, run: Path) -> subprocess.Popen[str]:
    # One thread, as in this process: sums over several round differently.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lewm", *arguments(config, run)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_metrics(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def saved_step(run: Path) -> int:
    newest = checkpoint.latest(run / "checkpoints")
    return int(newest.name.removeprefix("step_")) if newest else 0


def saved_tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step_{STEPS:07d}"
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / OPTIMIZER)


@pytest.mark.timeout(300)
def test_every_kind_of_interruption(debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    for number in (signal.SIGINT, signal.SIGTERM):
        before = saved_step(run)
        process = start(debug_config, run)
        wait_for_step(process, run, before + 20)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, (out, err)
        assert "The same command continues" in err
        assert "Traceback" not in err
        assert before + 20 <= saved_step(run) < STEPS
        assert f"{saved_step(run)} steps; checkpoint:" in out

    before = saved_step(run)
    process = start(debug_config, run)
    wait_for_step(process, run, before + CHECKPOINT_EVERY + 5)
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert f"at step {before}." in " ".join(out.split())
    assert before < saved_step(run) < STEPS

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    assert cli.run(arguments(debug_config, run)) == 0

    calm = replace(debug_config, out=tmp_path / "calm", train=replace(debug_config.train, steps=STEPS))
    train(replace(calm, train=replace(calm.train, checkpoint_every=STEPS, val_every=STEPS)))
    disturbed, undisturbed = saved_tensors(run), saved_tensors(tmp_path / "calm")
    assert disturbed.keys() == undisturbed.keys()
    assert [name for name in disturbed if not torch.equal(disturbed[name], undisturbed[name])] == []
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
