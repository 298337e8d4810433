"""A solver at work in a world model: what it minimises, and where the plans that it finds lead."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.capture import Captures
from lewm.plan.futures import Futures, Outcome
from lewm.plan.inputs import Encoded
from lewm.plan.recorded import RecordedPlans
from lewm.plan.solver import Problem, Search, Solver, solve
from lewm.types import Cost, WorldModel


@dataclass(frozen=True)
class Found:
    """One plan for each episode: z-scored actions (B, H, A), costs (B, 1), distances after each block (B, H).

    blocks: how many of them each plan has; what stands behind does not count.
    """

    actions_BHA: torch.Tensor
    cost_B1: torch.Tensor
    distances_BH: torch.Tensor
    blocks: list[int]


class ModelSearch:
    """Searches for one plan for each episode."""

    def __init__(
        self, model: WorldModel, solver: Solver, config: PlanConfig, futures: Futures, capture: Captures
    ) -> None:
        self.model, self.solver, self.config, self.futures = model, solver, config, futures
        self._capture = capture
        self._bounds_A = _bounds(model, config.action_limit)
        self._recorded_by_horizon: dict[int, RecordedPlans] = {}

    def plans(self, inputs: Encoded) -> Found:
        """What to do in each episode."""
        actions_BHA, (cost_B1, distances_B1H) = self.run(inputs)
        return Found(actions_BHA, cost_B1, distances_B1H[:, 0], [actions_BHA.shape[1]] * len(actions_BHA))

    def cost(self, inputs: Encoded) -> Cost:
        """What the solver minimises."""
        return self.futures.cost(inputs)

    def run(self, inputs: Encoded) -> tuple[torch.Tensor, Outcome]:
        """Run the solver, S times for each episode: z-scored plans (S*B, H, A), and where they lead."""
        if self.config.budget_ms is None and not self.futures.heavy:
            plans, *outcome = self._capture("search", self._search_to_the_end, *inputs)
            return plans, Outcome(*outcome)

        def step(search: Search) -> Search:
            return Search.of(*self._capture("step", self._step, *inputs, *search.tensors()))

        seconds = None if self.config.budget_ms is None else self.config.budget_ms / 1000
        plans = solve(self.solver, self._problem(inputs), seconds, step)
        return plans, Outcome(*self._capture("imagine", self._imagine, *inputs, plans))

    def recorded(self, horizon: int) -> RecordedPlans | None:
        """The model's recorded actions, as plans of this many blocks; None if they are not asked for."""
        if not self.config.icem.recorded:
            return None
        if horizon not in self._recorded_by_horizon:
            self._recorded_by_horizon[horizon] = RecordedPlans.from_model(self.model, horizon)
        return self._recorded_by_horizon[horizon]

    def check_differentiable(self, z_BTD: torch.Tensor) -> None:
        """Refuse a solver that needs gradients if futures from embeddings (1, 1, D) have none."""
        if not self.solver.needs_gradient:
            return
        block_dim = self.model.frame_skip * self.model.action_dim
        actions = torch.zeros(1, 1, 1, block_dim, device=self.model.device, requires_grad=True)
        nothing = z_BTD.new_zeros(1, 0, block_dim)
        inputs = Encoded(z_BTD, nothing, z_BTD[:, 0], nothing.new_zeros(1, dtype=torch.int64), actions[0])
        with torch.enable_grad():
            if not self.futures.distances(inputs, actions).requires_grad:
                raise PlanningError(
                    f"{type(self.solver).__name__} needs gradients of the rollout, and this model has none. "
                    "Choose a sampling solver: cem, icem or mppi."
                )

    def _search_to_the_end(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = Encoded(*tensors)
        plans = solve(self.solver, self._problem(inputs))
        return plans, *self._imagine(*inputs, plans)

    def _step(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step of a search, from the five inputs of a problem and the tensors of the search."""
        return self.solver.step(self._problem(Encoded(*tensors[:5])), Search.of(*tensors[5:])).tensors()

    def _problem(self, inputs: Encoded) -> Problem:
        _, horizon, block_dim = inputs.start_BHA.shape
        cost, recorded, (low_A, high_A) = self.cost(inputs), self.recorded(horizon), self._bounds_A
        keys, start, skip = inputs.keys, inputs.start_BHA, self.model.frame_skip
        return Problem(cost, horizon, block_dim, keys, start, low_A, high_A, skip, recorded)

    def _imagine(self, *tensors: torch.Tensor) -> Outcome:
        """Where plans (S*B, H, A) lead, from the five inputs of a problem and the plans."""
        inputs = Encoded(*tensors[:5])
        return self.futures.outcome(inputs, by_episode(tensors[5], len(inputs.z_BTD)))


def _bounds(model: WorldModel, limit: float | None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """A limit on raw actions, as bounds on z-scored blocks (A,)."""
    if limit is None:
        return None, None
    # A whole number would make tensors of integers, and the statistics in them zeros.
    raw = torch.full((model.frame_skip, model.action_dim), float(limit), device=model.device)
    return model.normalise_actions(-raw), model.normalise_actions(raw)


def by_episode(plans: torch.Tensor, episodes: int) -> torch.Tensor:
    """Plans (S*B, H, A) of S searches for each of B episodes, one search of all after the other -> (B, S, H, A)."""
    return plans.unflatten(0, (-1, episodes)).transpose(0, 1)
