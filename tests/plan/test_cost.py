"""Objectives on futures that can be counted on the fingers, and their sum."""

from __future__ import annotations

import pytest
import torch

from lewm.plan.cost import OBJECTIVES, Objective, TotalCost

# One episode, two candidates, three blocks, embeddings of two numbers. Squared distances to the goal (1, 0):
# first candidate 1, 0, 4; second 2, 9, 1.
Z_BSHD = torch.tensor([[[[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [1.0, 3.0], [1.0, 1.0]]]])
GOAL_BD = torch.tensor([[1.0, 0.0]])
ACTIONS_BSHA = torch.tensor([[[[2.0], [0.0], [1.0]], [[3.0], [0.0], [0.0]]]])


@pytest.mark.parametrize(
    ("objective", "expected"), [(OBJECTIVES["terminal"], [4.0, 1.0]), (OBJECTIVES["nearest"], [0.0, 1.0])]
)
def test_objectives(objective: Objective, expected: list[float]):
    torch.testing.assert_close(objective(Z_BSHD, GOAL_BD, ACTIONS_BSHA), torch.tensor([expected]))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_each_episode_has_its_own_goal(objective: Objective):
    z = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    goals, actions = z[:, 0, 2] + 1, z[..., :1]
    together = objective(z, goals, actions)
    assert together.shape == (3, 4)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], objective(z[i : i + 1], goals[i : i + 1], actions[i : i + 1]))


def test_the_total_adds_up_what_the_rollout_imagines():
    def own(z_BSHD: torch.Tensor, goal_BD: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """A user's wish: keep away from the second axis, early on, with small first actions."""
        return 10 * z_BSHD[:, :, 0, 1] + goal_BD[:, :1] + actions_BSHA[:, :, 0, 0]

    asked = []

    def rollout(actions_BSHA: torch.Tensor) -> torch.Tensor:
        asked.append(actions_BSHA)
        return Z_BSHD

    total = TotalCost(rollout, GOAL_BD, [OBJECTIVES["terminal"], own])(ACTIONS_BSHA)
    torch.testing.assert_close(total, torch.tensor([[4 + 3.0, 1 + 14.0]]))
    assert len(asked) == 1
    assert asked[0] is ACTIONS_BSHA
