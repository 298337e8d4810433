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
def test_compiled_and_captured_steps_train_what_acts_alike_on_both_devices(
    name: str, debug_config: Config, tmp_path: Path
):
    config = replace(preset("debug", name), data=debug_config.data, device="cuda", out=tmp_path / "run")
    fast = replace(config.train, steps=12, log_every=1, compile="on", cuda_graph=True)
    train(replace(config, train=fast))
    curve = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(curve) == 12
    assert np.isfinite(curve).all()

    pair = load_manifest("tworoom").pairs[0]
    plan = replace(config.plan, precision="float32")
    actions = []
    for device in ("cuda", "cpu"):
        method = lewm.load(tmp_path / "run", device=device)
        env = make_env("tworoom", resolution=method.image_size)
        env.reset(options={"state": pair.start, "goal": pair.goal})
        agent = lewm.Agent(method, plan, bounds=env.action_space)
        agent.reset(env.render_states(env.goal[None])[0], episode=0)
        actions.append(agent.act(env.render()))
    np.testing.assert_allclose(*actions, atol=1e-2)
