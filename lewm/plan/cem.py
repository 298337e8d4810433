"""The cross-entropy method (paper, Algorithm 2).

Sample plans from a Gaussian, keep the elites, refit the Gaussian to them, repeat; the answer is the last mean.
"""

from __future__ import annotations

import torch

from lewm.config import PlanConfig
from lewm.kernels import search as kernels
from lewm.plan.solver import Problem, Search


class CEM:
    """Cross-entropy method with the paper's settings by default."""

    needs_gradient = False

    def __init__(self, config: PlanConfig | None = None) -> None:
        self.config = config or PlanConfig()
        self.iterations = self.config.iterations

    def begin(self, problem: Problem) -> Search:
        return Search.begin(problem.first_mean(), self.config.init_std)

    def step(self, problem: Problem, search: Search) -> Search:
        plans_BSHA = problem.sample(search.mean_BHA, search.std_BHA, self.config.samples, search.iteration)
        return search.next(*refit(plans_BSHA, problem.cost(plans_BSHA), self.config.elites))


def refit(plans_BSHA: torch.Tensor, cost_BS: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation, (B, H, A) each, of the ``count`` plans of lowest cost."""
    if kernels.available(cost_BS):
        mean_BN, std_BN = kernels.refit(plans_BSHA.flatten(2), cost_BS, count)
        return mean_BN.view_as(plans_BSHA[:, 0]), std_BN.view_as(plans_BSHA[:, 0])
    best_BE = cost_BS.topk(count, dim=1, largest=False).indices
    elites_BEHA = torch.take_along_dim(plans_BSHA, best_BE[:, :, None, None], dim=1)
    return elites_BEHA.mean(1), elites_BEHA.std(1)
