"""An agent in a plain loop does what `lewm eval` does, episode by episode and bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import lewm
from lewm.config import SCHEDULES, Config, EvalConfig, PlanConfig, ScheduleName
from lewm.envs.base import WorldEnv
from lewm.errors import PlanningError
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.runner import evaluate
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.types import Array

EPISODES, BUDGET, SEED = 3, 23, 5  # the budget ends in the middle of a block
PAIRS = load_manifest("tworoom").first(EPISODES)


@pytest.fixture
def model(debug_model: LeWM) -> LeWM:
    """A model for which frames, goals and actions matter: after a few steps of training they hardly do."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in debug_model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return debug_model


def config_of(**plan: Any) -> Config:
    settings = PlanConfig(**{"horizon": 3, "samples": 12, "iterations": 2, "elites": 4} | plan)
    return replace(
        preset("debug"), plan=settings, eval=EvalConfig(episodes=EPISODES, budget=BUDGET), seed=SEED, device="cpu"
    )


def make_worlds(resolution: int, count: int = 1) -> list[WorldEnv]:
    return [lewm.make_env("tworoom", resolution=resolution) for _ in range(count)]


def begin(env: WorldEnv, number: int) -> Array:
    """Go to the start of a pair; an image of its goal."""
    env.reset(options={"state": PAIRS[number].start, "goal": PAIRS[number].goal})
    return env.render_states(env.goal[None])[0]


def one_by_one(agent: lewm.Agent, size: int) -> list[Array]:
    """The states of each episode, (steps+1, 2), in the loop of the README."""
    (env,) = make_worlds(size)
    states: list[Array] = []
    for number in range(EPISODES):
        agent.reset(begin(env, number))
        states.append(np.stack([env.state, *(step(env, agent.act(env.render())) for _ in range(BUDGET))]))
    return states


def step(env: WorldEnv, action: Array) -> Array:
    env.step(action)
    return env.state


def together(agent: lewm.Agent, size: int) -> list[Array]:
    """The same for all episodes at once."""
    worlds = make_worlds(size, EPISODES)
    agent.reset(np.stack([begin(env, number) for number, env in enumerate(worlds)]))
    states = [[env.state for env in worlds]]
    for _ in range(BUDGET):
        actions = agent.act(np.stack([env.render() for env in worlds]))
        states.append([step(*each) for each in zip(worlds, actions, strict=True)])
    return list(np.swapaxes(states, 0, 1))


def assert_same(found: Sequence[Array], config: Config, method: Any) -> None:
    results = evaluate(method, config).results
    assert [result.index for result in results] == list(range(EPISODES))
    for states, result in zip(found, results, strict=True):
        np.testing.assert_array_equal(states, result.states)


VARIANTS = [{"schedule": schedule, "warm_start": warm} for schedule in SCHEDULES for warm in (False, True)]


@pytest.mark.parametrize("plan", [*VARIANTS, {"solver": "icem", "action_limit": 0.5}, {"solver": "adam"}], ids=str)
def test_a_plain_loop_reaches_what_an_evaluation_reaches(model: LeWM, plan: dict[str, Any]):
    config, (env,) = config_of(**plan), make_worlds(28)

    def agent() -> lewm.Agent:
        return lewm.Agent(model, config.plan, bounds=env.action_space, seed=SEED)

    found = one_by_one(agent(), model.image_size)
    assert_same(found, config, model)
    for one, other in zip(found, together(agent(), model.image_size), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("schedule", ["whole", "shrinking"])
def test_the_seed_and_the_number_of_an_episode_select_its_plans(model: LeWM, schedule: ScheduleName):
    config = config_of(schedule=schedule)
    states = one_by_one(lewm.Agent(model, config.plan, bounds=(-1, 1), seed=SEED + 1), model.image_size)
    others = evaluate(model, config).results
    assert not any(np.array_equal(one, other.states) for one, other in zip(states, others, strict=True))
    assert_same(states, replace(config, seed=SEED + 1), model)


class Greedy:
    """A toy method that acts: along the straight line from the red of the newest frame to that of the goal."""

    history, frame_skip, action_dim, image_size = 2, 4, 2, 28
    device = torch.device("cpu")

    def act(self, frames_BTRRC: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        now, before, goal = (self.place(images) for images in (frames_BTRRC[:, -1], frames_BTRRC[:, 0], goals))
        way = (goal - now) / 4 + 0.01 * (now - before)
        return way.unsqueeze(1).repeat(1, self.frame_skip, 1)

    def place(self, images: torch.Tensor) -> torch.Tensor:
        red = (images[..., 0].float() - images[..., 1].float()).clamp_min(0) + 1e-3
        line = torch.arange(28.0)
        return torch.stack([(red.sum(1) * line).sum(1), (red.sum(2) * line).sum(1)], 1) / red.sum((1, 2))[:, None]


def test_a_method_that_acts_is_evaluated_like_one_that_plans():
    config = config_of(horizon=30)  # of plans that nobody makes
    evaluation = evaluate(Greedy(), config)
    assert all(result.plans == () for result in evaluation.results)
    assert evaluation.times.to_dict()["plans"] == 0
    moved = [np.linalg.norm(result.states[-1] - result.states[0]) for result in evaluation.results]
    assert min(moved) > 10, "it does something"
    for loop in (one_by_one, together):
        assert_same(loop(lewm.Agent(Greedy(), bounds=(-1, 1)), 28), config, Greedy())


def test_progress_of_a_method_that_acts_is_reported():
    seen: list[tuple[int, int]] = []
    evaluate(Greedy(), config_of(), lambda *progress: seen.append(progress))
    assert seen[-1] == (EPISODES * BUDGET, EPISODES * BUDGET)


def test_a_method_that_can_neither_plan_nor_act_is_refused():
    class Nothing:
        action_dim = 2

    with pytest.raises(PlanningError, match="Nothing can neither plan nor act"):
        evaluate(Nothing(), config_of())
