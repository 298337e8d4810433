"""The cross-entropy method: finds optima, refits to its elites, and treats each episode as if it were alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from lewm.config import PlanConfig
from lewm.plan.cem import CEM
from lewm.plan.solver import Problem
from lewm.types import Cost

H, A = 3, 4


class Recorder:
    """A cost that remembers the candidates it was asked about."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.asked: list[torch.Tensor] = []

    def __call__(self, actions_BSHA: torch.Tensor) -> torch.Tensor:
        self.asked.append(actions_BSHA.clone())
        return self.cost(actions_BSHA)


def quadratic(targets_BHA: torch.Tensor) -> Cost:
    return lambda actions_BSHA: (actions_BSHA - targets_BHA.unsqueeze(1)).square().sum((-2, -1))


def random_targets(batch: int) -> torch.Tensor:
    return torch.randn(batch, H, A, generator=torch.Generator().manual_seed(1))


def solve(cost: Cost, keys: list[int], config: PlanConfig) -> torch.Tensor:
    return CEM(config).solve(Problem(cost, H, A, torch.tensor(keys)))


def elites(plans_BSHA: torch.Tensor, cost_BS: torch.Tensor, count: int) -> torch.Tensor:
    order_BS = cost_BS.argsort(dim=1)
    return torch.stack([plans[order[:count]] for plans, order in zip(plans_BSHA, order_BS, strict=True)])


def test_finds_each_episodes_quadratic_optimum():
    targets_BHA = random_targets(5)
    found_BHA = solve(quadratic(targets_BHA), [3, 1, 4, 1, 5], PlanConfig(samples=128, elites=16, iterations=20))
    assert found_BHA.shape == (5, H, A)
    assert (found_BHA - targets_BHA).abs().max() < 0.02


def test_finds_the_deeper_of_two_basins():
    """Basins at +1.5 and -1.5; which is deeper differs between the episodes."""
    deeper_B = torch.tensor([1.5, -1.5, 1.5, -1.5])

    def cost(actions_BSHA: torch.Tensor) -> torch.Tensor:
        first_BS, sign_B1 = actions_BSHA[:, :, 0, 0], deeper_B.sign().unsqueeze(1)
        deep_BS = (first_BS * sign_B1 - 1.5).square()
        shallow_BS = (first_BS * sign_B1 + 1.5).square() + 0.5
        return torch.minimum(deep_BS, shallow_BS)

    found_BHA = solve(cost, [0, 1, 2, 3], PlanConfig(samples=128, elites=16, iterations=10))
    assert (found_BHA[:, 0, 0] - deeper_B).abs().max() < 0.02


def test_more_iterations_come_nearer():
    targets_BHA = random_targets(4)
    errors = [
        (solve(quadratic(targets_BHA), [0, 1, 2, 3], PlanConfig(samples=64, elites=8, iterations=n)) - targets_BHA)
        .square()
        .sum()
        for n in (1, 5, 15)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_starts_from_the_configured_gaussian():
    cost = Recorder(quadratic(random_targets(2)))
    solve(cost, [1, 2], PlanConfig(samples=5000, iterations=1, init_std=0.7))
    candidates = cost.asked[0][:, 1:]
    assert cost.asked[0].shape == (2, 5000, H, A)
    assert candidates.mean(1).abs().max() < 0.05
    assert (candidates.std(1) - 0.7).abs().max() < 0.05


def test_each_iteration_samples_around_the_elites_of_the_last():
    config = PlanConfig(samples=3000, elites=20, iterations=3)
    cost = Recorder(quadratic(random_targets(2)))
    found_BHA = solve(cost, [1, 2], config)
    noise = []
    for plans, following in itertools.pairwise(cost.asked):
        best = elites(plans, cost.cost(plans), config.elites)
        mean, std = best.mean(1, keepdim=True), best.std(1, keepdim=True)
        noise.append((following[:, 1:] - mean) / std)
        assert noise[-1].mean(1).abs().max() < 0.1
        assert (noise[-1].std(1) - 1).abs().max() < 0.1
    # Fresh numbers each time, and the answer is the last mean.
    correlation = (noise[0] * noise[1]).mean()
    assert abs(correlation) < 0.02
    best = elites(cost.asked[-1], cost.cost(cost.asked[-1]), config.elites)
    torch.testing.assert_close(found_BHA, best.mean(1))


def test_the_mean_so_far_competes_as_candidate_0():
    config = PlanConfig(samples=40, elites=5, iterations=4)
    cost = Recorder(quadratic(random_targets(3)))
    solve(cost, [1, 2, 3], config)
    assert torch.equal(cost.asked[0][:, 0], torch.zeros(3, H, A))
    for plans, following in itertools.pairwise(cost.asked):
        torch.testing.assert_close(following[:, 0], elites(plans, cost.cost(plans), config.elites).mean(1))


# Random numbers come in pairs: an iteration that needs an odd count of them must not disturb the next.
@pytest.mark.parametrize(("samples", "block_dim"), [(20, A), (21, A - 1)])
def test_a_batch_gives_bitwise_the_plans_of_each_episode_alone(samples: int, block_dim: int):
    targets_BHA = random_targets(6)[:, :, :block_dim]
    config, keys = PlanConfig(samples=samples, elites=5, iterations=8), torch.arange(6) * 1000

    def plans(indices: slice) -> torch.Tensor:
        return CEM(config).solve(Problem(quadratic(targets_BHA[indices]), H, block_dim, keys[indices]))

    together = plans(slice(None))
    for i in range(6):
        assert torch.equal(together[i : i + 1], plans(slice(i, i + 1)))


def test_the_key_decides_the_plan():
    cost, config = quadratic(random_targets(1)), PlanConfig(samples=16, elites=4, iterations=2)
    assert torch.equal(solve(cost, [7], config), solve(cost, [7], config))
    assert not torch.equal(solve(cost, [7], config), solve(cost, [8], config))


def test_needs_no_gradients():
    target = random_targets(1).requires_grad_()
    assert not solve(quadratic(target), [0], PlanConfig(samples=8, elites=2, iterations=1)).requires_grad
