"""The cross-entropy method (paper, Algorithm 2).

Sample plans from a Gaussian, keep the elites, refit the Gaussian to them, repeat; the answer is the last mean.
"""

from __future__ import annotations

import torch

from lewm.config import PlanConfig
from lewm.plan.noise import normal
from lewm.plan.solver import Problem


class CEM:
    """Cross-entropy method with the paper's settings by default."""

    def __init__(self, config: PlanConfig | None = None) -> None:
        self.config = config or PlanConfig()

    @torch.no_grad()
    def solve(self, problem: Problem) -> torch.Tensor:
        """The mean of the final sampling distribution, (B, H, A)."""
        shape = (len(problem.keys_B), problem.horizon, problem.block_dim)
        mean_BHA = torch.zeros(shape, device=problem.keys_B.device)
        std_BHA = torch.full_like(mean_BHA, self.config.init_std)
        for iteration in range(self.config.iterations):
            plans_BSHA = self._sample(problem, iteration, mean_BHA, std_BHA)
            elites_BEHA = self._elites(plans_BSHA, problem.cost(plans_BSHA))
            mean_BHA, std_BHA = elites_BEHA.mean(1), elites_BEHA.std(1)
        return mean_BHA

    def _sample(self, problem: Problem, iteration: int, mean_BHA: torch.Tensor, std_BHA: torch.Tensor) -> torch.Tensor:
        shape = (self.config.samples, problem.horizon, problem.block_dim)
        count = shape[0] * shape[1] * shape[2]
        # Each iteration starts at an even place of the stream, as the noise asks.
        start = iteration * (count + count % 2)
        noise_BSHA = normal(problem.keys_B, start, count).view(-1, *shape)
        plans_BSHA = mean_BHA.unsqueeze(1) + std_BHA.unsqueeze(1) * noise_BSHA
        # The mean itself competes, so that the best point found so far is not lost to sampling.
        plans_BSHA[:, 0] = mean_BHA
        return plans_BSHA

    def _elites(self, plans_BSHA: torch.Tensor, cost_BS: torch.Tensor) -> torch.Tensor:
        best_BE = cost_BS.topk(self.config.elites, dim=1, largest=False).indices
        return torch.take_along_dim(plans_BSHA, best_BE[:, :, None, None], dim=1)
