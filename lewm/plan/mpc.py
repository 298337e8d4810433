"""Model-predictive control: plan from what has been seen, execute some of it, look again, replan.

A plan starts from up to ``history`` real frames, one per action block, together with the actions that were executed
between them. With this context the predictor knows velocities that no single frame shows.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.cost import OBJECTIVES, ArrivalCost, Objective, TotalCost, add_up, squared_distance
from lewm.plan.graph import Recorder
from lewm.plan.schedule import soonest
from lewm.plan.solver import Precedents, Problem, Search, Solver, solve
from lewm.plan.solvers import make_solver
from lewm.types import Array, Context, Cost, Plan, WorldModel

# Goals whose embeddings are kept.
KEPT_GOALS = 1024


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


@dataclass(frozen=True)
class Request:
    """One episode that wants a plan.

    goal: uint8 (R, R, 3).  key: its random stream.  horizon: blocks to plan, None: as configured.
    start: raw actions (n*K, action_dim) to begin the search from; a missing end is filled with mean actions.
    """

    context: Context
    goal: Array
    key: int = 0
    horizon: int | None = None
    start: Array | None = None


class Planner:
    """Plans for a world model; the object a control loop would hold.

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
        if getattr(model, "training", False):
            raise PlanningError(
                "The model is in training mode: its BatchNorm would depend on the batch. Call model.eval() first."
            )
        self.model = model
        self.config = config or PlanConfig()
        self.solver = solver or make_solver(self.config)
        if objectives and self.config.schedule == "soonest":
            raise PlanningError(
                "The schedule 'soonest' has an objective of its own, the distance at each horizon; it takes no others. "
                "Choose another schedule, or plan without objectives."
            )
        self.objectives = list(objectives or [OBJECTIVES[self.config.objective]])
        self.block_dim = model.frame_skip * model.action_dim
        # Fails now, not after a search, for a model without action statistics.
        model.denormalise_actions(torch.zeros(self.block_dim, device=model.device))
        self._encoder = model.planning_encoder(self.config.precision)
        self._rollout = model.planning_rollout(self.config.precision, differentiable=self.solver.needs_gradient)
        self._check_differentiable()
        self._goals: dict[bytes, tuple[Array, torch.Tensor]] = {}
        self._record = Recorder(model.device, self.config.cuda_graph)
        self._bounds_A = self._bounds()
        self._precedents_by_horizon: dict[int, Precedents] = {}
        self._precedents(self.config.horizon)  # fails now, not after a search, for a model that has none

    def plan(self, frames: Array, goal: Array, executed_actions: Array | None = None, key: int = 0) -> Plan:
        """One plan towards a goal image.

        frames: uint8 (T, R, R, 3), the last frames, one per action block, T <= history; or one frame (R, R, 3).
        goal: uint8 (R, R, 3).  executed_actions: raw, (T-1, K, action_dim), what was done between the frames.
        key: selects the random stream; the same key gives the same plan.
        """
        frames = frames[None] if frames.ndim == 3 else frames
        executed = np.zeros((0, 0, 0), np.float32) if executed_actions is None else executed_actions
        return self.plan_many([Request(Context(frames, executed), goal, key)])[0]

    def plan_many(self, requests: Sequence[Request]) -> list[Plan]:
        """Plans for several episodes; each is the same as if it were planned alone (to rounding on a GPU)."""
        plans: dict[int, Plan] = {}
        for indices in self._batches(requests):
            plans.update(zip(indices, self._solve([requests[i] for i in indices]), strict=False))
        return [plans[i] for i in range(len(requests))]

    @property
    def batch_size(self) -> int:
        """How many plans are made together at most.

        On a CPU one: its samples fill the cores already, and products of a fixed shape round the same way whatever else
        is being planned.
        """
        return 1 if self.model.device.type == "cpu" else self.config.batch_size

    def _batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """Groups of equal context length and horizon that are solved together."""
        size = self.batch_size
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[len(request.context.frames), request.horizon or self.config.horizon].append(index)
        return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]

    @torch.no_grad()
    def _solve(self, requests: Sequence[Request]) -> list[Plan]:
        """Plans for requests of one context length and horizon."""
        requests = self._padded(requests)
        horizon = requests[0].horizon or self.config.horizon
        z_BTD, past_BTA = self._encode_contexts([request.context for request in requests])
        goal_BD = self._encode_goals([request.goal for request in requests])
        keys_B = torch.tensor([request.key for request in requests], dtype=torch.int64, device=self.model.device)
        start_BHA = torch.stack([self._start(request, horizon) for request in requests])
        inputs = z_BTD, past_BTA, goal_BD, keys_B, start_BHA
        if self.config.schedule == "soonest":
            return self._solve_all_horizons(inputs, horizon)
        actions_BHA, z_BSHD = self._search(inputs)
        cost_B1 = add_up(self.objectives, z_BSHD, goal_BD, actions_BHA.unsqueeze(1))
        return self._as_plans(actions_BHA, cost_B1, squared_distance(z_BSHD[:, 0], goal_BD.unsqueeze(1)))

    def _solve_all_horizons(self, inputs: tuple[torch.Tensor, ...], horizon: int) -> list[Plan]:
        """The schedule "soonest": one search per horizon, then the shortest good plan of each episode."""
        z_BTD, past_BTA, goal_BD, keys_B, start_BHA = inputs
        # Searches of one episode must not share their noise.
        keys = (torch.arange(horizon, device=keys_B.device).unsqueeze(1) + keys_B).flatten()
        plans, z_BSHD = self._search((z_BTD, past_BTA, goal_BD, keys, start_BHA.repeat(horizon, 1, 1)))
        reached_BSH = squared_distance(z_BSHD, goal_BD[:, None, None])  # S: the horizons that were searched for
        nearest_BH = reached_BSH.diagonal(dim1=1, dim2=2)
        chosen = [soonest(row) for row in nearest_BH.cpu().numpy()]
        at = torch.arange(len(chosen)), torch.tensor(chosen) - 1
        found = self._as_plans(_by_episode(plans, len(z_BTD))[at], nearest_BH[at].unsqueeze(1), reached_BSH[at])
        skip = self.model.frame_skip
        return [
            Plan(plan.actions[: h * skip], plan.cost, plan.distances[:h]) for plan, h in zip(found, chosen, strict=True)
        ]

    def _search(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the solver, S times for each episode: z-scored plans (S*B, H, A), and where they lead, (B, S, H, D)."""
        if self.config.budget_ms is None:
            plans, z_BSHD = self._record("search", self._search_to_the_end, *inputs)
            return plans, z_BSHD

        def step(search: Search) -> Search:
            return Search.of(*self._record("step", self._step, *inputs, *search.tensors()))

        plans = solve(self.solver, self._problem(*inputs), self.config.budget_ms / 1000, step)
        (z_BSHD,) = self._record("imagine", self._imagine, *inputs[:2], plans)
        return plans, z_BSHD

    def _search_to_the_end(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plans = solve(self.solver, self._problem(*inputs))
        return plans, *self._imagine(inputs[0], inputs[1], plans)

    def _step(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step of a search, from the five inputs of a problem and the tensors of the search."""
        return self.solver.step(self._problem(*tensors[:5]), Search.of(*tensors[5:])).tensors()

    def _problem(
        self,
        z_BTD: torch.Tensor,
        past_BTA: torch.Tensor,
        goal_BD: torch.Tensor,
        keys: torch.Tensor,
        start: torch.Tensor,
    ) -> Problem:
        """keys, start: of as many searches as there are episodes, or of H times as many (see ``ArrivalCost``)."""
        cost: Cost = TotalCost(functools.partial(self._rollout, z_BTD, past_BTA), goal_BD, self.objectives)
        if self.config.schedule == "soonest":
            cost = ArrivalCost(cost)
        horizon, skip = start.shape[1], self.model.frame_skip
        low_A, high_A = self._bounds_A
        precedents = self._precedents(horizon)
        return Problem(cost, horizon, self.block_dim, keys, start, low_A, high_A, skip, precedents)

    def _precedents(self, horizon: int) -> Precedents | None:
        """The model's recorded actions, as plans of this many blocks; None if they are not asked for."""
        if not self.config.icem.recorded:
            return None
        if horizon not in self._precedents_by_horizon:
            sequences = getattr(self.model, "recorded_actions", None)
            if sequences is None or not len(sequences):
                raise PlanningError(
                    "plan.icem.recorded asks for recorded actions, and this model has none. Train it again or, after "
                    "`lewm import-official`, import it with --dataset; or plan without."
                )
            steps, skip = horizon * self.model.frame_skip, self.model.frame_skip
            if sequences.shape[1] < steps:
                raise PlanningError(
                    f"plan.icem.recorded: a plan of {horizon} blocks has {steps} actions, the model's recorded "
                    f"sequences have {sequences.shape[1]}. Plan for fewer blocks, or without."
                )
            raw = sequences[:, :steps].to(self.model.device).unflatten(1, (horizon, skip))
            self._precedents_by_horizon[horizon] = Precedents.of(self.model.normalise_actions(raw))
        return self._precedents_by_horizon[horizon]

    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """The configured limit on raw actions, as bounds on z-scored blocks (A,)."""
        limit, model = self.config.action_limit, self.model
        if limit is None:
            return None, None
        # A whole number would make tensors of integers, and the statistics in them zeros.
        raw = torch.full((model.frame_skip, model.action_dim), float(limit), device=model.device)
        return model.normalise_actions(-raw), model.normalise_actions(raw)

    def _imagine(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, plans: torch.Tensor) -> tuple[torch.Tensor]:
        """Where plans (S*B, H, A) lead: predictions (B, S, H, D)."""
        return (self._rollout(z_BTD, past_BTA, _by_episode(plans, len(z_BTD))),)

    def _as_plans(self, actions_BHA: torch.Tensor, cost_B1: torch.Tensor, distances_BH: torch.Tensor) -> list[Plan]:
        # Together, because each copy from the device is a wait for it.
        results = torch.cat([actions_BHA.flatten(1), cost_B1, distances_BH], dim=1).cpu()
        actions, cost, distances = results.split([actions_BHA[0].numel(), 1, distances_BH.shape[1]], dim=1)
        raw = self.model.denormalise_actions(actions.view(actions_BHA.shape)).flatten(1, 2).numpy()
        return [Plan(*fields) for fields in zip(raw, cost.flatten().tolist(), distances.numpy(), strict=True)]

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _padded(self, requests: Sequence[Request]) -> Sequence[Request]:
        """On CUDA, repeat the last request up to a rounder number: few shapes, so few graphs to record."""
        if self.model.device.type != "cuda":
            return requests
        size = round_size(len(requests), self.config.batch_size)
        return [*requests, *[requests[-1]] * (size - len(requests))]

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
            return z_BTD, z_BTD.new_zeros(len(contexts), 0, self.block_dim)
        return z_BTD, self._normalised(np.stack([c.executed for c in contexts]))

    def _encode_goals(self, goals: Sequence[Array]) -> torch.Tensor:
        """Goal images -> embeddings (B, D). Each is encoded once: an episode asks with the same one every time."""
        if len(self._goals) > KEPT_GOALS:
            self._goals.clear()
        return torch.stack([self._encode_goal(goal) for goal in goals])

    def _encode_goal(self, goal: Array) -> torch.Tensor:
        # Every 16th row finds a goal again quickly; all pixels then decide whether it is the same.
        name = goal[::16].tobytes()
        known = self._goals.get(name)
        if known is None or not np.array_equal(known[0], goal):
            known = self._goals[name] = goal.copy(), self._encode(goal[None], "goal", axes=1)[0]
        return known[1]

    def _encode(self, pixels: Array, what: str, axes: int) -> torch.Tensor:
        """Images with ``axes`` leading axes -> embeddings."""
        size = self.model.image_size
        if pixels.dtype != np.uint8 or pixels.shape[axes:] != (size, size, 3):
            raise PlanningError(
                f"The {what} must be uint8 images of {size} x {size} x 3, as the model was trained on; got "
                f"{pixels.dtype} of shape {pixels.shape[1:]}. Render or resize to {size} pixels."
            )
        (z,) = self._record("encode", self._embed, torch.from_numpy(pixels))
        return z.clone()

    def _embed(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._encoder(pixels.to(self.model.device)),)

    def _start(self, request: Request, horizon: int) -> torch.Tensor:
        """Where a request's search begins, z-scored (H, A)."""
        start = torch.zeros(horizon, self.block_dim, device=self.model.device)
        if request.start is not None:
            blocks = request.start.reshape(-1, self.model.frame_skip, self.model.action_dim)[:horizon]
            start[: len(blocks)] = self._normalised(blocks)
        return start

    def _normalised(self, raw: Array) -> torch.Tensor:
        return self.model.normalise_actions(torch.from_numpy(raw).to(self.model.device, torch.float32))

    def _check_differentiable(self) -> None:
        if not self.solver.needs_gradient:
            return
        size = self.model.image_size
        (z,) = self._embed(torch.zeros(1, 1, size, size, 3, dtype=torch.uint8))
        z = z.detach()
        actions = torch.zeros(1, 1, 1, self.block_dim, device=self.model.device, requires_grad=True)
        with torch.enable_grad():
            if not self._rollout(z, z.new_zeros(1, 0, self.block_dim), actions).requires_grad:
                raise PlanningError(
                    f"{type(self.solver).__name__} needs gradients of the rollout, and this model has none. "
                    "Choose a sampling solver: cem, icem or mppi."
                )


def _by_episode(plans: torch.Tensor, episodes: int) -> torch.Tensor:
    """Plans (S*B, H, A) of S searches for each of B episodes, one search of all after the other -> (B, S, H, A)."""
    return plans.unflatten(0, (-1, episodes)).transpose(0, 1)


def round_size(count: int, most: int) -> int:
    """The next rounder number, four of them between powers of two; above ``most`` only if ``count`` is."""
    grain = 1 << max(0, (count - 1).bit_length() - 3)
    return min(-(-count // grain) * grain, max(most, count))
