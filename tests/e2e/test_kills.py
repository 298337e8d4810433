"""A training that is killed at any moment, also in the middle of saving, ends with the weights of a calm one."""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lewm import checkpoint
from lewm.cli import info
from lewm.config import Config
from lewm.train.logs import read_metrics
from lewm.train.loop import train

STEPS = 60
# Processes of this kind have everything imported when they begin, so that most of their life is training.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "lewm.train.loop", "tensorboard.summary", __name__])


def of_many_checkpoints(config: Config, out: Path) -> Config:
    """Saving is most of what it does."""
    settings = replace(config.train, steps=STEPS, checkpoint_every=1, log_every=1, val_every=STEPS)
    return replace(config, out=out, train=replace(settings, calibration_batches=1))


def train_here(config: Config) -> None:
    torch.set_num_threads(1)
    train(config)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


@pytest.fixture(scope="module")
def calm(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What an undisturbed run ends with."""
    out = tmp_path_factory.mktemp("calm") / "run"
    train(of_many_checkpoints(debug_config, out))
    return saved_tensors(out / "checkpoints" / f"step_{STEPS:07d}")


def newest_step(run: Path) -> int:
    return max((checkpoint.step_of(folder) or 0 for folder in checkpoint.of_run(run / "checkpoints")), default=0)


def kill_while_saving(config: Config, rng: random.Random) -> bool:
    """Train until there are some more checkpoints and a moment longer; whether it was in the middle of one."""
    assert config.out is not None
    wanted, deadline = newest_step(config.out) + rng.randint(0, 4), time.monotonic() + 60
    process = CONTEXT.Process(target=train_here, args=(config,))
    process.start()
    while process.is_alive() and newest_step(config.out) < wanted:
        assert time.monotonic() < deadline, f"step {wanted} was not reached"
        time.sleep(0.002)
    process.join(rng.uniform(0, 0.1))
    process.kill()
    process.join()
    return any(config.out.glob("checkpoints/.*.tmp"))


def assert_whole(folder: Path) -> None:
    """A folder that is called a checkpoint is one."""
    document = checkpoint.load_document(folder)
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER, checkpoint.ACTIONS):
        checkpoint.load_tensors(folder, document, name)


def check_kills(config: Config, calm: dict[str, torch.Tensor], kills: int, seed: int) -> int:
    """Kill a run so many times, look at what is there, and let it end; how often it was in the middle of saving."""
    assert config.out is not None
    rng, saving, newest = random.Random(seed), 0, 0
    for _ in range(kills):
        saving += kill_while_saving(config, rng)
        assert newest_step(config.out) >= newest, "what was saved is there"
        newest = newest_step(config.out)
        if newest:
            folder = config.out / "checkpoints" / f"step_{newest:07d}"
            assert info.model(str(config.out))["checkpoint"] == str(folder)
            assert_whole(folder)
    assert newest > 0
    train(config)
    ended = saved_tensors(config.out / "checkpoints" / f"step_{STEPS:07d}")
    assert [name for name in calm if not torch.equal(calm[name], ended[name])] == []
    steps = [row["step"] for row in read_metrics(config.out / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert not list(config.out.glob("checkpoints/.*")), "what was begun is cleared"
    assert not (config.out / ".lock").exists()
    return saving


@pytest.mark.timeout(300)
def test_a_killed_training_ends_as_a_calm_one(debug_config: Config, calm: dict[str, torch.Tensor], tmp_path: Path):
    check_kills(of_many_checkpoints(debug_config, tmp_path / "run"), calm, kills=4, seed=0)


@pytest.mark.slow
def test_a_training_killed_twenty_times_ends_as_a_calm_one(
    debug_config: Config, calm: dict[str, torch.Tensor], tmp_path: Path
):
    saving = [
        check_kills(of_many_checkpoints(debug_config, tmp_path / f"run {seed}"), calm, kills=20, seed=seed)
        for seed in (1, 2)
    ]
    assert sum(saving) > 0, "some of the kills were in the middle of saving"
