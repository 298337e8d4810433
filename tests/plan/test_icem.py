"""iCEM: coloured noise, elites that are kept, and the best plan as the answer."""

from __future__ import annotations

import pytest
import torch

from lewm.config import PlanConfig
from lewm.plan.icem import ICEM, colour, colouring_matrix
from lewm.plan.solver import Problem, solve


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0, 4.0])
def test_coloured_noise_has_unit_variance_at_every_step(exponent: float):
    matrix = colouring_matrix(25, exponent)
    torch.testing.assert_close(matrix.square().sum(1), torch.ones(25))


def test_exponent_zero_is_white():
    torch.testing.assert_close(colouring_matrix(25, 0.0), torch.eye(25))


def test_larger_exponents_are_smoother_in_time():
    covariances = [colouring_matrix(25, e) @ colouring_matrix(25, e).T for e in (0.0, 0.5, 1.0, 2.0, 3.0)]
    neighbours = [covariance.diagonal(1).mean() for covariance in covariances]
    assert neighbours == sorted(neighbours)
    assert neighbours[-1] > 0.9
    # Steps far apart are not tied to one another as they would be on a circle.
    for covariance in covariances[1:]:
        assert covariance[0, -1] < covariance[0, 12] < covariance[0, 1]


def test_noise_is_smooth_across_the_steps_of_blocks_and_not_across_action_numbers():
    """Two blocks of five steps of two numbers: each number has a course of its own over ten steps."""
    white = torch.randn(1, 20_000, 2, 10, generator=torch.Generator().manual_seed(0))
    steps = colour(white, colouring_matrix(10, 2.0)).view(20_000, 10, 2)
    expected = colouring_matrix(10, 2.0) @ colouring_matrix(10, 2.0).T
    for number in (0, 1):
        torch.testing.assert_close(torch.cov(steps[..., number].T), expected, atol=0.05, rtol=0)
    assert (steps[..., 0] * steps[..., 1]).mean(0).abs().max() < 0.05


def test_the_answer_is_the_cheapest_plan_that_was_tried():
    target, asked = torch.tensor([[[1.0, -1.0], [0.5, 2.0]], [[0.0, 1.0], [-2.0, 0.3]]]), []

    def rugged(plans_BSHA: torch.Tensor) -> torch.Tensor:
        away = plans_BSHA - target.unsqueeze(1)
        costs = (away.square() + (20 * away).sin().square()).sum((-2, -1))
        asked.append((plans_BSHA, costs))
        return costs

    config = PlanConfig(solver="icem", samples=40, elites=8, iterations=6)
    found_BHA = solve(ICEM(config), Problem(rugged, 2, 2, torch.tensor([1, 2])))
    plans_BSHA, costs_BS = (torch.cat(parts, dim=1) for parts in zip(*asked, strict=True))
    # Every candidate is evaluated once: those that are kept bring their costs along.
    assert costs_BS.shape == (2, 40 * 6)
    for episode, best in enumerate(costs_BS.argmin(1)):
        assert torch.equal(found_BHA[episode], plans_BSHA[episode, best])


def test_kept_elites_compete_again():
    """When the second iteration offers nothing, the elites of the first are still there."""
    config = PlanConfig(solver="icem", samples=40, elites=8, kept_elites=0.5, iterations=2)
    calls = []

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        calls.append(plans_BSHA)
        return plans_BSHA.square().sum((-2, -1)) + 100 * (len(calls) - 1)

    solver, problem = ICEM(config), Problem(cost, 2, 3, torch.tensor([5]))
    first = solver.step(problem, solver.begin(problem))
    second = solver.step(problem, first)
    assert first.memory[1].shape == (1, 4, 2, 3)
    assert torch.equal(second.memory[1], first.memory[1])
    assert torch.equal(second.mean_BHA, first.mean_BHA)
