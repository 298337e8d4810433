"""Equal arithmetic for every planner: how many iterations a number of floating-point operations buys."""

from __future__ import annotations

from dataclasses import replace

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.plan.solvers import make_solver
from lewm.types import WorldModel

# A backward pass costs about twice its forward pass.
GRADIENT_FACTOR = 3


def iteration_flops(model: WorldModel, plan: PlanConfig) -> int:
    """What one iteration of a search costs, for a plan that starts from a full history."""
    horizons = range(1, plan.horizon + 1) if plan.schedule == "soonest" else (plan.horizon,)
    factor = GRADIENT_FACTOR if make_solver(plan).needs_gradient else 1
    return plan.samples * factor * sum(model.rollout_flops(model.history, horizon) for horizon in horizons)


def with_fixed_flops(model: WorldModel, plan: PlanConfig, flops: float) -> PlanConfig:
    """The same search with as many iterations as ``flops`` per plan allow."""
    cost = iteration_flops(model, plan)
    if cost > flops:
        raise PlanningError(
            f"One iteration of {plan.solver} with {plan.samples} samples takes {cost:.2e} floating-point operations; "
            f"{flops:.2e} do not suffice. Raise --fixed-flops, or lower plan.samples or plan.horizon."
        )
    return replace(plan, iterations=int(flops // cost))
