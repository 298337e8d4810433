"""What a search asks of the futures that a model imagines: their costs, and how far from the goal they come.

Most models give embeddings, which objectives score. Where those are large, a model gives distances instead.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.cost import OBJECTIVES, OF_DISTANCES, Objective, TotalCost, add_up, squared_distance
from lewm.plan.inputs import Encoded
from lewm.types import Cost, DistanceModel, WorldModel


class Outcome(NamedTuple):
    """Where plans lead: their costs (B, S), and the distances to the goal after each block, (B, S, H)."""

    cost_BS: torch.Tensor
    distances_BSH: torch.Tensor


class Futures(ABC):
    """heavy: a step of a search is so much work that it is captured alone, not the search as a whole."""

    heavy = False

    @abstractmethod
    def cost(self, inputs: Encoded) -> Cost:
        """What a solver minimises."""

    @abstractmethod
    def outcome(self, inputs: Encoded, actions_BSHA: torch.Tensor) -> Outcome:
        """Where these plans lead."""

    @abstractmethod
    def distances(self, inputs: Encoded, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """The distances (B, S, H) alone: plans may be shorter here than objectives expect."""


class Embeddings(Futures):
    """Futures of a model that gives embeddings, scored by the sum of objectives."""

    def __init__(
        self, model: WorldModel, config: PlanConfig, objectives: Sequence[Objective], differentiable: bool
    ) -> None:
        self._rollout = model.planning_rollout(config.precision, differentiable=differentiable)
        self._objectives = objectives

    def cost(self, inputs: Encoded) -> Cost:
        rollout = functools.partial(self._rollout, inputs.z_BTD, inputs.past_BTA)
        return TotalCost(rollout, inputs.goal_BD, self._objectives)

    def outcome(self, inputs: Encoded, actions_BSHA: torch.Tensor) -> Outcome:
        z_BSHD = self._rollout(inputs.z_BTD, inputs.past_BTA, actions_BSHA)
        cost_BS = add_up(self._objectives, z_BSHD, inputs.goal_BD, actions_BSHA)
        return Outcome(cost_BS, squared_distance(z_BSHD, inputs.goal_BD[:, None, None]))

    def distances(self, inputs: Encoded, actions_BSHA: torch.Tensor) -> torch.Tensor:
        z_BSHD = self._rollout(inputs.z_BTD, inputs.past_BTA, actions_BSHA)
        return squared_distance(z_BSHD, inputs.goal_BD[:, None, None])


class Distances(Futures):
    """Futures of a model that gives distances."""

    heavy = True

    def __init__(self, model: DistanceModel, config: PlanConfig, differentiable: bool) -> None:
        self._distances = model.planning_distances(config.precision, differentiable=differentiable)
        self._objective = OF_DISTANCES[config.objective]

    def cost(self, inputs: Encoded) -> Cost:
        return lambda actions_BSHA: self.outcome(inputs, actions_BSHA).cost_BS

    def outcome(self, inputs: Encoded, actions_BSHA: torch.Tensor) -> Outcome:
        distances_BSH = self.distances(inputs, actions_BSHA)
        return Outcome(self._objective(distances_BSH), distances_BSH)

    def distances(self, inputs: Encoded, actions_BSHA: torch.Tensor) -> torch.Tensor:
        return self._distances(inputs.z_BTD, inputs.past_BTA, actions_BSHA, inputs.goal_BD)


def can_plan(method: Any) -> bool:
    """Whether it is a world model; it imagines embeddings, or distances to the goal."""
    return hasattr(method, "planning_rollout") or hasattr(method, "planning_distances")


def futures_of(
    model: WorldModel, config: PlanConfig, objectives: Sequence[Objective] | None, differentiable: bool
) -> Futures:
    """A model's futures. objectives: what makes them good, of embeddings; None: the distance that ``config`` names."""
    if not can_plan(model):
        raise PlanningError(f"{type(model).__name__} acts and makes no plans. `lewm.Agent` takes it as it is.")
    gives_distances = hasattr(model, "planning_distances")
    if gives_distances and not objectives:
        return Distances(cast(DistanceModel, model), config, differentiable)
    if not hasattr(model, "planning_rollout"):
        raise PlanningError(
            f"Objectives of your own score embeddings, and {type(model).__name__} gives distances only. Plan without "
            "them, with plan.objective."
        )
    return Embeddings(model, config, objectives or [OBJECTIVES[config.objective]], differentiable)
