"""The random policy's figures: simulated once, remembered, and never believed without reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lewm.evaluate import floor
from lewm.evaluate.episodes import Task, run_episodes
from lewm.evaluate.floor import cache_folder, random_outcomes, recorded_outcomes
from lewm.evaluate.manifest import PACKAGED, build_manifest, load_manifest
from lewm.evaluate.policies import RandomPolicy
from lewm.types import Outcome

TASK = Task("tworoom", load_manifest("tworoom").first(4), 20)


class Counted:
    """Counts how often episodes are simulated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return run_episodes(*arguments)

        monkeypatch.setattr(floor, "run_episodes", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counted:
    monkeypatch.setenv("LEWM_CACHE", str(tmp_path / "cache"))
    return Counted(monkeypatch)


def assert_right(outcomes: tuple[Outcome, ...], seed: int = 0, task: Task = TASK) -> None:
    expected = run_episodes(RandomPolicy(seed), task)
    assert [outcome.index for outcome in outcomes] == [result.index for result in expected]
    for outcome, result in zip(outcomes, expected, strict=True):
        assert outcome.solved_at_start == result.solved_at_start
        np.testing.assert_array_equal(outcome.reached, result.reached)
        assert outcome.reached.dtype == bool


def test_it_is_simulated_once(counted: Counted):
    for _ in range(3):
        assert_right(random_outcomes(TASK, seed=0))
    assert counted.count == 1
    assert_right(random_outcomes(replace(TASK, workers=2, group_size=1), seed=0))
    assert counted.count == 1, "how the work is divided changes nothing"


def test_other_questions_are_simulated(counted: Counted):
    random_outcomes(TASK, seed=0)
    others = [
        (replace(TASK, budget=21), 0),
        (replace(TASK, specs=TASK.specs[:3]), 0),
        (replace(TASK, specs=[replace(spec, goal=(50.0, 50.0)) for spec in TASK.specs]), 0),
        (TASK, 1),
    ]
    for number, (task, seed) in enumerate(others, start=2):
        assert_right(random_outcomes(task, seed), seed, task)
        assert counted.count == number


def test_other_versions_are_simulated(counted: Counted, monkeypatch: pytest.MonkeyPatch):
    random_outcomes(TASK, seed=0)
    monkeypatch.setattr(floor, "simulator_versions", lambda: {"gymnasium": "0.0"})
    random_outcomes(TASK, seed=0)
    assert counted.count == 2


def cut(text: str) -> str:
    return text[:100]


def of_another(text: str) -> str:
    return text.replace('"seed": 0', '"seed": 1')


def shorter(text: str) -> str:
    document = json.loads(text)
    document["episodes"][0][2].pop()
    return json.dumps(document)


def fewer(text: str) -> str:
    document = json.loads(text)
    document["episodes"].pop()
    return json.dumps(document)


def foreign(_: str) -> str:
    return "[]"


@pytest.mark.parametrize("damage", [cut, of_another, shorter, fewer, foreign])
def test_a_damaged_or_foreign_file_is_not_believed_and_replaced(counted: Counted, damage: Callable[[str], str]):
    random_outcomes(TASK, seed=0)
    (path,) = cache_folder().iterdir()
    whole = path.read_text()
    path.write_text(damage(whole))
    assert_right(random_outcomes(TASK, seed=0))
    assert (counted.count, path.read_text()) == (2, whole)


def test_without_a_place_it_is_simulated_every_time(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LEWM_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert_right(random_outcomes(TASK, seed=0))
    assert counted.count == 2


def test_where_it_is_remembered(monkeypatch: pytest.MonkeyPatch):
    assert cache_folder() == Path(os.environ["LEWM_CACHE"])
    monkeypatch.delenv("LEWM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/lewm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "lewm"


# -- the ceiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_name", ["tworoom", "pusht", "reacher", "cube"])
@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.usefixtures("frozen_arithmetic")
def test_recorded_actions_reach_the_frozen_goals(env_name: str, name: str):
    manifest = load_manifest(env_name, name)
    assert manifest.actions is not None
    outcomes = recorded_outcomes(Task(env_name, manifest.first(3), 50), manifest.actions)
    assert [bool(outcome.reached[24]) for outcome in outcomes] == [True] * 3
    assert [outcome.steps for outcome in outcomes] == [50] * 3


def test_nothing_is_done_after_the_recorded_actions():
    """Which in TwoRoom keeps the goal."""
    manifest = load_manifest("tworoom")
    assert manifest.actions is not None
    outcomes = recorded_outcomes(Task("tworoom", manifest.pairs, 50), manifest.actions)
    assert all(outcome.reached[24:].all() for outcome in outcomes)


def test_the_ceiling_is_simulated_once_for_the_same_actions(counted: Counted):
    actions = load_manifest("tworoom").actions
    assert actions is not None
    first = recorded_outcomes(TASK, actions)
    again = recorded_outcomes(TASK, actions)
    assert counted.count == 1
    assert all((one.reached == two.reached).all() for one, two in zip(first, again, strict=True))
    none = recorded_outcomes(TASK, np.zeros_like(actions))
    assert counted.count == 2
    assert sum(outcome.success for outcome in none) == sum(outcome.solved_at_start for outcome in first)
    recorded_outcomes(replace(TASK, budget=5), actions)
    assert counted.count == 3, "a budget may end before the actions do"


def test_actions_of_other_pairs_are_not_believed(tmp_path: Path):
    path = tmp_path / "pairs.json"
    built = build_manifest("tworoom", 2, 25, path)
    read = load_manifest("tworoom", path)
    assert read.actions is not None
    assert built.actions is not None
    np.testing.assert_array_equal(read.actions, built.actions)
    whole = path.read_text()
    path.write_text(whole.replace('"goal": [', '"goal": [1', 1))
    assert load_manifest("tworoom", path).actions is None
    path.write_text(whole)
    (tmp_path / "pairs_actions.npz").write_bytes(b"no actions")
    assert load_manifest("tworoom", path).actions is None
