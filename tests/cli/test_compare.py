"""`lewm compare`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lewm.envs.registry import env_names, pair_kinds

Lewm = Callable[..., Any]  # the fixture: arguments -> what came of it
Results = Callable[..., Path]  # the fixture: name, outcomes and what is special -> a results file

SOLVED, FAILED = (True, True), (False, False)


def test_evaluations_of_a_model(lewm: Lewm, debug_run: Path, tmp_path: Path):
    """Real results, of unequal questions: side by side, and never a p-value between them."""
    paths = {name: tmp_path / f"{name}.json" for name in ("first", "mppi", "fewer", "longer")}
    options: dict[str, list[object]] = {"first": [], "mppi": ["--solver", "mppi"], "fewer": ["--eval.episodes", 1]}
    options["longer"] = ["--eval.budget", 15]
    for name, out in paths.items():
        assert lewm("eval", debug_run, "--device", "cpu", "--out", out, *options[name]).status == 0
    assert json.loads(paths["mppi"].read_text())["command"] == f"lewm eval {debug_run} --plan.solver mppi"
    answer = lewm("compare", paths["first"], paths["mppi"])
    assert (answer.status, answer.err) == (0, "")
    for part in ("tworoom: 2 pairs, 10 actions", "random actions", "recorded actions", "cem, whole", "McNemar", "Holm"):
        assert part in answer.out
    assert "lewm (mppi) paper" in answer.out
    assert "at equal planning arithmetic" in answer.out
    answer = lewm("compare", paths["first"], paths["fewer"], paths["longer"])
    assert answer.status == 0
    assert "pair by pair" not in answer.out
    assert "McNemar" not in answer.out
    assert "(2 and 1, not the same)" in answer.out
    assert "first.json allows 10 actions" in answer.out
    assert "--eval.budget" in answer.out


def test_everything_is_written(lewm: Lewm, results: Results, tmp_path: Path):
    results("x/pldm", [SOLVED, FAILED], method="pldm")
    first = results("lewm", [SOLVED, SOLVED])
    outputs = {"--markdown": "page.md", "--json": "all.json", "--figure": "figure.png"}
    options = [part for flag, name in outputs.items() for part in (flag, tmp_path / "new" / name)]
    for _ in range(2):  # what it wrote before may be written anew
        answer = lewm("compare", first, tmp_path / "x", "--by", "room", *options)
        assert (answer.status, answer.err) == (0, "")
    assert "by room" in answer.out
    assert all(name in answer.out for name in outputs.values())
    assert "lewm eval x/pldm" in (tmp_path / "new" / "all.json").read_text()
    assert "| pldm | 50.0 [" in (tmp_path / "new" / "page.md").read_text()
    with Image.open(tmp_path / "new" / "figure.png") as figure:
        assert figure.width > 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "There is nothing to compare. usage: lewm compare [NAME=]FILE [...]"),
        (("no.json",), "no.json cannot be read"),
        (("a.json", "./a.json"), "a.json is given twice. Leave one of them out."),
        (("empty",), "The folder empty holds no results of `lewm eval`."),
        (("notes.md",), "notes.md cannot be read"),
        (("a.json", "--by", "grsap"), "Unknown kind of pairs 'grsap'."),
        (("a.json", "--markdown", "notes.md"), "notes.md exists and is not a page of `lewm compare`"),
        (("a.json", "--json", "a.json"), "a.json is what is read."),
        (("a.json", "--json", "b.json"), "b.json exists and is not a comparison; it stays as it is."),
        (("a.json", "--figure", "figure.gif"), "whose name ends in .png or .svg or .pdf. Rename it."),
        (("a.json", "--figure", "empty"), "whose name ends in .png"),
    ],
)
def test_mistakes_are_explained_and_change_nothing(
    lewm: Lewm, results: Results, tmp_path: Path, arguments: tuple[str, ...], message: str
):
    results("a", [SOLVED])
    results("b", [FAILED])
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("# Mine\n")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    lewm("compare", *arguments).assert_refused(message)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("world", env_names())
def test_help_names_what_tells_pairs_apart(lewm: Lewm, world: str):
    said = lewm("compare", "--help").out
    assert world in said
    assert all(key in said for key in pair_kinds(world))
