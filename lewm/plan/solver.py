"""What every solver offers.

A planning problem is a cost over z-scored plans (H, A), one per episode of a batch. A solver returns the plan it
likes best for each. All its randomness comes from the episodes' keys (see ``noise.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lewm.types import Cost


@dataclass(frozen=True)
class Problem:
    """cost: (B, S, H, A) -> (B, S).  keys_B: int64, one random stream per episode."""

    cost: Cost
    horizon: int
    block_dim: int
    keys_B: torch.Tensor


class Solver(Protocol):
    """Finds low-cost plans."""

    def solve(self, problem: Problem) -> torch.Tensor:
        """The best plan for each episode, z-scored (B, H, A)."""
        ...
