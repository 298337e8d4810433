"""Model-predictive control: plan from what has been seen, execute some of it, look again, replan.

A plan starts from up to ``history`` real frames, one per action block, together with the actions that were
executed between them. With this context the predictor knows velocities that no single frame shows.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.cem import CEM
from lewm.plan.cost import TerminalDistance, squared_distance
from lewm.plan.solver import Problem, Solver
from lewm.types import Array, Context, Plan, WorldModel


class Memory:
    """Collects an episode's frames and executed blocks, and hands out the part a plan starts from."""

    def __init__(self, first_frame: Array, history: int) -> None:
        self._frames = deque([first_frame], maxlen=history)
        self._executed: deque[Array] = deque(maxlen=history - 1)

    def add(self, block: Array, frame: Array) -> None:
        """An executed action block (K, action_dim) and the frame (R, R, 3) that followed it."""
        self._executed.append(block)
        self._frames.append(frame)

    def context(self) -> Context:
        """The last ``history`` frames, or as many as there are, and the blocks between them."""
        executed = np.stack(self._executed) if self._executed else np.zeros((0, 0, 0), np.float32)
        return Context(np.stack(self._frames), executed)


class Planner:
    """Plans for a world model; the object a control loop would hold.

    Args:
        model: the world model, in evaluation mode.
        solver: how to search; CEM with the settings of ``config`` by default.
        config: horizon, and how many episodes are planned together.
    """

    def __init__(self, model: WorldModel, solver: Solver | None = None, config: PlanConfig | None = None) -> None:
        if getattr(model, "training", False):
            raise PlanningError(
                "The model is in training mode: its BatchNorm would depend on the batch. Call model.eval() first."
            )
        self.model = model
        self.config = config or PlanConfig()
        self.solver = solver or CEM(self.config)
        # Fails now, not after a search, for a model without action statistics.
        model.denormalise_actions(torch.zeros(model.frame_skip * model.action_dim, device=model.device))

    def plan(self, frames: Array, goal: Array, executed_actions: Array | None = None, key: int = 0) -> Plan:
        """One plan towards a goal image.

        frames: uint8 (T, R, R, 3), the last frames, one per action block, T <= history; or one frame (R, R, 3).
        goal: uint8 (R, R, 3).  executed_actions: raw, (T-1, K, action_dim), what was done between the frames.
        key: selects the random stream; the same key gives the same plan.
        """
        frames = frames[None] if frames.ndim == 3 else frames
        executed = np.zeros((0, 0, 0), np.float32) if executed_actions is None else executed_actions
        return self.plan_many([Context(frames, executed)], [goal], [key])[0]

    def plan_many(self, contexts: Sequence[Context], goals: Sequence[Array], keys: Sequence[int]) -> list[Plan]:
        """Plans for several episodes; each is the same as if it were planned alone (to rounding on a GPU)."""
        plans: dict[int, Plan] = {}
        for indices in self._batches(contexts):
            solved = self._solve(
                [contexts[i] for i in indices], [goals[i] for i in indices], [keys[i] for i in indices]
            )
            plans.update(zip(indices, solved, strict=True))
        return [plans[i] for i in range(len(contexts))]

    def _batches(self, contexts: Sequence[Context]) -> list[list[int]]:
        """Groups of equal context length that are solved together.

        On a CPU each episode is a group of its own: one episode's samples fill the cores already, and products of
        a fixed shape round the same way whatever else is being planned.
        """
        size = 1 if self.model.device.type == "cpu" else self.config.batch_size
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, context in enumerate(contexts):
            by_length[len(context.frames)].append(index)
        return [group[i : i + size] for group in by_length.values() for i in range(0, len(group), size)]

    @torch.no_grad()
    def _solve(self, contexts: Sequence[Context], goals: Sequence[Array], keys: Sequence[int]) -> list[Plan]:
        z_BTD, past_BTA = self._encode_contexts(contexts)
        goal_BD = self._encode(np.stack(goals), "goal", axes=1)
        rollout = functools.partial(self.model.rollout, z_BTD, past_BTA)
        cost = TerminalDistance(rollout, goal_BD)
        block_dim = self.model.frame_skip * self.model.action_dim
        keys_B = torch.tensor(keys, dtype=torch.int64, device=self.model.device)
        actions_BHA = self.solver.solve(Problem(cost, self.config.horizon, block_dim, keys_B))
        actions_BSHA = actions_BHA.unsqueeze(1)
        distances_BH = squared_distance(rollout(actions_BSHA)[:, 0], goal_BD.unsqueeze(1)).cpu().numpy()
        costs = cost(actions_BSHA)[:, 0].tolist()
        raw = self.model.denormalise_actions(actions_BHA).flatten(1, 2).cpu().numpy()
        return [Plan(raw[i], costs[i], distances_BH[i]) for i in range(len(contexts))]

    def _encode_contexts(self, contexts: Sequence[Context]) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts of one length T -> embeddings (B, T, D) and z-scored blocks between them (B, T-1, A)."""
        model, length = self.model, len(contexts[0].frames)
        if not 1 <= length <= model.history:
            raise PlanningError(f"A plan starts from 1 to {model.history} frames, got {length}.")
        z_BTD = self._encode(np.stack([c.frames for c in contexts]), "frames", axes=2)
        expected = (length - 1, model.frame_skip, model.action_dim)
        for context in contexts:
            if length > 1 and context.executed.shape != expected:
                raise PlanningError(
                    f"{length} frames need executed actions of shape {expected}, got {context.executed.shape}."
                )
        if length == 1:
            return z_BTD, z_BTD.new_zeros(len(contexts), 0, model.frame_skip * model.action_dim)
        executed = torch.from_numpy(np.stack([c.executed for c in contexts])).to(model.device, torch.float32)
        return z_BTD, model.normalise_actions(executed)

    def _encode(self, pixels: Array, what: str, axes: int) -> torch.Tensor:
        """Images with ``axes`` leading axes -> embeddings."""
        size = self.model.image_size
        if pixels.dtype != np.uint8 or pixels.shape[axes:] != (size, size, 3):
            raise PlanningError(
                f"The {what} must be uint8 images of {size} x {size} x 3, as the model was trained on; got "
                f"{pixels.dtype} of shape {pixels.shape[1:]}. Render or resize to {size} pixels."
            )
        return self.model.encode(torch.from_numpy(pixels).to(self.model.device))
