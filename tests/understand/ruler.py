"""A world model without training: it sees where TwoRoom's dot is, and knows how far an action moves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from lewm.config import CollectConfig, MethodConfig, Preset, TrainConfig
from lewm.data.collect import collect
from lewm.envs import tworoom
from lewm.methods.base import Method
from lewm.types import ActionStats, Batch, DataFacts, Inputs, Losses, Peers

SIDE, HISTORY, BLOCK = 28, 2, 5


@dataclass(frozen=True)
class RulerConfig(MethodConfig):
    """Needs no settings."""

    NAME: ClassVar[str] = "ruler"
    reversed: bool = False  # Believe that actions move the dot the other way.

    def inputs(self) -> Inputs:
        return Inputs(HISTORY, BLOCK, 2, SIDE)

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[RulerConfig, TrainConfig]:
        return cls(), preset.at_its_pace(TrainConfig())

    def build(self, facts: DataFacts) -> Ruler:
        return Ruler(self, facts)


class Ruler(Method):
    """Embeddings are places (x, y) in px; the noise of drawing is far below one."""

    settings: RulerConfig

    def __init__(self, settings: RulerConfig | None = None, facts: DataFacts | None = None) -> None:
        stats = ActionStats((0.1, -0.2), (0.5, 2.0))
        super().__init__(settings or RulerConfig(), facts or DataFacts(stats, environment="lewm/TwoRoom-v0"))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.eval()

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        raise NotImplementedError

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Frames (..., R, R, 3) -> the dot's place (..., 2): where red is more than green."""
        self.check_frames(pixels)
        red = (pixels[..., 0].float() - pixels[..., 1].float()).clamp_min(0)
        centres = (torch.arange(SIDE) + 0.5) * tworoom.WORLD_SIZE / SIDE
        total = red.sum((-1, -2)).clamp_min(1e-3)
        return torch.stack([(red.sum(-2) * centres).sum(-1), (red.sum(-1) * centres).sum(-1)], -1) / total[..., None]

    def planning_encoder(self, precision: str = "auto") -> Any:
        del precision
        return self.encode

    def planning_rollout(self, precision: str = "auto", differentiable: bool = False) -> Any:
        del precision, differentiable

        def rollout(z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
            assert past_BTA.shape[1] == z_BTD.shape[1] - 1
            steps = self.denormalise_actions(actions_BSHA).clamp(-1, 1) * (-1 if self.settings.reversed else 1)
            place, places = z_BTD[:, -1, None], []
            for block in steps.unbind(2):
                for step in block.unbind(2):
                    place = moved(place, step)
                places.append(place)
            return torch.stack(places, 2)

        return rollout


def moved(place: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Where one action (..., 2) leads from places (..., 2), as TwoRoom has it."""
    x, y = (place + tworoom.SPEED * step).clamp(tworoom.ARENA_LOW, tworoom.ARENA_HIGH).unbind(-1)
    walled = (y - tworoom.DOOR_Y).abs() > tworoom.DOOR_HALF_EXTENT + tworoom.DOOR_MARGIN
    left = torch.where(walled, x.clamp(max=tworoom.WALL_LEFT), x)
    right = torch.where(walled, x.clamp(min=tworoom.WALL_RIGHT), x)
    return torch.stack([torch.where(place[..., 0] < tworoom.WALL_X, left, right), y], -1)


def episodes(path: Path, count: int, stride: int = 1) -> Path:
    """A small dataset of TwoRoom."""
    collect("tworoom", path, CollectConfig(count, resolution=SIDE, frame_stride=stride, workers=1))
    return path
