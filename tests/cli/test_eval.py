"""`lewm eval`: a model is measured as it was asked to, and nothing impossible is begun."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lewm.checked import to_dict
from lewm.evaluate.manifest import build_manifest
from lewm.methods.lewm import LeWM
from lewm.plan.tuned import tuned_plan
from lewm.presets import preset
from lewm.types import ActionStats, DataFacts

Lewm = Callable[..., Any]  # the fixture: arguments -> what came of it


def test_eval_can_be_told_where_to_write(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    answer = lewm("eval", debug_run, "--eval.episodes", 1, "--out", out, "--seed", 4, "--device", "cpu")
    assert answer.status == 0
    assert str(out) in answer.out
    assert json.loads(out.read_text())["config"]["seed"] == 4
    assert not (debug_run / "evaluations").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan.horizon", "9"], "A plan of 9 blocks of 5 steps does not fit into a budget of 10 steps."),
        (["--eval.episodes", "201"], "eval.episodes is 201"),
        (["--env", "twroom"], "Did you mean 'tworoom'?"),
        (["--plan.elites", "0"], "plan.elites must be between 2 and plan.samples (8), got 0."),
        (["--plan.elites", "9"], "plan.elites must be between 2 and plan.samples (8), got 9."),
        (["--fixed-flops", "1000"], "1.00e+03 do not suffice. Raise --fixed-flops"),
        (["--manifest", "no/such.json"], "There is no manifest at no/such.json"),
        (["--videos", "3"], "videos must be between 0 and eval.episodes (2), got 3."),
        (["--eval.workers", "-1"], "eval.workers must be between 0 and 10000, got -1."),
        (["--out", "."], ". is to be results of an evaluation, whose name ends in .json."),
    ],
)
def test_eval_refuses_the_impossible(lewm: Lewm, debug_run: Path, tmp_path: Path, options: list[str], message: str):
    answer = lewm("eval", debug_run, "--device", "cpu", "--out", tmp_path / "result.json", *options)
    answer.assert_refused(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--solver", "cem"], "--solver"),
        (["--tuned"], "--tuned"),
        (["--plan.samples", "90", "--plan.schedule", "soonest"], "--plan.samples, --plan.schedule"),
        (["--fixed-flops", "1e9"], "--fixed-flops"),
    ],
)
def test_a_method_that_acts_is_not_asked_to_plan(lewm: Lewm, tmp_path: Path, options: list[str], named: str):
    facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)), environment="lewm/TwoRoom-v0")
    preset("debug", "gcbc").method.build(facts).eval().save_pretrained(tmp_path / "model")
    answer = lewm("eval", tmp_path / "model", "--device", "cpu", "--out", tmp_path / "result.json", *options)
    answer.assert_refused("is of the method 'gcbc', which acts and makes no plans", f"Leave out {named}.")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_eval_with_everything(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out, pairs = tmp_path / "new" / "result.json", tmp_path / "pairs.json"
    build_manifest("tworoom", count=2, goal_offset=10, path=pairs)
    options = ("--solver", "mppi", "--fixed-flops", 1e7, "--manifest", pairs, "--eval.workers", 2, "--videos", 1)
    answer = lewm("eval", debug_run, "--device", "cpu", "--out", out, *options)
    assert (answer.status, answer.err) == (0, "")
    document = json.loads(out.read_text())
    assert document["goal_offset"] == 10
    assert document["config"]["plan"]["solver"] == "mppi"
    iterations = document["config"]["plan"]["iterations"]
    assert iterations > preset("debug").plan.iterations, "more than the run's own"
    assert f"{iterations} iterations of mppi: 9." in answer.out
    assert document["config"]["eval"] == {"episodes": 2, "budget": 10, "manifest": str(pairs), "workers": 2}
    videos = out.with_name("result_videos")
    assert f"Videos: {videos}" in answer.out
    assert [path.name for path in videos.iterdir()] == ["episode_000.gif"]
    with Image.open(videos / "episode_000.gif") as gif:
        assert gif.n_frames == 11


@pytest.mark.parametrize("solver", ["cem", "adam"])
def test_the_arithmetic_that_is_said_is_the_one_that_is_recorded(
    lewm: Lewm, debug_run: Path, tmp_path: Path, solver: str
):
    out = tmp_path / "result.json"
    options = ("--solver", solver, "--fixed-flops", 1e8, "--eval.episodes", 1, "--device", "cpu")
    answer = lewm("eval", debug_run, "--out", out, *options)
    assert (answer.status, answer.err) == (0, "")
    spent = json.loads(out.read_text())["flops_per_plan"]
    assert 0.5e8 < spent <= 1e8
    assert f"iterations of {solver}: {spent:.2e} floating-point operations per plan." in answer.out


def test_recorded_actions_are_for_the_solver_that_is_named_last(lewm: Lewm, debug_run: Path, tmp_path: Path):
    options = ("--device", "cpu", "--out", tmp_path / "result.json", "--plan.icem.recorded", 1, "--eval.episodes", 1)
    lewm("eval", debug_run, *options).assert_refused("plan.icem.recorded is for the solver icem, got 1 with cem")
    assert list(tmp_path.iterdir()) == []
    answer = lewm("eval", debug_run, *options, "--solver", "icem")
    assert (answer.status, answer.err) == (0, "")
    assert json.loads((tmp_path / "result.json").read_text())["config"]["plan"]["icem"]["recorded"] == 1


def test_tuned_plans_are_the_environments_but_for_what_is_asked(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    options = ("--device", "cpu", "--out", out, "--eval.episodes", 1, "--tuned", "--plan.icem.noise-exponent", 0)
    answer = lewm("eval", debug_run, *options)
    assert (answer.status, answer.err) == (0, "")
    tuned = tuned_plan("tworoom", preset("debug").plan)
    asked = replace(tuned, icem=replace(tuned.icem, noise_exponent=0.0))
    assert json.loads(out.read_text())["config"]["plan"] == to_dict(asked)


def test_a_model_is_evaluated_in_its_own_world_unless_another_is_named(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    arguments = ("eval", debug_run, "--device", "cpu", "--out", out, "--eval.episodes", 1)
    answer = lewm(*arguments)
    assert (answer.status, answer.err) == (0, "")
    assert "trained in" not in answer.out
    assert json.loads(out.read_text())["environment"] == "lewm/TwoRoom-v0"
    answer = lewm(*arguments, "--env", "tworoom")  # the same, by its other name
    assert answer.status == 0
    assert "trained in" not in answer.out
    elsewhere = tmp_path / "elsewhere.json"
    answer = lewm(*arguments, "--env", "pusht", "--out", elsewhere)
    assert (answer.status, answer.err) == (0, "")
    assert "This model was trained in lewm/TwoRoom-v0; it is evaluated in pusht, as asked." in answer.out
    assert json.loads(elsewhere.read_text())["environment"] == "lewm/PushT-v0"


def test_a_model_that_does_not_know_its_world_must_be_told(lewm: Lewm, tmp_path: Path):
    stats = ActionStats((0.0, 0.0), (1.0, 1.0))
    LeWM(preset("debug").method, DataFacts(stats)).save_pretrained(tmp_path / "model")
    small = ("--plan.samples", 4, "--plan.elites", 2, "--plan.iterations", 1, "--eval.episodes", 1)
    arguments = ("eval", tmp_path / "model", "--device", "cpu", *small, "--out", tmp_path / "result.json")
    lewm(*arguments).assert_refused("does not say which world it was trained in. Name one with --env.")
    assert not (tmp_path / "result.json").exists()
    answer = lewm(*arguments, "--env", "pusht")
    assert (answer.status, answer.err) == (0, "")
    assert json.loads((tmp_path / "result.json").read_text())["environment"] == "lewm/PushT-v0"


def test_a_solver_must_exist(lewm: Lewm, debug_run: Path):
    answer = lewm("eval", debug_run, "--solver", "cme")
    assert answer.status == 2
    assert "cem" in answer.err
