"""Statistics of a dataset: of its actions, and what its frames look like when nothing is there."""

from __future__ import annotations

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.rng import stream
from lewm.types import ActionStats, Array

RECORDED_SEQUENCES, RECORDED_STEPS = 1024, 50  # of actions that a model remembers: twice the paper's plans in length
BACKGROUND_FRAMES = 101  # enough that what covers a place in less than a third of the frames is not taken for it


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


def recorded_actions(actions: Array, lengths: Array, episodes: Array) -> Array:
    """Sequences of actions to remember, evenly from these episodes, in random order: float32 (N, T, action_dim).

    actions: (rows, action_dim), episode after episode, of ``lengths`` (E,) rows, in whose last no action is taken.
    episodes: int, which ones count.  T is RECORDED_STEPS, or less if half of the episodes are shorter.
    """
    taken = np.maximum(lengths - 1, 0)
    steps = int(np.clip(np.median(taken[episodes]), 1, RECORDED_STEPS))
    first_row = np.cumsum(lengths) - lengths
    starts = [first_row[episode] + np.arange(max(0, taken[episode] - steps + 1)) for episode in np.sort(episodes)]
    rows = np.concatenate([*starts, np.zeros(0, np.int64)])
    chosen = rows[np.linspace(0, max(0, len(rows) - 1), min(RECORDED_SEQUENCES, len(rows))).astype(np.int64)]
    sequences = actions[stream(0).permutation(chosen)[:, None] + np.arange(steps)].astype(np.float32)
    return sequences[np.isfinite(sequences).all(axis=(1, 2))]


def background(store: EpisodeStore, episodes: Array) -> Array:
    """What is most often seen at each place in frames of these episodes, int (E,): uint8 (R, R, 3).

    It is the median of frames that are evenly spaced over all of them: what moves is left out of it.
    """
    return np.median(spread_frames(store, episodes, BACKGROUND_FRAMES), axis=0).astype(np.uint8)


def spread_frames(store: EpisodeStore, episodes: Array, count: int) -> Array:
    """Frames that are evenly spaced over these episodes, int (E,): uint8 (N, R, R, 3), N at most ``count``."""
    in_episodes = np.isin(np.repeat(np.arange(store.num_episodes), store.lengths), episodes)
    rows = store.frame_rows[in_episodes[store.frame_rows]]
    if len(rows) == 0:
        raise DataError(f"{store.path}: the episodes for training have no frames. Collect more of them.")
    return store.read_frames(rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)])
