"""`lewm understand VERB`: what is asked is answered, found again, and refused in one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lewm.config import CollectConfig
from lewm.data.collect import collect


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "episodes.h5"
    collect("tworoom", path, CollectConfig(episodes=6, resolution=28, workers=1, frame_stride=5), 4)
    return path


@pytest.mark.parametrize(
    ("verb", "options", "words"),
    [
        ("map", ["--grid=5"], "Faithfulness of the map"),
        ("notice", ["--quick"], "agent moved"),
        ("landscape", [], "Latent distance along 6 episodes"),
        ("imagine", ["--windows=4", "--searches=1", "--blocks=2"], "Where plans end"),
        ("straightness", [], "as the model is now"),
    ],
)
def test_a_verb_answers(
    lewm: Callable, debug_run: Path, data: Path, tmp_path: Path, verb: str, options: list[str], words: str
):
    arguments = ("understand", verb, debug_run, "--data", data, "--out", tmp_path / "out", "--device=cpu", *options)
    answer = lewm(*arguments)
    assert answer.status == 0, answer.err
    assert words in answer.out
    assert {f"{verb}.{kind}" for kind in ("md", "json", "png")} <= {path.name for path in (tmp_path / "out").iterdir()}
    again = lewm(*arguments)
    assert again.status == 0
    assert verb == "straightness" or "asked before" in again.out


def test_several_runs_by_name_and_without_episodes(lewm: Callable, debug_run: Path, tmp_path: Path):
    answer = lewm("understand", "straightness", f"mine={debug_run}", f"again={debug_run}", "--out", tmp_path / "out")
    assert answer.status == 0, answer.err
    assert "mine lewm held-out windows" in answer.out
    assert not (tmp_path / "out" / "episodes.h5").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("straightness",), ("RUN", "missing")),
        (("map", "RUN", "--x", "agent_z", "--y", "agent_y"), ("agent_z", "Did you mean", "agent_x")),
        (
            ("map", "RUN", "--x", "agent_x", "--y", "agent_y", "--x-range", "-9", "100"),
            ("agent_x", "between 21 and 203"),
        ),
        (("map", "RUN", "--seed=-1"), ("seed", "between 0 and")),
        (("map", "RUN", "--grid=2"), ("map.grid", "between 4 and 60")),
        (("imagine", "RUN", "--blocks=0"), ("imagine.blocks", "positive")),
        (("RUN", "--skip=landscap"), ("landscap", "Did you mean", "landscape")),
        (("landskape", "RUN"), ("landskape", "landscape")),
    ],
)
def test_what_cannot_be_asked_is_refused(
    lewm: Callable, debug_run: Path, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
):
    given = [str(debug_run) if argument == "RUN" else argument for argument in arguments]
    lewm("understand", *given, "--out", tmp_path / "out").assert_refused(*parts)


def test_what_is_not_ours_is_not_overwritten(lewm: Callable, debug_run: Path, data: Path, tmp_path: Path):
    (tmp_path / "landscape.json").write_text("{}")
    lewm("understand", "landscape", debug_run, "--data", data, "--out", tmp_path).assert_refused("landscape.json")
    assert (tmp_path / "landscape.json").read_text() == "{}"


HELP_WITHOUT_TORCH = """
import sys
from lewm import cli
for verb in ("report", "map", "imagine", "straightness", "landscape", "notice"):
    try:
        cli.run(["understand", verb, "--help"])
    except SystemExit:
        pass
    assert "torch" not in sys.modules, f"{verb} --help has loaded torch"
"""


def test_help_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_report_overwrites_nothing_of_others(lewm: Callable, debug_run: Path, data: Path, tmp_path: Path):
    (tmp_path / "landscape.png").write_text("a drawing of mine")
    lewm("understand", debug_run, "--data", data, "--out", tmp_path, "--quick").assert_refused("landscape.png")
    assert [path.name for path in tmp_path.iterdir()] == ["landscape.png"]
