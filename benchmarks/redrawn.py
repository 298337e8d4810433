"""Does a model predict as well from frames that are drawn here as from those that it was trained on?

    python benchmarks/redrawn.py --model pretrained/cube --env cube [--episodes 12] [--exploration 0.6] [--mistakes 0.7]
        [--background-noise 0 1]

Collects the first episodes of the training data again (seed 0, the settings of the model's card) with the GL driver of
this machine, and prints the mean prediction error of their windows, as the training loss has it, without dropout. Where
it is well above the loss of training, the model does not know what it sees. `--background-noise` replaces the
encoder's setting: differences from the background, in grey levels, that do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from lewm.data.formats.demonstrations import load_demonstrations
from lewm.data.generate import generate_episode
from lewm.model.world_model import LeWM
from lewm.types import Array


@dataclass(frozen=True)
class Drawn:
    """Frames uint8 (F, R, R, 3) of an episode, one per block, and the raw blocks (F-1, K, action_dim) between them."""

    frames: Array
    blocks: Array


def draw(model: LeWM, env: str, index: int, **settings: Any) -> Drawn:
    """Episode ``index`` of the training data, collected with these settings and drawn here."""
    skip = model.frame_skip
    episode = generate_episode(env, model.image_size, 0, index, skip, **settings)
    steps = episode["frame_step"][:-1, None] + np.arange(skip)
    return Drawn(episode["pixels"], episode["action"][steps])


@torch.inference_mode()
def prediction_errors(model: LeWM, drawn: Drawn) -> Array:
    """Mean squared errors of every window's predictions, (windows * history,)."""
    z_FD = model.encode(torch.from_numpy(drawn.frames).to(model.device))
    blocks_FA = model.normalise_actions(torch.from_numpy(drawn.blocks).to(model.device))
    count = max(0, len(blocks_FA) - model.history + 1)  # none in an episode that is shorter than a window
    windows = torch.arange(count)[:, None] + torch.arange(model.history)
    predicted = model.predict(z_FD[windows], blocks_FA[windows])
    return (predicted - z_FD[windows + 1]).square().mean(-1).flatten().cpu().numpy()


def main(
    model: Path,
    env: str,
    episodes: int = 12,
    demos: str | None = None,
    exploration: float = 0.0,
    mistakes: float = 0.0,
    background_noise: tuple[float, ...] = (),
) -> None:
    """Print a row for each setting of the encoder."""
    if episodes < 1:
        raise SystemExit(f"It takes an episode: expected 1 or more, got {episodes}.")
    world_model = LeWM.from_pretrained(model)
    if background_noise and not world_model.encoder.kept_patches:
        raise SystemExit(f"{model} looks at all patches, so there is no background: leave out --background-noise.")
    settings: dict[str, Any] = {"demonstrations": load_demonstrations(demos) if demos else None}
    settings |= {"exploration": exploration, "mistakes": mistakes}
    drawn = [draw(world_model, env, index, **settings) for index in range(episodes)]
    print(f"{env}, {episodes} episodes\n{'background noise':>18s}{'mean':>10s}{'median':>10s}{'90 %':>10s}")
    for noise in background_noise or (world_model.encoder.background_noise,):
        world_model.encoder.background_noise = noise
        errors = np.concatenate([prediction_errors(world_model, each) for each in drawn])
        print(f"{noise:18g}{errors.mean():10.4f}{np.median(errors):10.4f}{np.quantile(errors, 0.9):10.4f}")


if __name__ == "__main__":
    tyro.cli(main)
