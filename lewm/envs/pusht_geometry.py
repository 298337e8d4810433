"""Push-T's shapes and frames, shared by its physics, its drawing and its experts.

World: 512 × 512 px, x to the right, y down, angles clockwise on the screen. Body: the T's own frame, whose origin is
the middle of the bar's upper edge and whose y axis runs down the stem. A pose is (x, y, angle) of that origin.
"""

from __future__ import annotations

import math

import numpy as np

from lewm.types import Array

WORLD_SIZE = 512
WALL_LOW, WALL_HIGH, WALL_RADIUS = 5, 506, 2
AGENT_RADIUS = 15
TARGET_POSE = np.array([256.0, 256.0, math.pi / 4])
TARGET_POSE.setflags(write=False)

# The T's two boxes in the body frame: (x low, y low, x high, y high).
BAR = (-60, 0, 60, 30)
STEM = (-15, 30, 15, 120)
MASS = 1.0
# Both as the public environment has them: the mean of the boxes' centres, and the bar's moment about the origin, twice.
CENTRE_OF_GRAVITY = (0.0, 45.0)
INERTIA = 3000.0


def corners(box: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """The four corners of a box, in order around it."""
    left, top, right, bottom = box
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


TEE_CORNERS = np.array([corners(BAR), corners(STEM)], np.float64)  # (2, 4, 2), body frame
TEE_CORNERS.setflags(write=False)


def rotation(angle: float) -> Array:
    """The matrix (2, 2) by which row vectors of the body frame become row vectors of the world's: ``v @ R``."""
    cosine, sine = math.cos(angle), math.sin(angle)
    return np.array([[cosine, sine], [-sine, cosine]])


def to_world(points: Array, pose: Array) -> Array:
    """Points (..., 2) of the body frame of a T at ``pose`` (3,), in the world."""
    return points @ rotation(pose[2]) + pose[:2]


def to_body(points: Array, pose: Array) -> Array:
    """Points (..., 2) of the world, in the body frame of a T at ``pose`` (3,)."""
    return (points - pose[:2]) @ rotation(pose[2]).T


def away_from_tee(points: Array) -> Array:
    """Vectors (..., 2) to points of the body frame (..., 2) from the T's nearest ones; zero inside."""
    from_bar, from_stem = (points - np.clip(points, box[:2], box[2:]) for box in (BAR, STEM))
    bar_is_nearer = np.square(from_bar).sum(-1) < np.square(from_stem).sum(-1)
    return np.where(bar_is_nearer[..., None], from_bar, from_stem)


def wrap_angle(angle: Array) -> Array:
    """Angles, any shape, brought to [-π, π)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi
