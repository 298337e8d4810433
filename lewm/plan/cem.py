"""The cross-entropy method (paper, Algorithm 2).

Sample plans from a Gaussian, keep the elites, refit the Gaussian to them, repeat; the answer is the last mean.
"""

from __future__ import annotations

import torch

from lewm.config import PlanConfig
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
        noise_BSHA = problem.noise(self.config.samples, search.iteration)
        plans_BSHA = problem.candidates(search.mean_BHA, search.std_BHA, noise_BSHA)
        elites_BEHA = select_elites(plans_BSHA, problem.cost(plans_BSHA), self.config.elites)
        return search.next(elites_BEHA.mean(1), elites_BEHA.std(1))


def select_elites(plans_BSHA: torch.Tensor, cost_BS: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` plans of lowest cost, best first: (B, E, H, A)."""
    best_BE = cost_BS.topk(count, dim=1, largest=False).indices
    return torch.take_along_dim(plans_BSHA, best_BE[:, :, None, None], dim=1)
