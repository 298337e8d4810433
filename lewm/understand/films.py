"""What happened beside what was imagined: strips for paper, films for a screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from lewm.files import FILM, check_output, completing
from lewm.types import Array
from lewm.understand.figures import COLOURS
from lewm.video import encode_gif

GAP, BORDER, CAPTION, TILE = 10, 2, 20, 168  # pixels of a film
FRAME_MS, HOLD_MS = 400, 1600
PAPER, INK = (27, 32, 42), (220, 226, 238)
SEEN, IMAGINED = (138, 148, 168), (230, 159, 0)
ROWS = ("what happened", "reconstructed", "imagined")


@dataclass(frozen=True)
class Strip:
    """One episode's frames, uint8 (T, R, R, 3) each: ``seen`` of them real, the rest imagined open loop.

    happened: the real ones.  reconstructed: decoded from their embeddings.  imagined: the same while frames are seen,
    then decoded from predictions.
    """

    happened: Array
    reconstructed: Array
    imagined: Array
    seen: int

    @property
    def rows(self) -> tuple[Array, Array, Array]:
        """In the order of ``ROWS``."""
        return self.happened, self.reconstructed, self.imagined


def step_label(step: int, seen: int) -> str:
    """How a frame is called: seen, or so many blocks ahead."""
    return "seen" if step < seen else f"+{step - seen + 1}"


def film(strips: list[Strip]) -> bytes:
    """An endless GIF with a row for each episode: what happened, its reconstruction, and what was imagined."""
    pictures = [_picture(strips, step) for step in range(len(strips[0].happened))]
    durations = [FRAME_MS] * (len(pictures) - 1) + [HOLD_MS]
    return encode_gif(pictures, durations, colours_of=(pictures[0], pictures[-1]))


def write_film(path: Path, strips: list[Strip]) -> None:
    """Write the film of some episodes."""
    check_output(path, FILM)
    with completing(path) as temporary:
        temporary.write_bytes(film(strips))


def _picture(strips: list[Strip], step: int) -> Image.Image:
    width, height = TILE + GAP, TILE + GAP
    canvas = Image.new("RGB", (len(ROWS) * width + GAP, len(strips) * height + GAP + CAPTION), PAPER)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=12)
    label = step_label(step, strips[0].seen)
    for column, name in enumerate(ROWS):
        ahead = f" {label}" if name == "imagined" else ""
        draw.text((GAP + column * width, 4), f"{name}{ahead}", fill=INK, font=font)
    for row, strip in enumerate(strips):
        for column, frames in enumerate(strip.rows):
            left, top = GAP + column * width, CAPTION + GAP // 2 + row * height
            colour = IMAGINED if column == 2 and step >= strip.seen else SEEN
            edge = (left - BORDER, top - BORDER, left + TILE + BORDER - 1, top + TILE + BORDER - 1)
            draw.rectangle(edge, fill=colour)
            canvas.paste(Image.fromarray(frames[step]).resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
    return canvas


def show_strip(axes: Axes, strip: Strip, title: str | None = None, labels: tuple[str, ...] = ROWS) -> None:
    """Draw the frames of one episode into axes: a row for each kind, a column for each step."""
    steps, size = len(strip.happened), strip.happened.shape[1]
    show_grid(axes, np.stack(strip.rows), [step_label(step, strip.seen) for step in range(steps)], labels)
    gap = _gap(size)
    axes.axvline(strip.seen * (size + gap) - gap / 2 - 0.5, color=COLOURS[1], linewidth=1.6)
    if title:
        axes.set_title(title, loc="left")


def show_grid(axes: Axes, frames: Array, columns: list[str], rows: tuple[str, ...]) -> None:
    """Frames uint8 (rows, columns, R, R, 3) as one picture, with names along its sides."""
    size, gap = frames.shape[2], _gap(frames.shape[2])
    padded = np.pad(frames, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=255)
    height, width = (n * (size + gap) for n in frames.shape[:2])
    picture = padded.transpose(0, 2, 1, 3, 4).reshape(height, width, 3)[: height - gap, : width - gap]
    axes.imshow(picture, interpolation="nearest")
    middles: Any = [(size + gap) * np.arange(n) + size / 2 for n in frames.shape[:2]]
    axes.set_yticks(middles[0], rows)
    axes.set_xticks(middles[1], columns)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _gap(size: int) -> int:
    return max(2, size // 28)


def strips_figure(width: float, heights: list[float]) -> tuple[Figure, list[Axes]]:
    """A figure of panels below one another, in inches, each as wide as the figure."""
    figure = Figure((width, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    return figure, [figure.add_subplot(grid[row]) for row in range(len(heights))]
