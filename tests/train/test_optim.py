"""The learning-rate schedule, and an optimiser that survives being written to disk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lewm.checkpoint import read_tensors, write_tensors
from lewm.config import MethodConfig, Preset, TrainConfig
from lewm.errors import CheckpointError, ConfigError
from lewm.methods.base import Group, Method
from lewm.train.optim import (
    clip_gradients,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_learning_rate,
)
from lewm.types import DataFacts, Inputs, Losses

COSINE = TrainConfig(steps=110, warmup_steps=10, lr=2.0, final_lr_fraction=0.01)


@dataclass(frozen=True)
class SmallConfig(MethodConfig):
    """Settings of a method that is nothing but parameters."""

    NAME: ClassVar[str] = "small"

    def inputs(self) -> Inputs:
        return Inputs(frames=1, frame_skip=1, action_dim=1)

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[MethodConfig, TrainConfig]:  # noqa: ARG003
        return cls(), TrainConfig()

    def build(self, facts: DataFacts) -> Method:  # noqa: ARG002
        return Small()


class Small(Method):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(SmallConfig())
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def losses(self, *_: Any) -> Losses:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Divided(Small):
    """Its second layer is trained at a tenth of the learning rate, and clipped for itself."""

    def groups(self) -> list[Group]:
        first, second = self.first.parameters(), self.second.parameters()
        return [Group(tuple(second), 0.1, "second"), Group(tuple(first))]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.2),  # the first step moves already
        (4, 1.0),
        (9, 2.0),  # the warm-up ends at the peak
        (10, 2.0),
        (60, 2.0 * (0.01 + 0.99 * 0.5)),  # half-way down
        (110, 0.02),
        (500, 0.02),  # and stays
    ],
)
def test_warm_up_then_cosine(step: int, expected: float):
    assert learning_rate(COSINE, step) == pytest.approx(expected)


def test_falls_all_the_way():
    rates = [learning_rate(COSINE, step) for step in range(10, 110)]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


def test_without_a_warm_up_the_peak_comes_first():
    assert learning_rate(TrainConfig(warmup_steps=0, lr=2.0), 0) == 2.0


def test_schedule_steps_says_where_the_cosine_ends():
    config = TrainConfig(steps=20, schedule_steps=110, warmup_steps=10, lr=2.0, final_lr_fraction=0.01)
    assert [learning_rate(config, s) for s in range(20)] == [learning_rate(COSINE, s) for s in range(20)]
    early = TrainConfig(steps=110, schedule_steps=60, warmup_steps=10, lr=2.0, final_lr_fraction=0.01)
    assert learning_rate(early, 60) == learning_rate(early, 100) == pytest.approx(0.02)


def test_optimizer_takes_its_settings():
    (group,) = make_optimizer(Small(), TrainConfig(lr=0.5, weight_decay=0.25)).param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.5, 0.25, 4)


def test_each_group_has_its_share_of_the_learning_rate():
    method = Divided()
    optimizer = make_optimizer(method, TrainConfig(lr=0.5))
    shares = {1.0: list(method.first.parameters()), 0.1: list(method.second.parameters())}
    set_learning_rate(optimizer, 0.3)
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.3 * group["share"])
        assert [id(p) for p in group["params"]] == [id(p) for p in shares.pop(group["share"])]
    assert not shares


def test_groups_of_one_name_are_clipped_together_and_others_apart():
    method = Divided()
    optimizer = make_optimizer(method, TrainConfig())
    for parameter in method.first.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    for parameter in method.second.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    small = [parameter.grad.clone() for parameter in method.second.parameters()]
    largest = 100 * 16**0.5
    assert clip_gradients(optimizer, 1.0).item() == pytest.approx(largest + 0.01 * 10**0.5)
    assert torch.cat([p.grad.flatten() for p in method.first.parameters()]).norm() == pytest.approx(1.0)
    for before, parameter in zip(small, method.second.parameters(), strict=True):
        assert torch.equal(parameter.grad, before)


def test_muon_without_a_transformer_is_refused():
    with pytest.raises(ConfigError, match=r"train\.optimizer muon is for transformers; small has none"):
        make_optimizer(Small(), TrainConfig(optimizer="muon"))


def test_optimizer_continues_from_disk_as_if_never_stopped(tmp_path: Path):
    config = TrainConfig(lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    model = Small()
    optimizer = make_optimizer(model, config)
    for number in range(3):
        step(model, optimizer, number)

    path = tmp_path / "optimizer.safetensors"
    write_tensors(path, optimizer_tensors(optimizer, model))
    copy = Small()
    copy.load_state_dict(model.state_dict())
    restored = make_optimizer(copy, config)
    load_optimizer_tensors(restored, copy, read_tensors(path), path)
    fresh = make_optimizer(fresh_model := Small(), config)
    fresh_model.load_state_dict(model.state_dict())

    step(model, optimizer, 3)
    step(copy, restored, 3)
    step(fresh_model, fresh, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    # The state matters: without it the same step leads elsewhere.
    assert not torch.equal(model.first.weight, fresh_model.first.weight)


@pytest.mark.parametrize("name", ["third.weight/exp_avg", "first.weight/exp_avg", "first/exp_avg"])
def test_another_models_state_is_refused(name: str):
    model = Small()
    optimizer = make_optimizer(model, TrainConfig())
    with pytest.raises(CheckpointError, match=rf"optimiser's state in here does not fit the model: it has {name}"):
        load_optimizer_tensors(optimizer, model, {name: torch.zeros(9)}, Path("here"))
