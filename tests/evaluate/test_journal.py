"""Interrupted evaluations: what was planned is not planned again, and the results are those of a calm one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lewm.config import Config, EvalConfig, PlanConfig
from lewm.errors import FileError
from lewm.evaluate.journal import Journal, Note
from lewm.evaluate.results import Evaluation
from lewm.evaluate.runner import evaluate
from lewm.methods.lewm import LeWM
from lewm.plan.inputs import Request
from lewm.plan.planner import Planner
from lewm.presets import preset
from lewm.types import Plan

EPISODES = 5
QUESTION = {"seed": 0}


def make_config(**plan: Any) -> Config:
    settings = PlanConfig(horizon=2, samples=8, iterations=2, elites=2)
    evaluation = EvalConfig(episodes=EPISODES, budget=20)
    return Config(preset("debug").method, plan=replace(settings, **plan), eval=evaluation, device="cpu")


class Counted:
    """Counts the plans that are made, and interrupts when there have been so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.most = 0, 10**9
        plan_many = Planner.plan_many

        def counted(planner: Planner, requests: Sequence[Request]) -> list[Plan]:
            if self.made >= self.most:
                raise KeyboardInterrupt
            self.made += len(requests)
            return plan_many(planner, requests)

        monkeypatch.setattr(Planner, "plan_many", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def interrupt(counted: Counted, after: int, path: Path, model: LeWM, config: Config) -> None:
    """An evaluation that ends after ``after`` more plans."""
    counted.made, counted.most = 0, after
    journal = Journal(path, QUESTION)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, config, notes=journal)
    journal.close()
    counted.made, counted.most = 0, 10**9


def assert_same(one: Evaluation, other: Evaluation) -> None:
    for mine, theirs in zip(one.results, other.results, strict=True):
        np.testing.assert_array_equal(mine.states, theirs.states)
        np.testing.assert_array_equal(mine.reached, theirs.reached)
        for a, b in zip(mine.plans, theirs.plans, strict=True):
            assert a.actions.dtype == b.actions.dtype
            np.testing.assert_array_equal(a.actions, b.actions)
            np.testing.assert_array_equal(a.distances, b.distances)
            assert a.cost == b.cost
    assert one.rates() == other.rates()


@pytest.mark.parametrize("plan", [{}, {"schedule": "shrinking", "warm_start": True}, {"schedule": "soonest"}], ids=str)
def test_an_interrupted_evaluation_ends_as_a_calm_one(
    debug_model: LeWM, counted: Counted, tmp_path: Path, plan: dict[str, Any]
) -> None:
    config, path = make_config(**plan), tmp_path / "new" / "result.json.partial"
    calm = evaluate(debug_model, config)
    everything, counted.made = counted.made, 0
    for after in (3, 4):
        interrupt(counted, after, path, debug_model, config)
    journal = Journal(path, QUESTION)
    assert journal.earlier == 7
    continued = evaluate(debug_model, config, notes=journal)
    assert counted.made == everything - 7, "known plans are not made again"
    assert_same(calm, continued)
    assert continued.times.to_dict()["plans"] == everything
    assert continued.times.to_dict()["environment_seconds"] > 0
    journal.remove()
    assert list(path.parent.iterdir()) == []


def test_a_word_that_was_cut_off_is_not_read(debug_model: LeWM, counted: Counted, tmp_path: Path):
    config, path = make_config(), tmp_path / "result.json.partial"
    interrupt(counted, 4, path, debug_model, config)
    whole = path.read_bytes()
    lengths = np.cumsum([len(line) for line in whole.splitlines(keepends=True)])
    assert len(lengths) == 5  # the question, and four plans made one by one
    for cut, plans in ((lengths[4] - 1, 3), (lengths[3] + 10, 3), (lengths[1], 1), (lengths[0], 0), (5, 0), (0, 0)):
        path.write_bytes(whole[:cut])
        journal = Journal(path, QUESTION)
        assert journal.earlier == plans
        evaluate(debug_model, config, notes=journal)
        journal.close()
        assert Journal(path, QUESTION).earlier == 2 * EPISODES, "it was written on behind the last word"
    path.write_bytes(whole[: lengths[2]] + b"\0" * 40 + b"\n" + whole[lengths[3] :])
    assert Journal(path, QUESTION).earlier == 2


def test_a_plan_that_has_changed_is_made_again(tmp_path: Path):
    path = tmp_path / "result.json.partial"
    journal = Journal(path, QUESTION)
    for index in range(3):
        journal.add({(index, 0): Note(Plan(np.full((2, 2), 0.25, np.float32), 1.5, np.ones(2, np.float32)), 0.1)})
    journal.close()
    first, *lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"0.25", b"0.75", 1)
    path.write_bytes(b"".join([first, *lines]))
    assert list(Journal(path, QUESTION).by_place) == [(0, 0)], "and so is what comes behind it"


@pytest.mark.parametrize("content", [b'{"seed": 1}\n', b"my shopping list", b'{"seed": 0}\0\n'])
def test_notes_of_another_question_are_neither_used_nor_lost(tmp_path: Path, content: bytes):
    path = tmp_path / "result.json.partial"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"notes of another evaluation.*or remove the file, or name other results"):
        Journal(path, QUESTION)
    assert path.read_bytes() == content


def test_numbers_that_are_none_are_valid_json(tmp_path: Path):
    path, distances = tmp_path / "result.json.partial", np.array([1.5, np.nan, np.inf], np.float32)
    journal = Journal(path, QUESTION)
    journal.add({(0, 0): Note(Plan(np.zeros((2, 2), np.float32), np.inf, distances), 0.1)})
    journal.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    plan = Journal(path, QUESTION).by_place[0, 0].plan
    assert np.isnan(plan.cost)
    np.testing.assert_array_equal(plan.distances, np.array([1.5, np.nan, np.nan], np.float32))


def test_progress_moves_with_every_plan_and_starts_where_the_last_one_stopped(
    debug_model: LeWM, counted: Counted, tmp_path: Path
) -> None:
    config, path, total = make_config(), tmp_path / "result.json.partial", 20 * EPISODES
    seen: list[tuple[int, int]] = []
    evaluate(debug_model, config, lambda *progress: seen.append(progress))
    assert seen == [(done, total) for done in range(10, total + 1, 10)], "plans of ten actions, one by one on a CPU"
    interrupt(counted, 4, path, debug_model, config)
    seen.clear()
    evaluate(debug_model, config, lambda *progress: seen.append(progress), Journal(path, QUESTION))
    assert seen == [(done, total) for done in range(50, total + 1, 10)]
