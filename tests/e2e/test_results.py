"""Results of evaluations are safe by construction: named by what was asked, made once, and never lost to others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lewm import checkpoint, cli
from lewm.config import Config
from lewm.files import json_digest, read_json
from lewm.train.loop import train

QUICK = ("--device", "cpu", "--eval.episodes", "2")
Lewm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lewm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lewm:
    """Runs `lewm ARGUMENTS` in this process: the status, and what was said and complained of."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, " ".join(captured.out.split()), " ".join(captured.err.split())

    return call


@pytest.fixture
def folder(debug_run: Path, tmp_path: Path) -> Path:
    """A model's folder of one's own."""
    newest = checkpoint.latest(debug_run / "checkpoints")
    assert newest is not None
    return shutil.copytree(newest, tmp_path / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is never written over ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "evaluation.json", "new/results.json"])
def test_nothing_is_written_into_a_model(lewm: Lewm, folder: Path, name: str):
    before = contents(folder)
    status, _, complaint = lewm("eval", folder, *QUICK, "--out", folder / name)
    assert status == 1
    assert "Choose another place" in complaint or "Rename it" in complaint
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["pairs.json", "notes.json", "data.h5"])
def test_no_other_file_loses_its_place(lewm: Lewm, folder: Path, tmp_path: Path, name: str):
    pairs = [{"start": [60, 60], "goal": [60, 120]}] * 2
    manifest = json.dumps({"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": pairs})
    for each, text in (("pairs.json", manifest), ("notes.json", '{"mine": 1}'), ("data.h5", "numbers")):
        (tmp_path / each).write_text(text)
    before = contents(tmp_path)
    status, said, complaint = lewm(
        "eval", folder, *QUICK, "--manifest", tmp_path / "pairs.json", "--out", tmp_path / name
    )
    assert (status, said) == (1, "")
    assert name in complaint
    assert contents(tmp_path) == before


def test_another_question_never_replaces_results(lewm: Lewm, folder: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    assert lewm("eval", folder, *QUICK, "--out", out)[0] == 0
    before = contents(tmp_path)
    others = [("--seed", 1), ("--plan.samples", 9), ("--eval.budget", 20), ("--eval.episodes", 3), ("--videos", 1)]
    for option, value in others[:-1]:
        status, said, complaint = lewm("eval", folder, *QUICK, "--out", out, option, value)
        assert (status, said) == (1, ""), option
        assert "result.json has the results of another evaluation" in complaint
    assert contents(tmp_path) == before
    assert lewm("eval", folder, *QUICK, "--out", out, *others[-1])[0] == 0, "films are no other question"
    assert (tmp_path / "result_videos" / "episode_000.gif").is_file()
    assert {name: content for name, content in contents(tmp_path).items() if "videos" not in name} == before


def changed_statistics(document: dict[str, Any]) -> None:
    document["facts"]["actions"]["std"] = [2 * value for value in document["facts"]["actions"]["std"]]


def changed_dropout(document: dict[str, Any]) -> None:
    document["method"]["predictor"]["dropout"] = 0.05


@pytest.mark.parametrize("change", [changed_statistics, changed_dropout])
def test_another_model_with_the_same_weights_is_another_question(
    lewm: Lewm, folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
):
    """Neither its results nor its notes are used: what identifies a model are not its weights alone."""
    out, other = tmp_path / "result.json", shutil.copytree(folder, tmp_path / "other")
    document = read_json(other / "config.json")
    change(document)
    document["digest"] = json_digest({name: value for name, value in document.items() if name != "digest"})
    (other / "config.json").write_text(json.dumps(document))
    process = start("eval", folder, "--out", out, "--device", "cpu", "--eval.episodes", 40)
    interrupt(process, out, plans=5)
    status, said, complaint = lewm("eval", other, "--out", out, "--device", "cpu", "--eval.episodes", 40)
    assert (status, "Going on" in said) == (1, False)
    assert "notes of another evaluation" in complaint
    status, said, _ = lewm("eval", folder, "--out", out, "--device", "cpu", "--eval.episodes", 40)
    assert (status, "Going on from" in said) == (0, True)
    before = out.read_bytes()
    assert lewm("eval", other, "--out", out, "--device", "cpu", "--eval.episodes", 40)[0] == 1
    assert out.read_bytes() == before
    assert checkpoint.load_document(other)["files"] == checkpoint.load_document(folder)["files"]


# -- where results are ------------------------------------------------------------------------------------------------


def test_training_on_keeps_the_results_of_a_checkpoint_that_goes(
    lewm: Lewm, debug_config: Config, tmp_path: Path
) -> None:
    class Crash:
        def step(self, step: int, *_: object) -> None:
            if step == 5:
                raise ZeroDivisionError

        def note(self, _: str) -> None: ...

    settings = replace(debug_config.train, steps=12, checkpoint_every=2, calibration_batches=0)
    config = replace(debug_config, out=tmp_path / "run", train=settings)
    with pytest.raises(ZeroDivisionError):
        train(config, monitor=Crash())
    assert lewm("eval", tmp_path / "run", *QUICK)[0] == 0
    (results,) = (tmp_path / "run").glob("**/*_2_*.json")
    before = results.read_bytes()
    train(config)
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["step_0000010", "step_0000012"]
    assert results.read_bytes() == before
    assert results.parent == tmp_path / "run" / "evaluations" / "step_0000004"


def test_a_checkpoint_may_go_while_it_is_evaluated(debug_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(debug_run, tmp_path / "run")
    out = tmp_path / "result.json"
    process = start("eval", run, "--out", out, "--device", "cpu", "--eval.episodes", 40)
    wait_for_notes(process, out, plans=3)
    shutil.rmtree(run / "checkpoints")
    printed = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert len(read_json(out)["episodes"]) == 40


def test_a_question_has_one_place_and_is_answered_once(
    lewm: Lewm, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    status, said, _ = lewm("eval", folder, *QUICK)
    assert (status, "answered before" in said) == (0, False)
    (results,) = Path("evaluations/model").iterdir()
    assert results.name.startswith("paper_cem_whole_2_")
    before = results.stat().st_mtime_ns, results.read_bytes()
    for source in (folder, "model", "./model"):
        for options in ((), ("--eval.workers", 2), ("--manifest", "paper")):
            status, said, _ = lewm("eval", source, *QUICK, *options)
            assert status == 0
            assert "answered before" in said
            assert f"Results: {results}" in said
            assert "policy, strict" in said, "the rates are shown again"
    assert (results.stat().st_mtime_ns, results.read_bytes()) == before
    assert lewm("eval", folder, *QUICK, "--seed", 1)[0] == 0
    assert lewm("eval", folder, *QUICK, "--plan.schedule", "receding", "--solver", "mppi")[0] == 0
    names = sorted(path.name.rpartition("_")[0] for path in Path("evaluations/model").iterdir())
    assert names == ["paper_cem_whole_2", "paper_cem_whole_2", "paper_mppi_receding_2"]


def test_what_is_refused_leaves_no_trace(
    lewm: Lewm, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert lewm("eval", folder, *QUICK, "--plan.horizon", 9)[0] == 1
    assert sorted(tmp_path.rglob("*")) == before


# -- one at a time ----------------------------------------------------------------------------------------------------


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lewm", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_notes(process: subprocess.Popen[str], out: Path, plans: int) -> None:
    notes, deadline = out.with_name(f"{out.name}.partial"), time.monotonic() + 60
    while not notes.exists() or notes.read_bytes().count(b"\n") < 1 + plans:  # a line for the question
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{plans} plans were not made"
        time.sleep(0.001)


def interrupt(process: subprocess.Popen[str], out: Path, plans: int) -> None:
    wait_for_notes(process, out, plans)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_two_evaluations_of_one_question_never_both_write(lewm: Lewm, folder: Path, tmp_path: Path) -> None:
    """The first is stopped when all its plans are noted; nothing is left to plan that would make the second notice."""
    out, options = tmp_path / "result.json", ("--device", "cpu", "--eval.episodes", 200)
    command = ("eval", folder, "--out", out, *options)
    os.environ["LEWM_CACHE"], remembered = str(tmp_path / "cache"), os.environ["LEWM_CACHE"]  # it acts at random first
    process = start(*command)
    try:
        wait_for_notes(process, out, plans=200)
        process.send_signal(signal.SIGSTOP)
        assert not out.exists(), "it was to be stopped before it wrote"
        status, said, complaint = lewm(*command)
        assert (status, said) == (1, "")
        assert "Another evaluation is writing" in complaint
        assert not out.exists()
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        os.environ["LEWM_CACHE"] = remembered
    first = out.read_bytes()
    assert "answered before" in lewm(*command)[1]
    assert out.read_bytes() == first
    assert not list(tmp_path.glob("result.json.*")), "neither notes nor a lock stay"
