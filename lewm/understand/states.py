"""Recorded states, which only these questions may read: checked once, for probes and for simulators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.types import Array

STATE = "state"
LARGEST = 1e100  # of a number that can still be squared


def recorded_states(store: EpisodeStore, names: Sequence[str] | None = None, rows: Array | None = None) -> Array:
    """The column of states, float64 (N, S), or of some rows; it must have numbers, finite ones, as many as names.

    names: of the numbers of the world's state; None: nobody knows them.
    """
    remedy = "Use data that `lewm collect` wrote, or add the states"
    if STATE not in store.columns:
        has = ", ".join(store.columns)
        raise DataError(f"{store.path} has no column {STATE!r} to read the world's states from, only {has}. {remedy}.")
    column = store.read_column(STATE)
    if column.dtype.kind not in "fiub" or column.ndim > 2:
        raise DataError(f"{store.path} has states of {column.dtype} {column.shape}, not rows of numbers. {remedy}.")
    states = column.reshape(len(column), -1).astype(np.float64)
    if names is not None and states.shape[1] != len(names):
        problem = f"has states of {states.shape[1]} numbers, but those of its world have {len(names)}"
        raise DataError(f"{store.path} {problem}. {remedy}.")
    rows = np.arange(len(states)) if rows is None else rows
    bad = ~(np.abs(states[rows]) < LARGEST).reshape(len(rows), -1).all(axis=1)  # NaN as well
    if bad.any():
        row = rows[bad.argmax()]
        raise DataError(f"{store.path} has no finite {STATE} at row {row}. Repair it, or drop its episode.")
    return states[rows]
