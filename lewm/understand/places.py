"""Where things are in frames, by their colour: of decoded frames, which no state stands behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lewm.types import Array

UNIT = 224  # places are in pixels of a frame of this size, whatever the frame's is
NEAR = 0.18 * UNIT  # Push-T's T reaches less far from its middle
SMALLEST_BLOCK = 0.2  # of the T's area that has to be seen
TEE_SHARE = 0.024  # of the frame's area that the T covers


@dataclass(frozen=True)
class Detector:
    """what: it finds.  find: places (N, 2), x and y in units of ``UNIT`` pixels a side; NaN where it sees nothing."""

    what: str
    find: Callable[[Array], Array]


def dot_places(frames: Array) -> Array:
    """TwoRoom's red dot in uint8 frames (N, R, R, 3): the middle of what is red."""
    red = frames[..., 0].astype(np.float32) - frames[..., 1:].max(-1)
    weights = np.maximum(red - 40, 0)
    peak = weights.max((1, 2), initial=0)
    return _middles(np.where(peak[:, None, None] > 20, weights, 0))


def block_places(frames: Array) -> Array:
    """Push-T's grey block in uint8 frames (N, R, R, 3): the middle of its area.

    White, walls and the agent, and what lies between them, are brighter in blue than the block; the target is greener.
    """
    red, green, blue = np.moveaxis(frames.astype(np.int16), -1, 0)
    block = (blue < 208) & (blue > 100) & (red < 175) & (green < blue + 8) & (blue - red < 70)
    enough = block.mean((1, 2)) > SMALLEST_BLOCK * TEE_SHARE
    block &= enough[:, None, None]
    places = _medians(block)
    for _ in range(3):  # stray pixels far from the T do not count
        places = _middles(block & (_distances(places, block.shape[1]) < NEAR))
    return places


DETECTORS = {"tworoom": Detector("dot", dot_places), "pusht": Detector("block", block_places)}


def _grid(size: int) -> Array:
    """Middles of pixels along a side of ``size`` pixels, in units of ``UNIT`` a side."""
    return (np.arange(size) + 0.5) * (UNIT / size)


def _middles(weights: Array) -> Array:
    """Weighted means of places, (N, R, R) -> (N, 2); NaN where all weights are 0."""
    mass, grid = weights.sum((1, 2), dtype=np.float64), _grid(weights.shape[1])
    totals = np.stack([weights.sum(1) @ grid, weights.sum(2) @ grid], axis=1)
    return np.divide(totals, mass[:, None], out=np.full_like(totals, np.nan), where=mass[:, None] > 0)


def _medians(mask: Array) -> Array:
    """Medians of the places of what is True, bool (N, R, R) -> (N, 2); NaN where nothing is."""
    grid = _grid(mask.shape[1])
    found = []
    for axis in (1, 2):
        sums = mask.sum(axis).cumsum(1)
        found.append(np.where(sums[:, -1] > 0, grid[(2 * sums >= sums[:, -1:]).argmax(1)], np.nan))
    return np.stack(found, axis=1)


def _distances(places: Array, size: int) -> Array:
    """How far pixels are from a place in each frame, (N, 2) -> (N, R, R)."""
    grid = _grid(size)
    x, y = grid[None, None, :] - places[:, 0, None, None], grid[None, :, None] - places[:, 1, None, None]
    return np.hypot(x, y)
