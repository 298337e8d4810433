"""What an evaluation asks: everything that its answer may depend on tells it from others, and nothing else does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lewm.config import Config, EncoderConfig
from lewm.envs.registry import env_entry
from lewm.evaluate import question as asked
from lewm.evaluate.question import Question, ask, environment_identity, versions
from lewm.methods.files import identity
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.types import ActionStats

CONFIG = preset("debug")


def with_plan(**changes: Any) -> Config:
    return replace(CONFIG, plan=replace(CONFIG.plan, **changes))


def with_eval(**changes: Any) -> Config:
    return replace(CONFIG, eval=replace(CONFIG.eval, **changes))


OTHERS = {
    "seed": replace(CONFIG, seed=1),
    "samples": with_plan(samples=9),
    "precision": with_plan(precision="bf16"),
    "noise": with_plan(icem=replace(CONFIG.plan.icem, noise_exponent=1.0)),
    "episodes": with_eval(episodes=3),
    "budget": with_eval(budget=11),
}
SAME = {
    "nothing": CONFIG,
    "workers": with_eval(workers=3),
    "the manifest's name": with_eval(manifest="paper"),
    "training": replace(CONFIG, train=replace(CONFIG.train, lr=0.5)),
    "places": replace(CONFIG, data=Path("elsewhere.h5"), device="cpu"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_settings_that_matter_make_another_question(debug_model: LeWM, other: Config):
    one, two = ask(debug_model, CONFIG), ask(debug_model, other)
    assert (one.digest == two.digest, one.name == two.name) == (False, False)


@pytest.mark.parametrize("other", SAME.values(), ids=SAME)
def test_settings_that_do_not_matter_make_none(debug_model: LeWM, other: Config):
    one, two = ask(debug_model, CONFIG), ask(debug_model, other)
    assert (one.digest, one.name) == (two.digest, two.name)


def test_pairs_make_another_question(debug_model: LeWM, tmp_path: Path):
    def manifest(goal: float, offset: int) -> Config:
        path = tmp_path / f"{goal}_{offset}.json"
        pairs = [{"start": [60, 60], "goal": [60, goal]}] * 2
        path.write_text(json.dumps({"environment": CONFIG.env, "goal_offset": offset, "pairs": pairs}))
        return with_eval(manifest=str(path))

    questions = [ask(debug_model, manifest(goal, offset)) for goal, offset in ((90, 10), (91, 10), (90, 11), (90, 10))]
    assert [question.digest == questions[0].digest for question in questions] == [True, False, False, True]
    assert questions[0].name.startswith("90_10_cem_whole_2_")


def test_a_model_that_gives_distances_alone_plans(debug_model: LeWM):
    """How it plans is a part of the question, as of any that plans."""

    class Far(LeWM):
        planning_rollout = property()  # type: ignore[assignment]  # not there: reading it raises AttributeError

        def planning_distances(self) -> None: ...

    debug_model.__class__ = Far
    assert not hasattr(debug_model, "planning_rollout")
    one, two = ask(debug_model, CONFIG), ask(debug_model, with_plan(samples=9))
    assert one.digest != two.digest
    assert one.name.startswith("paper_cem_whole_")


def with_facts(model: LeWM, **changes: Any) -> None:
    model.facts = replace(model.facts, **changes)


CHANGES: dict[str, Callable[[LeWM], Any]] = {
    "weights": lambda model: next(model.parameters()).data.mul_(1.001),
    "buffers": lambda model: model.projector.norm.running_var.mul_(2),
    "configuration": lambda model: setattr(model, "settings", replace(model.settings, encoder=EncoderConfig(depth=2))),
    "action statistics": lambda model: with_facts(model, actions=ActionStats((0.0, 0.0), (1.0, 1.0))),
    "recorded actions": lambda model: with_facts(model, recorded=torch.ones(1, 50, 2)),
    "no recorded actions": lambda model: with_facts(model, recorded=None),
    "world": lambda model: with_facts(model, environment="lewm/PushT-v0"),
    "dataset": lambda model: with_facts(model, digest="another"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_is_told_from_others_by_all_that_it_is(debug_model: LeWM, change: Callable[[LeWM], Any]):
    before = identity(debug_model)
    assert identity(debug_model) == before
    change(debug_model)
    assert identity(debug_model) != before


def test_versions_of_simulators_matter(debug_model: LeWM, monkeypatch: pytest.MonkeyPatch):
    assert versions().keys() >= {"lewm", "torch", "numpy", "python", "gymnasium", "pymunk"}
    before = ask(debug_model, CONFIG).digest
    monkeypatch.setattr(asked, "SIMULATORS", ("gymnasium", "no-such-package"))
    assert versions().keys() == {"lewm", "torch", "numpy", "python", "gymnasium"}
    assert ask(debug_model, CONFIG).digest != before


def test_the_source_of_an_environment_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of one that its user is writing, no version says that it has changed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_maze.py").write_text("walls = 3\n")
    entry = replace(env_entry("tworoom"), name="maze", gym_id="mine/Maze-v0", entry_point="my_maze:Maze")
    before = environment_identity(entry)
    assert environment_identity(entry) == before
    (tmp_path / "my_maze.py").write_text("walls = 4\n")
    assert environment_identity(entry) != before
    assert "my_maze" not in sys.modules, "no simulator is imported for it"
    assert environment_identity(replace(entry, entry_point="no_such_module:Maze")) == ["mine/Maze-v0", None]
    assert environment_identity(env_entry("tworoom"))[1] is not None


@pytest.mark.parametrize(
    ("source", "folder", "place"),
    [
        ("runs/a", "runs/a/checkpoints/step_0000008", "runs/a/evaluations/step_0000008"),
        ("runs/a/checkpoints/step_0000004", "runs/a/checkpoints/step_0000004", "runs/a/evaluations/step_0000004"),
        ("models/mine", "models/mine", "evaluations/mine"),
        ("pusht", "/somewhere/pretrained/pusht", "evaluations/pusht"),
        ("org/name", "/cache/models--org--name/snapshots/0a1b2c", "evaluations/name"),
        (".", "/somewhere/mine", "evaluations/mine"),
        ("..", "/somewhere/mine", "evaluations/mine"),
    ],
)
def test_results_have_a_place_outside_of_what_comes_and_goes(source: str, folder: str, place: str):
    assert Question("paper_12", {}).place(source, Path(folder)) == Path(place) / "paper_12.json"
