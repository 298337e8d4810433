"""iCEM, the sample-efficient cross-entropy method (Pinneri et al. 2020).

CEM with three additions that pay when samples are few: candidates that are smooth in time, elites that compete again in
the next iteration, and a distribution that does not forget the old one at once. The answer is the best plan met on the
way, not the last mean. A fourth is ours: the first candidates can be plans that were once executed (``recorded``).
"""

from __future__ import annotations

import functools

import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.recorded import RecordedPlans
from lewm.plan.solver import Problem, Search


class ICEM:
    """Improved cross-entropy method.

    Memory of a search: the mean to sample around (B, H, A); the elites kept (B, E, H, A), best first, and their costs
    (B, E); the matrix that colours noise.
    """

    needs_gradient = False

    def __init__(self, config: PlanConfig | None = None) -> None:
        self.config = config or PlanConfig()
        self.iterations = self.config.iterations
        # At least one: the first of the elites kept is the best plan so far.
        self.kept = max(1, round(self.config.icem.kept_elites * self.config.elites))

    def begin(self, problem: Problem) -> Search:
        mean_BHA = problem.first_mean()
        kept_BEHA = mean_BHA.unsqueeze(1).repeat(1, self.kept, 1, 1)
        # Nothing has been kept yet: at an infinite cost these never become elites.
        kept_cost_BE = kept_BEHA.new_full(kept_BEHA.shape[:2], torch.inf)
        colouring = self._colouring(problem)
        return Search.begin(mean_BHA, self.config.init_std, (mean_BHA.clone(), kept_BEHA, kept_cost_BE, colouring))

    def step(self, problem: Problem, search: Search) -> Search:
        mean_BHA, kept_BEHA, kept_cost_BE, colouring = search.memory
        noise_BSHA = colour(problem.noise(self.config.samples, search.iteration), colouring)
        plans_BSHA = problem.candidates(mean_BHA, search.std_BHA, noise_BSHA)
        if self.config.icem.recorded:
            plans_BSHA = self._recorded_first(problem, search, plans_BSHA)
        cost_BS = torch.cat([problem.cost(plans_BSHA), kept_cost_BE], dim=1)
        elite_cost_BE, best_BE = cost_BS.topk(self.config.elites, dim=1, largest=False)
        elites_BEHA = torch.take_along_dim(torch.cat([plans_BSHA, kept_BEHA], 1), best_BE[:, :, None, None], dim=1)
        mean_BHA = torch.lerp(elites_BEHA.mean(1), mean_BHA, self.config.icem.momentum)
        std_BHA = torch.lerp(elites_BEHA.std(1), search.std_BHA, self.config.icem.momentum)
        kept = elites_BEHA[:, : self.kept], elite_cost_BE[:, : self.kept]
        return search.next(elites_BEHA[:, 0], std_BHA, (mean_BHA, *kept, colouring))

    def _colouring(self, problem: Problem) -> torch.Tensor:
        if self.config.icem.recorded:
            return _known(problem.recorded).colouring
        steps = problem.horizon * problem.steps_per_block
        return colouring_matrix(steps, self.config.icem.noise_exponent, problem.keys_B.device)

    def _recorded_first(self, problem: Problem, search: Search, plans_BSHA: torch.Tensor) -> torch.Tensor:
        """Recorded plans in place of ``plans_BSHA``, but for the mean, in the first iterations."""
        samples = plans_BSHA.shape[1]
        recorded_BSHA = problem.bound(_known(problem.recorded).some(problem.keys_B, samples, search.iteration))
        # The device chooses: a search that is one CUDA graph cannot ask how far it is.
        early = (search.iteration < self.config.icem.recorded) & (torch.arange(samples, device=plans_BSHA.device) > 0)
        return torch.where(early[:, None, None], recorded_BSHA, plans_BSHA)


def _known(recorded: RecordedPlans | None) -> RecordedPlans:
    if recorded is None:
        raise PlanningError("plan.icem.recorded is for problems with recorded plans, and this one has none.")
    return recorded


def colour(white_BSHA: torch.Tensor, colouring: torch.Tensor) -> torch.Tensor:
    """White noise (B, S, H, A) -> noise that is correlated as ``colouring`` says.

    It is (H*K, H*K) if each number of an action goes its own way, as the primitive steps do, else (H*A, H*A).
    """
    steps_BSTa = white_BSHA.reshape(*white_BSHA.shape[:2], len(colouring), -1)
    return (colouring @ steps_BSTa).view_as(white_BSHA)


@functools.lru_cache(maxsize=16)  # a search that is being captured cannot copy it to the device
def colouring_matrix(steps: int, exponent: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """The (T, T) matrix that gives T white numbers a power spectrum of 1/f^exponent, each with unit variance."""
    # Twice the length, of which half is used: a spectrum's own period would tie the last step to the first.
    frequency = torch.fft.rfftfreq(2 * steps, dtype=torch.float64)
    frequency[0] = frequency[1]
    correlation = torch.fft.irfft(frequency**-exponent, n=2 * steps)
    time = torch.arange(steps)
    covariance = (correlation / correlation[0])[(time[:, None] - time).abs()]
    return torch.linalg.cholesky(covariance).float().to(device)
