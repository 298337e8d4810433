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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray

# Passing through the goal is not reaching it: the strict protocol wants so many actions in a row.
HOLD_STEPS = 3


@dataclass(frozen=True)
class ActionStats:
    """Mean and std of primitive actions, (action_dim,) each: part of the model, whose action space they define.

    Or, as ``DataFacts.proprio``, of the numbers that an agent senses of itself.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class GoalSampling:
    """Where goals of training windows come from: shares that add up to 1.

    current: the frame that acts itself, which has arrived.  future: a later frame of the same episode, uniformly, or,
    with a discount ``gamma``, geometrically: (1 - gamma) * gamma^n of them lie n + 1 frames ahead.  random: any frame.
    max_steps: future goals lie at most so many rows ahead, None: anywhere up to the episode's end.
    """

    current: float = 0.0
    future: float = 1.0
    random: float = 0.0
    gamma: float | None = None
    max_steps: int | None = None


@dataclass(frozen=True)
class Inputs:
    """What a method's training windows hold.

    frames: T.  frame_skip: K, rows from one frame to the next.  image_size: of pixels, None: the method reads none.
    features: the frozen encoder whose features stand in place of pixels, None: none.  proprio: what the agent senses
    of itself, at every frame.  goals: by name, how each is drawn.  anchor: the frame that acts, from which goals are
    counted.  last_block: losses read the last block of actions too, so that windows leave out episodes' missing ones.
    """

    frames: int
    frame_skip: int
    action_dim: int
    image_size: int | None = None
    features: str | None = None
    proprio: bool = False
    goals: Mapping[str, GoalSampling] = field(default_factory=dict)
    anchor: int = -1
    last_block: bool = False


@dataclass(frozen=True)
class Batch:
    """Windows cut from episodes, as a method's losses consume them. See ``data/windows.py`` for the alignment.

    actions: raw primitive actions, float32 (B, T, K, action_dim).  pixels: uint8 (B, T, R, R, 3).
    features: of a frozen encoder, (B, T, ...), float32, or float16 where it gives tokens.  proprio: float32 (B, T, P).
    goals: by name, uint8 (B, R, R, 3), or features (B, ...) where windows hold features.
    steps: by name, rows from the anchor frame to that goal, int64 (B,); 0: it is reached, -1: a random one.
    What a method does not ask for is None or empty.
    """

    actions: torch.Tensor
    pixels: torch.Tensor | None = None
    features: torch.Tensor | None = None
    proprio: torch.Tensor | None = None
    goals: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: dict[str, torch.Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with ``function`` applied to every tensor: how it is moved, captured and sliced as a whole."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, dict):
                changed[item.name] = {name: function(tensor) for name, tensor in value.items()}
            else:
                changed[item.name] = None if value is None else function(value)
        return Batch(**changed)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor it holds, in a fixed order."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.map(note)
        return tuple(found)

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class Losses:
    """What a method says of a batch.

    total: what is minimised.  terms: by name, for log, progress and report.  embeddings: (B, T, D), for the
    diagnostics; None where frames have none.
    """

    total: torch.Tensor
    terms: dict[str, torch.Tensor]
    embeddings: torch.Tensor | None = None

    def detach(self) -> Losses:
        """The same numbers without the graph that computed them."""
        terms = {name: term.detach() for name, term in self.terms.items()}
        return Losses(self.total.detach(), terms, None if self.embeddings is None else self.embeddings.detach())


@dataclass(frozen=True)
class DataFacts:
    """What a model learns of its data besides its weights, and keeps.

    actions: statistics of primitive actions.  recorded: raw sequences, float32 (N, T, action_dim), for planners to try.
    background: uint8 (R, R, 3), a frame without what moves.  digest: of the dataset's content.  episodes: how many.
    environment: the Gymnasium id of their world.  encoder: digest of the frozen encoder whose features were seen.
    proprio: statistics of what the agent senses of itself, if the method reads it.
    """

    actions: ActionStats | None = None
    recorded: torch.Tensor | None = None
    background: Array | None = None
    digest: str | None = None
    episodes: int | None = None
    environment: str | None = None
    encoder: str | None = None
    proprio: ActionStats | None = None


class Peers(Protocol):
    """Who shares a batch. count: how many; each holds an equal part of it."""

    @property
    def count(self) -> int: ...

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all of them, differentiable."""
        ...


@dataclass(frozen=True)
class Alone:
    """A batch that nobody shares."""

    count: int = 1

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


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
    proprio: what the agent sensed of itself at the frames, (T, P), for models that read it.
    """

    frames: Array
    executed: Array
    proprio: Array | None = None


@dataclass(frozen=True)
class Plan:
    """A solved planning problem, and the solver's cost of the solution.

    actions: raw primitive actions to execute in order, float32 (H*K, action_dim).
    distances: imagined distance to the goal after each block, float32 (H,): squared, in latent space; mean squared for
    a model whose own distance is that.
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
class Outcome:
    """How one evaluation episode went. reached: whether the state counted as the goal after each action, bool (steps,).

    solved_at_start: whether it did so before anything was done.
    failure: what the simulator said when it gave up, None: it did not. Such an episode reached nothing.
    """

    index: int
    solved_at_start: bool
    reached: Array
    failure: str | None = field(default=None, kw_only=True)

    @property
    def steps(self) -> int:
        """How many actions were executed."""
        return len(self.reached)

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


@dataclass(frozen=True)
class EpisodeResult(Outcome):
    """What happened in one evaluation episode; ``plans`` has one entry per replanning.

    goal: the state to reach, float64 (state_dim,).
    states: the environment's state before each action and after the last, float64 (steps+1, state_dim).
    """

    goal: Array
    states: Array
    plans: tuple[Plan, ...] = ()


class RolloutFunction(Protocol):
    """Embeddings (B, T, D), blocks between them (B, T-1, A), candidates (B, S, H, A) -> predictions (B, S, H, D)."""

    def __call__(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor: ...


class DistanceFunction(Protocol):
    """Arguments as of ``RolloutFunction``, and goals (B, D) -> how far predictions are from them, (B, S, H)."""

    def __call__(
        self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor, goal_BD: torch.Tensor
    ) -> torch.Tensor: ...


# uint8 frames (..., R, R, 3) in, embeddings (..., D) out. A model with a ``proprio_dim`` takes proprioception beside
# them, raw, float32 (..., P).
EncoderFunction: TypeAlias = "Callable[..., torch.Tensor]"


class Sighted(Protocol):
    """What it looks at and does, of whatever an agent can be made of."""

    @property
    def history(self) -> int: ...
    @property
    def frame_skip(self) -> int: ...
    @property
    def action_dim(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class WorldModel(Sighted, Protocol):
    """What a planner needs of a model; ``lewm.LeWM`` is one. ``Method`` has what is not its own."""

    def planning_encoder(self, precision: str) -> EncoderFunction: ...
    def planning_rollout(self, precision: str, differentiable: bool) -> RolloutFunction: ...
    def normalise_actions(self, raw: torch.Tensor) -> torch.Tensor: ...
    def denormalise_actions(self, blocks: torch.Tensor) -> torch.Tensor: ...
    def rollout_flops(self, context: int, horizon: int) -> int: ...


class DistanceModel(WorldModel, Protocol):
    """A world model with a distance of its own, or whose predictions would not fit for all candidates at once.

    Planners ask it how far predictions are from the goal, and for ``planning_rollout`` only where someone wants to see
    the embeddings themselves.
    """

    def planning_distances(self, precision: str, differentiable: bool) -> DistanceFunction: ...


class Actor(Sighted, Protocol):
    """What an agent needs of a method that does not plan: it acts at once."""

    def act(self, frames_BTRRC: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        """Blocks of raw actions, (B, K, action_dim), after the last T <= history frames, towards goals (B, R, R, 3).

        frames_BTRRC: uint8 (B, T, R, R, 3), oldest first.
        """
        ...


# What a solver minimises: z-scored candidate plans (B, S, H, A) in, costs (B, S) out.
Cost: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

# Called with (done, total) while long work goes on.
ProgressCallback = Callable[[int, int], None]
