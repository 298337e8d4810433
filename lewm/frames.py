"""Frames of other sizes than a model's: brought to its size in the one way that its training data was."""

from __future__ import annotations

import cv2
import numpy as np

from lewm.types import Array


def resized(frames: Array, side: int) -> Array:
    """Square frames, uint8 (N, S, S, 3), as (N, side, side, 3); those that fit are returned as they are."""
    if frames.shape[1] == side:
        return frames
    new = np.empty((len(frames), side, side, 3), np.uint8)
    for frame, target in zip(frames, new, strict=True):
        # Means over each new pixel's area: nothing is skipped when shrinking.
        cv2.resize(np.ascontiguousarray(frame), (side, side), dst=target, interpolation=cv2.INTER_AREA)
    return new
