"""Plans on request: from what was seen and done, towards a goal image.

A plan starts from up to ``history`` real frames, one per action block, together with the actions that were executed
between them. With this context the predictor knows velocities that no single frame shows. ``Agent`` asks for plans when
they are due; whoever uses a ``Planner`` alone keeps the context, and decides when to plan again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.capture import Captures
from lewm.plan.cost import Objective
from lewm.plan.futures import futures_of
from lewm.plan.inputs import InputEncoder, Request, grouped, largest_batch, padded
from lewm.plan.search import Found, ModelSearch
from lewm.plan.solver import Solver
from lewm.plan.solvers import make_solver
from lewm.plan.soonest import SoonestSearch
from lewm.types import Array, Context, Plan, WorldModel


class Planner:
    """Plans for a world model.

    Args:
        model: the world model, in evaluation mode.
        solver: how to search; by default the one that ``config`` names.
        config: everything else about planning.
        objectives: what makes a future good; by default the distance that ``config`` names. Functions
            (z_BSHD, goal_BD, actions_BSHA) -> (B, S), added up.
    """

    def __init__(
        self,
        model: WorldModel,
        solver: Solver | None = None,
        config: PlanConfig | None = None,
        objectives: Sequence[Objective] | None = None,
    ) -> None:
        self.model, self.config = model, config or PlanConfig()
        _check(model, self.config, objectives)
        solver, capture = solver or make_solver(self.config), Captures(model.device, self.config.cuda_graph)
        futures = futures_of(model, self.config, objectives, solver.needs_gradient)
        kind = SoonestSearch if self.config.schedule == "soonest" else ModelSearch
        self.search = kind(model, solver, self.config, futures, capture)
        self.inputs = InputEncoder(model, self.config.precision, capture)
        # Fails now, not after a search.
        self.search.check_differentiable(self.inputs.blank())
        self.search.recorded(self.config.horizon)

    def plan(
        self,
        frames: Array,
        goal: Array,
        executed_actions: Array | None = None,
        key: int = 0,
        proprio: Array | None = None,
        goal_proprio: Array | None = None,
    ) -> Plan:
        """One plan towards a goal image.

        frames: uint8 (T, R, R, 3), the last frames, one per action block, T <= history; or one frame (R, R, 3).
        goal: uint8 (R, R, 3).  executed_actions: raw, (T-1, K, action_dim), what was done between the frames.
        key: selects the random stream; the same key gives the same plan.
        proprio, goal_proprio: what the agent senses of itself at the frames, (T, P), and at the goal, (P,), for a
        model that reads it.
        """
        if frames.ndim == 3:
            frames, proprio = frames[None], None if proprio is None else np.reshape(proprio, (1, -1))
        executed = np.zeros((0, 0, 0), np.float32) if executed_actions is None else executed_actions
        return self.plan_many([Request(Context(frames, executed, proprio), goal, key, goal_proprio=goal_proprio)])[0]

    def plan_many(self, requests: Sequence[Request]) -> list[Plan]:
        """Plans for several episodes; each is the same as if it were planned alone (to rounding on a GPU)."""
        plans: dict[int, Plan] = {}
        kinds = [(len(request.context.frames), self._horizon(request)) for request in requests]
        for indices in grouped(kinds, self.batch_size):
            batch = padded([requests[i] for i in indices], self.model.device, self.config.batch_size)
            plans.update(zip(indices, self.plan_together(batch), strict=False))
        return [plans[i] for i in range(len(requests))]

    @property
    def batch_size(self) -> int:
        """How many plans are made together at most."""
        return largest_batch(self.model.device, self.config.batch_size)

    @torch.no_grad()
    def plan_together(self, requests: Sequence[Request]) -> list[Plan]:
        """Plans for requests of one context length and horizon, in a single batch."""
        return self._as_plans(self.search.plans(self.inputs.encode(requests, self._horizon(requests[0]))))

    def _horizon(self, request: Request) -> int:
        return request.horizon or self.config.horizon

    def _as_plans(self, found: Found) -> list[Plan]:
        actions_BHA, distances_BH = found.actions_BHA, found.distances_BH
        # Together, because each copy from the device is a wait for it.
        results = torch.cat([actions_BHA.flatten(1), found.cost_B1, distances_BH], dim=1).cpu()
        actions, cost, distances = results.split([actions_BHA[0].numel(), 1, distances_BH.shape[1]], dim=1)
        raw = self.model.denormalise_actions(actions.view(actions_BHA.shape)).flatten(1, 2).numpy()
        parts = zip(raw, cost.flatten().tolist(), distances.numpy(), found.blocks, strict=True)
        return [Plan(steps[: h * self.model.frame_skip], total, far[:h]) for steps, total, far, h in parts]


def _check(model: WorldModel, config: PlanConfig, objectives: Sequence[Objective] | None) -> None:
    """Refuse what cannot be planned with, before anything is made for it."""
    if getattr(model, "training", False):
        raise PlanningError(
            "The model is in training mode: its BatchNorm would depend on the batch. Call model.eval() first."
        )
    if objectives and config.schedule == "soonest":
        raise PlanningError(
            "The schedule 'soonest' has an objective of its own, the distance at each horizon; it takes no others. "
            "Choose another schedule, or plan without objectives."
        )
    # An error for a model without action statistics.
    model.denormalise_actions(torch.zeros(model.frame_skip * model.action_dim, device=model.device))
