"""A solver at work in a world model: what it minimises, and where the plans that it finds lead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.capture import Captures
from lewm.plan.cost import Objective, TotalCost, add_up, squared_distance
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
        self, model: WorldModel, solver: Solver, config: PlanConfig, objectives: Sequence[Objective], capture: Captures
    ) -> None:
        self.model, self.solver, self.config, self.objectives = model, solver, config, objectives
        self._capture = capture
        self._rollout = model.planning_rollout(config.precision, differentiable=solver.needs_gradient)
        self._bounds_A = _bounds(model, config.action_limit)
        self._recorded_by_horizon: dict[int, RecordedPlans] = {}

    def plans(self, inputs: Encoded) -> Found:
        """What to do in each episode."""
        actions_BHA, z_BSHD = self.run(inputs)
        cost_B1 = add_up(self.objectives, z_BSHD, inputs.goal_BD, actions_BHA.unsqueeze(1))
        distances_BH = squared_distance(z_BSHD[:, 0], inputs.goal_BD.unsqueeze(1))
        return Found(actions_BHA, cost_B1, distances_BH, [actions_BHA.shape[1]] * len(actions_BHA))

    def cost(self, inputs: Encoded) -> Cost:
        """What the solver minimises."""
        rollout = functools.partial(self._rollout, inputs.z_BTD, inputs.past_BTA)
        return TotalCost(rollout, inputs.goal_BD, self.objectives)

    def run(self, inputs: Encoded) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the solver, S times for each episode: z-scored plans (S*B, H, A), and where they lead, (B, S, H, D)."""
        if self.config.budget_ms is None:
            plans, z_BSHD = self._capture("search", self._search_to_the_end, *inputs)
            return plans, z_BSHD

        def step(search: Search) -> Search:
            return Search.of(*self._capture("step", self._step, *inputs, *search.tensors()))

        plans = solve(self.solver, self._problem(inputs), self.config.budget_ms / 1000, step)
        (z_BSHD,) = self._capture("imagine", self._imagine, inputs.z_BTD, inputs.past_BTA, plans)
        return plans, z_BSHD

    def recorded(self, horizon: int) -> RecordedPlans | None:
        """The model's recorded actions, as plans of this many blocks; None if they are not asked for."""
        if not self.config.icem.recorded:
            return None
        if horizon not in self._recorded_by_horizon:
            self._recorded_by_horizon[horizon] = RecordedPlans.from_model(self.model, horizon)
        return self._recorded_by_horizon[horizon]

    def check_differentiable(self, z_BTD: torch.Tensor) -> None:
        """Refuse a solver that needs gradients if the rollout from embeddings (1, 1, D) has none."""
        if not self.solver.needs_gradient:
            return
        block_dim = self.model.frame_skip * self.model.action_dim
        actions = torch.zeros(1, 1, 1, block_dim, device=self.model.device, requires_grad=True)
        with torch.enable_grad():
            if not self._rollout(z_BTD, z_BTD.new_zeros(1, 0, block_dim), actions).requires_grad:
                raise PlanningError(
                    f"{type(self.solver).__name__} needs gradients of the rollout, and this model has none. "
                    "Choose a sampling solver: cem, icem or mppi."
                )

    def _search_to_the_end(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = Encoded(*tensors)
        plans = solve(self.solver, self._problem(inputs))
        return plans, *self._imagine(inputs.z_BTD, inputs.past_BTA, plans)

    def _step(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step of a search, from the five inputs of a problem and the tensors of the search."""
        return self.solver.step(self._problem(Encoded(*tensors[:5])), Search.of(*tensors[5:])).tensors()

    def _problem(self, inputs: Encoded) -> Problem:
        _, horizon, block_dim = inputs.start_BHA.shape
        cost, recorded, (low_A, high_A) = self.cost(inputs), self.recorded(horizon), self._bounds_A
        keys, start, skip = inputs.keys, inputs.start_BHA, self.model.frame_skip
        return Problem(cost, horizon, block_dim, keys, start, low_A, high_A, skip, recorded)

    def _imagine(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, plans: torch.Tensor) -> tuple[torch.Tensor]:
        """Where plans (S*B, H, A) lead: predictions (B, S, H, D)."""
        return (self._rollout(z_BTD, past_BTA, by_episode(plans, len(z_BTD))),)


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
