"""The policy that collects Reacher's data: random torques, which lead everywhere."""

from __future__ import annotations

import math

import numpy as np

from lewm.envs.base import Expert
from lewm.types import Array


class ReacherExpert(Expert):
    """Torques that know neither state nor goal; of every two episodes one is rough and one smooth, on average.

    Rough: i.i.d. uniform in [-1, 1], as in the released data. They mostly cancel out, so the arm stays slow. Smooth:
    clipped Gaussian noise of standard deviation 0.7 whose correlation time, in steps, is drawn log-uniformly from
    ``correlation_times`` once per episode; the arm swings through all of its range, as one that is planned for does.
    """

    steps = 200

    def __init__(self, rng: np.random.Generator, correlation_times: tuple[float, float] = (2.0, 30.0)) -> None:
        self._rng = rng
        self._rough = rng.random() < 0.5
        time = math.exp(rng.uniform(*np.log(correlation_times)))
        self._memory = math.exp(-1 / time)
        self._noise = rng.normal(size=2)

    def act(self, state: Array, goal: Array) -> Array:
        """Torques (2,) in [-1, 1], float32."""
        del state, goal
        if self._rough:
            return self._rng.uniform(-1.0, 1.0, 2).astype(np.float32)
        action = np.clip(0.7 * self._noise, -1.0, 1.0)
        # Scaled such that the noise keeps its unit variance.
        self._noise = self._memory * self._noise + math.sqrt(1 - self._memory**2) * self._rng.normal(size=2)
        return action.astype(np.float32)
