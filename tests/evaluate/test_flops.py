"""Arithmetic that is counted, and equal for every planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lewm.config import PlanConfig
from lewm.errors import PlanningError
from lewm.evaluate.flops import iteration_flops, with_fixed_flops
from lewm.methods.lewm import LeWM
from lewm.model.flops import rollout_flops
from lewm.presets import preset

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
    # The same arithmetic: a gradient costs three rollouts, "soonest" a search for each horizon.
    assert with_fixed_flops(MODEL, replace(PLAN, solver="adam"), 60 * once).iterations == 20
    every_horizon = 10 * sum(rollout_flops(SETTINGS, 3, horizon) for horizon in (1, 2, 3, 4))
    assert with_fixed_flops(MODEL, replace(PLAN, schedule="soonest"), 15.5 * every_horizon).iterations == 15
    assert with_fixed_flops(MODEL, replace(PLAN, samples=20), 60 * once).iterations == 30


def test_less_than_one_iteration_is_refused():
    with pytest.raises(PlanningError, match=r"One iteration of cem with 10 samples takes .*Raise --fixed-flops"):
        with_fixed_flops(MODEL, PLAN, iteration_flops(MODEL, PLAN) - 1)
