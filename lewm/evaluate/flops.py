"""Equal arithmetic for every planner: what plans cost, and how many iterations a number of operations buys."""

from __future__ import annotations

from dataclasses import replace

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.schedule import next_turn
from lewm.plan.solvers import make_solver
from lewm.types import WorldModel

# A backward pass costs about twice its forward pass.
GRADIENT_FACTOR = 3


def iteration_flops(model: WorldModel, plan: PlanConfig, horizon: int | None = None) -> int:
    """What one iteration of a search costs, for a plan of ``horizon`` blocks that starts from a full history."""
    horizon = horizon or plan.horizon
    horizons = range(1, horizon + 1) if plan.schedule == "soonest" else (horizon,)
    per_candidate = sum(model.rollout_flops(model.history, blocks) for blocks in horizons)
    if make_solver(plan).needs_gradient:
        return plan.gradient.restarts * GRADIENT_FACTOR * per_candidate
    return plan.samples * per_candidate


def plan_flops(model: WorldModel, plan: PlanConfig) -> float:
    """What a plan costs; of a schedule whose horizon changes, the mean over its turns."""
    horizons = [next_turn(plan, blocks).horizon for blocks in range(plan.horizon)]
    costs = [iteration_flops(model, plan, horizon) for horizon in horizons]
    return (plan.iterations + _scored_besides(plan)) * sum(costs) / len(costs)


def with_fixed_flops(model: WorldModel, plan: PlanConfig, flops: float) -> PlanConfig:
    """The same search with as many iterations as ``flops`` per plan allow."""
    if not hasattr(model, "rollout_flops"):
        name = type(model).__name__
        raise PlanningError(
            f"{name} acts: it has no planning whose arithmetic could be fixed. Leave out --fixed-flops."
        )
    cost = iteration_flops(model, plan)
    iterations = int(flops // cost) - _scored_besides(plan)
    if iterations < 1:
        few = (
            ("restarts", "plan.gradient.restarts") if make_solver(plan).needs_gradient else ("samples", "plan.samples")
        )
        count = plan.gradient.restarts if few[0] == "restarts" else plan.samples
        least = (1 + _scored_besides(plan)) * cost
        raise PlanningError(
            f"One iteration of {plan.solver} with {count} {few[0]} takes {least:.2e} floating-point operations; "
            f"{flops:.2e} do not suffice. Raise --fixed-flops, or lower {few[1]} or plan.horizon."
        )
    return replace(plan, iterations=iterations)


def _scored_besides(plan: PlanConfig) -> int:
    """How often candidates are scored besides once in each iteration: a gradient's plans are, after the last step."""
    return int(make_solver(plan).needs_gradient)
