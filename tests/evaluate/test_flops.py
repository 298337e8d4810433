"""Arithmetic that is counted, and equal for every planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lewm.config import GradientConfig, PlanConfig, SolverName
from lewm.errors import PlanningError
from lewm.evaluate.flops import GRADIENT_FACTOR, iteration_flops, plan_flops, with_fixed_flops
from lewm.methods.lewm import LeWM
from lewm.model.flops import rollout_flops
from lewm.plan.solver import Problem, solve
from lewm.plan.solvers import make_solver
from lewm.presets import preset
from lewm.types import DataFacts

SETTINGS = preset("debug").method
MODEL = LeWM(SETTINGS)
PLAN = PlanConfig(horizon=4, samples=10, iterations=7, elites=5)


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("horizon", [1, 4])
def test_the_count_is_pytorchs(context: int, horizon: int):
    config = replace(SETTINGS, embed_dim=12, history=3)
    model, samples = LeWM(config).eval(), 2
    past, plans = (1, context - 1, config.block_dim), (1, samples, horizon, config.block_dim)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.rollout(torch.zeros(1, context, 12), torch.zeros(past), torch.zeros(plans))
    assert counter.get_total_flops() == samples * rollout_flops(config, context, horizon)


def test_iterations_fill_the_budget_and_no_more():
    once = iteration_flops(MODEL, PLAN)
    assert once == 10 * rollout_flops(SETTINGS, 3, 4)
    assert with_fixed_flops(MODEL, PLAN, 3.5 * once) == replace(PLAN, iterations=3)
    assert with_fixed_flops(MODEL, PLAN, once).iterations == 1
    # The same arithmetic: "soonest" is a search for each horizon.
    every_horizon = 10 * sum(rollout_flops(SETTINGS, 3, horizon) for horizon in (1, 2, 3, 4))
    assert with_fixed_flops(MODEL, replace(PLAN, schedule="soonest"), 15.5 * every_horizon).iterations == 15
    assert with_fixed_flops(MODEL, replace(PLAN, samples=20), 60 * once).iterations == 30


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
def test_a_gradient_solver_pays_for_its_restarts(solver: SolverName):
    """And for no samples, which it does not draw. A gradient costs three rollouts; the last step is scored, too."""
    plan = replace(PLAN, solver=solver, gradient=GradientConfig(restarts=2))
    once = 2 * 3 * rollout_flops(SETTINGS, 3, 4)
    assert iteration_flops(MODEL, plan) == iteration_flops(MODEL, replace(plan, samples=500)) == once
    assert plan_flops(MODEL, plan) == (7 + 1) * once
    assert with_fixed_flops(MODEL, plan, 6.5 * once).iterations == 5
    with pytest.raises(
        PlanningError, match=rf"One iteration of {solver} with 2 restarts .* lower plan.gradient.restarts"
    ):
        with_fixed_flops(MODEL, plan, 1.5 * once)


@pytest.mark.parametrize("solver", ["cem", "icem", "mppi", "sgd", "rmsprop", "adam"])
def test_the_solver_rolls_out_as_many_plans_as_are_counted(solver: SolverName):
    plan, seen = replace(PLAN, solver=solver, gradient=GradientConfig(restarts=3)), list[int]()

    def cost(plans_BSHA: torch.Tensor) -> torch.Tensor:
        seen.append(plans_BSHA.shape[1])
        return plans_BSHA.square().sum((-2, -1))

    solve(make_solver(plan), Problem(cost, 4, 10, torch.tensor([1])))
    factor = GRADIENT_FACTOR if solver in ("sgd", "rmsprop", "adam") else 1
    assert plan_flops(MODEL, plan) == sum(seen) * factor * rollout_flops(SETTINGS, 3, 4)


def test_a_decision_costs_what_its_schedule_plans():
    """A shrinking plan looks ahead 4, 3, 2, 1 blocks in turn."""
    lengths = {h: 7 * 10 * rollout_flops(SETTINGS, 3, h) for h in (1, 2, 3, 4)}
    for schedule, expected in (("whole", lengths[4]), ("receding", lengths[4]), ("soonest", sum(lengths.values()))):
        assert plan_flops(MODEL, replace(PLAN, schedule=schedule)) == expected
    assert plan_flops(MODEL, replace(PLAN, schedule="shrinking")) == sum(lengths.values()) / 4


def test_less_than_one_iteration_is_refused():
    with pytest.raises(PlanningError, match=r"One iteration of cem with 10 samples takes .*Raise --fixed-flops"):
        with_fixed_flops(MODEL, PLAN, iteration_flops(MODEL, PLAN) - 1)


def test_who_acts_has_no_arithmetic_to_fix():
    actor = preset("debug", "gcbc").method.build(DataFacts())
    with pytest.raises(PlanningError, match=r"GCBC acts: it has no planning .* Leave out --fixed-flops"):
        with_fixed_flops(cast(Any, actor), PLAN, 1e12)
