"""Push-T's frames: drawn at 512 px as the public environment draws them, then scaled down bilinearly.

Only the surroundings of block and agent are drawn and scaled: all else is a background that is made once.
"""

from __future__ import annotations

import math

import cv2
import numpy as np

from lewm.envs.base import Colour
from lewm.envs.pusht_geometry import (
    AGENT_RADIUS,
    TARGET_POSE,
    TEE_CORNERS,
    WALL_HIGH,
    WALL_LOW,
    WALL_RADIUS,
    WORLD_SIZE,
    to_world,
)
from lewm.types import Array

OWN_COLOURS: dict[str, Colour] = {"agent": (65, 105, 225), "block": (119, 136, 153), "target": (144, 238, 144)}
WALL_COLOUR: Colour = (211, 211, 211)
RIM = 4  # width of the agent's dark rim
OUTLINE = 4  # width of the block's dark outline; half of it lies outside the T

Box = tuple[int, int, int, int]  # left, top, right, bottom


class PushTDrawing:
    """Draws states of Push-T as frames (resolution, resolution, 3)."""

    def __init__(self, resolution: int) -> None:
        self._resolution = resolution
        # Where R pixels are made of 512, the smallest square of whole pixels on both sides. When scaling down, bilinear
        # interpolation never looks beyond it, so that any rectangle of cells can be scaled on its own.
        cells = math.gcd(WORLD_SIZE, resolution) if resolution <= WORLD_SIZE else 1
        self._cell, self._small_cell = WORLD_SIZE // cells, resolution // cells
        self._colours = dict(OWN_COLOURS)
        self._draw_background()

    def paint(self, name: str, colour: Colour | None) -> None:
        """Draw "agent", "block" or "target" in ``colour`` from now on; None: in its own."""
        colour = OWN_COLOURS[name] if colour is None else colour
        if colour != self._colours[name]:
            self._colours[name] = colour
            if name == "target":
                self._draw_background()

    def draw(self, states: Array) -> Array:
        """Frames uint8 (N, R, R, 3) of states (N, 5 or more): agent x, y, block x, y, angle."""
        frames = np.empty((len(states), *self._background.shape), np.uint8)
        for frame, state in zip(frames, states, strict=True):
            frame[:] = self._background
            block = np.rint(to_world(TEE_CORNERS, state[2:5])).astype(np.int32)
            agent = [round(state[0]), round(state[1])]
            self._draw_block(block)
            self._draw_agent(agent)
            tee = block.reshape(8, 2).tolist()
            touched = (self._cells_of(tee, OUTLINE), self._cells_of([agent], AGENT_RADIUS))
            for box in touched:
                self._scale(box, frame)
            for box in touched:  # not before both are scaled: they may overlap
                pixels = _slices(box, self._cell)
                self._canvas[pixels] = self._empty[pixels]
        return frames

    def _draw_block(self, boxes: Array) -> None:
        """Two filled and outlined rectangles, int32 (2, 4, 2)."""
        dark = self._colours["block"]
        light = _lighter(dark)
        for box in boxes:
            cv2.fillConvexPoly(self._canvas, box, light)
            cv2.polylines(self._canvas, [box], True, dark, OUTLINE)

    def _draw_agent(self, centre: list[int]) -> None:
        """A disc whose diameter is even, so that its middle lies between pixels: hence half pixels (``shift`` 1)."""
        dark = self._colours["agent"]
        doubled = (2 * centre[0] - 1, 2 * centre[1] - 1)
        for radius, colour in ((AGENT_RADIUS, dark), (AGENT_RADIUS - RIM, _lighter(dark))):
            cv2.circle(self._canvas, doubled, 2 * radius - 1, colour, cv2.FILLED, cv2.LINE_8, 1)

    def _draw_background(self) -> None:
        """Walls and target at 512 px, and scaled."""
        outer = (WALL_LOW - WALL_RADIUS, WALL_HIGH + WALL_RADIUS)
        inner = (WALL_LOW + WALL_RADIUS + 1, WALL_HIGH - WALL_RADIUS - 1)
        canvas = np.full((WORLD_SIZE, WORLD_SIZE, 3), 255, np.uint8)
        cv2.rectangle(canvas, (outer[0], outer[0]), (outer[1], outer[1]), WALL_COLOUR, cv2.FILLED)
        cv2.rectangle(canvas, (inner[0], inner[0]), (inner[1], inner[1]), (255, 255, 255), cv2.FILLED)
        for box in np.rint(to_world(TEE_CORNERS, TARGET_POSE)).astype(np.int32):
            cv2.fillConvexPoly(canvas, box, self._colours["target"])
        self._empty = canvas
        self._canvas = canvas.copy()
        self._background = cv2.resize(canvas, (self._resolution, self._resolution))

    def _cells_of(self, points: list[list[int]], margin: int) -> Box:
        """The cells within ``margin`` px of some points, as a box in units of cells; empty outside the picture."""
        cell, cells = self._cell, WORLD_SIZE // self._cell
        # Plain numbers: for so few, NumPy takes longer.
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        left, top = (max((min(values) - margin) // cell, 0) for values in (xs, ys))
        right, bottom = (min((max(values) + margin) // cell + 1, cells) for values in (xs, ys))
        return left, top, max(left, right), max(top, bottom)

    def _scale(self, box: Box, frame: Array) -> None:
        """Scale a box of cells from the canvas into ``frame``, if any of it is in the picture."""
        left, top, right, bottom = box
        if left < right and top < bottom:
            size = ((right - left) * self._small_cell, (bottom - top) * self._small_cell)
            frame[_slices(box, self._small_cell)] = cv2.resize(self._canvas[_slices(box, self._cell)], size)


def _slices(box: Box, cell: int) -> tuple[slice, slice]:
    """The rows and columns of a box of cells, each ``cell`` pixels wide."""
    left, top, right, bottom = box
    return slice(top * cell, bottom * cell), slice(left * cell, right * cell)


def _lighter(colour: Colour) -> Colour:
    """What the inside of an outlined shape is filled with."""
    red, green, blue = (min(255, round(1.2 * channel)) for channel in colour)
    return red, green, blue
