"""GCBC, goal-conditioned behaviour cloning: do what the data did on its way to where it came to (paper, "GC-RL").

    L = mean ‖ π(o_t, g) - a_t ‖²,      g a later frame of the same episode

The goal is relabelled in hindsight, so no reward is needed. Frames are seen by an encoder that is trained along, or by
the frozen encoder of another model, whose features are computed once.

Shapes: B batch, T the frames that it looks at, F size of a frame's features, A action block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from lewm.config import EncoderConfig, JEPAConfig, MethodConfig, Preset, TrainConfig
from lewm.errors import ConfigError
from lewm.methods.base import Group, Method, blocks_apart
from lewm.methods.frozen import frozen_encoder
from lewm.model.encoder import Encoder, make_encoder
from lewm.model.view import view
from lewm.types import Batch, DataFacts, GoalSampling, Inputs, Losses, Peers

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GCBCConfig(MethodConfig):
    """Goal-conditioned behaviour cloning."""

    NAME: ClassVar[str] = "gcbc"

    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # Trained along, unless features are given.
    features: str | None = None  # A model whose frozen encoder sees instead: a folder, a name or a hub id.
    history: int = 1  # Frames that it looks at; at an episode's start the first one stands for those before it.
    frame_skip: int = 5  # Primitive actions that it decides upon at a time.
    action_dim: int = 2  # Size of a primitive action.
    width: int = 512  # Of the hidden layers.
    depth: int = 3  # Hidden layers.
    goal_steps: int | None = 50  # Goals lie at most so many rows ahead; None: anywhere in the rest of the episode.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("history", "frame_skip", "action_dim", "depth", most=1000)
        self._check_positive("width", most=1 << 16)
        if self.goal_steps is not None:
            self._check_positive("goal_steps")

    def inputs(self) -> Inputs:
        goals = {"goal": GoalSampling(future=1.0, max_steps=self.goal_steps)}
        size = None if self.features else self.encoder.image_size
        return Inputs(self.history, self.frame_skip, self.action_dim, size, self.features, goals=goals, last_block=True)

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[GCBCConfig, TrainConfig]:
        """The encoder that a world model would have, and a head that suits its size."""
        encoder = JEPAConfig.sized(preset).encoder
        width, train = {
            "debug": (16, TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2)),
            "compact": (256, TrainConfig(2000, batch_size=64, lr=1e-3, warmup_steps=100)),
            "full": (512, TrainConfig(20_000, lr=3e-4, warmup_steps=300)),
        }[preset.size]
        return cls(encoder, action_dim=preset.action_dim, width=width), preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> GCBC:
        return GCBC(self, facts)

    @property
    def needs_background(self) -> bool:
        return not self.features and self.encoder.needs_background

    def rows(self) -> dict[str, str]:
        return {"encoder": f"frozen, of {self.features}" if self.features else self.encoder.title}


# -- the method ----------------------------------------------------------------------------------------------------


class GCBC(Method):
    """A policy that acts towards goals. Shapes as in ``lewm.types``."""

    settings: GCBCConfig

    def __init__(self, settings: GCBCConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        if settings.features:
            self.frozen_encoder = frozen_encoder(settings.features, self.facts.encoder)
            if len(self.frozen_encoder.shape) != 1:
                raise ConfigError(f"GCBC takes features of one dimension, {settings.features} gives more.")
            self.eyes, size = self.frozen_encoder.module, self.frozen_encoder.shape[0]
        else:
            self.eyes, size = make_encoder(settings.encoder, self.facts.background), settings.encoder.out_width
        layers: list[nn.Module] = []
        for depth in range(settings.depth):
            inputs = settings.width if depth else (settings.history + 1) * size
            layers += [nn.Linear(inputs, settings.width), nn.LayerNorm(settings.width), nn.GELU()]
        self.head = nn.Sequential(*layers, nn.Linear(settings.width, settings.frame_skip * settings.action_dim))

    @property
    def image_size(self) -> int:
        return self.frozen_encoder.image_size if self.settings.features else self.settings.encoder.image_size

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Squared error of the block that the last frame's actor chose, on its way to the goal."""
        del draws, peers
        if batch.features is not None:
            seen_BTF, goal_BF = batch.features, batch.goals["goal"]
        else:
            assert batch.pixels is not None
            seen_BTF, goal_BF = self._see(batch.pixels), self._see(batch.goals["goal"])
        block_BA = self.normalise_actions(batch.actions[:, -1])
        error = F.mse_loss(self._decide(seen_BTF, goal_BF).float(), block_BA)
        return Losses(error, {"action": error})

    @torch.no_grad()
    def act(self, frames: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        """Frames (B, T, R, R, 3), T <= history, and goals (B, R, R, 3), uint8 -> raw blocks (B, K, action_dim)."""
        self.check_frames(frames)
        seen_BTF = self._see(frames)
        missing = self.settings.history - seen_BTF.shape[1]
        if missing > 0:
            seen_BTF = torch.cat([seen_BTF[:, :1].expand(-1, missing, -1), seen_BTF], dim=1)
        return self.denormalise_actions(self._decide(seen_BTF, self._see(goals)).float())

    def _see(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 frames (..., R, R, 3) -> features (..., F)."""
        see = self.frozen_encoder if self.settings.features else self.eyes
        return see(pixels.flatten(0, -4)).unflatten(0, pixels.shape[:-3])

    def _decide(self, seen_BTF: torch.Tensor, goal_BF: torch.Tensor) -> torch.Tensor:
        """z-scored blocks (B, A)."""
        return self.head(torch.cat([seen_BTF.flatten(1), goal_BF], dim=1))

    def frozen(self) -> tuple[nn.Module, ...]:
        return (self.eyes,) if self.settings.features else ()

    def use_kernels(self, enabled: bool) -> None:
        if not self.settings.features:
            cast(Encoder, self.eyes).use_kernels(enabled)

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        fast = view(self)
        if not self.settings.features:
            fast.eyes = cast(Encoder, self.eyes).compiled(compile)
        return fast

    def groups(self) -> list[Group]:
        return blocks_apart(self)
