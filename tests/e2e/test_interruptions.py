"""Real processes, interrupted in every way there is, still end with the weights and the data of calm ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lewm import checkpoint, cli
from lewm.config import Config
from lewm.files import read_json
from lewm.train.logs import read_metrics
from lewm.train.loop import train

STEPS, CHECKPOINT_EVERY = 120, 15


def training(config: Config, run: Path) -> list[str]:
    options = f"--train.steps {STEPS} --train.checkpoint-every {CHECKPOINT_EVERY} --train.log-every 1"
    options += " --train.val-every 50 --device cpu"
    return ["train", "debug", *options.split(), f"--data={config.data}", f"--out={run}"]


def start(command: list[str]) -> subprocess.Popen[str]:
    # One thread, as in this process: sums over several round differently.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lewm", *command]
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
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


@pytest.mark.timeout(300)
def test_every_kind_of_interruption(debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    for number in (signal.SIGINT, signal.SIGTERM):
        before = saved_step(run)
        process = start(training(debug_config, run))
        wait_for_step(process, run, before + 20)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, (out, err)
        assert "The same command continues" in err
        assert "Traceback" not in err
        assert before + 20 <= saved_step(run) < STEPS
        assert f"{saved_step(run)} steps; checkpoint:" in out

    before = saved_step(run)
    process = start(training(debug_config, run))
    wait_for_step(process, run, before + CHECKPOINT_EVERY + 5)
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert f"at step {before}." in " ".join(out.split())
    assert before < saved_step(run) < STEPS

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    assert cli.run(training(debug_config, run)) == 0

    calm = replace(debug_config, out=tmp_path / "calm", train=replace(debug_config.train, steps=STEPS))
    train(replace(calm, train=replace(calm.train, checkpoint_every=STEPS, val_every=STEPS)))
    disturbed, undisturbed = saved_tensors(run), saved_tensors(tmp_path / "calm")
    assert disturbed.keys() == undisturbed.keys()
    assert [name for name in disturbed if not torch.equal(disturbed[name], undisturbed[name])] == []
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_who_waits_for_other_processes_hears_a_signal(debug_config: Config, tmp_path: Path, number: int) -> None:
    """One of two, whose other never comes: PyTorch waits for it for an hour, and hears nothing."""
    port = free_port()
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environment = os.environ | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lewm", *training(debug_config, tmp_path / "run")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while True:  # until it listens
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=5)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.startswith("Interrupted.")
    assert not (tmp_path / "run").exists()


# -- collecting -------------------------------------------------------------------------------------------------------

COLLECT = """
import sys
import lewm
settings = lewm.CollectConfig(episodes=100, resolution=28, workers=2, frame_stride=2)
lewm.collect("tworoom", sys.argv[1], settings, seed=3)
"""


def start_collecting(out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", COLLECT, str(out)], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def calm_collection(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """SHA-256 of the file of an undisturbed collection, and the seconds it took."""
    out = tmp_path_factory.mktemp("calm") / "data.h5"
    started = time.monotonic()
    assert start_collecting(out).wait(timeout=120) == 0
    return hashlib.sha256(out.read_bytes()).hexdigest(), time.monotonic() - started


MOMENTS = np.random.default_rng(0).uniform(0.05, 1.0, 10).round(3).tolist()  # in shares of the whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", [MOMENTS[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS[1:])])
def test_a_collection_killed_at_any_moment_ends_as_if_it_had_not_been(
    calm_collection: tuple[str, float], tmp_path: Path, moment: float
) -> None:
    digest, seconds = calm_collection
    out = tmp_path / "data.h5"
    process = start_collecting(out)
    time.sleep(moment * seconds)
    process.kill()  # by SIGKILL; its workers notice by themselves
    process.wait(timeout=60)
    if out.exists():
        assert hashlib.sha256(out.read_bytes()).hexdigest() == digest, "the file is complete or absent"
    assert start_collecting(out).wait(timeout=120) == 0, "the same command continues"
    assert hashlib.sha256(out.read_bytes()).hexdigest() == digest
    assert [path.name for path in tmp_path.iterdir()] == ["data.h5"]


# -- evaluating -------------------------------------------------------------------------------------------------------


def evaluation(run: Path, out: Path) -> list[str]:
    options = "--eval.episodes 40 --plan.samples 64 --plan.schedule shrinking --device cpu"
    return ["eval", str(run), f"--out={out}", *options.split()]


def wait_for_plans(process: subprocess.Popen[str], journal: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b"\n") < 1 + count:  # a line for the question
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{count} plans were not made"
        time.sleep(0.001)


@pytest.mark.timeout(300)
def test_an_evaluation_goes_on_after_every_kind_of_interruption(
    debug_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, journal = tmp_path / "result.json", tmp_path / "result.json.partial"
    for plans, number in ((5, signal.SIGINT), (20, signal.SIGTERM), (40, signal.SIGKILL)):
        process = start(evaluation(debug_run, out))
        wait_for_plans(process, journal, plans)
        process.send_signal(number)
        printed, err = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), (printed, err)
        assert "Traceback" not in err
        assert not out.exists()
        assert (f"Going on from {journal}:" in printed) == (plans > 5)

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    assert cli.run(evaluation(debug_run, out)) == 0
    assert "Going on from" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert cli.run(evaluation(debug_run, tmp_path / "calm.json")) == 0
    assert "Going on from" not in capsys.readouterr().out
    disturbed, undisturbed = (read_json(tmp_path / name) for name in ("result.json", "calm.json"))
    assert disturbed.pop("times")["plans"] == undisturbed.pop("times")["plans"] == 80
    assert disturbed == undisturbed
