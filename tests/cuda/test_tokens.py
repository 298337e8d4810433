"""Planning with the tokens of whole frames on a GPU: in time, and the same plans however they come about."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lewm.config import Config, PlanConfig, PredictorConfig
from lewm.methods.dino_wm import DinoWM, DinoWMConfig
from lewm.model import token_rollout
from lewm.model.token_predictor import TokenPredictor
from lewm.model.token_rollout import TokenRollout
from lewm.plan.inputs import Request
from lewm.plan.planner import Planner
from lewm.presets import preset
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.types import ActionStats, Array, Context, DataFacts

pytestmark = pytest.mark.cuda

SECONDS_A_PLAN = 2.0  # on an H200, the paper's plan: 300 candidates, 30 times, 5 blocks
CONFIG = PlanConfig(samples=64, elites=8, iterations=6, precision="float32")


@pytest.fixture(scope="module")
def model() -> DinoWM:
    """Sixteen tokens of 147 numbers: odd sizes, which products are given even ones of."""
    torch.manual_seed(0)
    settings = DinoWMConfig(image_size=56, predictor=PredictorConfig(3, 4, 64, 256))
    model = DinoWM(settings, DataFacts(ActionStats((0.1, -0.2), (0.8, 0.9))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.cuda().eval()


def requests(count: int, frames: int = 1, size: int = 56) -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(
            Context(rng.integers(0, 256, (frames, size, size, 3), np.uint8), rng.normal(size=(frames - 1, 5, 2))),
            rng.integers(0, 256, (size, size, 3), np.uint8),
            key,
        )
        for key in range(count)
    ]


def actions(model: DinoWM, asked: list[Request], config: PlanConfig) -> Array:
    return np.stack([plan.actions for plan in Planner(model, config=config).plan_many(asked)])


@pytest.mark.parametrize("changes", [{}, {"solver": "icem"}, {"solver": "adam"}, {"budget_ms": 60_000.0}], ids=str)
@pytest.mark.parametrize("frames", [1, 3])
def test_captured_and_launched_one_by_one(model: DinoWM, frames: int, changes: dict[str, Any]) -> None:
    asked, config = requests(3, frames), replace(CONFIG, **changes)
    graphed = actions(model, asked, config)
    np.testing.assert_allclose(graphed, actions(model, asked, replace(config, cuda_graph=False)), atol=1e-3)


def test_a_captured_step_serves_other_problems_of_its_shape(model: DinoWM) -> None:
    planner, asked = Planner(model, config=CONFIG), requests(2)
    first, second = (planner.plan_many([request])[0].actions for request in asked)
    assert np.abs(first - second).max() > 1e-2
    np.testing.assert_allclose(planner.plan_many(asked[:1])[0].actions, first, atol=1e-4)


def test_parts_change_no_plan(model: DinoWM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(3)
    whole = actions(model, asked, CONFIG)
    monkeypatch.setattr(token_rollout, "PART_BYTES", 8 << 20)
    np.testing.assert_allclose(actions(model, asked, CONFIG), whole, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bf16", 0.03)])
def test_distances_are_those_of_the_cpu(model: DinoWM, precision: str, tolerance: float) -> None:
    size = model.tokens * model.token_width
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, size), (2, 2, 10), (2, 9, 5, 10), (2, size)
    asked = [torch.randn(shape, generator=generator) for shape in shapes]
    found = TokenRollout(model.predictor, precision).distances(*(tensor.cuda() for tensor in asked)).cpu()
    expected = TokenRollout(model.predictor, "float32").distances(*(tensor.cuda() for tensor in asked)).cpu()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    on_cpu = TokenRollout(model.cpu().predictor, "float32").distances(*asked)
    model.cuda()
    torch.testing.assert_close(found, on_cpu, rtol=tolerance, atol=0)


# On an H200 a search of 300 x 30 imagines for 1.7 s with EfficientNet's features, from one frame. The others are to get
# there, and are known not to have: 2.4, 2.9 and 4.0 s, and 2.6 s for a whole plan with 192 numbers a token.
too_slow_yet = pytest.mark.xfail(strict=True, reason="more than two seconds")


@torch.no_grad()
@pytest.mark.parametrize(
    ("features", "context"),
    [(112, 1), *(pytest.param(*case, marks=too_slow_yet) for case in ((112, 3), (384, 1), (384, 3)))],
)
def test_a_plan_of_the_papers_size_is_imagined_in_time(features: int, context: int) -> None:
    """EfficientNet's and DINOv2's tokens, and the original's predictor."""
    predictor = TokenPredictor(3, 196, features, 10, 10, PredictorConfig()).cuda().eval()
    rollout, size = TokenRollout(predictor), 196 * features
    shapes = (1, context, size), (1, context - 1, 10), (1, 300, 5, 10), (1, size)
    asked = [torch.randn(shape, device="cuda") for shape in shapes]
    for _ in range(2):
        rollout.distances(*asked)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(30):
        rollout.distances(*asked)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < SECONDS_A_PLAN


@too_slow_yet
def test_a_plan_of_the_papers_size_is_made_in_time() -> None:
    """All of it, with 196 tokens of 192 numbers, which are pixels here."""
    settings = DinoWMConfig(image_size=224, patch_size=16, patch_cells=8)
    model = DinoWM(settings, DataFacts(ActionStats((0.1, -0.2), (0.8, 0.9)))).cuda().eval()
    assert model.tokens == 196
    planner, (request,) = Planner(model), requests(1, size=224)
    planner.plan_many([request])  # captures
    started = time.perf_counter()
    planner.plan_many([request])
    assert time.perf_counter() - started < SECONDS_A_PLAN


def test_it_learns_on_a_gpu_compiled_and_captured(debug_config: Config, tmp_path: Path) -> None:
    config = preset("debug", "dino_wm")
    settings = {"steps": 60, "lr": 3e-3, "log_every": 1, "checkpoint_every": 30, "compile": "on"}
    fast = replace(config.train, **settings)  # type: ignore[arg-type]
    train(replace(config, data=debug_config.data, device="cuda", out=tmp_path / "run", train=fast))
    curve = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert sum(curve[-5:]) < 0.8 * sum(curve[:5])
