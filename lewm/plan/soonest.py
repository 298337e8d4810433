"""The schedule "soonest": search for the best plan of 1, 2, ... H blocks at once, and follow the shortest good one.

These searches come together: with B episodes and H horizons they are H*B, the shortest horizon of every episode first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lewm.plan.inputs import Encoded
from lewm.plan.search import Found, ModelSearch, by_episode
from lewm.types import Array, Cost

# "About as near": this much farther, relative to the nearest, counts as reached. A short plan that is nearly as good
# is the better one, because what remains is corrected by the next.
SOONEST_TOLERANCE = 0.5


@dataclass(frozen=True)
class ArrivalCost:
    """``cost`` on arrival, for searches that are to arrive after 1, 2, ... H blocks: (H*B, S, H, A) -> (H*B, S).

    Of their candidates only the blocks until then count.
    """

    cost: Cost

    def __call__(self, actions_BSHA: torch.Tensor) -> torch.Tensor:
        parts = actions_BSHA.chunk(actions_BSHA.shape[2])
        return torch.cat([self.cost(part[:, :, :blocks]) for blocks, part in enumerate(parts, 1)])


class SoonestSearch(ModelSearch):
    """Searches for every horizon up to the one that is asked for, and chooses."""

    def cost(self, inputs: Encoded) -> Cost:
        return ArrivalCost(super().cost(inputs))

    def plans(self, inputs: Encoded) -> Found:
        horizon = inputs.start_BHA.shape[1]
        # Searches of one episode must not share their noise.
        keys = (torch.arange(horizon, device=inputs.keys.device).unsqueeze(1) + inputs.keys).flatten()
        plans, outcome = self.run(inputs._replace(keys=keys, start_BHA=inputs.start_BHA.repeat(horizon, 1, 1)))
        reached_BSH = outcome.distances_BSH  # S: the horizons that were searched for
        nearest_BH = reached_BSH.diagonal(dim1=1, dim2=2)
        chosen = [soonest(row) for row in nearest_BH.cpu().numpy()]
        at = torch.arange(len(chosen)), torch.tensor(chosen) - 1
        return Found(by_episode(plans, len(chosen))[at], nearest_BH[at].unsqueeze(1), reached_BSH[at], chosen)


def soonest(distances_H: Array) -> int:
    """Which of the plans of 1..H blocks to follow, given how near each comes to the goal: its number of blocks."""
    good_enough = distances_H <= distances_H.min() * (1 + SOONEST_TOLERANCE)
    return int(np.argmax(good_enough)) + 1
