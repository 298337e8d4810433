"""Tuned plans are those that the published models' figures were measured with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lewm import checkpoint
from lewm.config import PlanConfig
from lewm.errors import ConfigError
from lewm.export.card import CARD, _planner
from lewm.plan.tuned import TUNED, tuned_plan


@pytest.mark.parametrize("env", TUNED)
def test_the_card_of_the_environments_model_has_figures_of_its_tuned_plan(env: str) -> None:
    plan = tuned_plan(env)
    rows = [line.split(" | ") for line in (checkpoint.resolve(env) / CARD).read_text().splitlines()]
    assert any(plan.schedule in row and _planner(plan) in row for row in rows)


def test_what_was_not_tuned_stays() -> None:
    plan = PlanConfig(samples=64, horizon=3)
    assert tuned_plan("cube", plan) == replace(tuned_plan("cube"), samples=64, horizon=3)


def test_an_environment_without_tuned_plans_is_named() -> None:
    with pytest.raises(ConfigError, match="tuned for tworoom, pusht, reacher, cube, not for 'maze'"):
        tuned_plan("maze")
