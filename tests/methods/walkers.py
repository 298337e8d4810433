"""A toy world for methods that act: walkers that cross a plane, each in its own direction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lewm.config import TrainConfig
from lewm.data.frames import open_frames
from lewm.data.store import EpisodeStore, write_episodes
from lewm.data.windows import Windows, batch_indices
from lewm.methods.base import Method
from lewm.train.distributed import Processes
from lewm.train.optim import make_optimizer
from lewm.train.step import PlainStep
from lewm.types import Batch, Inputs

EPISODES, ROWS, SPEED = 120, 20, 0.1


class Walkers:
    """Straight walks through [-1, 1]^2. A frame is the number of its row; features (16,) show the place smoothly."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(0)
        heading = rng.uniform(0, 2 * np.pi, EPISODES)
        step = SPEED * np.stack([np.cos(heading), np.sin(heading)], -1)
        middle = rng.uniform(-0.3, 0.3, (EPISODES, 1, 2))
        self.places = middle + step[:, None] * (np.arange(ROWS)[None, :, None] - ROWS / 2)
        self._steps = step
        write_episodes(path, self._episodes(), {"environment": "lewm/Tiny-v0", "seed": 3, "frame_stride": 1})
        self.store = EpisodeStore(path)
        generator = torch.Generator().manual_seed(0)
        self._waves = torch.randn(2, 8, generator=generator) * 2
        self._shown = self.show(torch.from_numpy(self.places).float().flatten(0, 1))

    def _episodes(self) -> Iterator[dict[str, np.ndarray]]:
        for episode in range(EPISODES):
            rows = np.arange(episode * ROWS, (episode + 1) * ROWS)
            pixels = np.zeros((ROWS, 4, 4, 3), np.uint8)
            pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = rows // 256, rows % 256
            action = np.repeat(self._steps[None, episode], ROWS, 0).astype(np.float32) / SPEED
            action[-1] = np.nan
            state = self.places[episode]
            yield {"pixels": pixels, "frame_step": np.arange(ROWS), "action": action, "state": state}

    def show(self, places: torch.Tensor) -> torch.Tensor:
        """Features (..., 16) of places (..., 2)."""
        angles = places @ self._waves
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def windows(self, inputs: Inputs) -> Windows:
        """Of all walks, as ``inputs`` ask for them, with frames that show the number of their row."""
        inputs = replace(inputs, image_size=4)
        return Windows(self.store, open_frames(self.store, "memory"), np.arange(EPISODES), inputs)

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        """The numbers in frames (..., 4, 4, 3)."""
        return pixels[..., 0, 0, 0].long() * 256 + pixels[..., 0, 0, 1].long()

    def batches(self, inputs: Inputs, size: int, count: int) -> Iterator[Batch]:
        """Windows as ``inputs`` ask for them, with features in place of pixels."""
        windows = self.windows(inputs)
        for step in range(count):
            batch = windows.batch(batch_indices(len(windows), size, step, 0), (0, step))
            assert batch.pixels is not None
            goals = {name: self._features(goal) for name, goal in batch.goals.items()}
            yield replace(batch, pixels=None, features=self._features(batch.pixels), goals=goals)

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        return self._shown[self.rows(pixels)]

    def train(self, method: Method, steps: int, lr: float = 2e-3) -> None:
        """On windows of them; the method is left in evaluation mode."""
        settings = TrainConfig(steps=steps, lr=lr, warmup_steps=1)
        step = PlainStep(method.train(), make_optimizer(method, settings), settings, Processes())
        for batch in self.batches(method.inputs, 128, steps):
            assert step(batch, {}).finite
        method.eval()
