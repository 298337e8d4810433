"""The learning-rate schedule, and an optimiser that survives being written to disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from lewm.checkpoint import read_tensors, write_tensors
from lewm.config import TrainConfig
from lewm.train.optim import learning_rate, load_optimizer_tensors, make_optimizer, optimizer_tensors

COSINE = TrainConfig(steps=110, warmup_steps=10, lr=2.0, final_lr_fraction=0.01)


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
    (group,) = make_optimizer(nn.Linear(2, 2), TrainConfig(lr=0.5, weight_decay=0.25)).param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.5, 0.25, 2)


def test_optimizer_continues_from_disk_as_if_never_stopped(tmp_path: Path):
    config = TrainConfig(lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make_optimizer(model, config)
    for number in range(3):
        step(model, optimizer, number)

    path = tmp_path / "optimizer.safetensors"
    write_tensors(path, optimizer_tensors(optimizer, model))
    copy = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    copy.load_state_dict(model.state_dict())
    restored = make_optimizer(copy, config)
    load_optimizer_tensors(restored, copy, read_tensors(path))
    fresh = make_optimizer(fresh_model := nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), config)
    fresh_model.load_state_dict(model.state_dict())

    step(model, optimizer, 3)
    step(copy, restored, 3)
    step(fresh_model, fresh, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    # The state matters: without it the same step leads elsewhere.
    assert not torch.equal(model[0].weight, fresh_model[0].weight)
