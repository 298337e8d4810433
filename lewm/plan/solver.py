"""What every solver offers, and the loop that runs it.

A planning problem is a cost over z-scored plans (H, A), one per episode of a batch. A solver improves a ``Search`` step
by step; it holds no state of its own, so the loop can stop it early, run it on a clock, or replay its step as a CUDA
graph. All its randomness comes from the episodes' keys (see ``noise.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lewm.kernels import search as kernels
from lewm.plan.noise import normal
from lewm.plan.recorded import RecordedPlans
from lewm.types import Cost


@dataclass(frozen=True)
class Problem:
    """cost: (B, S, H, A) -> (B, S).  keys_B: int64, one random stream per episode.

    start_BHA: a plan to begin from, None: zeros, the mean of the training actions.
    low_A, high_A: bounds on z-scored actions, None: unbounded, as in the paper.
    steps_per_block: K, the primitive actions in a block.
    recorded: plans that were once executed, None: none is known.
    """

    cost: Cost
    horizon: int
    block_dim: int
    keys_B: torch.Tensor
    start_BHA: torch.Tensor | None = None
    low_A: torch.Tensor | None = None
    high_A: torch.Tensor | None = None
    steps_per_block: int = 1
    recorded: RecordedPlans | None = None

    def first_mean(self) -> torch.Tensor:
        """Where the search begins, (B, H, A)."""
        if self.start_BHA is not None:
            return self.start_BHA.clone()
        return torch.zeros(len(self.keys_B), self.horizon, self.block_dim, device=self.keys_B.device)

    def bound(self, plans: torch.Tensor) -> torch.Tensor:
        """Plans (..., A) moved into the bounds, if there are any."""
        return plans if self.low_A is None else plans.clamp(self.low_A, self.high_A)

    def noise(self, samples: int, iteration: torch.Tensor) -> torch.Tensor:
        """Standard normal numbers (B, S, H, A), different for each iteration of each episode."""
        count = samples * self.horizon * self.block_dim
        # Each iteration starts at an even place of the stream, as the noise asks.
        start = iteration * (count + count % 2)
        return normal(self.keys_B, start, count).view(-1, samples, self.horizon, self.block_dim)

    def sample(
        self, mean_BHA: torch.Tensor, std_BHA: torch.Tensor, samples: int, iteration: torch.Tensor
    ) -> torch.Tensor:
        """``candidates`` with this iteration's noise, (B, S, H, A)."""
        if not kernels.available(mean_BHA):
            return self.candidates(mean_BHA, std_BHA, self.noise(samples, iteration))
        plans_BSN = kernels.sample(mean_BHA.flatten(1), std_BHA.flatten(1), self.keys_B, iteration, samples)
        return self.bound(plans_BSN.unflatten(2, mean_BHA.shape[1:]))

    def candidates(self, mean_BHA: torch.Tensor, std_BHA: torch.Tensor, noise_BSHA: torch.Tensor) -> torch.Tensor:
        """Plans around a mean, within the bounds, (B, S, H, A).

        The mean itself is the first of them, so that the best point found so far is not lost to sampling.
        """
        plans_BSHA = mean_BHA.unsqueeze(1) + std_BHA.unsqueeze(1) * noise_BSHA
        plans_BSHA[:, 0] = mean_BHA
        return self.bound(plans_BSHA)


@dataclass(frozen=True)
class Search:
    """Where a search stands.

    iteration: int64 scalar, on the device.  mean_BHA: the plan it would return now.  std_BHA: how far candidates lie
    around it.  memory: whatever else the solver carries from step to step.
    """

    iteration: torch.Tensor
    mean_BHA: torch.Tensor
    std_BHA: torch.Tensor
    memory: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def begin(mean_BHA: torch.Tensor, std: float, memory: tuple[torch.Tensor, ...] = ()) -> Search:
        """A search before its first step."""
        iteration = torch.zeros((), dtype=torch.int64, device=mean_BHA.device)
        return Search(iteration, mean_BHA, torch.full_like(mean_BHA, std), memory)

    @staticmethod
    def of(iteration: torch.Tensor, mean_BHA: torch.Tensor, std_BHA: torch.Tensor, *memory: torch.Tensor) -> Search:
        """The search that ``tensors`` was called on."""
        return Search(iteration, mean_BHA, std_BHA, memory)

    def next(self, mean_BHA: torch.Tensor, std_BHA: torch.Tensor, memory: tuple[torch.Tensor, ...] = ()) -> Search:
        """The search one step later."""
        return Search(self.iteration + 1, mean_BHA, std_BHA, memory)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything it holds, in a fixed order."""
        return self.iteration, self.mean_BHA, self.std_BHA, *self.memory


class Solver(Protocol):
    """Finds low-cost plans. ``needs_gradient``: the cost must be differentiable."""

    iterations: int
    needs_gradient: bool

    def begin(self, problem: Problem) -> Search: ...
    def step(self, problem: Problem, search: Search) -> Search: ...


Step = Callable[[Search], Search]


def solve(solver: Solver, problem: Problem, seconds: float | None = None, step: Step | None = None) -> torch.Tensor:
    """Run a solver to its end: the plan it settles on for each episode, z-scored (B, H, A).

    seconds: stop after so much time, with the plan so far. That makes the loop wait for the device after each step,
    and results then depend on the clock.  step: replaces ``solver.step`` on this problem, for instance by a captured
    graph of it.
    """
    started = time.perf_counter()
    search = solver.begin(problem)
    for _ in range(solver.iterations):
        search = step(search) if step else solver.step(problem, search)
        if seconds is not None and _elapsed(search, started) > seconds:
            break
    return problem.bound(search.mean_BHA)


def _elapsed(search: Search, started: float) -> float:
    """Seconds since ``started``, when everything that the search has asked of the device is done."""
    if search.mean_BHA.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
