"""Gradient descent through the world model, from several starting points at once.

The first start is the problem's own, the others lie around it. The answer is the best plan met on the way.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lewm.config import PlanConfig
from lewm.plan.solver import Problem, Search

# Decay of the running means of gradients and of their squares, as usual for the two methods.
_DECAYS = {"rmsprop": (0.0, 0.99), "adam": (0.9, 0.999)}
_EPSILON = 1e-8


class Gradient:
    """SGD, RMSProp or Adam on plans, as ``config.solver`` says, on R = ``config.gradient.restarts`` plans at once.

    Memory of a search: current plans, and running means of their gradients and squared gradients, (B, R, H, A) each;
    the cost of the best plan so far, (B,); the gradients at the current plans. Its ``std_BHA`` is how far the plans
    moved in the last step. Plans are scored as soon as they are made, so those of the last step count too.
    """

    needs_gradient = True

    def __init__(self, config: PlanConfig | None = None) -> None:
        self.config = config or PlanConfig(solver="adam")
        self.iterations = self.config.iterations

    def begin(self, problem: Problem) -> Search:
        mean_BHA = problem.first_mean()
        search = Search.begin(mean_BHA, self.config.init_std)
        noise_BRHA = problem.noise(self.config.gradient.restarts, search.iteration)
        others_BRHA = mean_BHA.unsqueeze(1) + self.config.init_std * noise_BRHA[:, 1:]
        plans_BRHA = problem.bound(torch.cat([mean_BHA.unsqueeze(1), others_BRHA], dim=1))
        cost_BR, gradient_BRHA = _scored(problem, plans_BRHA)
        unknown_B = torch.full_like(cost_BR[:, 0], torch.inf)
        best_BHA, best_cost_B = _better(plans_BRHA, cost_BR, mean_BHA, unknown_B)
        still_BRHA = torch.zeros_like(plans_BRHA)
        memory = plans_BRHA, still_BRHA, still_BRHA.clone(), best_cost_B, gradient_BRHA
        return replace(search, mean_BHA=best_BHA, memory=memory)

    def step(self, problem: Problem, search: Search) -> Search:
        plans_BRHA, first_BRHA, second_BRHA, best_cost_B, gradient_BRHA = search.memory
        uphill_BRHA, first_BRHA, second_BRHA = self._uphill(gradient_BRHA, first_BRHA, second_BRHA, search.iteration)
        # Falling to zero, so that the last steps settle.
        lr = self.config.gradient.lr * (1 - search.iteration / self.iterations)
        moved_BRHA = problem.bound(plans_BRHA - lr * uphill_BRHA)
        cost_BR, gradient_BRHA = _scored(problem, moved_BRHA)
        best_BHA, best_cost_B = _better(moved_BRHA, cost_BR, search.mean_BHA, best_cost_B)
        spread_BHA = (moved_BRHA - plans_BRHA).square().mean(1).sqrt()
        return search.next(best_BHA, spread_BHA, (moved_BRHA, first_BRHA, second_BRHA, best_cost_B, gradient_BRHA))

    def _uphill(
        self, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, iteration: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which way the cost rises, about 1 in size, and the running means; all (B, R, H, A)."""
        if self.config.solver == "sgd":
            # Costs have no natural scale: the largest gradient so far, of each restart, is what counts as 1.
            second = torch.maximum(second, gradient.square().mean((-2, -1), keepdim=True))
            return gradient / (second.sqrt() + _EPSILON), first, second
        decay_1, decay_2 = _DECAYS[self.config.solver]
        first = torch.lerp(gradient, first, decay_1)
        second = torch.lerp(gradient.square(), second, decay_2)
        unbiased_1, unbiased_2 = (1 - decay ** (iteration + 1) for decay in (decay_1, decay_2))
        return (first / unbiased_1) / ((second / unbiased_2).sqrt() + _EPSILON), first, second


def _scored(problem: Problem, plans_BRHA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What plans cost, (B, R), and how that changes with them, (B, R, H, A)."""
    with torch.enable_grad():
        leaf_BRHA = plans_BRHA.detach().requires_grad_()
        cost_BR = problem.cost(leaf_BRHA)
        (gradient_BRHA,) = torch.autograd.grad(cost_BR.sum(), leaf_BRHA)
    return cost_BR.detach(), gradient_BRHA


def _better(
    plans_BRHA: torch.Tensor, cost_BR: torch.Tensor, best_BHA: torch.Tensor, best_cost_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best plan of each episode and its cost, after these have been seen too."""
    lowest_B, index_B = cost_BR.min(1)
    found_BHA = torch.take_along_dim(plans_BRHA, index_B[:, None, None, None], dim=1)[:, 0]
    better_B = lowest_B < best_cost_B
    return torch.where(better_B[:, None, None], found_BHA, best_BHA), torch.minimum(lowest_B, best_cost_B)
