"""Every registered method in every world that lewm comes with: it trains, continues to the same bits, and is evaluated.

``test_methods`` kills processes, in TwoRoom. Here is what a world changes: its dataset, its actions, and its pairs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import lewm
from lewm import checkpoint
from lewm.checked import to_dict
from lewm.cli.eval import run as evaluate
from lewm.cli.train import run as train_by_command
from lewm.config import CollectConfig, Config
from lewm.data.collect import collect
from lewm.data.store import EpisodeStore
from lewm.envs.registry import env_entry, env_names, env_type
from lewm.files import read_json
from lewm.methods.registry import METHODS
from lewm.presets import preset
from lewm.train.loop import train
from lewm.train.trainer import SilentMonitor

RESOLUTION = preset("debug").collect.resolution
STEPS, LOST = 8, 7  # Checkpoints are written after 4 and 8 steps.
every_method = pytest.mark.parametrize("name", METHODS)
every_world = pytest.mark.parametrize("world", env_names())


class Crash(SilentMonitor):
    """Ends a run as nobody would, after a step whose checkpoint was never written."""

    def step(self, step: int, total: int, values: dict[str, float]) -> None:  # noqa: ARG002
        if step == LOST:
            self.end()

    def end(self) -> NoReturn:
        raise ZeroDivisionError


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A few episodes of each world, as its expert has them."""
    folder = tmp_path_factory.mktemp("worlds")
    few = CollectConfig(episodes=6, resolution=RESOLUTION, frame_stride=5, workers=1)
    for world in env_names():
        collect(env_entry(world).gym_id, folder / f"{world}.h5", few, seed=0)
    return {world: folder / f"{world}.h5" for world in env_names()}


def settings(name: str, world: str, data: Path, out: Path) -> tuple[Config, list[str]]:
    """A run of debug size in a world: as a configuration, and as the command's arguments."""
    config = preset("debug", name)
    numbers = EpisodeStore(data).actions.shape[1]
    config = replace(
        config,
        env=env_entry(world).gym_id,
        data=data,
        out=out,
        device="cpu",
        method=replace(config.method, action_dim=numbers),
    )
    size = () if numbers == preset("debug", name).method.inputs().action_dim else ("--method.action-dim", str(numbers))
    options = ["--method", name, "--env", world, "--data", data, "--out", out, "--device", "cpu", *size]
    return config, ["debug", *map(str, options)]


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state after the last step."""
    folder = run / "checkpoints" / f"step_{STEPS:07d}"
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


@every_world
@every_method
def test_a_method_in_a_world_trains_continues_to_the_same_bits_and_is_evaluated(
    name: str, world: str, datasets: dict[str, Path], tmp_path: Path
):
    calm, crashed = tmp_path / "calm", tmp_path / "crashed"
    config, command = settings(name, world, datasets[world], calm)
    train_by_command(command)
    with pytest.raises(ZeroDivisionError):
        train(replace(config, out=crashed), monitor=Crash())
    assert [folder.name for folder in (crashed / "checkpoints").iterdir()] == ["step_0000004"]
    train_by_command(settings(name, world, datasets[world], crashed)[1])
    one, other = saved(calm), saved(crashed)
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    described = read_json(crashed / "config.json")
    assert described["method"] == to_dict(config.method)
    evaluate([str(crashed), "--device", "cpu", "--out", str(tmp_path / "results.json")])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["environment"] == env_entry(world).gym_id
    assert results["rates"]["policy"]["episodes"] == 2
    assert results["rates"]["recorded"]["episodes"] == 2


@pytest.mark.parametrize(("name", "reads"), [("dino_wm", "tokens:"), ("gciql", "")])
@every_world
def test_features_and_what_the_agent_senses_in_a_world(
    name: str, reads: str, world: str, datasets: dict[str, Path], tmp_path: Path
):
    """Of a model that was trained there; evaluation sees through it, and senses what the dataset has."""
    eyes, out = tmp_path / "eyes", tmp_path / "run"
    train_by_command(settings("lewm", world, datasets[world], eyes)[1])
    command = [*settings(name, world, datasets[world], out)[1], "--method.features", f"{reads}{eyes}"]
    train_by_command([*command, "--method.proprio"] if name == "dino_wm" else command)
    evaluate([str(out), "--device", "cpu", "--out", str(tmp_path / "results.json")])
    assert json.loads((tmp_path / "results.json").read_text())["rates"]["policy"]["episodes"] == 2
    model = lewm.load(out, device="cpu")
    assert model.proprio_dim == (len(env_type(world).proprio_names) if name == "dino_wm" else 0)
    assert not any(key.startswith("eyes.") for key in model.own_state())
