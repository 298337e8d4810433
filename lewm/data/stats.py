"""Statistics of a dataset's actions."""

from __future__ import annotations

import numpy as np

from lewm.errors import DataError
from lewm.types import ActionStats, Array


def action_stats(actions: Array) -> ActionStats:
    """Mean and standard deviation of actions (N, action_dim), without the NaN rows in which none was taken."""
    # float64: summed in float32, a million actions lose the digits that the variance is made of.
    taken = actions[np.isfinite(actions).all(axis=1)].astype(np.float64)
    if len(taken) == 0:
        raise DataError(f"None of {len(actions)} rows has an action. Give at least one episode of two rows.")
    std = taken.std(axis=0)
    # A constant dimension carries nothing to scale: it is only centred, so that its z-score is 0 and not
    # 0/0. Compared by its range, because rounding can leave a constant with a std of 1e-17.
    std[(np.ptp(taken, axis=0) == 0) | (std == 0)] = 1.0
    return ActionStats(mean=tuple(taken.mean(axis=0).tolist()), std=tuple(std.tolist()))
