"""How like drawn frames are to real ones: pixel by pixel, and by the place of what moves."""

from __future__ import annotations

import numpy as np

from lewm.types import Array
from lewm.understand.places import Detector

WHITE = 255.0


def decibels(shown: Array, real: Array) -> list[float]:
    """Mean peak signal-to-noise ratio by step, of frames uint8 (N, H, R, R, 3)."""
    found = []
    for step in range(real.shape[1]):
        errors = np.subtract(shown[:, step], real[:, step], dtype=np.float32)
        squares = np.maximum(np.square(errors).mean((1, 2, 3)), 1e-2)  # equal frames: 68 dB
        found.append(float((10 * np.log10(WHITE**2 / squares)).mean()))
    return found


def place_errors(detector: Detector, shown: Array, real: Array) -> list[dict[str, float | int | None]]:
    """How far a thing is from where it really is, by step, in pixels of 224."""
    found = []
    for step in range(real.shape[1]):
        there, here = detector.find(real[:, step]), detector.find(shown[:, step])
        errors = np.linalg.norm(here - there, axis=1)
        visible, errors = int(np.isfinite(there).all(1).sum()), errors[np.isfinite(errors)]
        none = not len(errors)
        median, most = (None, None) if none else (float(np.median(errors)), float(np.quantile(errors, 0.9)))
        found.append({"median": median, "p90": most, "found": len(errors), "visible": visible})
    return found
