"""Gradient solvers: their steps, their restarts, and the best plan as the answer."""

from __future__ import annotations

import itertools

import pytest
import torch

from lewm.config import GradientConfig, PlanConfig
from lewm.plan.gradient import Gradient
from lewm.plan.solver import Problem, Search

H, A = 2, 3
TARGET = torch.tensor([[1.0, -2.0, 0.5], [0.3, 3.0, -1.0]])


def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
    """Steep in some directions, flat in others."""
    steepness = torch.tensor([0.1, 1.0, 5.0])
    return (steepness * (plans_BSHA - TARGET).square()).sum((-2, -1))


def searches(config: PlanConfig, keys: tuple[int, ...] = (0,)) -> list[Search]:
    """Every search from the first to the last."""
    solver, problem = Gradient(config), Problem(cost, H, A, torch.tensor(keys))
    found = [solver.begin(problem)]
    for _ in range(config.iterations):
        found.append(solver.step(problem, found[-1]))
    return found


def test_adam_is_torchs_adam_with_a_falling_learning_rate():
    config = PlanConfig(solver="adam", iterations=12, gradient=GradientConfig(1, 0.2))
    plan = torch.zeros(1, 1, H, A, requires_grad=True)
    optimiser = torch.optim.Adam([plan], lr=config.gradient.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / config.iterations)
    for search in searches(config)[1:]:
        optimiser.zero_grad()
        cost(plan).sum().backward()
        optimiser.step()
        schedule.step()
        torch.testing.assert_close(search.memory[0], plan.detach())


def test_the_first_rmsprop_step_has_the_size_of_the_learning_rate_in_every_direction():
    moved = searches(PlanConfig(solver="rmsprop", gradient=GradientConfig(1, 0.2)))[1].memory[0]
    torch.testing.assert_close(moved[0, 0], 0.2 * TARGET.sign())


def test_an_sgd_step_follows_the_gradient_and_is_never_larger_than_the_learning_rate():
    config = PlanConfig(solver="sgd", iterations=20, gradient=GradientConfig(4, 0.2))
    plans = [search.memory[0] for search in searches(config, (1, 2))]
    for before, after in itertools.pairwise(plans):
        assert ((after - before).square().mean((-2, -1)).sqrt() < 0.2 + 1e-6).all()
    gradient = 2 * torch.tensor([0.1, 1.0, 5.0]) * (plans[0] - TARGET)
    size = gradient.square().mean((-2, -1), keepdim=True).sqrt()
    torch.testing.assert_close(plans[1] - plans[0], -0.2 * gradient / size)


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
def test_restarts_lie_around_the_first_which_is_the_start(solver: str):
    start_BHA = torch.full((2, H, A), 3.0)
    config = PlanConfig(solver=solver, init_std=0.5, gradient=GradientConfig(3000))
    plans_BRHA = Gradient(config).begin(Problem(cost, H, A, torch.tensor([1, 2]), start_BHA)).memory[0]
    assert torch.equal(plans_BRHA[:, 0], start_BHA)
    assert (plans_BRHA[:, 1:].mean(1) - 3).abs().max() < 0.05
    assert (plans_BRHA[:, 1:].std(1) - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
def test_the_answer_is_the_cheapest_plan_that_was_tried(solver: str):
    """Even when steps that are far too large make plans worse; and the plans after the last step were tried, too."""
    visited = searches(PlanConfig(solver=solver, iterations=5, gradient=GradientConfig(4, 3.0)), (1, 2))
    plans_BSHA = torch.cat([search.memory[0] for search in visited], dim=1)
    costs_BS = cost(plans_BSHA)
    for episode, best in enumerate(costs_BS.argmin(1)):
        assert torch.equal(visited[-1].mean_BHA[episode], plans_BSHA[episode, best])
        assert visited[-1].memory[3][episode] == costs_BS[episode, best]


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
def test_the_last_step_is_scored(solver: str):
    """Small steps improve each time, so the answer is where the last one led, wherever a clock stops the search."""
    visited = searches(PlanConfig(solver=solver, iterations=4, gradient=GradientConfig(1, 0.01)), (1, 2))
    for search in visited[1:]:
        assert torch.equal(search.mean_BHA, search.memory[0][:, 0])
        torch.testing.assert_close(search.memory[3], cost(search.memory[0])[:, 0])


def test_the_spread_is_how_far_the_last_step_moved():
    before, after = searches(PlanConfig(solver="sgd", iterations=3, gradient=GradientConfig(4)), (1, 2))[1:3]
    moved_BRHA = after.memory[0] - before.memory[0]
    torch.testing.assert_close(after.std_BHA, moved_BRHA.square().mean(1).sqrt())
