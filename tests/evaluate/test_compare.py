"""Paired comparison of two evaluations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lewm.errors import DataError, FileError
from lewm.evaluate.results import compare
from lewm.evaluate.stats import Comparison, Rate


# n discordant episodes of which k are the loser's: twice the binomial tail, from tables of the binomial distribution.
@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (8, 2, 0.109375), (3, 3, 1.0), (1, 9, 0.021484375)],
)
def test_mcnemar_is_exact(only_first: int, only_second: int, p_value: float):
    rate = Rate(5, 10)
    assert Comparison(rate, rate, only_first, only_second).p_value == pytest.approx(p_value, rel=1e-12)
    assert Comparison(rate, rate, only_second, only_first).p_value == pytest.approx(p_value, rel=1e-12)


def test_mcnemar_with_many_episodes():
    """Far beyond floats' 2**1023; the normal approximation with a continuity correction is close there."""
    found = Comparison(Rate(0, 1), Rate(0, 1), 1060, 940).p_value
    assert found == pytest.approx(math.erfc((120 - 1) / math.sqrt(2 * 2000)), rel=0.01)


def test_outcomes_are_paired():
    both, first, second, neither = (True, True), (True, False), (False, True), (False, False)
    outcomes = [both] * 4 + [first] * 3 + [second] * 1 + [neither] * 2
    found = Comparison.of(*zip(*outcomes, strict=True))
    assert found == Comparison(Rate(7, 10), Rate(5, 10), 3, 1)
    with pytest.raises(ValueError):
        Comparison.of([True], [True, False])


def results_file(path: Path, outcomes: list[tuple[bool, bool | None]], **changes: Any) -> Path:
    """What a comparison reads of an evaluation's results."""
    episodes = [
        {"index": i, "start": [i, 0.0], "goal": [0.0, i], "success": success, "strict_success": strict}
        for i, (success, strict) in enumerate(outcomes)
    ]
    path.write_text(json.dumps({"environment": "lewm/TwoRoom-v0", "episodes": episodes} | changes))
    return path


A = [(True, True), (True, False), (False, False), (True, None)]
B = [(True, True), (True, True), (True, False), (False, None)]


def test_files_are_compared_by_both_protocols(tmp_path: Path):
    found = compare(results_file(tmp_path / "a.json", A), results_file(tmp_path / "b.json", B))
    assert found == {
        "paper": Comparison(Rate(3, 4), Rate(3, 4), 1, 1),
        "strict": Comparison(Rate(1, 3), Rate(2, 3), 0, 1),
    }


def test_only_the_same_problems_can_be_compared(tmp_path: Path):
    first = results_file(tmp_path / "a.json", A)
    with pytest.raises(DataError, match=r"a\.json is about lewm/TwoRoom-v0, .*b\.json about lewm/Maze-v0"):
        compare(first, results_file(tmp_path / "b.json", A, environment="lewm/Maze-v0"))
    with pytest.raises(DataError, match=r"differ \(4 and 3, not the same\)\. Evaluate both with the same --manifest"):
        compare(first, results_file(tmp_path / "b.json", A[:3]))
    other = json.loads(first.read_text())["episodes"]
    other[1]["goal"] = [7.0, 7.0]
    with pytest.raises(DataError, match=r"4 and 4, not the same"):
        compare(first, results_file(tmp_path / "b.json", [], episodes=other))


def test_other_files_are_refused(tmp_path: Path):
    first, other = results_file(tmp_path / "a.json", A), tmp_path / "b.json"
    with pytest.raises(FileError, match=r"b\.json cannot be read"):
        compare(first, other)
    for text in ("{}", "[]", '{"episodes": [{"index": 0}]}'):
        other.write_text(text)
        with pytest.raises(DataError, match=r"b\.json does not hold the results of `lewm eval`"):
            compare(first, other)
