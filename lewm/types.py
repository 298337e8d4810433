"""The vocabulary of lewm: small frozen objects that pass between its parts.

Shape alphabet, used in the names of tensors (``z_BTD`` has shape (B, T, D)):

    B  batch: windows in training, episodes in planning
    T  time: frames of a window, or real frames that a plan starts from (its context)
    H  horizon: action blocks that a plan looks ahead
    S  samples: candidate plans per episode
    D  embedding dimension
    A  size of an action block: ``frame_skip`` primitive actions, flattened and z-scored
    K  ``frame_skip``, the primitive actions in a block
    R  resolution: frames are (R, R, 3), uint8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray

# Passing through the goal is not reaching it: the strict protocol wants so many actions in a row.
HOLD_STEPS = 3


@dataclass(frozen=True)
class ActionStats:
    """Mean and std of primitive actions, (action_dim,) each: part of the model, whose action space they define."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Batch:
    """Windows cut from episodes, as the objective consumes them. See ``data/windows.py`` for the alignment.

    pixels: uint8 (B, T, R, R, 3).  actions: raw primitive actions, float32 (B, T, K, action_dim).
    """

    pixels: torch.Tensor
    actions: torch.Tensor


@dataclass(frozen=True)
class Demonstration:
    """A recorded episode for an expert to replay: states float64 (L, state_dim), actions float64 (L, action_dim).

    Of Push-T: states (agent x, y, block x, y, block angle), actions the absolute place that the agent is drawn to.
    """

    states: Array
    actions: Array


@dataclass(frozen=True)
class Context:
    """What an agent has seen and done: the last few frames, one per action block, oldest first.

    frames: uint8 (T, R, R, 3).  executed: raw primitive actions between them, float32 (T-1, K, action_dim).
    """

    frames: Array
    executed: Array


@dataclass(frozen=True)
class Plan:
    """A solved planning problem, and the solver's cost of the solution.

    actions: raw primitive actions to execute in order, float32 (H*K, action_dim).
    distances: imagined squared latent distance to the goal after each block, float32 (H,).
    """

    actions: Array
    cost: float
    distances: Array


@dataclass(frozen=True)
class EpisodeSpec:
    """One evaluation episode: where to start and what to reach, as environment states."""

    index: int
    start: tuple[float, ...]
    goal: tuple[float, ...]


@dataclass(frozen=True)
class EpisodeResult:
    """What happened in one evaluation episode; ``plans`` has one entry per replanning.

    goal: the state to reach, float64 (state_dim,).
    reached: whether the state counted as the goal after each action, bool (steps,).
    states: the environment's state before each action and after the last, float64 (steps+1, state_dim).
    """

    index: int
    goal: Array
    solved_at_start: bool
    reached: Array
    states: Array
    plans: tuple[Plan, ...] = ()

    @property
    def first_success(self) -> int | None:
        """Number of executed actions after which the goal was first reached, None if never."""
        return int(self.reached.argmax()) + 1 if self.reached.any() else None

    @property
    def success(self) -> bool:
        """The paper's protocol: the goal was reached after any action."""
        return bool(self.reached.any())

    @property
    def strict_success(self) -> bool | None:
        """The strict protocol: reached at the end, or after ``HOLD_STEPS`` actions in a row; None: does not count.

        A pair that is solved before anything was done says nothing about who solves it.
        """
        if self.solved_at_start:
            return None
        in_a_row = np.lib.stride_tricks.sliding_window_view(self.reached, min(HOLD_STEPS, len(self.reached)))
        return bool(self.reached[-1] or in_a_row.all(-1).any())


class RolloutFunction(Protocol):
    """Embeddings (B, T, D), blocks between them (B, T-1, A), candidates (B, S, H, A) -> predictions (B, S, H, D)."""

    def __call__(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor: ...


# uint8 frames (..., R, R, 3) in, embeddings (..., D) out.
EncoderFunction: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


class WorldModel(Protocol):
    """What a planner needs of a model; ``lewm.LeWM`` is one."""

    history: int
    frame_skip: int
    action_dim: int
    image_size: int

    @property
    def device(self) -> torch.device: ...

    def planning_encoder(self, precision: str) -> EncoderFunction: ...
    def planning_rollout(self, precision: str, differentiable: bool) -> RolloutFunction: ...
    def normalise_actions(self, raw: torch.Tensor) -> torch.Tensor: ...
    def denormalise_actions(self, blocks: torch.Tensor) -> torch.Tensor: ...


# What a solver minimises: z-scored candidate plans (B, S, H, A) in, costs (B, S) out.
Cost: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

# Called with (done, total) while long work goes on.
ProgressCallback = Callable[[int, int], None]
