"""What methods that act share: frames or features, tokens, histories; and GCBC, the plainest of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import lewm
from lewm.config import EvalConfig, MethodConfig, Preset, TrainConfig
from lewm.data.collect import collect
from lewm.errors import ConfigError
from lewm.evaluate.manifest import TUNING_EPISODE, build_manifest
from lewm.evaluate.runner import evaluate
from lewm.methods.base import Method
from lewm.methods.gcbc import GCBC, GCBCConfig
from lewm.methods.registry import METHODS
from lewm.presets import preset
from lewm.train.loop import train
from lewm.types import ALONE, ActionStats, Batch, DataFacts, Inputs, Losses, Peers

FACTS = DataFacts(ActionStats((0.1, -0.2), (0.5, 2.0)), environment="lewm/TwoRoom-v0")
ACTING = ("gcbc", "gcivl", "gciql", "gc_idm")
every_acting_method = pytest.mark.parametrize("name", ACTING)
SIDE = 28


# -- an encoder that gives tokens -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuartersConfig(MethodConfig):
    """Gives the mean colour of parts of a frame, in a shape."""

    NAME: ClassVar[str] = "quarters"
    shape: str = "tokens"  # "tokens", "vector" or "cube".

    def inputs(self) -> Inputs:
        return Inputs(1, 5, 2, SIDE)

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[QuartersConfig, TrainConfig]:
        return cls(), preset.at_its_pace(TrainConfig())

    def build(self, facts: DataFacts) -> Quarters:
        return Quarters(self, facts)


class Quarters(Method):
    def __init__(self, settings: QuartersConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        raise NotImplementedError

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        colours = torch.nn.functional.adaptive_avg_pool2d(pixels.float().movedim(-1, -3).flatten(0, -4), 2) / 255
        tokens = (colours * self.scale).flatten(2).mT.unflatten(0, pixels.shape[:-3])
        shapes = {"tokens": tokens, "vector": tokens.flatten(-2), "cube": tokens.unflatten(-2, (2, 2))}
        return shapes[self.settings.shape]  # type: ignore[attr-defined]


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves such an encoder, and returns its folder."""
    monkeypatch.setitem(METHODS, "quarters", f"{__name__}:QuartersConfig")

    def save(shape: str) -> str:
        Quarters(QuartersConfig(shape=shape), FACTS).save_pretrained(tmp_path / shape)
        return str(tmp_path / shape)

    return save


def frames(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)


def build(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = preset("debug", name).method
    method = replace(config, **settings).build(FACTS)  # type: ignore[type-var]
    with torch.no_grad():
        for parameter in method.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return method.eval()


@every_acting_method
@pytest.mark.parametrize("shape", ["tokens", "vector"])
def test_features_are_vectors_or_tokens(name: str, shape: str, encoder: Any):
    """A loss on features is the loss on their frames; what is saved names the encoder, and loads."""
    method = build(name, features=encoder(shape))
    inputs = method.inputs
    assert inputs.features
    assert inputs.image_size is None
    seen, goals = frames(6, inputs.frames), {goal: frames(6, seed=i + 1) for i, goal in enumerate(inputs.goals)}
    look = method.frozen_encoder
    steps = {goal: torch.tensor([0, 5, 10, 15, 20, 25]) for goal in goals}
    batch = Batch(torch.randn(6, inputs.frames, 5, 2), features=look(seen.flatten(0, 1)).unflatten(0, seen.shape[:2]))
    batch = replace(batch, goals={goal: look(goals[goal]) for goal in goals}, steps=steps)
    losses = method.losses(batch, {}, ALONE)
    losses.total.backward()
    assert all(p.grad is not None for group in method.groups() for p in group.parameters)
    acted = method.act(seen[:, :1], frames(6, seed=9))
    assert acted.shape == (6, 5, 2)
    folder = Path(method.settings.features).with_name(f"{name}_{shape}")
    method.save_pretrained(folder)
    assert torch.equal(lewm.load(folder, device="cpu").act(seen[:, :1], frames(6, seed=9)), acted)
    assert not any("eyes" in key for key in method.own_state())


def test_features_of_other_shapes_are_refused(encoder: Any):
    with pytest.raises(ConfigError, match=r"gcbc takes features \(F,\) of a frame, or tokens \(N, F\).*\(2, 2, 3\)"):
        build("gcbc", features=encoder("cube"))


def test_seen_frames_are_told_apart_however_little_they_differ():
    """An untrained encoder gives nearly the same for all frames."""
    method = build("gcbc").train()
    seen = frames(8, 1)
    batch = Batch(torch.randn(8, 1, 5, 2), seen // 64 + 100, goals={"goal": seen[:, 0] // 64 + 100})
    shown, goals = method.see(batch)
    assert torch.cat([shown[:, 0], goals["goal"]]).var(0).mean() > 0.5


def test_calibration_measures_what_is_seen():
    method, pixels = build("gcbc").train(), frames(32, 1)
    batch = Batch(torch.zeros(32, 1, 5, 2), pixels, goals={"goal": frames(32, seed=3)})
    method.calibrate([batch])
    assert not method.training
    shown = torch.cat([pixels[:, 0], batch.goals["goal"]])
    seen = method.eyes(shown).detach()
    torch.testing.assert_close(method.norm.running_mean, seen.mean(0))
    torch.testing.assert_close(method.norm.running_var, seen.var(0), rtol=1e-3, atol=1e-5)


@every_acting_method
def test_it_acts_from_as_many_frames_as_there_are(name: str):
    """One, two or three; and each frame says something."""
    method = build(name, history=3)
    seen, goal = frames(2, 3), frames(2, seed=1)
    decisions = [method.act(seen[:, 3 - length :], goal) for length in (1, 2, 3)]
    assert all(block.shape == (2, 5, 2) for block in decisions)
    assert not torch.equal(decisions[0], decisions[1])
    assert not torch.equal(decisions[1], decisions[2])
    one_by_one = torch.cat([method.act(seen[i : i + 1], goal[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(one_by_one, decisions[2])


# -- GCBC -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 3])
def test_gcbcs_loss_is_its_formula(history: int):
    method = build("gcbc", history=history)
    assert isinstance(method, GCBC)
    batch = Batch(torch.randn(4, history, 5, 2), frames(4, history), goals={"goal": frames(4, seed=1)})
    assert batch.pixels is not None
    errors = []
    for i in range(4):
        block = batch.actions[i : i + 1, -1]
        for first in range(history):  # what it would do from the last frames alone
            done = method.act(batch.pixels[i : i + 1, first:], batch.goals["goal"][i : i + 1])
            errors.append((((done - block) / torch.tensor([0.5, 2.0])) ** 2).mean().item())
    found = method.losses(batch, {}, ALONE)
    assert found.total.item() == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert GCBCConfig(history=history).inputs().last_block


@pytest.mark.slow
def test_gcbc_solves_tworoom_at_compact_size(tmp_path: Path):
    """From pixels alone, with the settings of the preset "demo"."""
    config = preset("demo", "gcbc")
    data, pairs = tmp_path / "tworoom.h5", tmp_path / "pairs.json"
    collect(config.env, data, config.collect, config.seed)
    build_manifest("tworoom", 25, 25, pairs, unsolved_only=True, first_episode=TUNING_EPISODE)
    config = replace(config, data=data, out=tmp_path / "run", device="cpu")
    config = replace(config, eval=EvalConfig(episodes=25, manifest=str(pairs)))
    found = evaluate(train(config).model, config).rates()
    assert found["policy"].value >= 0.8
    assert found["random"].value < 0.5
