"""Evaluation episodes as one animated GIF: where each began, what it had to reach, and what the agent did.

Where somebody has drawn what the plans imagined, that as well, at the agent's pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lewm.envs.registry import make_env
from lewm.files import FILM, check_output, completing
from lewm.types import Array, EpisodeResult
from lewm.video import encode_gif

FRAME_MS, HOLD_MS = 80, 2400  # GIF counts time in hundredths of a second
RESOLUTION, COLUMNS = 112, 2
MARGIN, GUTTER, GAP, BORDER, CAPTION = 16, 30, 12, 3, 22
BACKGROUND, NEUTRAL, SOLVED, FAILED = (27, 32, 42), (138, 148, 168), (61, 191, 125), (240, 98, 98)
IMAGINED = (230, 159, 0)


@dataclass(frozen=True)
class Imagined:
    """What a plan imagined that was made after ``step`` actions of an episode.

    frames: drawn from embeddings, uint8 (H + 1, R, R, 3): of what was seen then, and after each block of ``block``
    actions.
    """

    step: int
    block: int
    frames: Array

    def at(self, step: int) -> Array:
        """What it imagined for this step, (R, R, 3)."""
        frame: Array = self.frames[min((step - self.step) // self.block, len(self.frames) - 1)]
        return frame


def episodes_gif(
    env_name: str, results: Sequence[EpisodeResult], imagined: Sequence[Sequence[Imagined]] | None = None
) -> bytes:
    """An endless GIF of episodes side by side, each as start | goal | agent; one frame per environment state.

    The agent is framed green from where it first reaches the goal, and red at the end if it never does.
    imagined: what each episode's plans imagined, in their order; it stands beside the agent.
    """
    with make_env(env_name, RESOLUTION) as env:
        goals = env.render_states(np.stack([result.goal for result in results]))
        films = [env.render_states(result.states) for result in results]
    pictures = [_picture(results, goals, films, step, imagined) for step in range(max(map(len, films)))]
    durations = [FRAME_MS] * (len(pictures) - 1) + [HOLD_MS]
    # The first and the last picture hold every colour that occurs: moving, solved and failed.
    return encode_gif(pictures, durations, colours_of=(pictures[0], pictures[-1]))


def write_videos(
    folder: Path, env_name: str, results: Sequence[EpisodeResult], imagined: Sequence[Sequence[Imagined]] | None = None
) -> None:
    """Write one GIF per episode into ``folder``, which is made if needed. imagined: as for ``episodes_gif``."""
    for number, result in enumerate(results):
        film = folder / f"episode_{result.index:03d}.gif"
        check_output(film, FILM)
        with completing(film) as temporary:
            temporary.write_bytes(episodes_gif(env_name, [result], imagined and imagined[number : number + 1]))


def _picture(
    results: Sequence[EpisodeResult],
    goals: Array,
    films: Sequence[Array],
    step: int,
    imagined: Sequence[Sequence[Imagined]] | None,
) -> Image.Image:
    """The whole grid, ``step`` actions into every episode. goals: (N, R, R, 3).  films: N of (steps+1, R, R, 3)."""
    columns, rows = min(COLUMNS, len(results)), -(-len(results) // COLUMNS)
    count = 4 if imagined else 3
    width, height = count * RESOLUTION + (count - 1) * GAP + GUTTER, CAPTION + RESOLUTION + MARGIN
    canvas = Image.new("RGB", (columns * width - GUTTER + 2 * MARGIN, rows * height + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=12)
    for i, (result, goal, film) in enumerate(zip(results, goals, films, strict=True)):
        now = film[min(step, len(film) - 1)]
        tiles = [(f"{result.index}: start", NEUTRAL, film[0]), ("goal", NEUTRAL, goal), (*_status(result, step), now)]
        if imagined:
            tiles.append(("imagined", IMAGINED, _imagined_at(imagined[i], min(step, len(film) - 1), now)))
        top, last = MARGIN + height * (i // COLUMNS) + CAPTION, RESOLUTION + BORDER - 1
        for j, (caption, colour, pixels) in enumerate(tiles):
            left = MARGIN + width * (i % COLUMNS) + (RESOLUTION + GAP) * j
            draw.rectangle((left - BORDER, top - BORDER, left + last, top + last), fill=colour)
            draw.text((left, top - CAPTION - 1), caption, fill=colour, font=font)
            canvas.paste(Image.fromarray(pixels).resize((RESOLUTION, RESOLUTION)), (left, top))
    return canvas


def _imagined_at(plans: Sequence[Imagined], step: int, now: Array) -> Array:
    """What the plan that is followed imagined for a step; without any, an empty frame."""
    followed = [plan for plan in plans if plan.step <= step]
    return followed[-1].at(step) if followed else np.zeros_like(now)


def _status(result: EpisodeResult, step: int) -> tuple[str, tuple[int, int, int]]:
    """What to write above the agent ``step`` actions into the animation, and the colour of that and of its frame."""
    steps = len(result.states) - 1
    if result.first_success is not None and step >= result.first_success:
        return f"solved at {result.first_success}", SOLVED
    if step < steps:
        return f"step {step}", NEUTRAL
    return f"not reached ({steps})", FAILED
