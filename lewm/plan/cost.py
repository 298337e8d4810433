"""Costs of imagined futures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def squared_distance(z: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance in latent space: (..., D) and broadcastable (..., D) -> (...)."""
    return (z - goal).square().sum(-1)


@dataclass(frozen=True)
class TerminalDistance:
    """The paper's cost: squared distance between the last predicted embedding and the goal's.

    rollout: candidate plans (B, S, H, A) -> predictions (B, S, H, D).  goal_BD: the goals' embeddings.
    """

    rollout: Callable[[torch.Tensor], torch.Tensor]
    goal_BD: torch.Tensor

    def __call__(self, actions_BSHA: torch.Tensor) -> torch.Tensor:
        return squared_distance(self.rollout(actions_BSHA)[:, :, -1], self.goal_BD.unsqueeze(1))
