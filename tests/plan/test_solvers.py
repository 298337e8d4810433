"""What every solver promises, whichever it is."""

from __future__ import annotations

import time
from typing import get_args, get_type_hints

import pytest
import torch

from lewm.config import GradientConfig, IcemConfig, PlanConfig
from lewm.plan.solver import Problem, solve
from lewm.plan.solvers import make_solver
from lewm.types import Cost

H, A = 3, 4
SOLVERS = get_args(get_type_hints(PlanConfig)["solver"])
SAMPLING = ("cem", "icem", "mppi")
# The budget within which each must succeed: 128 x 20 candidates, or 16 x 60 gradients.
BUDGET = {
    **{name: PlanConfig(solver=name, samples=128, elites=16, iterations=20) for name in SAMPLING},
    **{name: PlanConfig(solver=name, iterations=60) for name in ("sgd", "rmsprop", "adam")},
}
SMALL = {
    name: PlanConfig(
        solver=name,
        samples=21,
        elites=5,
        iterations=6,
        icem=IcemConfig(kept_elites=0.5),
        gradient=GradientConfig(restarts=3),
    )
    for name in SOLVERS
}

every_solver = pytest.mark.parametrize("name", SOLVERS)


def quadratic(targets_BHA: torch.Tensor) -> Cost:
    return lambda plans_BSHA: (plans_BSHA - targets_BHA.unsqueeze(1)).square().sum((-2, -1))


def targets(batch: int, block_dim: int = A) -> torch.Tensor:
    return torch.randn(batch, H, block_dim, generator=torch.Generator().manual_seed(1))


def problem(cost: Cost, keys: list[int], block_dim: int = A, **fields: object) -> Problem:
    return Problem(cost, H, block_dim, torch.tensor(keys), **fields)


def test_every_name_is_tested():
    assert set(BUDGET) == set(SOLVERS)


@every_solver
def test_finds_each_episodes_quadratic_optimum(name: str):
    found_BHA = solve(make_solver(BUDGET[name]), problem(quadratic(targets(5)), [3, 1, 4, 1, 5]))
    assert found_BHA.shape == (5, H, A)
    assert (found_BHA - targets(5)).abs().max() < 0.1


@every_solver
def test_finds_an_optimum_whatever_the_scale_of_the_costs(name: str):
    """Latent distances may be tiny or huge; a temperature or learning rate must not depend on it."""
    for scale in (1e-4, 1e4):
        cost = quadratic(targets(2))
        found_BHA = solve(make_solver(BUDGET[name]), problem(lambda x, c=cost, s=scale: s * c(x), [3, 1]))
        assert (found_BHA - targets(2)).abs().max() < 0.1


@every_solver
def test_finds_the_deeper_of_two_basins(name: str):
    """Basins at +1.5 and -1.5; which is deeper differs between the episodes."""
    deeper_B = torch.tensor([1.5, -1.5, 1.5, -1.5])

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        first_BS = plans_BSHA[:, :, 0, 0] * deeper_B.sign().unsqueeze(1)
        return torch.minimum((first_BS - 1.5).square(), (first_BS + 1.5).square() + 0.5)

    found_BHA = solve(make_solver(BUDGET[name]), problem(cost, [0, 1, 2, 3]))
    assert (found_BHA[:, 0, 0] - deeper_B).abs().max() < 0.1


# Random numbers come in pairs: an iteration that needs an odd count of them must not disturb the next.
@pytest.mark.parametrize("block_dim", [4, 3])
@every_solver
def test_a_batch_gives_bitwise_the_plans_of_each_episode_alone(name: str, block_dim: int):
    solver, keys, where = make_solver(SMALL[name]), [0, 1000, 2000, 5], targets(4, block_dim)
    together = solve(solver, problem(quadratic(where), keys, block_dim, steps_per_block=block_dim))
    for i, key in enumerate(keys):
        alone = problem(quadratic(where[i : i + 1]), [key], block_dim, steps_per_block=block_dim)
        assert torch.equal(together[i : i + 1], solve(solver, alone))


@every_solver
def test_the_key_decides_the_plan(name: str):
    """Every number may become 1 or -1, and the start is the hill between: only the noise can choose."""
    solver = make_solver(SMALL[name])

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        return (plans_BSHA.square() - 1).square().sum((-2, -1))

    reference = solve(solver, problem(cost, [7]))
    assert torch.equal(reference, solve(solver, problem(cost, [7])))
    assert not torch.equal(reference, solve(solver, problem(cost, [8])))


@every_solver
def test_bounds_hold_for_candidates_and_answers(name: str):
    asked: list[torch.Tensor] = []
    low_A, high_A = torch.tensor([-0.5, -1.0, 0.0, 0.1]), torch.tensor([0.5, -0.2, 0.3, 0.2])

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        asked.append(plans_BSHA.detach().clone())
        return quadratic(3 * targets(2))(plans_BSHA)

    found_BHA = solve(make_solver(BUDGET[name]), problem(cost, [1, 2], low_A=low_A, high_A=high_A))
    for plans in (*asked, found_BHA):
        assert ((low_A <= plans) & (plans <= high_A)).all()
    # The quadratic's constrained optimum is its clamped one.
    start, found, best = (
        quadratic(3 * targets(2))(plans_BHA.unsqueeze(1))
        for plans_BHA in (torch.zeros(2, H, A).clamp(low_A, high_A), found_BHA, (3 * targets(2)).clamp(low_A, high_A))
    )
    assert (found - best < 0.1 * (start - best)).all()


@every_solver
def test_a_search_from_the_optimum_stays_there(name: str):
    where = 5 * targets(3)  # out of reach of a search that begins at zero
    found_BHA = solve(make_solver(BUDGET[name]), problem(quadratic(where), [1, 2, 3], start_BHA=where))
    assert (found_BHA - where).abs().max() < 0.1


@every_solver
def test_a_start_is_not_modified(name: str):
    start = torch.ones(2, H, A)
    solve(make_solver(SMALL[name]), problem(quadratic(targets(2)), [1, 2], start_BHA=start))
    assert torch.equal(start, torch.ones(2, H, A))


@every_solver
def test_a_step_changes_nothing_but_what_it_returns(name: str):
    """A step may be recorded once and replayed: neither the solver nor the old search may remember anything."""
    solver, task = make_solver(SMALL[name]), problem(quadratic(targets(2)), [1, 2])
    before = solver.step(task, solver.begin(task))
    copies = [tensor.clone() for tensor in before.tensors()]
    first, second = solver.step(task, before), solver.step(task, before)
    assert all(torch.equal(a, b) for a, b in zip(before.tensors(), copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))
    assert [t.shape for t in first.tensors()] == [t.shape for t in before.tensors()]
    assert [t.dtype for t in first.tensors()] == [t.dtype for t in solver.begin(task).tensors()]
    assert first.iteration == 2


@every_solver
def test_nothing_that_is_returned_carries_a_gradient(name: str):
    cost = quadratic(targets(1).requires_grad_())
    solver, task = make_solver(SMALL[name]), problem(cost, [0])
    with torch.no_grad():
        search = solver.step(task, solver.begin(task))
    assert not any(tensor.requires_grad for tensor in search.tensors())


@every_solver
def test_a_time_budget_ends_the_search_with_a_usable_plan(name: str):
    """However busy the machine is: a step takes at least so long, and after the budget none is begun."""
    step, budget = 0.03, 0.25
    calls = 0

    def slow_cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        time.sleep(step)
        return quadratic(targets(2))(plans_BSHA)

    started = time.perf_counter()
    found_BHA = solve(make_solver(BUDGET[name]), problem(slow_cost, [1, 2]), seconds=budget)
    assert time.perf_counter() - started > budget
    assert calls <= budget / step + 1 < BUDGET[name].iterations / 2
    nothing_done = quadratic(targets(2))(torch.zeros(2, 1, H, A))
    assert (quadratic(targets(2))(found_BHA.unsqueeze(1)) < 0.8 * nothing_done).all()
