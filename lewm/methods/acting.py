"""What methods that act towards goals share: how frames are seen, what a decision rests on, how a block is chosen.

Frames are seen by an encoder that is trained along, or by the frozen encoder of another model, whose features are
computed once. Of the frames of an episode a method knows at most ``history``, at its start only one. Training looks at
every such length, so that none is strange when it acts.

Shapes: B batch, T frames of a window, F numbers of a frame, C situations of a window, X numbers of one, A action block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from lewm.config import LARGEST_BLOCK, LARGEST_LAYER, EncoderConfig, JEPAConfig, MethodConfig, Preset
from lewm.errors import ConfigError
from lewm.methods.base import Group, Method, blocks_apart
from lewm.methods.frozen import frozen_encoder
from lewm.model.encoder import Encoder, make_encoder
from lewm.model.policy import LaidOut, situation, situation_size
from lewm.model.projector import measuring
from lewm.model.view import view
from lewm.types import Array, Batch, DataFacts, GoalSampling, Inputs


@dataclass(frozen=True)
class ActingConfig(MethodConfig):
    """Settings of all methods that act."""

    NAME: ClassVar[str] = ""  # a method has its own

    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # Trained along, unless features are given.
    features: str | None = None  # A model whose frozen encoder sees instead: a folder, a name or a hub id.
    history: int = 1  # Frames that it decides by; at an episode's start there are fewer.
    frame_skip: int = 5  # Primitive actions that it decides upon at a time.
    action_dim: int = 2  # Size of a primitive action.
    width: int = 512  # Of the hidden layers.
    depth: int = 3  # Hidden layers.
    dropout: float = 0.0  # Share of the units of what decides that are dropped in training.
    goal_steps: int | None = 50  # It learns to reach goals at most so many rows ahead; None: all of the episode's rest.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("history", "frame_skip", "action_dim", "depth", most=LARGEST_BLOCK)
        self._check_positive("width", most=LARGEST_LAYER)
        self._require(0 <= self.dropout < 1, "dropout", "in [0, 1)")
        if self.goal_steps is not None:
            self._check_positive("goal_steps")

    def inputs(self) -> Inputs:
        """Windows that end in the frame that acts, and a goal that lies ahead."""
        sizes = (self.history, self.frame_skip, self.action_dim, self.pixels, self.features)
        goals = {"goal": GoalSampling(future=1.0, max_steps=self.goal_steps)}
        return Inputs(*sizes, goals=goals, last_block=True)

    @classmethod
    def sized(cls, preset: Preset, **rest: Any) -> Self:
        """The encoder that a world model would have, and heads that suit its size."""
        width = {"debug": 16, "compact": 256, "full": 512}[preset.size]
        return cls(encoder=JEPAConfig.sized(preset).encoder, action_dim=preset.action_dim, width=width, **rest)

    @property
    def block_dim(self) -> int:
        """A, the size of a flattened action block."""
        return self.frame_skip * self.action_dim

    @property
    def pixels(self) -> int | None:
        """Side of the frames in its windows; None: they hold features."""
        return None if self.features else self.encoder.image_size

    @property
    def needs_background(self) -> bool:
        return not self.features and self.encoder.needs_background

    def rows(self) -> dict[str, str]:
        return {"encoder": f"frozen, of {self.features}" if self.features else self.encoder.title}


class Acting(Method):
    """A method that acts. Its subclass has heads upon situations and goals. Shapes as in ``lewm.types``."""

    settings: ActingConfig
    eyes: nn.Module

    def __init__(self, settings: ActingConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        self.layout: nn.Module = nn.Identity()
        if settings.features:
            self.frozen_encoder = frozen_encoder(settings.features, self.facts.encoder)
            self.eyes, shape = self.frozen_encoder.module, self.frozen_encoder.shape
            if len(shape) > 2:
                given = f"{settings.features} gives {tuple(shape)}"
                raise ConfigError(f"{settings.NAME} takes features (F,) of a frame, or tokens (N, F); {given}.")
            self.frame_size = shape[0] if len(shape) == 1 else settings.width
            if len(shape) == 2:
                self.layout = LaidOut(*shape, settings.width)
        else:
            self.eyes = make_encoder(settings.encoder, self.facts.background)
            self.frame_size = settings.encoder.out_width
        # What differs between frames may be small beside what they have in common.
        self.norm = nn.BatchNorm1d(self.frame_size)

    @property
    def longest(self) -> int:
        """The most frames that a situation holds."""
        return self.settings.history

    @property
    def history(self) -> int:
        return self.settings.history

    @property
    def image_size(self) -> int:
        return self.frozen_encoder.image_size if self.settings.features else self.settings.encoder.image_size

    @property
    def question_size(self) -> int:
        """Numbers of a situation and a goal together."""
        return situation_size(self.frame_size, self.longest) + self.frame_size

    # -- seeing ----------------------------------------------------------------------------------------------------

    def see(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A window's frames, (B, T, F), and its goals by name, (B, F)."""
        shown = batch.features if batch.features is not None else batch.pixels
        assert shown is not None
        together = torch.cat([shown, *(goal[:, None] for goal in batch.goals.values())], dim=1)
        seen = self._look(together) if batch.features is None else self._normed(together.flatten(0, 1))
        seen, frames = seen.view(*together.shape[:2], -1), shown.shape[1]
        return seen[:, :frames], {name: seen[:, frames + i] for i, name in enumerate(batch.goals)}

    def _look(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 frames (..., R, R, 3) -> (..., F)."""
        look = self.frozen_encoder if self.settings.features else self.eyes
        return self._normed(look(pixels.flatten(0, -4))).unflatten(0, pixels.shape[:-3])

    def _normed(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the encoder (N, ...) -> (N, F), float32."""
        return self.norm(self.layout(features.float()).float())

    def questions(self, seen: list[torch.Tensor], goal_BF: torch.Tensor) -> torch.Tensor:
        """What to do in each of C situations, of some frames (B, t, F) each, towards a goal: (B, C, X + F)."""
        return torch.stack([torch.cat([situation(frames, self.longest), goal_BF], 1) for frames in seen], dim=1)

    def endings(self, seen_BTF: torch.Tensor) -> list[torch.Tensor]:
        """What may be known at the last frame: it alone, with the one before, and so on, ``longest`` in all."""
        return [seen_BTF[:, -length:] for length in range(1, self.longest + 1)]

    # -- acting ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def decide(self, question: torch.Tensor) -> torch.Tensor:
        """Situations and goals (..., X + F) -> z-scored blocks (..., A)."""

    @torch.no_grad()
    def act(self, frames: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        """Frames (B, T, R, R, 3), T <= history, and goals (B, R, R, 3), uint8 -> raw blocks (B, K, action_dim)."""
        self.check_frames(frames)
        (question_BX,) = self.questions([self._look(frames)], self._look(goals)).unbind(1)
        return self.denormalise_actions(self.decide(question_BX).float())

    # -- for the trainer -------------------------------------------------------------------------------------------

    def frozen(self) -> tuple[nn.Module, ...]:
        return (self.eyes,) if self.settings.features else ()

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Set the statistics of what is seen to those of ``batches``. The method is left in evaluation mode."""
        self.eval()
        with measuring(self.norm if self.settings.features else self):
            for batch in batches:
                self.see(batch)

    def use_kernels(self, enabled: bool) -> None:
        if not self.settings.features:
            cast(Encoder, self.eyes).use_kernels(enabled)

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        fast = view(self)
        if not self.settings.features:
            fast.eyes = cast(Encoder, self.eyes).compiled(compile)
        return fast

    def remarks(self, frames: Array) -> list[str]:
        return [] if self.settings.features else cast(Encoder, self.eyes).remarks(frames)

    def groups(self) -> list[Group]:
        return blocks_apart(self)


def clipped_apart(method: Method, parts: dict[str, nn.Module]) -> list[Group]:
    """The method's groups, with these parts of it clipped by norms of their own: one clip would couple their losses."""
    of_part = {parameter: name for name, part in parts.items() for parameter in part.parameters()}
    groups = []
    for whole in blocks_apart(method):
        for clip in ("", *parts):
            mine = tuple(p for p in whole.parameters if of_part.get(p, "") == clip)
            groups.append(Group(mine, clip=clip, muon=whole.muon and not clip))
    return groups
