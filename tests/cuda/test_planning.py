"""Planning on a GPU: the same plans however they are batched and captured."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lewm.config import EncoderConfig, IcemConfig, PlanConfig, ScheduleName
from lewm.methods.lewm import LeWM, LeWMConfig
from lewm.plan.inputs import Request
from lewm.plan.planner import Planner
from lewm.types import ActionStats, Context, DataFacts

pytestmark = pytest.mark.cuda

CONFIG = PlanConfig(samples=64, elites=8, iterations=6, precision="float32")


@pytest.fixture(scope="module")
def model() -> LeWM:
    """The full-size predictor behind a small encoder, with weights that make plans matter."""
    torch.manual_seed(0)
    model = LeWM(LeWMConfig(EncoderConfig(image_size=28, depth=1)), DataFacts(ActionStats((0.1, -0.2), (0.8, 0.9))))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.cuda().eval()


def requests(count: int, frames: int = 1) -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(
            Context(rng.integers(0, 256, (frames, 28, 28, 3), np.uint8), rng.normal(size=(frames - 1, 5, 2)) * 0.5),
            rng.integers(0, 256, (28, 28, 3), np.uint8),
            key,
        )
        for key in range(count)
    ]


def actions(model: LeWM, asked: list[Request], config: PlanConfig) -> np.ndarray:
    return np.stack([plan.actions for plan in Planner(model, config=config).plan_many(asked)])


@pytest.mark.parametrize("frames", [1, 3])
def test_one_episode_alone_and_among_fifty(model: LeWM, frames: int) -> None:
    asked = requests(50, frames)
    together = actions(model, asked, CONFIG)
    alone = np.concatenate([actions(model, [request], CONFIG) for request in asked[:8]])
    np.testing.assert_allclose(together[:8], alone, atol=1e-3)


def test_captured_and_launched_one_by_one(model: LeWM) -> None:
    asked = requests(5)
    graphed = actions(model, asked, CONFIG)
    np.testing.assert_allclose(graphed, actions(model, asked, replace(CONFIG, cuda_graph=False)), atol=1e-3)


def test_the_models_recorded_actions_are_tried_on_a_gpu_as_elsewhere(
    model: LeWM, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = torch.rand(100, 30, 2, generator=torch.manual_seed(0)) - 0.5
    monkeypatch.setattr(model, "facts", replace(model.facts, recorded=recorded))
    asked, config = requests(5), replace(CONFIG, solver="icem", icem=IcemConfig(recorded=2))
    graphed = actions(model, asked, config)
    np.testing.assert_allclose(graphed, actions(model, asked, replace(config, cuda_graph=False)), atol=1e-3)
    np.testing.assert_allclose(graphed, actions(model.cpu(), asked, config), atol=1e-3)
    model.cuda()


def test_a_captured_step_serves_other_problems_of_its_shape(model: LeWM) -> None:
    planner = Planner(model, config=CONFIG)
    asked = requests(4)
    first = planner.plan_many(asked[:1])[0].actions
    second = planner.plan_many(asked[1:2])[0].actions
    assert np.abs(first - second).max() > 1e-2
    np.testing.assert_allclose(planner.plan_many(asked[:1])[0].actions, first, atol=1e-4)
    np.testing.assert_allclose(actions(model, asked[1:2], CONFIG)[0], second, atol=1e-3)


@pytest.mark.parametrize("schedule", ["whole", "soonest"])
def test_the_device_changes_no_plan(model: LeWM, schedule: ScheduleName) -> None:
    asked, config = requests(3), replace(CONFIG, schedule=schedule)
    on_gpu = Planner(model, config=config).plan_many(asked)
    on_cpu = Planner(model.cpu(), config=config).plan_many(asked)
    model.cuda()
    for one, other in zip(on_gpu, on_cpu, strict=True):
        np.testing.assert_allclose(one.actions, other.actions, atol=1e-3)


@pytest.mark.parametrize("solver", ["cem", "icem", "mppi", "adam"])
def test_every_solver_can_be_captured_and_lowers_the_cost(model: LeWM, solver: str) -> None:
    config = replace(CONFIG, solver=solver, samples=32, elites=8, iterations=10)
    asked = requests(3)
    plans = Planner(model, config=config).plan_many(asked)
    unplanned = Planner(model, config=replace(config, iterations=1, solver="mppi", samples=2)).plan_many(asked)
    assert np.mean([p.cost for p in plans]) < np.mean([p.cost for p in unplanned])


def test_half_precision_finds_plans_as_good(model: LeWM) -> None:
    asked, config = requests(8), replace(CONFIG, samples=256, elites=24, iterations=15)
    exact = [plan.cost for plan in Planner(model, config=config).plan_many(asked)]
    half_planner = Planner(model, config=replace(config, precision="bf16"))
    half_plans = half_planner.plan_many(asked)
    # Judged by the exact model, not by its own.
    judge = Planner(model, config=replace(config, iterations=1, init_std=1e-6))
    half = [judge.plan_many([replace(r, start=p.actions)])[0].cost for r, p in zip(asked, half_plans, strict=True)]
    assert np.mean(half) < 1.1 * np.mean(exact)
