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
from lewm.evaluate.floor import cache_folder, random_outcomes
from lewm.evaluate.manifest import load_manifest
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
