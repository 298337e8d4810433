"""Running episodes: the protocol is kept, and an episode's outcome does not depend on its companions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lewm.config import Config, PlanConfig, preset, to_dict
from lewm.envs.experts import TwoRoomExpert
from lewm.envs.registry import make_env
from lewm.errors import ConfigError, PlanningError
from lewm.evaluate import runner
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.runner import Episode, PlanningPolicy, RandomPolicy, evaluate, run_episodes
from lewm.model.world_model import LeWM
from lewm.plan.mpc import Planner
from lewm.types import ActionStats, Array, EpisodeResult, EpisodeSpec

SPECS = load_manifest("tworoom").first(6)


class Oracle:
    """Knows the true state and walks straight to the goal, one step at a time."""

    history = 1

    def __init__(self) -> None:
        self._expert = TwoRoomExpert(np.random.default_rng(0), noise_std=0, repeat_probability=0)

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        return [self._expert.act(e.env.state, e.env.goal)[None] for e in episodes]


class Constant:
    """Executes the same action for ever, three blocks at a time."""

    history = 1

    def __init__(self, action: tuple[float, float]) -> None:
        self.action = action

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        return [np.tile(np.float32(self.action), (3 * e.frame_skip, 1)) for e in episodes]


def walk(policy: Any, specs: Sequence[EpisodeSpec], budget: int = 50, frame_skip: int = 5) -> list[EpisodeResult]:
    return run_episodes(policy, "tworoom", specs, resolution=28, frame_skip=frame_skip, budget=budget)


def assert_same(one: EpisodeResult, other: EpisodeResult) -> None:
    """Bitwise the same states, outcome and plans."""
    assert (one.index, one.first_success) == (other.index, other.first_success)
    np.testing.assert_array_equal(one.states, other.states)
    assert len(one.plans) == len(other.plans)
    for a, b in zip(one.plans, other.plans, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.distances, b.distances)
        assert a.cost == b.cost


# -- the protocol ---------------------------------------------------------------------------------------------


def test_an_oracle_solves_every_pair():
    specs = load_manifest("tworoom").first(30)
    results = walk(Oracle(), specs, frame_skip=1)
    assert [result.index for result in results] == [spec.index for spec in specs]
    assert all(result.success for result in results)


def test_first_success_is_the_first():
    env = make_env("tworoom", resolution=8)
    for spec, result in zip(SPECS, walk(Oracle(), SPECS, frame_skip=1), strict=True):
        np.testing.assert_array_equal(result.states[0], spec.start)
        np.testing.assert_array_equal(result.goal, spec.goal)
        reached = env.is_success(result.states, np.array(spec.goal))
        assert result.first_success == len(result.states) - 1
        assert reached[1:].tolist() == [False] * (len(reached) - 2) + [True]
        assert result.solved_at_start == reached[0]


def test_a_success_in_the_middle_of_a_block_ends_the_episode():
    """The goal counts from less than 16 px away: x = 63 is too far from 80, x = 68 is not."""
    (result,) = walk(Constant((1.0, 0.0)), [EpisodeSpec(0, (48.0, 150.0), (80.0, 150.0))])
    assert result.first_success == 4
    np.testing.assert_allclose(result.states[:, 0], [48, 53, 58, 63, 68])


@pytest.mark.parametrize("budget", [5, 7, 15, 17])
def test_the_budget_is_kept_to_the_step(budget: int):
    (result,) = walk(Constant((-1.0, 0.0)), [EpisodeSpec(0, (90.0, 150.0), (190.0, 150.0))], budget)
    assert len(result.states) == budget + 1
    assert not result.success
    expected = np.maximum(90.0 - 5 * np.arange(budget + 1), 21.0)
    np.testing.assert_allclose(result.states[:, 0], expected)


def test_a_policy_remembers_the_frames_between_its_blocks():
    """Constant executes three blocks of five at a time: its second decision sees the frames of steps 5, 10 and 15."""

    class Historian(Constant):
        history = 3

        def decide(self, episodes: Sequence[Episode]) -> list[Array]:
            self.context = episodes[0].memory.context()
            return super().decide(episodes)

    policy = Historian((-0.5, 0.25))
    (result,) = walk(policy, [EpisodeSpec(0, (90.0, 50.0), (190.0, 150.0))], budget=20)
    frames = make_env("tworoom", resolution=28).render_states(result.states[[5, 10, 15]])
    np.testing.assert_array_equal(policy.context.frames, frames)
    np.testing.assert_array_equal(policy.context.executed, np.broadcast_to(np.float32([-0.5, 0.25]), (2, 5, 2)))


def test_solved_at_the_start_is_recorded_but_not_a_success():
    away = walk(Constant((-1.0, 0.0)), [EpisodeSpec(0, (60.0, 150.0), (75.0, 150.0))], budget=10)
    assert (away[0].solved_at_start, away[0].success) == (True, False)


def test_progress_reaches_its_total():
    seen: list[tuple[int, int]] = []
    run_episodes(
        RandomPolicy(0),
        "tworoom",
        SPECS[:2],
        resolution=8,
        frame_skip=5,
        budget=20,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (40, 40)
    assert seen == sorted(seen)


# -- independence of companions -------------------------------------------------------------------------------


def test_a_random_policy_is_a_function_of_seed_and_pair():
    together = walk(RandomPolicy(1), SPECS)
    for spec, result in zip(SPECS, together, strict=True):
        assert_same(result, walk(RandomPolicy(1), [spec])[0])
    others = walk(RandomPolicy(2), SPECS)
    assert not any(np.array_equal(a.states[1], b.states[1]) for a, b in zip(together, others, strict=True))
    moves = {tuple(result.states[1] - result.states[0]) for result in together}
    assert len(moves) == len(SPECS), "each episode must have actions of its own"


@pytest.mark.parametrize("execute", [None, 1])
def test_planned_episodes_do_not_depend_on_their_companions(debug_model: LeWM, execute: int | None):
    """Together, in halves, one by one, and whatever the planner's batch size: bitwise the same on the CPU."""
    plan = PlanConfig(horizon=2, samples=16, iterations=2, elites=4, execute=execute)

    def planned(specs: Sequence[EpisodeSpec], batch_size: int = 50) -> list[EpisodeResult]:
        planner = Planner(debug_model, config=replace(plan, batch_size=batch_size))
        return walk(PlanningPolicy(planner, seed=0), specs, budget=23)

    together = planned(SPECS)
    assert all(len(r.plans) >= (2 if execute is None else 4) for r in together if not r.success)
    halves = planned(SPECS[:3]) + planned(SPECS[3:])
    alone = [planned([spec])[0] for spec in SPECS]
    reversed_order = planned(SPECS[::-1])[::-1]
    unbatched = planned(SPECS, batch_size=1)
    for other in (halves, alone, reversed_order, unbatched):
        for a, b in zip(together, other, strict=True):
            assert_same(a, b)


def test_the_planned_actions_are_what_is_executed(debug_model: LeWM):
    plan = PlanConfig(horizon=2, samples=16, iterations=2, elites=4, execute=1)
    (result,) = walk(PlanningPolicy(Planner(debug_model, config=plan), seed=0), SPECS[:1], budget=12)
    env = make_env("tworoom", resolution=8)
    env.reset(seed=0, options={"state": SPECS[0].start, "goal": SPECS[0].goal})
    executed = np.concatenate([p.actions[:5] for p in result.plans])[:12]
    for action, state in zip(executed, result.states[1:], strict=True):
        env.step(action)
        np.testing.assert_array_equal(env.state, state)


# -- evaluate -------------------------------------------------------------------------------------------------


def test_evaluation_compares_with_a_random_policy_on_the_same_pairs(debug_model: LeWM):
    config = replace(preset("debug"), seed=5)
    evaluation = evaluate(debug_model, config)
    specs = load_manifest("tworoom").first(config.eval.episodes)
    for results in (evaluation.results, evaluation.random_results):
        assert [r.index for r in results] == [0, 1]
        assert [tuple(r.states[0]) for r in results] == [spec.start for spec in specs]
        assert all(len(r.states) <= config.eval.budget + 1 for r in results)
    for a, b in zip(evaluation.random_results, walk(RandomPolicy(5), specs, budget=10), strict=True):
        assert_same(a, b)
    assert evaluation.goal_offset == 25


def test_saved_evaluation_says_everything(debug_model: LeWM, tmp_path: Path):
    evaluation = evaluate(debug_model, preset("debug"))
    # Made up, so that a success is among them.
    solved = replace(evaluation.results[0], first_success=4)
    evaluation = replace(evaluation, results=(solved, evaluation.results[1]))
    evaluation.save(tmp_path / "evaluation.json")
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    document = json.loads((tmp_path / "evaluation.json").read_text())
    assert document["config"] == to_dict(preset("debug"))
    assert document["goal_offset"] == 25
    rate = document["rates"]["planning with the world model"]
    assert (rate["successes"], rate["episodes"]) == (1 + evaluation.results[1].success, 2)
    first, second = document["episodes"]
    assert (first["index"], first["success"], first["first_success"]) == (0, True, 4)
    assert (second["index"], second["success"]) == (1, evaluation.results[1].success)
    assert first["plan_costs"] == [plan.cost for plan in solved.plans]
    assert first["random_policy_success"] == evaluation.random_results[0].success


def refuse_to_run(*_: Any, **__: Any) -> None:
    raise AssertionError("an episode was run")


@pytest.fixture
def nothing_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_episodes", refuse_to_run)


@pytest.mark.usefixtures("nothing_may_run")
def test_a_model_with_other_actions_is_refused():
    config = preset("debug")
    model = LeWM(replace(config.model, action_dim=3), ActionStats((0.0,) * 3, (1.0,) * 3)).eval()
    with pytest.raises(PlanningError, match=r"TwoRoom-v0 has 2-dimensional actions.*with 3-dimensional.*--env"):
        evaluate(model, config)


@pytest.mark.usefixtures("nothing_may_run")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plan": PlanConfig(horizon=3)}, PlanningError, r"3 blocks of 5 steps.*budget of 10.*plan\.horizon"),
        ({"eval": replace(preset("debug").eval, episodes=201)}, ConfigError, r"eval\.episodes is 201"),
    ],
)
def test_impossible_requests_are_refused_at_once(
    debug_model: LeWM, change: dict[str, Any], error: type[Exception], message: str
):
    config: Config = replace(preset("debug"), **change)
    with pytest.raises(error, match=message):
        evaluate(debug_model, config)
