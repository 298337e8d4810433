"""GC-IDM, goal-conditioned inverse dynamics: which block leads from here to there in so many steps?

    L = mean ‖ f(z_t, z_{t+n}, n) - a_t ‖²,      n uniform, up to 50 rows

Not in the paper, and strong: the row that a planner has to beat. It is meant for frozen embeddings (``features``). Who
acts does not know how many steps are left. So a second head learns to read them off frame and goal, as the median of
what the data took, and every decision reads them anew. On TwoRoom at compact size that solved 99 of 100 pairs that are
25 steps apart; with 25 steps supposed at every decision it were 87, with 10 of them 93.

Shapes: B batch, C situations that a decision may rest on, X numbers of one with the goal's, A action block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from lewm.config import LARGEST_LAYER, Preset, TrainConfig
from lewm.methods.acting import Acting, ActingConfig, clipped_apart
from lewm.methods.base import Group
from lewm.model.policy import SteeredMLP, mlp, waves
from lewm.types import Batch, DataFacts, Losses, Peers

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GCIDMConfig(ActingConfig):
    """Goal-conditioned inverse dynamics."""

    NAME: ClassVar[str] = "gc_idm"

    act_steps: int | None = None  # Steps to the goal that it supposes as it acts; None: it reads them off the frames.
    steps_width: int = 64  # Of what the number of steps is turned into.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("steps_width", most=LARGEST_LAYER)
        self._require(self.steps_width % 2 == 0, "steps_width", "even")
        if self.act_steps is not None:
            self._check_positive("act_steps")
            learns = self.goal_steps is None or self.act_steps <= self.goal_steps
            self._require(learns, "act_steps", f"at most {self.goal_steps} (goal_steps), which it learns")

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[Self, TrainConfig]:
        """Dropout and weight decay keep it from learning the data by heart."""
        train = {
            "debug": TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2, weight_decay=0.05),
            "compact": TrainConfig(2000, batch_size=64, lr=1e-3, warmup_steps=100, weight_decay=0.05),
            "full": TrainConfig(20_000, batch_size=256, lr=1e-3, warmup_steps=300, weight_decay=0.05),
        }[preset.size]
        return cls.sized(preset, dropout=0.1), preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> GCIDM:
        return GCIDM(self, facts)


# -- the method ----------------------------------------------------------------------------------------------------


class GCIDM(Acting):
    """An inverse model over many steps. Shapes as in ``lewm.types``."""

    settings: GCIDMConfig

    def __init__(self, settings: GCIDMConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        sizes, dropout = (settings.width, settings.depth), settings.dropout
        self.head = SteeredMLP(self.question_size, settings.steps_width, *sizes, settings.block_dim, dropout)
        self.steps_head = mlp(self.question_size, *sizes, 1, dropout)

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Squared error of the block, and how far the logarithm of the steps is off."""
        del draws, peers
        seen_BTF, goals = self.see(batch)
        question_BCX = self.questions(self.endings(seen_BTF), goals["goal"])
        steps_BC = batch.steps["goal"].clamp(min=1)[:, None].expand(-1, question_BCX.shape[1])
        block_BA = self.normalise_actions(batch.actions[:, -1])
        action = (self._decide_within(question_BCX, steps_BC).float() - block_BA[:, None]).square().mean()
        # What is seen is for the actions to shape.
        steps = (self._log_steps(question_BCX.detach()) - steps_BC.log()).abs().mean()
        return Losses(action + steps, {"action": action, "steps": steps})

    def decide(self, question: torch.Tensor) -> torch.Tensor:
        supposed = self.settings.act_steps
        if supposed is None:
            steps = self._log_steps(question).exp().clamp(min=1, max=self.settings.goal_steps)
        else:
            steps = torch.full(question.shape[:-1], float(supposed), device=question.device)
        return self._decide_within(question, steps)

    def _decide_within(self, question: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """z-scored blocks (..., A), with steps (...,) left."""
        return self.head(question, waves(steps, self.settings.steps_width))

    def _log_steps(self, question: torch.Tensor) -> torch.Tensor:
        """Of how many steps lie between here and the goal, (...,)."""
        return self.steps_head(question).squeeze(-1).float()

    def groups(self) -> list[Group]:
        """The steps' head is clipped apart: it is a reading of its own."""
        return clipped_apart(self, {"steps": self.steps_head})
