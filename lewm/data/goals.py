"""Goals of training windows: which frame a method is asked to reach from the frame that acts, the anchor.

    row of an episode         0    1    2    3    4    5    6    7    8
    frame, in every second         o         o         o         o
    goals of anchor 3                      current  future    future         and random ones, of any episode

All numbers of a batch are drawn at once, from one stream for each name, and sliced afterwards: who asks for which part
of it, and what other goals there are, changes nothing.
"""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError
from lewm.rng import stream
from lewm.types import Array, GoalSampling, Inputs

GOALS = 1  # what these streams are for, in their keys behind the batch's own


class Goals:
    """Goals by name, as ``inputs`` asks for them, among the frames of the episodes ``ids``, int (E,)."""

    def __init__(self, store: EpisodeStore, ids: Array, inputs: Inputs) -> None:
        self._samplings = dict(inputs.goals)
        self._frame_skip, self._frame_stride = inputs.frame_skip, store.frame_stride
        self._offsets, self._ends = store.offsets, store.offsets + store.lengths
        self._choices = store.frame_rows[np.isin(self._episode_of(store.frame_rows), ids)]
        for name, sampling in self._samplings.items():
            _check(name, sampling, self._spacing(sampling))

    def draw(self, anchors: Array, key: tuple[int, ...]) -> dict[str, tuple[Array, Array]]:
        """For windows that act at rows ``anchors``, int (B,): rows of the goals, and the steps there, int64 (B,) each.

        Steps are the rows from the anchor to its goal; 0: it is the anchor itself, -1: a random one.
        key: of the batch; the draw is a pure function of it.
        """
        drawn = {}
        for name, sampling in self._samplings.items():
            rng = stream(*key, GOALS, crc32(name.encode()))
            drawn[name] = self._draw(anchors, sampling, rng)
        return drawn

    def _draw(self, anchors: Array, sampling: GoalSampling, rng: np.random.Generator) -> tuple[Array, Array]:
        # Divided by the last, so that shares whose sum is rounded leave no gap.
        shares = np.cumsum([sampling.current, sampling.future, sampling.random])
        kind = np.searchsorted(shares / shares[-1], rng.random(len(anchors)), side="right")
        future = self._future(anchors, sampling, rng)
        anywhere = self._choices[rng.integers(len(self._choices), size=len(anchors))]
        rows = np.choose(kind, [anchors, future, anywhere])
        return rows, np.where((kind == 2) & (rows != anchors), -1, rows - anchors)

    def _future(self, anchors: Array, sampling: GoalSampling, rng: np.random.Generator) -> Array:
        """A later row of the same episode for each anchor, or the anchor where there is none, int64 (B,)."""
        spacing, rows_left = self._spacing(sampling), self._ends[self._episode_of(anchors)] - 1 - anchors
        if sampling.max_steps is not None:
            rows_left = np.minimum(rows_left, sampling.max_steps)
        reach = rows_left // spacing
        if sampling.gamma is None:
            ahead = 1 + (rng.random(len(anchors)) * reach).astype(np.int64)
        else:
            ahead = rng.geometric(1 - sampling.gamma, len(anchors))
        return anchors + np.minimum(ahead, reach) * spacing

    def _spacing(self, sampling: GoalSampling) -> int:
        """Rows between two future goals."""
        return self._frame_stride if sampling.gamma is None else self._frame_skip

    def _episode_of(self, rows: Array) -> Array:
        return np.searchsorted(self._offsets, rows, side="right") - 1


def _check(name: str, sampling: GoalSampling, spacing: int) -> None:
    """Refuse what cannot be drawn. spacing: rows between two future goals."""
    shares = (sampling.current, sampling.future, sampling.random)
    if not (all(0 <= share <= 1 for share in shares) and math.isclose(sum(shares), 1, abs_tol=1e-6)):
        got = f"current {shares[0]}, future {shares[1]}, random {shares[2]}"
        raise ConfigError(f"The goals {name!r} must have shares that add up to 1, got {got}.")
    if sampling.gamma is not None and not 0 <= sampling.gamma < 1:
        raise ConfigError(f"The goals {name!r} need a gamma in [0, 1), or none, got {sampling.gamma}.")
    if sampling.max_steps is not None and sampling.max_steps < spacing:
        least = f"at least {spacing}, the rows from one such goal to the next"
        raise ConfigError(f"The goals {name!r} need max_steps of {least}, got {sampling.max_steps}.")
