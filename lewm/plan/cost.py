"""Costs of imagined futures, which add up.

An objective scores predictions: ``objective(z_BSHD, goal_BD, actions_BSHA) -> (B, S)``, with z-scored actions. A user's
own function of that form can stand beside those here. ``TotalCost`` turns them into what a solver minimises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def squared_distance(z: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance in latent space: (..., D) and broadcastable (..., D) -> (...)."""
    return (z - goal).square().sum(-1)


def terminal_distance(z_BSHD: torch.Tensor, goal_BD: torch.Tensor, _actions: torch.Tensor) -> torch.Tensor:
    """The paper's cost: squared distance between the last predicted embedding and the goal's."""
    return squared_distance(z_BSHD[:, :, -1], goal_BD.unsqueeze(1))


def nearest_distance(z_BSHD: torch.Tensor, goal_BD: torch.Tensor, _actions: torch.Tensor) -> torch.Tensor:
    """Squared distance at the nearest point of the way: for goals that may be reached before the horizon."""
    return squared_distance(z_BSHD, goal_BD[:, None, None]).amin(-1)


OBJECTIVES: dict[str, Objective] = {"terminal": terminal_distance, "nearest": nearest_distance}

# The same of a model that gives distances (B, S, H) itself.
OF_DISTANCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "terminal": lambda distances_BSH: distances_BSH[:, :, -1],
    "nearest": lambda distances_BSH: distances_BSH.amin(-1),
}


def add_up(
    objectives: Sequence[Objective], z_BSHD: torch.Tensor, goal_BD: torch.Tensor, actions_BSHA: torch.Tensor
) -> torch.Tensor:
    """The sum of objectives, (B, S)."""
    return sum((f(z_BSHD, goal_BD, actions_BSHA) for f in objectives), start=z_BSHD.new_zeros(()))


@dataclass(frozen=True)
class TotalCost:
    """The sum of objectives over the futures that ``rollout`` imagines: candidates (B, S, H, A) -> costs (B, S)."""

    rollout: Callable[[torch.Tensor], torch.Tensor]
    goal_BD: torch.Tensor
    objectives: Sequence[Objective]

    def __call__(self, actions_BSHA: torch.Tensor) -> torch.Tensor:
        return add_up(self.objectives, self.rollout(actions_BSHA), self.goal_BD, actions_BSHA)
