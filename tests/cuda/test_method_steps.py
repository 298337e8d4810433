"""Every method on a GPU: compiled and captured steps, and an agent, as on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import lewm
from lewm.config import Config
from lewm.envs.registry import make_env
from lewm.evaluate.manifest import load_manifest
from lewm.methods.registry import METHODS
from lewm.presets import preset
from lewm.train.logs import read_metrics
from lewm.train.loop import train

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", METHODS)
def test_compiled_and_captured_steps_train_what_then_acts(name: str, debug_config: Config, tmp_path: Path):
    config = replace(preset("debug", name), data=debug_config.data, device="cuda", out=tmp_path / "run")
    fast = replace(config.train, steps=12, log_every=1, compile="on", cuda_graph=True)
    train(replace(config, train=fast))
    curve = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(curve) == 12
    assert np.isfinite(curve).all()

    one, again, on_cpu = (first_action(config, device) for device in ("cuda", "cuda", "cpu"))
    assert np.isfinite(one).all()
    np.testing.assert_allclose(again, one, atol=1e-6)
    # After so few steps a search tells plans apart by their last digits, in which devices differ.
    if not hasattr(lewm.load(tmp_path / "run", device="cpu"), "planning_rollout"):
        np.testing.assert_allclose(on_cpu, one, atol=1e-2)


def first_action(config: Config, device: str) -> np.ndarray:
    """What an agent of the trained method does at the start of a frozen pair."""
    assert config.out is not None
    pair, method = load_manifest("tworoom").pairs[0], lewm.load(config.out, device=device)
    env = make_env("tworoom", resolution=method.image_size)
    env.reset(options={"state": pair.start, "goal": pair.goal})
    agent = lewm.Agent(method, replace(config.plan, precision="float32"), bounds=env.action_space)
    agent.reset(env.render_states(env.goal[None])[0], episode=0)
    return agent.act(env.render())
