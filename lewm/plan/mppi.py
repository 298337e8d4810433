"""Model-predictive path integral control (Williams et al. 2017).

Like CEM, but every candidate counts, with a weight that falls exponentially with its cost. The spread shrinks on a
fixed schedule: the few candidates that carry the weight would underestimate it, and a spread fitted to them collapses
before the basin of the optimum is found. A constant spread, as in the original, leaves the mean too noisy.
"""

from __future__ import annotations

import torch

from lewm.config import PlanConfig
from lewm.plan.solver import Problem, Search

# The spread after the last iteration, relative to the first.
FINAL_SPREAD = 0.05


class MPPI:
    """Path integral control with a cooling spread."""

    needs_gradient = False

    def __init__(self, config: PlanConfig | None = None) -> None:
        self.config = config or PlanConfig()
        self.iterations = self.config.iterations
        self.cooling = FINAL_SPREAD ** (1 / self.iterations)

    def begin(self, problem: Problem) -> Search:
        return Search.begin(problem.first_mean(), self.config.init_std)

    def step(self, problem: Problem, search: Search) -> Search:
        plans_BSHA = problem.sample(search.mean_BHA, search.std_BHA, self.config.samples, search.iteration)
        weight_BS11 = candidate_weights(problem.cost(plans_BSHA), self.config.mppi.temperature)[:, :, None, None]
        return search.next((weight_BS11 * plans_BSHA).sum(1), search.std_BHA * self.cooling)


def candidate_weights(cost_BS: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights (B, S) that sum to one; ``temperature`` is in standard deviations of an episode's costs."""
    # Costs have no natural scale, and theirs shrinks as the search converges: a fixed temperature would fit only once.
    scale_B1 = cost_BS.std(1, correction=0, keepdim=True).clamp_min(1e-12)
    excess_BS = cost_BS - cost_BS.amin(1, keepdim=True)
    return (-excess_BS / (temperature * scale_B1)).softmax(1)
