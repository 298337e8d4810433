"""An expert that wanders off now and then, for data in which actions do not follow from what is seen.

A model that only ever sees what an expert does can predict well without looking at the actions: it learns what the
expert would do. A planner, which tries everything else, then finds plans that work in imagination only.
"""

from __future__ import annotations

import numpy as np

from lewm.envs.base import Expert
from lewm.types import Array

SHORTEST, LONGEST = 2, 15  # actions of a stretch in which something else is done
TAKEN_OVER = 0.75  # how likely each number of an action is then not the expert's
LARGEST_NOISE = 0.7


def start_probability(share: float, shortest: int, longest: int) -> float:
    """Of an action to begin a stretch of ``shortest`` to ``longest``, such that these have ``share`` of them all."""
    return share / (share + (1 - share) * (shortest + longest) / 2)


class WanderingExpert(Expert):
    """``expert``, interrupted by stretches of other actions; it goes on from wherever these have led.

    The share of an episode's actions that are in stretches is drawn from [0, ``exploration``]. In a stretch some of an
    action's numbers are the expert's, the others one random value in [-1, 1] that is held, with white noise on it. How
    long it lasts, which numbers, and how much noise is drawn for each.
    """

    def __init__(self, expert: Expert, rng: np.random.Generator, exploration: float) -> None:
        self._expert, self._rng = expert, rng
        self.steps = expert.steps
        self._probability = start_probability(rng.uniform(0, exploration), SHORTEST, LONGEST)
        self._left = 0

    def begin(self, state: Array, goal: Array) -> tuple[Array, Array]:
        """As the expert's."""
        return self._expert.begin(state, goal)

    def act(self, state: Array, goal: Array) -> Array:
        """The expert's action (action_dim,), or another one in [-1, 1]."""
        action = self._expert.act(state, goal)
        if self._left == 0 and self._rng.random() < self._probability:
            self._left = int(self._rng.integers(SHORTEST, LONGEST + 1))
            self._held = self._rng.uniform(-1, 1, len(action))
            self._taken = self._rng.random(len(action)) < TAKEN_OVER
            self._noise = self._rng.uniform(0, LARGEST_NOISE)
        if self._left == 0:
            return action
        self._left -= 1
        other = np.clip(self._held + self._rng.normal(0, self._noise, len(action)), -1, 1)
        return np.where(self._taken, other, action).astype(action.dtype)
