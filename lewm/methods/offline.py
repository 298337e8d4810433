"""What GCIVL and GCIQL share: their goals and their moments, values whose targets follow, and an actor drawn from them.

A reward of -1 is given for every block until the goal is reached, so a value is minus the discounted number of blocks.
Goals are relabelled in hindsight, one for the value and one for the actor. Value and actor are trained together, as
OGBench does; the authors train one after the other. Two variants:

- published: what the paper's authors ran, probably flawed. Windows hold three frames that act, with the goal of the
  last: "current" is that frame, and future ones lie after it. The value of each frame, known from the window's start
  on, is regressed under that goal. So the value of one frame alone, by which the policy acts, never sees a goal that
  is reached. Half of the actor's goals are random, the others anywhere ahead, whatever ``goal_steps`` is.
- mended: goals are those of the frame that acts, whatever is known of what came before. Values are float32 in every
  precision, since bf16 near -100 has steps of 0.5. The actor's goals lie on its own way.

Both have the same networks here, and act in blocks, where the authors act at every step. Where an encoder is trained
along, the actor alone shapes what is seen: values whose targets see with the same eyes lead these astray. On TwoRoom at
compact size GCIQL then solved 38 of 100 pairs, and 99 without.

Shapes: B batch, T frames of a window, C situations in it, X numbers of one with the goal's, A action block.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from lewm.config import Preset, TrainConfig
from lewm.methods.acting import Acting, ActingConfig, clipped_apart
from lewm.methods.base import Group
from lewm.model.policy import GaussianActor, Values, advantage_weight, follow
from lewm.types import Batch, DataFacts, GoalSampling, Inputs, Peers

PUBLISHED_FRAMES = 3  # that act, in a window as published


@dataclass(frozen=True)
class OfflineConfig(ActingConfig):
    """Settings of GCIVL and GCIQL."""

    TEMPERATURES: ClassVar[dict[str, float]] = {}  # inverse ones, by variant; a method has its own

    variant: Literal["published", "mended"] = "mended"  # As the paper's authors ran it, or with its flaws mended.
    discount: float = 0.99  # Of values, for a block.
    expectile: float = 0.9  # Of the targets to which values are regressed.
    target_rate: float = 0.005  # Share of the way by which targets follow in each step.
    inverse_temperature: float | None = None  # Of the weights that advantages give; None: the variant's.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.discount < 1, "discount", "in [0, 1)")
        self._require(0 < self.expectile < 1, "expectile", "between 0 and 1")
        self._require(0 < self.target_rate <= 1, "target_rate", "above 0, and at most 1")
        if self.inverse_temperature is not None:
            self._check_positive("inverse_temperature")
        acts_from_one = self.history == 1 or not self.as_published
        self._require(acts_from_one, "history", "1 in the variant published, which acts from one frame")

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[Self, TrainConfig]:
        """A released learning rate in full size; where a run is short, targets follow faster."""
        train = {
            "debug": TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2),
            "compact": TrainConfig(2000, batch_size=64, lr=1e-3, warmup_steps=100),
            "full": TrainConfig(20_000, batch_size=256, lr=3e-4, warmup_steps=300),
        }[preset.size]
        rate = 0.005 if preset.size == "full" else 0.02
        return cls.sized(preset, target_rate=rate), preset.at_its_pace(train)

    @property
    def as_published(self) -> bool:
        return self.variant == "published"

    @property
    def beta(self) -> float:
        """The inverse temperature of an advantage's weight."""
        given = self.inverse_temperature
        return self.TEMPERATURES[self.variant] if given is None else given

    def inputs(self) -> Inputs:
        """Windows of the frames that act, the goals of the last of them, and one frame more."""
        acting = PUBLISHED_FRAMES if self.as_published else self.history
        goals = {
            "value": GoalSampling(current=0.2, future=0.5, random=0.3, gamma=self.discount),
            "actor": GoalSampling(future=0.5, random=0.5)
            if self.as_published
            else GoalSampling(future=1.0, max_steps=self.goal_steps),
        }
        sizes = (acting + 1, self.frame_skip, self.action_dim, self.pixels, self.features)
        return Inputs(*sizes, goals=goals, anchor=acting - 1)

    def rows(self) -> dict[str, str]:
        return {**super().rows(), "variant": self.variant}


@dataclass(frozen=True)
class Moments:
    """What a window tells.

    value, value_next: situations and those a block later, (B, C, X), with the value's goal; they have no gradient.
    actor, actor_next: the same with the actor's goal.  blocks: z-scored, done there, (B, C, A).
    reached: whether the value's goal is, bool (B, C).
    """

    value: torch.Tensor
    value_next: torch.Tensor
    actor: torch.Tensor
    actor_next: torch.Tensor
    blocks: torch.Tensor
    reached: torch.Tensor


class Offline(Acting):
    """A policy with a value that tells how far the goal is. Shapes as in ``lewm.types``."""

    settings: OfflineConfig

    def __init__(self, settings: OfflineConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        sizes = (settings.width, settings.depth)
        self.actor = GaussianActor(self.question_size, *sizes, settings.block_dim, settings.dropout)
        self.values = Values(self.question_size, *sizes)
        self.slow_values = slow_copy(self.values)

    @property
    def longest(self) -> int:
        return PUBLISHED_FRAMES if self.settings.as_published else self.settings.history

    def moments(self, batch: Batch) -> Moments:
        """What a window tells, of every situation that a decision may rest on."""
        seen_BTF, goals = self.see(batch)
        now_BTF, blocks_BTA = seen_BTF[:, :-1], self.normalise_actions(batch.actions)[:, :-1]
        lengths = range(1, self.longest + 1)
        if self.settings.as_published:  # known are the frames since the window's start, then since one later
            now = [seen_BTF[:, :length] for length in lengths]
            later = [seen_BTF[:, 1 : length + 1] for length in lengths]
            blocks_BCA, reached_BC = blocks_BTA, same_as_goal(batch, self.longest)
        else:  # known are more and more frames before the one that acts, and then one more
            now = self.endings(now_BTF)
            later = [seen_BTF[:, -min(length + 1, self.longest) :] for length in lengths]
            blocks_BCA = blocks_BTA[:, -1:].expand(-1, self.longest, -1)
            reached_BC = (batch.steps["value"] == 0)[:, None].expand(-1, self.longest)
        value, value_next = (self.questions(seen, goals["value"]).detach() for seen in (now, later))
        actor, actor_next = (self.questions(seen, goals["actor"]) for seen in (now, later))
        return Moments(value, value_next, actor, actor_next, blocks_BCA, reached_BC)

    def arrives(self, reached: torch.Tensor, later_values: torch.Tensor) -> torch.Tensor:
        """r + γ m V(s'): nothing where the goal is reached, else a block and what comes after it."""
        return torch.where(reached, 0.0, -1 + self.settings.discount * later_values.float())

    def extraction(self, moments: Moments, peers: Peers) -> torch.Tensor:
        """The actor's loss, (): -log π of what was done, weighted by exp(β A), at most 100; A = V(s') - V(s)."""
        del peers
        with self.precisely(), torch.no_grad():
            advantage_BC = self.values.least(moments.actor_next) - self.values.least(moments.actor)
        weight_BC = advantage_weight(advantage_BC, self.settings.beta)
        return (weight_BC * self.actor.surprise(moments.actor, moments.blocks)).mean()

    @contextlib.contextmanager
    def precisely(self) -> Iterator[None]:
        """Where values are computed: in float32 if mended."""
        mended = not self.settings.as_published
        with torch.autocast(self.device.type, enabled=False) if mended else contextlib.nullcontext():
            yield

    def decide(self, question: torch.Tensor) -> torch.Tensor:
        return self.actor(question)

    def followed(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        """Networks by name, each with the slow copy that follows it."""
        return {"values": (self.values, self.slow_values)}

    def after_step(self) -> None:
        for fast, slow in self.followed().values():
            follow(slow.parameters(), fast.parameters(), self.settings.target_rate)

    def groups(self) -> list[Group]:
        """Actor and critics are clipped apart."""
        parts: dict[str, nn.Module] = {name: fast for name, (fast, _) in self.followed().items()}
        return clipped_apart(self, {"actor": self.actor, **parts})


def slow_copy(module: Any) -> Any:
    """A copy that is not trained, but follows."""
    return copy.deepcopy(module).requires_grad_(False)


def same_as_goal(batch: Batch, frames: int) -> torch.Tensor:
    """Whether each of a window's first frames looks exactly like the value's goal, bool (B, frames)."""
    shown = batch.features if batch.features is not None else batch.pixels
    assert shown is not None
    return (shown[:, :frames] == batch.goals["value"][:, None]).flatten(2).all(-1)
