"""MPPI: weights that fall with the cost, and a spread that cools."""

from __future__ import annotations

import pytest
import torch

from lewm.config import PlanConfig
from lewm.plan.mppi import FINAL_SPREAD, MPPI, candidate_weights
from lewm.plan.solver import Problem, solve


def test_weights_fall_exponentially_with_the_cost_in_standard_deviations():
    costs = torch.tensor([[5.0, 7.0, 7.0, 5.0], [30.0, 10.0, 10.0, 30.0]])  # standard deviations 1 and 10
    weights = candidate_weights(costs, temperature=0.5)
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    torch.testing.assert_close(weights[0, 0] / weights[0, 1], torch.tensor(4.0).exp())
    torch.testing.assert_close(weights[1], weights[0, [1, 0, 3, 2]])


@pytest.mark.parametrize("value", [0.0, 3.0, 1e30])
@pytest.mark.parametrize("count", [1, 4])
def test_equal_costs_weigh_the_same(value: float, count: int):
    torch.testing.assert_close(candidate_weights(torch.full((1, count), value), 0.1), torch.full((1, count), 1 / count))


def test_the_mean_is_the_weighted_mean_of_the_candidates():
    asked = []

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        asked.append(plans_BSHA)
        return (plans_BSHA - 1).square().sum((-2, -1))

    config = PlanConfig(solver="mppi", samples=30, iterations=1)
    found_BHA = solve(MPPI(config), Problem(cost, 2, 3, torch.tensor([1, 2])))
    weights_BS = candidate_weights(cost(asked[0]), config.mppi.temperature)
    torch.testing.assert_close(found_BHA, torch.einsum("bs,bsha->bha", weights_BS, asked[0]))


@pytest.mark.parametrize("iterations", [1, 10, 30])
def test_the_spread_cools_to_the_same_end_whatever_the_number_of_iterations(iterations: int):
    solver = MPPI(PlanConfig(solver="mppi", samples=8, iterations=iterations, init_std=2.0))
    problem = Problem(lambda plans: plans.sum((-2, -1)), 2, 3, torch.tensor([1]))
    search = solver.begin(problem)
    for _ in range(iterations):
        search = solver.step(problem, search)
    torch.testing.assert_close(search.std_BHA, torch.full((1, 2, 3), 2.0 * FINAL_SPREAD))
