"""GCBC, goal-conditioned behaviour cloning: do what the data did on its way to where it came to (paper, "GC-RL").

    L = mean ‖ π(o_t, g) - a_t ‖²,      g a later frame of the same episode

The goal is relabelled in hindsight, so no reward is needed.

Shapes: B batch, C situations that a decision may rest on, X numbers of one, A action block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lewm.config import Preset, TrainConfig
from lewm.methods.acting import Acting, ActingConfig
from lewm.model.policy import mlp
from lewm.types import Batch, DataFacts, Losses, Peers

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GCBCConfig(ActingConfig):
    """Goal-conditioned behaviour cloning."""

    NAME: ClassVar[str] = "gcbc"

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[GCBCConfig, TrainConfig]:
        """The encoder that a world model would have, and a head that suits its size."""
        train = {
            "debug": TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2),
            "compact": TrainConfig(2000, batch_size=64, lr=1e-3, warmup_steps=100),
            "full": TrainConfig(20_000, lr=3e-4, warmup_steps=300),
        }[preset.size]
        return cls.sized(preset), preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> GCBC:
        return GCBC(self, facts)


# -- the method ----------------------------------------------------------------------------------------------------


class GCBC(Acting):
    """A policy that acts towards goals. Shapes as in ``lewm.types``."""

    settings: GCBCConfig

    def __init__(self, settings: GCBCConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        self.head = mlp(self.question_size, settings.width, settings.depth, settings.block_dim, settings.dropout)

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Squared error of the block that the last frame's actor chose, on its way to the goal."""
        del draws, peers
        seen_BTF, goals = self.see(batch)
        question_BCX = self.questions(self.endings(seen_BTF), goals["goal"])
        block_BA = self.normalise_actions(batch.actions[:, -1])
        error = (self.decide(question_BCX).float() - block_BA[:, None]).square().mean()
        return Losses(error, {"action": error})

    def decide(self, question: torch.Tensor) -> torch.Tensor:
        return self.head(question)
