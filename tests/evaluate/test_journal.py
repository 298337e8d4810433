"""Interrupted evaluations: what was planned is not planned again, and the results are those of a calm one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lewm.config import Config, EvalConfig, PlanConfig
from lewm.errors import DataError, PlanningError
from lewm.evaluate.journal import Journal, Note
from lewm.evaluate.results import Evaluation
from lewm.evaluate.runner import evaluate, open_journal
from lewm.model.world_model import LeWM
from lewm.plan.inputs import Request
from lewm.plan.planner import Planner
from lewm.types import Plan

EPISODES = 5


def make_config(**plan: Any) -> Config:
    settings = PlanConfig(horizon=2, samples=8, iterations=2, elites=2)
    return Config(plan=replace(settings, **plan), eval=EvalConfig(episodes=EPISODES, budget=20), device="cpu")


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


def interrupt(counted: Counted, after: int, out: Path, model: LeWM, config: Config) -> None:
    """An evaluation that ends after ``after`` more plans."""
    counted.made, counted.most = 0, after
    journal = open_journal(out, model, config)
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
    config, out = make_config(**plan), tmp_path / "new" / "result.json"
    calm = evaluate(debug_model, config)
    everything, counted.made = counted.made, 0
    for after in (3, 4):
        interrupt(counted, after, out, debug_model, config)
    journal = open_journal(out, debug_model, config)
    assert (journal.earlier, journal.forgets) == (7, False)
    continued = evaluate(debug_model, config, notes=journal)
    assert counted.made == everything - 7, "known plans are not made again"
    assert_same(calm, continued)
    assert continued.times.to_dict()["plans"] == everything
    assert continued.times.to_dict()["environment_seconds"] > 0
    journal.remove()
    assert list(out.parent.iterdir()) == []


def test_a_word_that_was_cut_off_is_not_read(debug_model: LeWM, counted: Counted, tmp_path: Path):
    config, out = make_config(), tmp_path / "result.json"
    interrupt(counted, 4, out, debug_model, config)
    path = tmp_path / "result.json.partial"
    whole = path.read_bytes()
    lengths = np.cumsum([len(line) for line in whole.splitlines(keepends=True)])
    assert len(lengths) == 5  # the question, and four plans made one by one
    for cut, plans in ((lengths[4] - 1, 3), (lengths[3] + 10, 3), (lengths[1], 1), (lengths[0], 0)):
        path.write_bytes(whole[:cut])
        journal = open_journal(out, debug_model, config)
        assert journal.earlier == plans
        evaluate(debug_model, config, notes=journal)
        journal.close()
        assert open_journal(out, debug_model, config).earlier == 2 * EPISODES, "it was written on behind the last word"
    path.write_bytes(whole[: lengths[2]] + b"\0" * 40 + b"\n" + whole[lengths[3] :])
    assert open_journal(out, debug_model, config).earlier == 2


def test_notes_of_another_question_are_not_used(debug_model: LeWM, counted: Counted, tmp_path: Path):
    config, out = make_config(), tmp_path / "result.json"
    interrupt(counted, 4, out, debug_model, config)

    def known(model: LeWM, config: Config) -> tuple[int, bool]:
        journal = open_journal(out, model, config)
        return journal.earlier, journal.forgets

    assert known(debug_model, config) == (4, False)
    assert known(debug_model, replace(config, eval=replace(config.eval, workers=2))) == (4, False)
    others = [
        replace(config, seed=1),
        replace(config, plan=replace(config.plan, samples=9)),
        replace(config, eval=replace(config.eval, episodes=4)),
        replace(config, eval=replace(config.eval, budget=25)),
        replace(config, eval=replace(config.eval, manifest="strict")),
    ]
    assert [known(debug_model, other) for other in others] == [(0, True)] * len(others)
    before = next(debug_model.parameters()).data.clone()
    next(debug_model.parameters()).data.mul_(1.001)
    assert known(debug_model, config) == (0, True)
    next(debug_model.parameters()).data.copy_(before)

    evaluate(debug_model, others[0], notes=open_journal(out, debug_model, others[0]))
    assert known(debug_model, config) == (0, True), "the other one has taken its place"


def test_what_is_refused_leaves_notes_alone(debug_model: LeWM, counted: Counted, tmp_path: Path):
    config, out = make_config(), tmp_path / "result.json"
    interrupt(counted, 4, out, debug_model, config)
    impossible = replace(config, plan=replace(config.plan, horizon=5))  # of 25 steps, where 20 are allowed
    with pytest.raises(PlanningError, match="does not fit into a budget"):
        evaluate(debug_model, impossible, notes=open_journal(out, debug_model, impossible))
    assert open_journal(out, debug_model, config).earlier == 4


def test_a_journal_that_another_process_writes_is_left_to_it(tmp_path: Path):
    path, note = tmp_path / "result.json.partial", Note(Plan(np.zeros((2, 2), np.float32), 1.5, np.ones(2)), 0.1)
    program = f"""
import sys, numpy as np
from pathlib import Path
from lewm.evaluate.journal import Journal, Note
from lewm.types import Plan
journal = Journal(Path({str(path)!r}), {{"a": 1}})
journal.add({{(0, 0): Note(Plan(np.zeros((2, 2), np.float32), 1.5, np.ones(2)), 0.1)}})
print("written", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "written\n"
    journal = Journal(path, {"a": 1})
    assert journal.earlier == 1
    with pytest.raises(DataError, match=r"Another evaluation is writing .* or name other results with --out"):
        journal.add({(0, 1): note})
    other.kill()
    other.communicate()
    Journal(path, {"a": 1}).add({(0, 1): note})
    assert Journal(path, {"a": 1}).earlier == 2
    # Finished by the other one, and removed, after this one had read it: nothing to go on from.
    journal = Journal(path, {"a": 1})
    path.unlink()
    with pytest.raises(DataError, match="Another evaluation"):
        journal.add({(0, 2): note})


def test_progress_moves_with_every_plan_and_starts_where_the_last_one_stopped(
    debug_model: LeWM, counted: Counted, tmp_path: Path
) -> None:
    config, out, total = make_config(), tmp_path / "result.json", 20 * EPISODES
    seen: list[tuple[int, int]] = []
    evaluate(debug_model, config, lambda *progress: seen.append(progress))
    assert seen == [(done, total) for done in range(10, total + 1, 10)], "plans of ten actions, one by one on a CPU"
    interrupt(counted, 4, out, debug_model, config)
    seen.clear()
    evaluate(debug_model, config, lambda *progress: seen.append(progress), open_journal(out, debug_model, config))
    assert seen == [(done, total) for done in range(50, total + 1, 10)]
