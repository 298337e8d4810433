"""iCEM: coloured noise, elites that are kept, and the best plan as the answer."""

from __future__ import annotations

import pytest
import torch

from lewm.config import IcemConfig, PlanConfig
from lewm.errors import PlanningError
from lewm.plan.icem import ICEM, colour, colouring_matrix
from lewm.plan.recorded import RecordedPlans
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
    config = PlanConfig(solver="icem", samples=40, elites=8, iterations=2, icem=IcemConfig(kept_elites=0.5))
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


# -- recorded plans -------------------------------------------------------------------------------------------


def wave(count: int, steps: int = 6) -> torch.Tensor:
    """Plans (N, 3, 4) of 2 actions per block, 2 numbers each: a random walk, and its negative a step later."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(count, steps + 1, generator=generator).cumsum(1)
    return torch.stack([walk[:, 1:], -walk[:, :-1]], dim=-1).reshape(count, 3, 4)


def test_noise_is_correlated_as_recorded_plans_are():
    plans = wave(5000)
    white = torch.randn(1, 50_000, 3, 4, generator=torch.Generator().manual_seed(1))
    noise = colour(white, RecordedPlans.of(plans).colouring)[0].flatten(1)
    torch.testing.assert_close(torch.corrcoef(noise.T), torch.corrcoef(plans.flatten(1).T), atol=0.03, rtol=0)
    torch.testing.assert_close(noise.std(0), torch.ones(12), atol=0.02, rtol=0)


@pytest.mark.parametrize("plans", [torch.zeros(20, 3, 4), wave(1), wave(3)], ids=["constant", "one", "three"])
def test_few_or_constant_plans_still_give_noise_of_every_kind(plans: torch.Tensor):
    colouring = RecordedPlans.of(plans).colouring
    assert torch.linalg.matrix_rank(colouring) == 12
    torch.testing.assert_close(colouring.square().sum(1), torch.ones(12))


def test_every_recorded_plan_is_tried_before_one_is_tried_again():
    recorded = RecordedPlans.of(torch.arange(10.0).view(10, 1, 1))
    keys = torch.tensor([3, -(2**62) - 1])
    seen = torch.cat([recorded.some(keys, 5, torch.tensor(iteration)) for iteration in (0, 1)], dim=1).flatten(1)
    assert seen.sort(1).values.tolist() == [list(range(10))] * 2
    assert seen[0].tolist() != seen[1].tolist()


def test_the_first_iterations_try_recorded_plans_and_the_place_to_begin():
    recorded, asked = RecordedPlans.of(wave(100)), []

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        asked.append(plans_BSHA)
        return plans_BSHA.square().sum((-2, -1))

    start = torch.full((1, 3, 4), 0.25)
    config = PlanConfig(solver="icem", samples=21, elites=4, iterations=4, icem=IcemConfig(recorded=2))
    solve(ICEM(config), Problem(cost, 3, 4, torch.tensor([7]), start, recorded=recorded))
    known = {tuple(plan.flatten().tolist()) for plan in recorded.plans_NHA}
    tried = [[tuple(plan.flatten().tolist()) in known for plan in plans[0]] for plans in asked]
    assert tried == [[False] + [True] * 20] * 2 + [[False] * 21] * 2
    assert torch.equal(asked[0][0, 0], start[0])


def test_recorded_plans_are_moved_into_the_bounds():
    asked = []

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        asked.append(plans_BSHA)
        return plans_BSHA.square().sum((-2, -1))

    low, high = torch.full((4,), -0.5), torch.full((4,), 0.5)
    config = PlanConfig(solver="icem", samples=20, elites=4, iterations=2, icem=IcemConfig(recorded=1))
    problem = Problem(cost, 3, 4, torch.tensor([7]), low_A=low, high_A=high, recorded=RecordedPlans.of(wave(100)))
    solve(ICEM(config), problem)
    assert all(plans.abs().max() <= 0.5 for plans in asked)
    assert (asked[0].abs() == 0.5).any()


def test_a_narrow_way_that_was_recorded_is_found():
    """A cost that is flat but for a hole around one of the recorded plans: noise does not find it."""
    plans = wave(200)

    def hole(plans_BSHA: torch.Tensor) -> torch.Tensor:
        return (plans_BSHA - plans[17]).square().sum((-2, -1)).clamp_max(1.0)

    found = {}
    for recorded in (0, 1):
        config = PlanConfig(solver="icem", samples=200, elites=20, iterations=8, icem=IcemConfig(recorded=recorded))
        problem = Problem(hole, 3, 4, torch.tensor([7]), recorded=RecordedPlans.of(plans))
        found[recorded] = hole(solve(ICEM(config), problem).unsqueeze(1)).item()
    assert found == {0: 1.0, 1: pytest.approx(0.0, abs=1e-9)}


def test_a_problem_without_recorded_plans_is_an_error():
    config = PlanConfig(solver="icem", samples=20, elites=4, iterations=2, icem=IcemConfig(recorded=1))
    with pytest.raises(PlanningError, match="this one has none"):
        solve(ICEM(config), Problem(lambda plans: plans.sum((-2, -1)), 3, 4, torch.tensor([7])))
