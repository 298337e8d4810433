"""runs/paper: the comparison from data to page, at toy size; and the page from results that were made up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lewm.cli.train import run as train
from lewm.errors import LewmError
from lewm.methods.registry import METHODS

PAPER = Path(__file__).parents[2] / "runs" / "paper"
Results = Callable[..., Path]  # the fixture: name, outcomes and what is special -> a results file
SOLVED, FAILED = (True, True), (False, False)
CARD = PAPER.parents[1] / "pretrained" / "tworoom" / "config.json"
AS_THE_PAPER = {"eval.episodes": 200, "eval.manifest": "paper"}
SECTIONS = ("paper", "summary", "commands")
BOUNDS = ("random actions", "recorded actions")
TOY_ROWS = """
lewm | lewm | plans | |
pldm | pldm | plans | |
gcbc | gcbc | acts | --method.features @lewm |
"""
TOY = {
    "WORLDS": "tworoom",
    "PRESET": "debug",
    "EPISODES": "8",
    "RESOLUTION": "28",
    "STEPS": "8",
    "EVAL_EPISODES": "2",
    "TUNING_PAIRS": "2",
    "DEVICE": "cpu",
}


class Script:
    """comparison.sh in a folder of its own."""

    def __init__(self, folder: Path, rows: str = TOY_ROWS) -> None:
        self.folder = folder
        self.page = folder / "docs" / "comparison.md"
        (folder / "tables").mkdir()
        for name in ("worlds", "planners"):
            shutil.copy(PAPER / f"{name}.tsv", folder / "tables")
        (folder / "tables" / "methods.tsv").write_text(rows)

    def __call__(self, **settings: str) -> subprocess.CompletedProcess[str]:
        places = {"DATA": "data", "OUT": "out", "RECORD": "record", "TABLES": "tables"}
        places = {name: str(self.folder / place) for name, place in places.items()} | {"PAGES": str(self.page)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **TOY, **places, **settings}
        command = ["bash", str(PAPER / "comparison.sh")]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def done(self, **settings: str) -> list[str]:
        """The commands that a run of it took."""
        answer = self(**settings)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return [line[2:] for line in (answer.stderr + answer.stdout).splitlines() if line.startswith("+ ")]


def kinds(commands: list[str]) -> list[str]:
    """What commands are of: the verb of `lewm`, or the program."""
    return [words[1] if (words := line.split())[0] == "lewm" else words[0] for line in commands]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, list[str]]:
    """The script after all of its stages, and the commands that they took."""
    script = Script(tmp_path_factory.mktemp("paper"))
    return script, script.done(PLANNERS="tuned")


@pytest.mark.slow
def test_every_number_is_made_from_data_to_page(rehearsed: tuple[Script, list[str]]):
    script, commands = rehearsed
    made = kinds(commands)
    assert [made.count(verb) for verb in ("collect", "train", "eval", "compare")] == [1, 3, 3 + 2, 2]
    page = script.page.read_text()
    assert re.search(r"\| lewm \| \d+\.0 \[.*\] \(2, icem, shrinking\)<br>published: 87 \(paper\) \|", page)
    assert re.search(r"\| gcbc \| \d+\.0 \[.*\] \(2\)<br>", page)
    for bound in ("random actions", "recorded actions"):
        assert f"\n| {bound} | " in page
    out = script.folder / "out" / "tworoom"
    assert f"`lewm eval {out}/runs/pldm --env tworoom`" in page
    assert f"--out {out}/runs/gcbc --device cpu --method.features {out}/runs/lewm --train.steps 8`" in page
    for block in ("paper", "best"):
        assert script.page.with_name(f"comparison_{block}.png").is_file()
        assert json.loads((script.folder / "record" / f"results_{block}.json").read_text())["contests"]


@pytest.mark.slow
def test_what_is_there_is_not_made_again(rehearsed: tuple[Script, list[str]]):
    """And a planner is chosen on tuning pairs, by as many tries as there are planners, where there is a choice."""
    script, _ = rehearsed
    before = script.page.read_text()
    assert kinds(script.done(PLANNERS="tuned")) == ["compare", "compare", "python"]
    assert script.page.read_text() == before
    (script.folder / "out" / "tworoom" / "best" / "lewm.json").unlink()
    commands = script.done(PLANNERS="paper tuned", METHODS="lewm", BLOCKS="best")
    tuning = [line for line in commands if "/tuning/" in line and line.startswith("lewm eval")]
    assert len(tuning) == 2
    assert all("tworoom_tuning.json" in line for line in tuning)
    assert re.search(r"\| lewm \| (\*\*)?\d of 2(\*\*)? \| (\*\*)?\d of 2(\*\*)? \| – \|", script.page.read_text())


@pytest.mark.slow
def test_a_page_has_what_was_found_elsewhere(rehearsed: tuple[Script, list[str]]):
    """Results and commands are kept in one archive; models are not, so whoever asks for these trains them."""
    script, _ = rehearsed
    script.done(PLANNERS="tuned", STAGES="page")
    before, archive = script.page.read_text(), (script.folder / "record" / "evaluations.tar.xz").read_bytes()
    shutil.rmtree(script.folder / "out")
    assert kinds(script.done(PLANNERS="tuned", STAGES="page")) == ["compare", "compare", "python"]
    assert script.page.read_text() == before
    assert (script.folder / "record" / "evaluations.tar.xz").read_bytes() == archive
    assert kinds(script.done(METHODS="lewm", BLOCKS="paper", STAGES="train eval", DRY="1")) == ["train"]
    assert kinds(script.done(METHODS="lewm", BLOCKS="paper", STAGES="train eval")) == ["train", "eval"]


def test_nothing_is_done_when_dry(tmp_path: Path):
    """All worlds and rows of the real tables, as one can read before a night of work begins."""
    script = Script(tmp_path, (PAPER / "methods.tsv").read_text())
    worlds = "tworoom pusht reacher cube"
    commands = script.done(DRY="1", WORLDS=worlds, DEMOS="demos.npz", BLOCKS="paper best equal", SEEDS="0 1", PRESET="")
    rows = [line for line in (PAPER / "methods.tsv").read_text().splitlines() if line and line[0] != "#"]
    trained = {line.split("--out ")[1].split()[0] for line in commands if " train " in line}
    assert len(trained) == 4 * len(rows) * 2
    assert sum(" collect " in line for line in commands) == 4
    assert any("--fixed-flops 3.1e12 --plan.samples 12" in line for line in commands)
    assert not any("@" in line for line in commands)
    of_pldm = [line for line in commands if "cube/runs/pldm-similarity" in line and " train " in line]
    assert all("--train.steps 50000 " in line for line in of_pldm)
    assert len(of_pldm) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tables"]


def test_results_that_are_older_than_their_model_are_asked_for_again(tmp_path: Path):
    """It was trained anew with other settings: `lewm eval` says whether they still hold."""
    script, world = Script(tmp_path), tmp_path / "out" / "tworoom"
    done, results = world / "runs" / "lewm.done", world / "paper" / "lewm.json"
    for path in (done, results):
        path.parent.mkdir(parents=True)
        path.touch()
    asked = {"DRY": "1", "STAGES": "eval", "METHODS": "lewm", "BLOCKS": "paper"}
    (command,) = script.done(**asked)
    results.with_name("lewm.json.done").write_text(command + "\n")
    for ages, expected in (((100, 200), 0), ((200, 100), 1)):
        for path, seconds in zip((done, results), ages, strict=True):
            os.utime(path, (seconds, seconds))
        assert len(script.done(**asked)) == expected


@pytest.mark.parametrize("settings", [{"EVAL_EPISODES": "3"}, {"DEVICE": "cuda"}])
def test_results_of_another_question_are_asked_for_again(tmp_path: Path, settings: dict[str, str]):
    """As after a rehearsal with fewer pairs."""
    script, paper = Script(tmp_path), tmp_path / "out" / "tworoom" / "paper"
    paper.mkdir(parents=True)
    asked = {"DRY": "1", "STAGES": "eval", "METHODS": "lewm", "BLOCKS": "paper"}
    (command,) = script.done(**asked)
    (paper / "lewm.json").touch()
    (paper / "lewm.json.done").write_text(command + "\n")
    assert script.done(**asked) == []
    (other,) = script.done(**asked, **settings)
    assert other != command


def test_a_run_that_is_older_than_the_model_whose_features_it_reads_is_asked_for_again(tmp_path: Path):
    script, runs = Script(tmp_path), tmp_path / "out" / "tworoom" / "runs"
    runs.mkdir(parents=True)
    asked = {"STAGES": "train", "METHODS": "gcbc"}
    eyes, mine = script.done(DRY="1", **asked)
    for ages, expected in (((100, 200), []), ((200, 100), [mine])):
        for name, command, seconds in zip(("lewm", "gcbc"), (eyes, mine), ages, strict=True):
            (runs / name).mkdir(exist_ok=True)
            (runs / f"{name}.done").write_text(command + "\n")
            os.utime(runs / f"{name}.done", (seconds, seconds))
        assert script.done(DRY="1", **asked) == expected


def test_an_answer_that_is_taken_over_appears_whole(tmp_path: Path):
    """A kill while it is copied must not leave a part of it where results are looked for."""
    script, world = Script(tmp_path), tmp_path / "out" / "tworoom"
    (world / "paper").mkdir(parents=True)
    (world / "paper" / "lewm.json").touch()
    commands = script.done(DRY="1", STAGES="eval", METHODS="lewm", BLOCKS="best", PLANNERS="paper")
    (copied,) = (line.split()[-1] for line in commands if line.startswith("install"))
    assert not copied.endswith(".json")
    assert f"mv {copied} {world}/best/lewm.json" in commands


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"WORLDS": "tworoom maze"}, "maze is not in"),
        ({"METHODS": "lewn"}, "methods.tsv, which has: lewm pldm gcbc"),
        ({"PLANNERS": "best"}, "which has: paper tuned shrinking"),
        ({"BLOCKS": "paper strict"}, "BLOCKS has strict; there are: paper best equal"),
        ({"STAGES": "train draw", "METHODS": "lewm", "DRY": "1"}, "STAGES has draw; there are: data train eval page"),
        ({"WORLDS": "pusht", "DRY": "1"}, "DEMOS: is not set: name the demonstrations"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, settings: dict[str, str], message: str):
    answer = Script(tmp_path)(**settings)
    assert answer.returncode == 1
    assert message in answer.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tables"]


def page(folder: Path, results: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PAPER / "page.py"), "write", str(results), "--page", str(folder / "page.md"), *more]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_page_has_every_cell_with_its_interval(results: Results, tmp_path: Path):
    """A world more, a seed more, a method that acts, and one that differs from the first."""
    for world, env in (("tworoom", "lewm/TwoRoom-v0"), ("reacher", "lewm/Reacher-v0")):
        places = {0: ((0.0, 0.0, 0.1, 0.0), (1.0, 1.0, 0.0, 0.0))} if world == "reacher" else None
        rest = dict.fromkeys(range(1, 12), ((0.0, 0.0, 2.0, 0.0), (1.0, 1.0, 0.0, 0.0)))
        special = {"environment": env, "places": places and places | rest}
        results(f"r/{world}/paper/lewm", [SOLVED] * 12, **special)
        results(f"r/{world}/paper/lewm.seed1", [SOLVED] * 11 + [FAILED], **special)
        results(f"r/{world}/paper/gcbc", [FAILED] * 12, method="gcbc", plans=0, **special)
    results("r/tworoom/best/lewm", [SOLVED] * 12)
    done = page(tmp_path, tmp_path / "r")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.md").read_text()
    seeds = "100.0 [75.8, 100.0] (12)<br>seed 1: 91.7 [64.6, 98.5] (12)<br>published: 87 (paper)"
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in text.split("<!-- end paper")[0].splitlines()}
    assert (rows["lewm"][0], rows["lewm"][2]) == (seeds, seeds.replace("87", "86"))
    not_evaluated = "–<br>published: 75 (paper, DINOv2)"
    assert rows["gcbc"][:2] == ["0.0 [0.0, 24.2]† (12)<br>published: 100 (paper, DINOv2)", not_evaluated]
    assert rows["gcbc"][2] == "0.0 [0.0, 24.2]† (12)"
    assert rows["dino_wm-tokens"] == ["–", "–", "–", "– |"]
    assert "\n– has not been evaluated yet.\n" in text, "and all is against the row lewm"
    assert "| lewm | 100.0 [75.8, 100.0] (12, cem, whole)<br>" in text, "in the block best"
    assert "|  | starts at rest (1 pairs) | starts moving (11 pairs) |" in text
    assert "| gcbc | acts | acts |" in text
    assert "`lewm eval r/reacher/paper/gcbc`" in text
    assert page(tmp_path, tmp_path / "r").returncode == 0
    assert (tmp_path / "page.md").read_text() == text, "written a second time, it is the same"


def test_the_shipped_model_stands_in_for_the_first_row(results: Results, tmp_path: Path):
    """With what its card says, until it is evaluated here; until then nobody is tested against it."""
    results("r/tworoom/paper/pldm", [SOLVED] * 12)
    results("r/tworoom/paper/gcbc", [FAILED] * 12, method="gcbc", plans=0)
    (tmp_path / "page.md").write_text("".join(f"<!-- begin {n} -->\n<!-- end {n} -->\n" for n in SECTIONS))
    assert page(tmp_path, tmp_path / "r").returncode == 0
    text = (tmp_path / "page.md").read_text()
    (of_card,) = (each for each in json.loads(CARD.read_text())["evaluations"] if each["settings"] == AS_THE_PAPER)
    successes, total = of_card["rates"]["policy"]
    cell = (
        rf"\| lewm \| {100 * successes / total:.1f} \[[\d.]+, [\d.]+\] \({total}, card\)<br>published: 87 \(paper\) \|"
    )
    assert len(re.findall(cell, text)) == 2, "in the whole table and in the summary"
    assert "| tworoom | lewm | card | `lewm eval tworoom --eval.episodes 200` |" in text
    assert "no lewm in tworoom pair by pair, so nothing is marked there." in text
    summary = text.partition("begin summary -->\n")[2].partition("\n<!-- end")[0].splitlines()
    assert [line.split(" | ")[0] for line in summary[2:]] == [f"| {row}" for row in ("lewm", "pldm", "gcbc", *BOUNDS)]
    assert summary[0] == "|  | tworoom |"
    assert "†" not in text


def test_tries_are_shown_beside_their_row(results: Results, tmp_path: Path):
    """On tuning pairs and on the frozen ones; and they are no rows of the comparison."""
    for name, solved in (("gcbc", 3), ("gcbc-fast", 2)):
        outcomes = [SOLVED] * solved + [FAILED] * (4 - solved)
        results(f"r/tworoom/paper/{name}", outcomes, method="gcbc", plans=0)
    results("r/tworoom/tuning/paper/gcbc-fast", [SOLVED, FAILED], method="gcbc", plans=0)
    assert page(tmp_path, tmp_path / "r").returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert "| gcbc | – | – | – | 3 of 4 |\n| gcbc-fast: gcbc with `--train.lr 1e-3` | 1 of 2 | – | – | 2 of 4 |" in text
    assert "| tworoom | gcbc-fast | tuning, paper | `lewm eval r/tworoom/tuning/paper/gcbc-fast` |" in text
    assert "gcbc-fast" not in text.split("<!-- begin tried -->")[0]


def test_only_tests_against_the_first_row_are_marked(results: Results, tmp_path: Path):
    """Where that row is not there yet, or has answered about other pairs, others are tested against one another."""
    results("r/tworoom/paper/pldm", [SOLVED] * 12, method="pldm")
    results("r/tworoom/paper/gcbc", [FAILED] * 12, method="gcbc", plans=0)
    results("r/reacher/paper/lewm", [SOLVED] * 3, environment="lewm/Reacher-v0")
    results("r/reacher/paper/pldm", [SOLVED] * 12, environment="lewm/Reacher-v0", method="pldm")
    results("r/reacher/paper/gcbc", [FAILED] * 12, environment="lewm/Reacher-v0", method="gcbc", plans=0)
    (tmp_path / "page.md").write_text("<!-- begin paper -->\n<!-- end paper -->\n")
    assert page(tmp_path, tmp_path / "r").returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert text.count("| gcbc | 0.0 [0.0, 24.2] (12)") == 1
    assert "†" not in text


def test_what_people_write_around_the_tables_stays(results: Results, tmp_path: Path):
    results("r/tworoom/paper/lewm", [SOLVED])
    (tmp_path / "page.md").write_text("# Mine\n<!-- begin paper -->\nold\n<!-- end paper -->\nA conclusion.\n")
    assert page(tmp_path, tmp_path / "r").returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Mine\n<!-- begin paper -->\n|  | tworoom |")
    assert text.endswith("<!-- end paper -->\nA conclusion.\n")
    for broken, message in (("<!-- begin paper -->", "no <!-- end paper -->"), ("<!-- begin papers -->", "'papers'")):
        (tmp_path / "page.md").write_text(broken)
        done = page(tmp_path, tmp_path / "r")
        assert done.returncode == 1
        assert done.stderr.startswith("Error: ")
        assert message in done.stderr
        assert (tmp_path / "page.md").read_text() == broken


def test_the_planner_with_most_successes_is_the_best(results: Results):
    tried = {"paper": [SOLVED, FAILED], "tuned": [SOLVED, SOLVED], "third": [SOLVED, SOLVED]}
    files = [str(results(f"{planner}/lewm", outcomes)) for planner, outcomes in tried.items()]
    command = [sys.executable, str(PAPER / "page.py"), "best", *files]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "tuned\n"


def test_every_row_can_be_trained(tmp_path: Path):
    """Its options are ones that its method has; where all methods are here."""
    lines = [line for line in (PAPER / "methods.tsv").read_text().splitlines() if line and line[0] != "#"]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    if missing := {method for _, method, *_ in rows} - set(METHODS):
        pytest.skip(f"no {', '.join(sorted(missing))} here yet")
    for _, method, kind, options, _ in rows:
        assert kind in ("plans", "acts")
        given = options.replace("@lewm", str(tmp_path)).replace("@steps", "8").split()
        with pytest.raises(LewmError):  # nothing is wrong but the dataset or the encoder, which are not there
            train(["tworoom", "--method", method, "--data", str(tmp_path / "no.h5"), *given])
