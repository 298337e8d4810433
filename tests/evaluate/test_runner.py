"""Running episodes: the protocol is kept, and an episode's outcome does not depend on its companions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lewm.checked import to_dict
from lewm.config import Config, PlanConfig, ScheduleName
from lewm.envs.experts import TwoRoomExpert
from lewm.envs.registry import make_env
from lewm.errors import ConfigError, DataError, PlanningError
from lewm.evaluate import runner
from lewm.evaluate.episodes import Episode, Task, run_episodes
from lewm.evaluate.flops import iteration_flops
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.policies import AgentPolicy, RandomPolicy
from lewm.evaluate.question import ask
from lewm.evaluate.results import LABELS, Evaluation, model_files, read_rates
from lewm.evaluate.runner import evaluate
from lewm.files import read_json
from lewm.methods.lewm import LeWM
from lewm.plan.agent import Agent
from lewm.presets import preset
from lewm.types import ActionStats, Array, DataFacts, EpisodeResult, EpisodeSpec, Outcome

SPECS = load_manifest("tworoom").first(6)


class Blind:
    """A policy that looks at nothing."""

    history, frame_skip, image_size = 0, 5, 8

    def begin(self, episodes: Sequence[Episode]) -> None: ...


class Oracle(Blind):
    """Knows the true state and walks straight to the goal, one step at a time."""

    frame_skip = 1

    def __init__(self) -> None:
        self._expert = TwoRoomExpert(np.random.default_rng(0), noise_std=0, repeat_probability=0)

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        return [self._expert.act(e.states[-1], np.array(e.spec.goal))[None] for e in episodes]


class Constant(Blind):
    """Executes the same action for ever, three blocks at a time."""

    def __init__(self, action: tuple[float, float]) -> None:
        self.action = action

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        return [np.tile(np.float32(self.action), (3 * self.frame_skip, 1)) for _ in episodes]


def walk(policy: Any, specs: Sequence[EpisodeSpec], budget: int = 50, **options: Any) -> list[EpisodeResult]:
    return run_episodes(policy, Task("tworoom", specs, budget, **options))


def assert_same(one: EpisodeResult, other: EpisodeResult) -> None:
    """Bitwise the same states, outcome and plans."""
    assert (one.index, one.solved_at_start) == (other.index, other.solved_at_start)
    np.testing.assert_array_equal(one.states, other.states)
    np.testing.assert_array_equal(one.reached, other.reached)
    assert len(one.plans) == len(other.plans)
    for a, b in zip(one.plans, other.plans, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.distances, b.distances)
        assert a.cost == b.cost


# -- the protocol ---------------------------------------------------------------------------------------------


def test_an_oracle_solves_every_pair():
    specs = load_manifest("tworoom").first(30)
    results = walk(Oracle(), specs)
    assert [result.index for result in results] == [spec.index for spec in specs]
    assert all(result.success for result in results)


def test_every_step_is_judged():
    env = make_env("tworoom", resolution=8)
    for spec, result in zip(SPECS, walk(Oracle(), SPECS), strict=True):
        np.testing.assert_array_equal(result.states[0], spec.start)
        np.testing.assert_array_equal(result.goal, spec.goal)
        assert len(result.states) == 51, "an episode goes on after its first success"
        reached = env.is_success(result.states, np.array(spec.goal))
        assert result.solved_at_start == reached[0]
        np.testing.assert_array_equal(result.reached, reached[1:])
        assert result.first_success == reached[1:].tolist().index(True) + 1


def test_passing_through_the_goal_is_a_success_only_by_the_papers_protocol():
    """The goal counts from less than 16 px away: at 5 px a step, from x = 68 at the 4th to x = 93 at the 9th."""
    spec = EpisodeSpec(0, (48.0, 150.0), (80.0, 150.0))
    (result,) = walk(Constant((1.0, 0.0)), [spec], budget=7)
    np.testing.assert_allclose(result.states[:, 0], [48, 53, 58, 63, 68, 73, 78, 83])
    assert (result.first_success, result.success, result.strict_success) == (4, True, True)
    for budget, strict in ((3, False), (4, True), (6, True), (30, True)):
        assert walk(Constant((1.0, 0.0)), [spec], budget)[0].strict_success is strict
    # Along a chord of the goal's circle that takes two steps only: reached, and left again.
    passing = EpisodeSpec(0, (60.0, 150.0), (72.5, 164.5))
    (result,) = walk(Constant((1.0, 0.0)), [passing], budget=10)
    assert (result.reached.sum(), result.success, result.strict_success) == (2, True, False)
    (result,) = walk(Constant((1.0, 0.0)), [passing], budget=result.first_success)
    assert result.strict_success, "at the end of the budget it is there"


@pytest.mark.parametrize(
    ("reached", "paper", "strict"),
    [
        ("......", False, False),
        ("..##..", True, False),
        ("#.#.#.", True, False),
        ("..###.", True, True),
        (".....#", True, True),
        ("####..", True, True),
        ("#", True, True),
        (".", False, False),
        ("#.", True, False),
    ],
)
def test_the_two_protocols(reached: str, paper: bool, strict: bool):
    flags = np.array([flag == "#" for flag in reached])
    result = Outcome(0, False, flags)
    assert (result.success, result.strict_success) == (paper, strict)
    assert result.first_success == (reached.index("#") + 1 if paper else None)
    assert replace(result, solved_at_start=True).strict_success is None
    assert replace(result, solved_at_start=True).success == paper


@pytest.mark.parametrize("budget", [5, 7, 15, 17])
def test_the_budget_is_kept_to_the_step(budget: int):
    (result,) = walk(Constant((-1.0, 0.0)), [EpisodeSpec(0, (90.0, 150.0), (190.0, 150.0))], budget)
    assert len(result.states) == budget + 1
    assert not result.success
    expected = np.maximum(90.0 - 5 * np.arange(budget + 1), 21.0)
    np.testing.assert_allclose(result.states[:, 0], expected)


def test_a_policy_is_shown_the_frames_after_its_last_blocks():
    """Constant executes three blocks of five at a time: its second decision sees the frames of steps 10 and 15."""

    class Historian(Constant):
        history, image_size = 2, 28

        def decide(self, episodes: Sequence[Episode]) -> list[Array]:
            self.effect = episodes[0].effect
            return super().decide(episodes)

    policy = Historian((-0.5, 0.25))
    (result,) = walk(policy, [EpisodeSpec(0, (90.0, 50.0), (190.0, 150.0))], budget=20)
    frames = make_env("tworoom", resolution=28).render_states(result.states[[10, 15]])
    np.testing.assert_array_equal(policy.effect.frames, frames)
    np.testing.assert_array_equal(policy.effect.executed, np.broadcast_to(np.float32([-0.5, 0.25]), (15, 2)))


def test_solved_at_the_start_is_recorded_but_not_a_success():
    (away,) = walk(Constant((-1.0, 0.0)), [EpisodeSpec(0, (60.0, 150.0), (75.0, 150.0))], budget=10)
    assert (away.solved_at_start, away.success, away.strict_success) == (True, False, None)


def test_progress_reaches_its_total():
    seen: list[tuple[int, int]] = []
    run_episodes(RandomPolicy(0), Task("tworoom", SPECS[:2], 20), lambda *progress: seen.append(progress))
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


@pytest.mark.parametrize(("schedule", "plans"), [("whole", 3), ("receding", 5)])
def test_planned_episodes_do_not_depend_on_their_companions(debug_model: LeWM, schedule: ScheduleName, plans: int):
    """Together, in halves, one by one, and whatever the planner's batch size: bitwise the same on the CPU."""
    plan = PlanConfig(horizon=2, samples=16, iterations=2, elites=4, schedule=schedule)

    def planned(specs: Sequence[EpisodeSpec], batch_size: int = 50, **options: Any) -> list[EpisodeResult]:
        agent = Agent(debug_model, replace(plan, batch_size=batch_size))
        return walk(AgentPolicy(agent), specs, budget=23, **options)

    together = planned(SPECS)
    assert all(len(r.plans) == plans for r in together)
    halves = planned(SPECS[:3]) + planned(SPECS[3:])
    alone = [planned([spec])[0] for spec in SPECS]
    reversed_order = planned(SPECS[::-1])[::-1]
    unbatched = planned(SPECS, batch_size=1)
    in_groups = planned(SPECS, group_size=4)
    for other in (halves, alone, reversed_order, unbatched, in_groups):
        for a, b in zip(together, other, strict=True):
            assert_same(a, b)


def test_the_planned_actions_are_what_is_executed(debug_model: LeWM):
    plan = PlanConfig(horizon=2, samples=16, iterations=2, elites=4, schedule="receding")
    (result,) = walk(AgentPolicy(Agent(debug_model, plan)), SPECS[:1], budget=12)
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
    assert [tuple(result.states[0]) for result in evaluation.results] == [spec.start for spec in specs]
    for results in (evaluation.results, evaluation.random_results):
        assert [(result.index, result.steps) for result in results] == [(0, 10), (1, 10)]
    for a, b in zip(evaluation.random_results, walk(RandomPolicy(5), specs, budget=10), strict=True):
        assert (a.index, a.solved_at_start) == (b.index, b.solved_at_start)
        np.testing.assert_array_equal(a.reached, b.reached)
    assert evaluation.goal_offset == 25


def test_rates_of_both_protocols():
    """Of four pairs one is solved at the start; the goals are held, passed through, and missed."""
    held, passed, missed = (np.array(flags) for flags in ([False, True], [True, False], [False, False]))
    specs = ((False, held), (False, passed), (False, missed), (True, held))
    nowhere = np.zeros(2), np.zeros((3, 2))
    results = tuple(EpisodeResult(i, at, flags, *nowhere) for i, (at, flags) in enumerate(specs))
    random_results = tuple(replace(result, reached=missed) for result in results)
    evaluation = Evaluation(preset("debug"), 25, results, random_results)
    expected = {
        "policy": (3, 4),
        "policy_strict": (1, 3),
        "random": (0, 4),
        "random_strict": (0, 3),
        "solved_at_start": (1, 4),
    }
    assert {name: (rate.successes, rate.total) for name, rate in evaluation.rates().items()} == expected
    rates = replace(evaluation, recorded_results=results).rates()
    expected |= {"recorded": (3, 4), "recorded_strict": (1, 3)}
    assert {name: (rate.successes, rate.total) for name, rate in rates.items()} == expected
    assert list(rates) == list(LABELS), "the headline comes first"


def test_saved_evaluation_says_everything(debug_model: LeWM, debug_run: Path, tmp_path: Path):
    evaluation = evaluate(debug_model, preset("debug"))
    # Made up, so that a goal that was reached and left is among them.
    reached = np.arange(10) == 3
    solved = replace(evaluation.results[0], reached=reached, solved_at_start=False)
    evaluation = replace(evaluation, results=(solved, evaluation.results[1]))
    path, folder = tmp_path / "new" / "evaluation.json", debug_run / "checkpoints" / "step_0000008"
    question = ask(debug_model, preset("debug"))
    evaluation.save(path, model_files(folder), question)
    assert list(path.parent.iterdir()) == [path]
    document = json.loads(path.read_text())
    assert document["config"] == to_dict(preset("debug"))
    assert (document["environment"], document["goal_offset"]) == ("lewm/TwoRoom-v0", 25)
    assert document["versions"].keys() >= {"lewm", "torch", "numpy", "python", "gymnasium", "pymunk"}
    assert document["question"] == question.digest
    assert document["device"] == "cpu"
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert document["checkpoint"] == {"path": str(folder), "weights_sha256": weights}
    assert read_rates(path) == evaluation.rates()
    rate = document["rates"]["policy"]
    assert (rate["successes"], rate["episodes"]) == (1 + evaluation.results[1].success, 2)
    first, second = document["episodes"]
    assert [first[key] for key in ("index", "success", "strict_success", "first_success")] == [0, True, False, 4]
    assert (tuple(first["start"]), tuple(first["goal"])) == (SPECS[0].start, SPECS[0].goal)
    assert (second["index"], second["success"]) == (1, evaluation.results[1].success)
    assert first["plan_costs"] == [plan.cost for plan in solved.plans]
    assert first["random_policy_success"] == evaluation.random_results[0].success
    assert evaluation.recorded_results is not None
    assert first["recorded_success"] == evaluation.recorded_results[0].success
    assert second["recorded_strict_success"] == evaluation.recorded_results[1].strict_success
    plan = preset("debug").plan
    assert document["flops_per_plan"] == plan.iterations * iteration_flops(debug_model, plan)
    times = document["times"]
    assert times["plans"] == sum(len(result.plans) for result in evaluation.results)
    assert 0 < times["seconds_per_plan_p50"] <= times["seconds_per_plan_p99"] <= times["planning_seconds"]
    assert 0 < times["planning_seconds"] < evaluation.times.total
    assert times["environment_seconds"] == pytest.approx(evaluation.times.total - times["planning_seconds"])
    evaluation.save(path)
    assert json.loads(path.read_text())["checkpoint"] is None


def test_numbers_that_are_none_are_null_in_the_file(debug_model: LeWM, tmp_path: Path):
    evaluation = evaluate(debug_model, preset("debug"))
    first, *rest = evaluation.results
    plans = tuple(replace(plan, cost=cost) for plan, cost in zip(first.plans * 3, (np.nan, np.inf, 2.5), strict=False))
    replace(evaluation, results=(replace(first, plans=plans), *rest)).save(tmp_path / "result.json")
    document = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert document["episodes"][0]["plan_costs"] == [None, None, 2.5][: len(plans)]
    assert len(plans) >= 2


def test_files_of_earlier_versions_are_read(debug_model: LeWM, tmp_path: Path):
    path = tmp_path / "result.json"
    evaluate(debug_model, preset("debug")).save(path)
    rates = read_rates(path)
    document = read_json(path)
    earlier = LABELS | {"policy": "planning with the world model"}
    earlier["policy_strict"] = "planning with the world model, strict"
    known = [name for name in rates if "recorded" not in name]
    document["rates"] = {earlier[name]: document["rates"][name] for name in known}
    path.write_text(json.dumps(document))
    assert read_rates(path) == {name: rates[name] for name in known}
    path.write_text('{"rates": {"policy": {"successes": 1}}}')
    with pytest.raises(DataError, match="does not hold the results of `lewm eval`"):
        read_rates(path)


def test_what_is_not_known_is_not_said(debug_model: LeWM, tmp_path: Path):
    """Of pairs without recorded actions, and of a search that a clock stops."""
    config, pairs = preset("debug"), tmp_path / "pairs.json"
    pair = {"start": SPECS[0].start, "goal": SPECS[0].goal}
    pairs.write_text(json.dumps({"environment": config.env, "goal_offset": 25, "pairs": [pair]}))
    asked = replace(config.eval, episodes=1, manifest=str(pairs))
    evaluation = evaluate(debug_model, replace(config, eval=asked, plan=replace(config.plan, budget_ms=1000.0)))
    assert (evaluation.recorded_results, evaluation.flops_per_plan) == (None, None)
    evaluation.save(tmp_path / "result.json")
    document = json.loads((tmp_path / "result.json").read_text())
    assert "recorded" not in document["rates"]
    assert "recorded_success" not in document["episodes"][0]
    assert read_rates(tmp_path / "result.json") == evaluation.rates()


def refuse_to_run(*_: Any, **__: Any) -> None:
    raise AssertionError("an episode was run")


@pytest.fixture
def nothing_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_episodes", refuse_to_run)


@pytest.mark.usefixtures("nothing_may_run")
def test_a_model_with_other_actions_is_refused():
    config = preset("debug")
    model = LeWM(replace(config.method, action_dim=3), DataFacts(ActionStats((0.0,) * 3, (1.0,) * 3))).eval()
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


@pytest.mark.usefixtures("nothing_may_run")
def test_a_gradient_solver_needs_a_model_with_gradients(debug_model: LeWM, monkeypatch: pytest.MonkeyPatch):
    rollout = debug_model.planning_rollout("float32", differentiable=False)

    def without_gradients(*arguments: torch.Tensor) -> torch.Tensor:
        return rollout(*arguments).detach()

    monkeypatch.setattr(debug_model, "planning_rollout", lambda *_, **__: without_gradients)
    config = preset("debug")
    with pytest.raises(PlanningError, match=r"Gradient needs gradients.*Choose a sampling solver"):
        evaluate(debug_model, replace(config, plan=replace(config.plan, solver="adam")))


@pytest.mark.usefixtures("nothing_may_run")
def test_pairs_of_another_environment_are_refused(debug_model: LeWM, tmp_path: Path):
    path = tmp_path / "maze.json"
    pairs = [{"start": [1, 2], "goal": [3, 4]}]
    path.write_text(json.dumps({"environment": "lewm/Maze-v0", "goal_offset": 25, "pairs": pairs}))
    config = preset("debug")
    with pytest.raises(ConfigError, match=r"has pairs of lewm/Maze-v0, not of lewm/TwoRoom-v0.*--env lewm/Maze-v0"):
        evaluate(debug_model, replace(config, eval=replace(config.eval, manifest=str(path))))


# -- another world ------------------------------------------------------------------------------------------------


def in_pusht(config: Config) -> Config:
    """It has actions of two numbers, as TwoRoom has."""
    return replace(config, env="pusht", device="cpu")


@pytest.mark.usefixtures("nothing_may_run")
@pytest.mark.parametrize("name", ["pusht", "lewm/PushT-v0"])
def test_a_model_is_not_evaluated_in_another_world(debug_model: LeWM, name: str):
    assert debug_model.facts.environment == "lewm/TwoRoom-v0"
    message = r"was trained in lewm/TwoRoom-v0, and lewm/PushT-v0 is another world.*elsewhere=True"
    with pytest.raises(PlanningError, match=message):
        evaluate(debug_model, replace(preset("debug"), env=name))


def test_unless_that_is_asked_for(debug_model: LeWM):
    evaluation = evaluate(debug_model, in_pusht(preset("debug")), elsewhere=True)
    assert evaluation.config.env == "pusht"
    assert {len(result.states[0]) for result in evaluation.results} == {len(make_env("pusht").state)}


@pytest.mark.parametrize("name", ["tworoom", "lewm/TwoRoom-v0"])
def test_the_models_own_world_has_two_names(debug_model: LeWM, name: str):
    assert len(evaluate(debug_model, replace(preset("debug"), env=name)).results) == 2


def test_a_model_that_does_not_know_its_world_is_evaluated_in_any():
    stats = ActionStats((0.0, 0.0), (1.0, 1.0))
    model = LeWM(preset("debug").method, DataFacts(stats)).eval()
    assert len(evaluate(model, in_pusht(preset("debug"))).results) == 2


@pytest.mark.usefixtures("nothing_may_run")
def test_a_model_that_senses_something_else_than_the_agent_there_is_refused():
    """Its data, which others made, took four numbers for proprioception."""
    config = preset("debug", "dino_wm")
    stats = ActionStats((0.0,) * 4, (1.0,) * 4)
    facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)), environment=config.env, proprio=stats)
    model = replace(config.method, proprio=True).build(facts).eval()  # type: ignore[call-arg]
    with pytest.raises(PlanningError, match=r"reads 4 numbers .* lewm/TwoRoom-v0 gives 2: agent_x, agent_y\. Train"):
        evaluate(model, config)
