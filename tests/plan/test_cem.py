"""The cross-entropy method: samples from a Gaussian and refits it to the elites."""

from __future__ import annotations

import itertools

import torch

from lewm.config import PlanConfig
from lewm.plan.cem import CEM
from lewm.plan.solver import Problem, solve
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


def cem(cost: Cost, keys: list[int], config: PlanConfig) -> torch.Tensor:
    return solve(CEM(config), Problem(cost, H, A, torch.tensor(keys)))


def elites(plans_BSHA: torch.Tensor, cost_BS: torch.Tensor, count: int) -> torch.Tensor:
    order_BS = cost_BS.argsort(dim=1)
    return torch.stack([plans[order[:count]] for plans, order in zip(plans_BSHA, order_BS, strict=True)])


def test_more_iterations_come_nearer():
    targets_BHA = random_targets(4)
    errors = [
        (cem(quadratic(targets_BHA), [0, 1, 2, 3], PlanConfig(samples=64, elites=8, iterations=n)) - targets_BHA)
        .square()
        .sum()
        for n in (1, 5, 15)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_starts_from_the_configured_gaussian():
    cost = Recorder(quadratic(random_targets(2)))
    cem(cost, [1, 2], PlanConfig(samples=5000, iterations=1, init_std=0.7))
    candidates = cost.asked[0][:, 1:]
    assert cost.asked[0].shape == (2, 5000, H, A)
    assert candidates.mean(1).abs().max() < 0.05
    assert (candidates.std(1) - 0.7).abs().max() < 0.05


def test_each_iteration_samples_around_the_elites_of_the_last():
    config = PlanConfig(samples=3000, elites=20, iterations=3)
    cost = Recorder(quadratic(random_targets(2)))
    found_BHA = cem(cost, [1, 2], config)
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
    cem(cost, [1, 2, 3], config)
    assert torch.equal(cost.asked[0][:, 0], torch.zeros(3, H, A))
    for plans, following in itertools.pairwise(cost.asked):
        torch.testing.assert_close(following[:, 0], elites(plans, cost.cost(plans), config.elites).mean(1))
