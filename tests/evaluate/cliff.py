"""A world whose simulator fails in some places, as contact solvers do."""

from __future__ import annotations

from typing import Any

import numpy as np

from lewm.envs.tworoom import TwoRoom

CLIFF = 52.0, 60.0  # from x to x


class Cliff(TwoRoom):
    """It raises there."""

    def step(self, action: Any) -> Any:
        done = super().step(action)
        if CLIFF[0] < self.state[0] < CLIFF[1]:
            self.fail()
        return done

    def fail(self) -> None:
        raise ArithmeticError("the solver\n diverged")


class Fog(Cliff):
    """There its state is not a number any more."""

    def fail(self) -> None:
        self._position = np.full(2, np.nan)
