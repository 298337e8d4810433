"""What to do next: by planning with a world model (model-predictive control), or by a method that acts at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.futures import can_plan
from lewm.plan.inputs import Request, grouped, largest_batch
from lewm.plan.planner import Planner
from lewm.plan.schedule import Turn, next_turn
from lewm.rng import derive_seed
from lewm.types import Actor, Array, Context, Plan, WorldModel

PLANNING = 1  # second element of the keys below: what a random stream is for
ACTING_BATCH = 50  # episodes that an actor on a GPU decides upon together


class Memory:
    """What an agent knows of one episode: its goal, what it has seen and done, and the plan that it follows.

    goal: uint8 (R, R, 3).  goal_proprio: what the agent senses of itself there, (P,), None: nobody reads it.
    number: of the episode; it selects the random stream.  blocks: executed so far.
    plans: how many were made so far.  plan: the last of them.  followed: how many actions were executed since.
    """

    def __init__(self, goal: Array, number: int, history: int, goal_proprio: Array | None = None) -> None:
        self.goal, self.number, self.goal_proprio = goal, number, goal_proprio
        self.blocks = self.plans = self.followed = 0
        self.plan: Plan | None = None
        self._frames: deque[Array] = deque(maxlen=history)
        self._executed: deque[Array] = deque(maxlen=history - 1)
        self._proprio: deque[Array | None] = deque(maxlen=history)  # at the frames

    @property
    def is_empty(self) -> bool:
        """Whether it has seen nothing yet."""
        return not self._frames

    def add(self, frames: Array, executed: Array, proprio: Array | None = None) -> None:
        """What was done since the last frame, blocks (n, K, action_dim), and the frames (m, R, R, 3) after the last m.

        An episode begins with one frame and no block. Where frames were left out is a gap that no context bridges.
        proprio: what the agent sensed of itself at the frames, (m, P).
        """
        self.blocks += len(executed)
        self.followed += executed.shape[0] * executed.shape[1]
        sensed = [None] * len(frames) if proprio is None else list(proprio)
        if self.is_empty:
            self._see(frames[0], sensed[0])
            frames, sensed = frames[1:], sensed[1:]
        if len(frames) < len(executed):
            self._frames.clear()
            self._executed.clear()
            self._proprio.clear()
        for block, frame, numbers in zip(executed[len(executed) - len(frames) :], frames, sensed, strict=True):
            if self._frames:
                self._executed.append(block)
            self._see(frame, numbers)

    def _see(self, frame: Array, proprio: Array | None) -> None:
        self._frames.append(frame)
        self._proprio.append(proprio)

    def follow(self, plan: Plan) -> None:
        """Begin a new plan."""
        self.plan, self.followed, self.plans = plan, 0, self.plans + 1

    def context(self) -> Context:
        """The last ``history`` frames, or as many as there are, and the blocks between them."""
        executed = np.stack(self._executed) if self._executed else np.zeros((0, 0, 0), np.float32)
        sensed = [numbers for numbers in self._proprio if numbers is not None]
        whole = len(sensed) == len(self._frames)
        return Context(np.stack(self._frames), executed, np.stack(sensed) if whole else None)


class Policy(ABC):
    """Chooses what to execute next. batch_size: how many episodes are decided upon together at most.

    proprio_dim: how many numbers it wants, with each frame, of what an agent senses of itself.
    """

    proprio_dim: int = 0

    def __init__(self, method: WorldModel | Actor, batch_size: int) -> None:
        if getattr(method, "training", False):
            raise PlanningError(f"{type(method).__name__} is in training mode. Call eval() first.")
        self.history, self.frame_skip = method.history, method.frame_skip
        self.action_dim, self.image_size = method.action_dim, method.image_size
        self.proprio_dim = getattr(method, "proprio_dim", 0)
        self.batch_size = batch_size

    @abstractmethod
    def decide(self, memories: Sequence[Memory]) -> list[Array]:
        """Raw actions (n*K, action_dim) for each episode, to be executed before it is asked about again."""


class PlanMaker(Protocol):
    """What makes the plans of a policy; ``Planner`` does."""

    model: WorldModel
    config: PlanConfig

    @property
    def batch_size(self) -> int: ...

    def plan_many(self, requests: Sequence[Request]) -> list[Plan]: ...


class PlanningPolicy(Policy):
    """Plan from what has been seen and done, execute as much of it as the schedule says, plan again.

    seed: of the random streams; each plan has one of its own, by its episode's number and how many plans that had.
    """

    def __init__(self, planner: PlanMaker, seed: int = 0) -> None:
        super().__init__(planner.model, planner.batch_size)
        self.planner, self.seed = planner, seed

    def decide(self, memories: Sequence[Memory]) -> list[Array]:
        turns = [next_turn(self.planner.config, memory.blocks) for memory in memories]
        plans = self.planner.plan_many(list(map(self._request, memories, turns)))
        for memory, plan in zip(memories, plans, strict=True):
            memory.follow(plan)
        return [p.actions[: turn.execute * self.frame_skip] for p, turn in zip(plans, turns, strict=True)]

    def _request(self, memory: Memory, turn: Turn) -> Request:
        place, start = (memory.number, memory.plans), None
        if self.planner.config.warm_start and memory.plan:
            start = memory.plan.actions[memory.followed :]
        key = derive_seed(self.seed, PLANNING, *place)
        return Request(memory.context(), memory.goal, key, turn.horizon, start, place, memory.goal_proprio)


class ActingPolicy(Policy):
    """Ask a method for one block after the other."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor, largest_batch(actor.device, ACTING_BATCH))
        self.actor = actor

    def decide(self, memories: Sequence[Memory]) -> list[Array]:
        frames = [memory.context().frames for memory in memories]
        blocks: dict[int, Array] = {}
        for indices in grouped([len(each) for each in frames], self.batch_size):
            seen, goals = np.stack([frames[i] for i in indices]), np.stack([memories[i].goal for i in indices])
            blocks.update(zip(indices, self._blocks(seen, goals), strict=True))
        return [blocks[i] for i in range(len(memories))]

    @torch.no_grad()
    def _blocks(self, frames_BTRRC: Array, goals: Array) -> Array:
        """What the method does, float32 (B, K, action_dim)."""
        frames, wanted = (torch.from_numpy(images).to(self.actor.device) for images in (frames_BTRRC, goals))
        blocks = self.actor.act(frames, wanted)
        expected = len(goals), self.frame_skip, self.action_dim
        if tuple(blocks.shape) != expected:
            name = type(self.actor).__name__
            raise PlanningError(f"{name}.act was to return blocks of shape {expected}, got {tuple(blocks.shape)}.")
        return blocks.to("cpu", torch.float32).numpy()


def policy_for(method: Any, settings: PlanConfig | None = None, seed: int = 0) -> Policy:
    """A policy of a method, by what it can do: a world model (or a planner of one) plans, an actor acts.

    settings: of planning, None: the paper's; an actor has no use for them, a planner has its own.
    """
    if isinstance(method, Policy) or hasattr(method, "plan_many"):
        if settings:
            raise PlanningError(f"{type(method).__name__} has settings of its own already: leave out the others.")
        return method if isinstance(method, Policy) else PlanningPolicy(method, seed)
    if can_plan(method):
        return PlanningPolicy(Planner(method, config=settings), seed)
    if hasattr(method, "act"):
        return ActingPolicy(method)
    raise PlanningError(
        f"{type(method).__name__} can neither plan nor act: expected a world model with `planning_rollout`, or a "
        "method with `act(frames, goals)` (lewm/types.py has both protocols)."
    )
