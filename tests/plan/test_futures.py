"""Models that give distances are planned with as those that give embeddings are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lewm.config import GradientConfig, PlanConfig
from lewm.errors import PlanningError
from lewm.plan.cost import OBJECTIVES, OF_DISTANCES, squared_distance, terminal_distance
from lewm.plan.inputs import Request
from lewm.plan.planner import Planner
from lewm.plan.policy import policy_for
from lewm.presets import preset
from lewm.types import ActionStats, Array, Context, DataFacts, DistanceFunction, EncoderFunction, Plan, RolloutFunction

CONFIG = PlanConfig(horizon=3, samples=32, iterations=4, elites=6, gradient=GradientConfig(3))


class World:
    """Its embedding is the sum of all z-scored blocks so far."""

    history, frame_skip, action_dim, image_size = 2, 2, 2, 8
    device = torch.device("cpu")

    def planning_encoder(self, precision: str) -> EncoderFunction:  # noqa: ARG002
        return lambda pixels: pixels[..., 0, :4, 0].float() / 16

    def normalise_actions(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.flatten(-2)

    def denormalise_actions(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.unflatten(-1, (2, 2))


def rollout(z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return z_BTD[:, -1, None, None] + actions_BSHA.cumsum(2)


class Embeds(World):
    """Gives embeddings."""

    def planning_rollout(self, precision: str, differentiable: bool) -> RolloutFunction:  # noqa: ARG002
        return rollout


class Measures(World):
    """Gives distances."""

    def planning_distances(self, precision: str, differentiable: bool) -> DistanceFunction:  # noqa: ARG002
        return lambda z, past, actions, goal_BD: squared_distance(rollout(z, past, actions), goal_BD[:, None, None])


class MeasuresElsewhere(Embeds, Measures):
    """Gives both, by a distance of its own: ten times as far."""

    def planning_distances(self, precision: str, differentiable: bool) -> DistanceFunction:
        usual = super().planning_distances(precision, differentiable)
        return lambda *tensors: 10 * usual(*tensors)


def image(*values: int) -> Array:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[0, :4, 0] = values
    return pixels


def plans(model: Any, config: PlanConfig) -> list[Plan]:
    goals = [image(30, 20, 0, 5), image(0, 40, 9, 9)]
    empty = np.zeros((0, 0, 0), np.float32)
    return Planner(model, config=config).plan_many(
        [Request(Context(image(8, 8, 8, 8)[None], empty), goal, key) for key, goal in enumerate(goals)]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "terminal"},
        {"objective": "nearest"},
        {"schedule": "soonest"},
        {"solver": "icem", "schedule": "shrinking"},
        {"solver": "mppi"},
        {"solver": "adam"},
        {"budget_ms": 60_000.0},
        {"schedule": "soonest", "budget_ms": 60_000.0, "solver": "rmsprop"},
    ],
    ids=str,
)
def test_a_model_that_gives_distances_has_the_plans_of_one_that_gives_embeddings(changes: dict[str, Any]):
    config = replace(CONFIG, **changes)
    for one, other in zip(plans(Measures(), config), plans(Embeds(), config), strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.distances, other.distances)
        assert one.cost == other.cost
        assert len(one.distances) > 1 or config.schedule == "soonest"


def test_a_model_that_gives_both_is_asked_for_its_own_distance():
    for one, other in zip(plans(MeasuresElsewhere(), CONFIG), plans(Embeds(), CONFIG), strict=True):
        np.testing.assert_allclose(one.distances, 10 * other.distances, rtol=1e-5)
        assert one.cost == pytest.approx(10 * other.cost)


def test_objectives_of_distances_are_those_of_embeddings():
    assert OF_DISTANCES.keys() == OBJECTIVES.keys()
    z_BSHD, goal_BD = torch.randn(2, 3, 4, 5), torch.randn(2, 5)
    distances_BSH = squared_distance(z_BSHD, goal_BD[:, None, None])
    for name, objective in OBJECTIVES.items():
        torch.testing.assert_close(OF_DISTANCES[name](distances_BSH), objective(z_BSHD, goal_BD, torch.empty(0)))


def test_objectives_of_ones_own_need_embeddings():
    def own(z_BSHD: torch.Tensor, goal_BD: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        return terminal_distance(z_BSHD, goal_BD, actions_BSHA) + 3

    with pytest.raises(PlanningError, match=r"score embeddings, and Measures gives distances only.*plan\.objective"):
        Planner(Measures(), config=CONFIG, objectives=[own])
    start, goal = image(8, 8, 8, 8), image(30, 20, 0, 5)
    plan = Planner(MeasuresElsewhere(), config=CONFIG, objectives=[own]).plan(start, goal)
    assert plan.cost == pytest.approx(plan.distances[-1] + 3)


def test_it_acts_by_planning():
    policy = policy_for(Measures(), CONFIG)
    assert (policy.history, policy.frame_skip) == (2, 2)


def test_a_gradient_solver_is_refused_if_distances_have_none():
    class NoGradient(Measures):
        def planning_distances(self, precision: str, differentiable: bool) -> DistanceFunction:
            usual = super().planning_distances(precision, differentiable)
            return lambda *tensors: usual(*tensors).detach()

    with pytest.raises(PlanningError, match="needs gradients of the rollout, and this model has none"):
        Planner(NoGradient(), config=replace(CONFIG, solver="adam"))


def test_a_method_that_acts_makes_no_plans():
    facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)))
    with pytest.raises(PlanningError, match=r"^GCBC acts and makes no plans\. .*lewm\.Agent"):
        Planner(preset("debug", "gcbc").method.build(facts).eval())  # type: ignore[arg-type]
