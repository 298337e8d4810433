"""Evaluations side by side: what is tested, what is not, and what is said of both."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lewm.errors import ConfigError, DataError, FileError
from lewm.evaluate.comparison import CEILING, FLOOR, compare, nearest_imagined, paired, rates, time_ratio, to_dict
from lewm.evaluate.comparison_figure import write_figure
from lewm.evaluate.comparison_files import FIGURE, MARK, Entry, read_entries, read_entry
from lewm.evaluate.comparison_tables import markdown, tables
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.stats import Comparison, Rate, holm
from lewm.files import HEAD_BYTES

Outcomes = list[tuple[bool, bool | None]]  # by the paper's protocol and the strict one
Results = Callable[..., Path]  # the fixture: name, outcomes and what is special -> a results file


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


def test_holm_takes_the_number_of_tests_into_account():
    """0.01 of three counts three times, the next twice; and none may fall behind a smaller one."""
    assert holm([0.03, 0.01, 0.04]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.2]) == [0.2]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


A = [(True, True), (True, False), (False, False), (True, None)]
B = [(True, True), (True, True), (True, False), (False, None)]
C = [(False, False), (False, False), (False, False), (False, None)]


def read(results: Results, name: str, outcomes: Outcomes, **changes: Any) -> Entry:
    return read_entry(results(name, outcomes, **changes), name)


def test_evaluations_are_paired_by_both_protocols(results: Results):
    first, second = read(results, "a", A), read(results, "b", B)
    assert paired(first, second, "paper") == Comparison(Rate(3, 4), Rate(3, 4), 1, 1)
    assert paired(first, second, "strict") == Comparison(Rate(1, 3), Rate(2, 3), 0, 1)


def test_an_episode_that_counts_in_one_of_them_only_is_left_out(results: Results):
    other = read(results, "b", [(True, None), *B[1:]])
    assert paired(read(results, "a", A), other, "strict") == Comparison(Rate(0, 2), Rate(1, 2), 0, 1)


def test_only_answers_to_the_same_question_are_paired(results: Results):
    first = read(results, "a", A)
    with pytest.raises(DataError, match=r"a\.json is about lewm/TwoRoom-v0, .*b\.json about lewm/PushT-v0: nothing"):
        paired(first, read(results, "b", A, environment="lewm/PushT-v0"), "paper")
    with pytest.raises(DataError, match=r"differ \(4 and 3, not the same\)\. Evaluate both with the same --manifest"):
        paired(first, read(results, "c", A[:3]), "paper")
    with pytest.raises(DataError, match=r"4 and 4, not the same"):
        paired(first, read(results, "d", A, moved=1), "paper")
    with pytest.raises(
        DataError, match=r"a\.json allows 50 actions, .*e\.json 100: .* Evaluate both with the same --eval"
    ):
        paired(first, read(results, "e", A, budget=100), "paper")


def test_unequal_budgets_and_pairs_get_no_p_value(results: Results):
    """They stand side by side, and a sentence says why there is no test."""
    entries = [read(results, "a", A), read(results, "b", B, budget=100), read(results, "c", A[:2])]
    compared = compare(entries)
    assert [[entry.name for entry in contest.entries] for contest in compared.contests] == [["a"], ["b"], ["c"]]
    assert compared.tests == ()
    budgets, pairs = compared.notes
    assert "No test of b against a." in budgets
    assert "more actions reach more goals" in budgets
    assert "(4 and 2, not the same)" in pairs


def test_where_no_episode_counts_nothing_is_tested(results: Results):
    """The strict protocol may leave none."""
    paths = [results(name, [(True, None), (name == "two", None)]) for name in ("one", "two", "three")]
    compared = compare(read_entries(list(map(str, paths))))
    assert [test.protocol for test in compared.tests] == ["paper", "paper"]
    assert "corrected for the 2 tests by one protocol" in markdown(compared)


def test_a_contest_says_which_pairs_it_is_about(results: Results):
    """Those of two manifests may be as many."""
    entries = [read(results, "a", A), read(results, "b", A, moved=1, manifest="pairs/strict.json")]
    titles = [contest.title for contest in compare(entries).contests]
    assert titles == ["tworoom: 4 pairs, 50 actions", "tworoom: 4 strict pairs, 50 actions"]


def test_every_other_is_tested_against_the_first_of_its_contest(results: Results):
    many = [(True, True)] * 10, [(False, False)] * 10, [(True, True)] * 4 + [(False, False)] * 6
    entries = [read(results, name, outcomes) for name, outcomes in zip("abc", many, strict=True)]
    entries.append(read(results, "d", A, environment="lewm/PushT-v0"))
    compared = compare(entries)
    found = {(test.entry.name, test.protocol): test for test in compared.tests}
    assert set(found) == {(name, protocol) for name in "bc" for protocol in ("paper", "strict")}
    assert found["b", "paper"].found == Comparison(Rate(10, 10), Rate(0, 10), 10, 0)
    p_b, p_c = 2 / 2**10, 2 / 2**6
    assert found["b", "paper"].adjusted == pytest.approx(2 * p_b)
    assert found["c", "strict"].adjusted == pytest.approx(p_c)
    assert not compared.notes


def test_only_worlds_that_nothing_shares_are_said_to_be_apart(results: Results):
    compared = compare([read(results, "a", A), read(results, "b", A, environment="lewm/PushT-v0")])
    assert compared.notes == (
        "Evaluations of different worlds are shown side by side, and not tested against each other.",
    )


def test_floor_and_ceiling_are_those_of_the_pairs(results: Results):
    (contest,) = compare([read(results, "a", A, recorded=False), read(results, "b", B)]).contests
    bounds = {name: rates(outcomes) for name, outcomes in contest.bounds().items()}
    assert bounds == {
        "random actions": {"paper": Rate(1, 4), "strict": Rate(0, 3)},
        "recorded actions": {"paper": Rate(4, 4), "strict": Rate(3, 3)},
    }
    (alone,) = compare([read(results, "c", A, recorded=False)]).contests
    assert list(alone.bounds()) == ["random actions"]


def test_times_are_compared_on_one_device_and_of_planners(results: Results):
    first, slower = read(results, "a", A, seconds=0.5), read(results, "b", A, seconds=2.0)
    assert time_ratio(slower, first) == 4
    assert time_ratio(read(results, "c", A, device="NVIDIA H200"), first) is None
    acts = read(results, "d", A, plans=0)
    assert (acts.planner, acts.seconds_per_plan, time_ratio(acts, first), time_ratio(first, acts)) == (None,) * 4


def test_equal_arithmetic_is_that_of_an_episode(results: Results):
    """Twice as many plans at half the price; 5 % more is alike, 20 % is not."""
    given = {"a": (1e12, 8), "b": (0.5e12, 16), "c": (1.05e12, 8), "d": (1.2e12, 8), "e": (None, 8)}
    entries = [read(results, name, A, flops=flops, plans=plans) for name, (flops, plans) in given.items()]
    (contest,) = compare(entries).contests
    assert [[entry.name for entry in group] for group in contest.equal_arithmetic()] == [["a", "b", "c"]]


def test_pairs_are_told_apart(results: Results):
    """Of these four, the first two lead into the other room."""
    places = {0: ((50.0, 50.0), (150.0, 50.0)), 1: ((150.0, 50.0), (50.0, 50.0))}
    compared = compare([read(results, "a", A, places=places, costs=[3.0, 1.0])], ["room"])
    (kinds,) = compared.kinds
    assert kinds.places == {"other room": [0, 1], "same room": [2, 3]}
    outcomes = compared.contests[0].first.outcomes
    assert rates(outcomes, kinds.places["same room"]) == {"paper": Rate(1, 2), "strict": Rate(0, 1)}
    assert nearest_imagined(compared.contests[0].first, [0, 1]) == 1.0
    for table in tables(compared):
        if "by room" in table.title:
            assert table.header == ("", "", "other room (2)", "same room (2)")
            assert table.rows[0] == ("a", "paper", "100.0 [34.2, 100.0]", "50.0 [9.5, 90.5]")
            assert table.rows[-1] == ("a", "nearest imagined", "1", "1")
            break
    else:
        pytest.fail("there is a table of the kinds")


@pytest.mark.parametrize(("world", "key"), [("reacher", "torques"), ("cube", "grasp"), ("pusht", "block")])
def test_kinds_of_frozen_pairs_are_known(results: Results, world: str, key: str):
    """Torques are read from what is recorded with the pairs."""
    manifest = load_manifest(world)
    places = {pair.index: (pair.start, pair.goal) for pair in manifest.pairs[:20]}
    entry = read(results, world, [(True, True)] * 20, places=places, environment=manifest.environment)
    (kinds,) = compare([entry], [key]).kinds
    assert len(kinds.places) > 1
    assert "unknown" not in kinds.places
    assert sorted(place for found in kinds.places.values() for place in found) == list(range(20))


def test_torques_of_pairs_that_are_nobodys_are_unknown(results: Results):
    places = dict.fromkeys(range(4), ((0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0)))
    entry = read(results, "a", A, environment="lewm/Reacher-v0", places=places)
    assert compare([entry], ["torques"]).kinds[0].places == {"unknown": [0, 1, 2, 3]}


def test_what_tells_pairs_apart_must_be_known_somewhere(results: Results):
    entries = [read(results, "a", A), read(results, "b", A, environment="lewm/PushT-v0")]
    assert [kinds.contest.world for kinds in compare(entries, ["room", "block"]).kinds] == ["tworoom", "pusht"]
    with pytest.raises(
        ConfigError, match=r"Unknown kind of pairs 'rooms'\. Did you mean 'room'\?.*These are of tworoom, p"
    ):
        compare(entries, ["rooms"])


def test_the_document_can_be_counted_again(results: Results):
    entries = [read(results, "a", A), read(results, "b", B)]
    document = json.loads(json.dumps(to_dict(compare(entries, ["room"]))))
    (contest,) = document["contests"]
    first, second = contest["entries"]
    assert first["outcomes"] == {"paper": "1101", "strict": "100-"}
    assert second["success"]["paper"]["successes"] == second["outcomes"]["paper"].count("1")
    assert contest["bounds"]["random actions"]["outcomes"]["paper"] == "1000"
    assert [test["p"] for test in contest["tests"]] == [1.0, 1.0]
    assert contest["by"]["room"]["same room"]["a"]["paper"]["episodes"] == 4


def test_a_page_has_every_table_and_no_broken_row(results: Results):
    entries = [
        read(results, "a|b", A),
        read(results, "b", B),
        read(results, "c", C, environment="lewm/PushT-v0", plans=0),
    ]
    page = markdown(compare(entries, ["room"]))
    assert page.startswith(MARK)
    lines = [line.replace("\\|", "") for line in page.splitlines() if line.startswith("|")]
    assert {"### Success by world", "### tworoom: 4 pairs, 50 actions: by room"} <= set(page.splitlines())
    blocks = [
        list(group) for alike, group in itertools.groupby(page.splitlines(), lambda line: line[:1] == "|") if alike
    ]
    assert all(len({line.replace("\\|", "").count("|") for line in block}) == 1 for block in blocks)
    assert any("| acts |" in line for line in lines)
    assert "Methods that act have no planning" in page


# -- files ---------------------------------------------------------------------------------------------------------


def test_files_of_earlier_versions_are_read(results: Results):
    """Without a method's name, arithmetic, recorded actions or a command."""
    path = results("old", A, recorded=False)
    document = json.loads(path.read_text())
    del document["config"]["method"], document["flops_per_plan"], document["command"], document["question"]
    path.write_text(json.dumps(document))
    entry = read_entry(path)
    assert (entry.method, entry.planner, entry.recorded, entry.flops_per_episode) == ("lewm", "cem, whole", None, None)
    assert entry.digest is entry.command is None


def test_a_file_without_the_floor_is_compared_without_it(results: Results):
    """What somebody else wrote, or cut."""
    paths = [results(name, A) for name in ("one", "two")]
    for path in paths:
        document = json.loads(path.read_text())
        document["episodes"] = [
            {key: value for key, value in each.items() if "random" not in key} for each in document["episodes"]
        ]
        path.write_text(json.dumps(document))
    other = results("other", A, environment="lewm/PushT-v0")
    compared = compare(read_entries([*map(str, paths), str(other)]))
    assert [list(contest.bounds()) for contest in compared.contests] == [[CEILING], [FLOOR, CEILING]]
    assert "| random actions | – | " in markdown(compared)


def test_other_files_are_refused(results: Results, tmp_path: Path):
    other = tmp_path / "other.json"
    with pytest.raises(FileError, match=r"other\.json cannot be read"):
        read_entries([str(other)])
    whole = json.loads(results("a", A).read_text())
    broken = [{}, [], 3, {"episodes": [{"index": 0}]}, whole | {"episodes": []}, whole | {"times": None}]
    broken.append(whole | {"episodes": [whole["episodes"][0] | {"success": "yes"}]})
    for document in broken:
        other.write_text(json.dumps(document))
        with pytest.raises(DataError, match=r"other\.json does not hold the results of `lewm eval`"):
            read_entries([str(other)])


def test_a_folder_stands_for_the_results_in_it(results: Results, tmp_path: Path):
    for name in ("x/one", "x/two"):
        results(name, A, method=name[2:])
    (tmp_path / "x" / "config.json").write_text("{}")
    assert [entry.name for entry in read_entries([str(tmp_path / "x")])] == ["one", "two"]
    first = read_entries([str(tmp_path / "x" / "two.json"), str(tmp_path / "x")])
    assert [entry.name for entry in first] == ["two", "one"], "what is named is not taken a second time"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no results of `lewm eval`. usage: lewm compare"):
        read_entries([str(tmp_path / "empty")])


def test_nothing_and_duplicates_are_refused(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"There is nothing to compare\. usage: lewm compare \[NAME=\]FILE"):
        read_entries([])
    path = results("a", A)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.json is given twice"):
        read_entries([str(path), "a.json"])
    shutil.copy(path, tmp_path / "copy.json")
    with pytest.raises(ConfigError, match=r"copy\.json has the same results as .*a\.json\. Leave one of them out"):
        read_entries([str(path), "copy.json"])


def test_names_tell_evaluations_apart(results: Results, tmp_path: Path):
    def names(*sources: object) -> list[str]:
        return [entry.name for entry in read_entries([str(source) for source in sources])]

    one, two = results("runs/one/step_5/paper", A), results("runs/two/step_5/paper", A)
    assert names(one, results("c", A, method="gcbc")) == ["lewm", "gcbc"]
    assert names(one, two) == ["lewm (one)", "lewm (two)"]
    assert names(f"ours={one}", two) == ["ours", "lewm (two)"]
    assert names(one, results("other", B, environment="lewm/PushT-v0")) == ["lewm", "lewm"], "of two worlds"
    assert names(f"ours={tmp_path / 'runs'}") == ["ours (one)", "ours (two)"]
    odd = results("a=b", A)
    assert names(odd, one)[0] == "lewm (a=b)", "a file may have such a name"


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_figure_is_of_the_kind_that_its_name_says(results: Results, tmp_path: Path, ending: str):
    entries = [read(results, "a", A), read(results, "b", C), read(results, "c", B, environment="lewm/PushT-v0")]
    path = tmp_path / f"figure.{ending}"
    write_figure(path, compare(entries))
    assert FIGURE.fits(path.read_bytes()[:HEAD_BYTES])
    before = path.read_bytes()
    write_figure(path, compare(entries))
    assert path.read_bytes() == before, "the same figure is the same file"
    if ending == "svg":
        text = path.read_text()
        assert all(
            label in text for label in ("tworoom", "pusht", "random actions", "recorded actions", "strict protocol")
        )
