"""Every registered method from data to results, through the command line alone, on a CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import lewm
from lewm import checkpoint
from lewm.config import Config
from lewm.evaluate.manifest import load_manifest
from lewm.methods.registry import METHODS
from lewm.train.logs import read_metrics
from lewm.types import Plan

every_method = pytest.mark.parametrize("name", METHODS)
STEPS = 400  # enough that a kill comes before the end


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "lewm", *map(str, arguments)]


def run(*arguments: object) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def training(name: str, data: Path | None, out: Path) -> list[object]:
    pace = ("--train.checkpoint-every", 5, "--train.log-every", 1, "--train.val-every", 50)
    fixed = ("--data", data, "--out", out, "--device", "cpu", "--train.steps", STEPS)
    return ["train", "debug", "--method", name, *fixed, *pace]


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of the newest checkpoint."""
    folder = checkpoint.latest(run / "checkpoints")
    assert folder is not None
    assert folder.name == f"step_{STEPS:07d}"
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


@every_method
def test_a_run_that_is_killed_continues_to_the_same_weights_and_is_evaluated(
    name: str, debug_config: Config, tmp_path: Path
):
    run(*training(name, debug_config.data, tmp_path / "calm"))
    killed = tmp_path / "killed"
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(
            command(*training(name, debug_config.data, killed)), stdout=subprocess.PIPE, text=True
        )
        begun = len(read_metrics(killed / "metrics.jsonl"))
        deadline = time.monotonic() + 120
        while len(read_metrics(killed / "metrics.jsonl")) < begun + 20:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.communicate()
        assert process.returncode == (130 if number == signal.SIGTERM else -number)
    said = run(*training(name, debug_config.data, killed))
    assert re.search(r"Continuing .* at step [1-9]\d*\.", said)
    calm, disturbed = saved(tmp_path / "calm"), saved(killed)
    assert calm.keys() == disturbed.keys()
    assert [key for key in calm if not torch.equal(calm[key], disturbed[key])] == []
    assert f"method {name}" in " ".join(run("info", killed).split())
    results = tmp_path / "results.json"
    assert " policy " in run("eval", killed, "--device", "cpu", "--out", results)
    assert json.loads(results.read_text())["rates"]["policy"]["episodes"] == 2


@every_method
def test_the_first_decision_knows_nothing_but_frame_and_goal(name: str, debug_config: Config, tmp_path: Path):
    """The same to the bit for a fresh agent, for one that has acted before, and whatever was done before."""
    run(*training(name, debug_config.data, tmp_path / "run")[:-6], "--train.steps", 8)
    method = lewm.load(tmp_path / "run", device="cpu")
    env = lewm.make_env("tworoom", resolution=method.image_size)
    pair, other = load_manifest("tworoom").pairs[:2]

    def images(which: object) -> tuple[np.ndarray, np.ndarray]:
        env.reset(options={"state": which.start, "goal": which.goal})  # type: ignore[attr-defined]
        return env.render(), env.render_states(env.goal[None])[0]

    def first(agent: lewm.Agent) -> tuple[np.ndarray, Plan | None]:
        frame, goal = images(pair)
        agent.reset(goal, episode=0)
        return agent.act(frame), agent.plan

    used = lewm.Agent(method, debug_config.plan, bounds=env.action_space)
    frame, goal = images(other)
    used.reset(goal, episode=1)
    for _ in range(7):
        env.step(used.act(frame))
        frame = env.render()
    fresh = lewm.Agent(method, debug_config.plan, bounds=env.action_space)
    (one, plan), (two, other_plan) = first(fresh), first(used)
    np.testing.assert_array_equal(one, two)
    if plan is not None and other_plan is not None:
        np.testing.assert_array_equal(plan.actions, other_plan.actions)


def test_a_method_reads_features_of_another_which_are_computed_once(
    debug_config: Config, debug_run: Path, tmp_path: Path
):
    """And is evaluated on frames, which the frozen encoder sees."""
    features = ("--method.features", debug_run, "--method.history", 2, "--train.steps", 8)
    arguments = ["train", "debug", "--method", "gcbc", "--data", debug_config.data, "--device", "cpu", *features]
    run(*arguments, "--out", tmp_path / "one")
    run(*arguments, "--out", tmp_path / "two")
    folder = Path(f"{debug_config.data}.features")
    assert len(list(folder.iterdir())) == 1
    one, two = (lewm.load(tmp_path / name, device="cpu") for name in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.own_state().values(), two.own_state().values(), strict=True))
    assert not any("encoder" in key for key in one.own_state()), "the frozen encoder is named, not saved again"
    assert one.facts.encoder is not None
    assert " policy " in run("eval", tmp_path / "one", "--device", "cpu", "--out", tmp_path / "results.json")
