"""The command line: verbs, answers, and errors that a user can act on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lewm.cli import VERBS
from lewm.cli.demo import DemoArgs
from lewm.cli.train import COMMON, EXAMPLES
from lewm.methods.registry import METHODS
from lewm.presets import PRESETS
from lewm.version import __version__

Lewm = Callable[..., Any]  # the fixture: arguments -> what came of it


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb(lewm: Lewm, arguments: list[str]):
    answer = lewm(*arguments)
    assert answer.status == 0
    for verb in VERBS:
        assert f"lewm {verb} " in answer.out


def test_help_on_training_lists_every_preset_and_method(lewm: Lewm):
    answer = lewm("train", "--help")
    assert answer.status == 0
    for name in (*PRESETS, *METHODS):
        assert name in answer.out


@pytest.mark.parametrize("arguments", ["collect --help", "train pusht --help", "envs"])
def test_who_stops_reading_is_told_nothing(arguments: str):
    """As `lewm ... | head` does."""
    command = [sys.executable, "-m", "lewm", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode != 0


def test_version(lewm: Lewm):
    answer = lewm("--version")
    assert (answer.status, answer.out, answer.err) == (0, f"lewm {__version__}", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--help"], "--fresh"),
        (["collect", "--help"], "--episodes"),
        (["train", "--help"], "PRESET is one of debug, demo, tworoom"),
        (["train", "--method", "pldm", "--help"], "--train.batch-size N"),
        (["eval", "--seed", "1", "-h"], "CHECKPOINT is a model or run folder"),
        (["train", "debug", "--help"], "--method.encoder.depth"),
        (["train", "debug", "--help"], "--resume"),
        (["eval", "--help"], "CHECKPOINT"),
        (["compare", "--help"], "episode by episode against the first"),
        (["info", "--help"], "dataset file"),
        (["import-official", "--help"], "--frame-skip"),
    ],
)
def test_each_verb_explains_itself(lewm: Lewm, arguments: list[str], expected: str):
    answer = lewm(*arguments)
    assert answer.status == 0
    assert expected in answer.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_can_be_asked_for_help(lewm: Lewm, verb: str):
    answer = lewm(verb, "--help")
    assert (answer.status, answer.err) == (0, "")
    assert verb in answer.out


@pytest.mark.parametrize("options", [[], ["debug"], ["debug", "--method", "gcbc"]])
def test_train_help_begins_with_what_most_runs_change(lewm: Lewm, options: list[str]):
    """A dozen settings and examples, with a preset and without, before everything else."""
    answer = lewm("train", *options, "--help").out
    common = answer[: answer.index("usage:")]
    for flag in COMMON:
        assert flag in common
    for example in EXAMPLES:
        assert example in common
    assert len(COMMON) == 13


@pytest.mark.parametrize("method", METHODS)
def test_train_help_has_nothing_that_training_does_not_read(lewm: Lewm, method: str):
    answer = lewm("train", "debug", "--method", method, "--help").out
    flags = set(re.findall(r"--[a-z][a-z.-]+", answer[answer.index("usage:") :]))
    sections = {flag.partition(".")[0] for flag in flags if "." in flag}
    assert sections == {"--train", "--method", "--loader"}
    assert {flag for flag in flags if "." not in flag} == {
        *("--help", "--out", "--env", "--data", "--seed", "--device", "--resume")
    }


@pytest.mark.parametrize("flag", [flag.split()[0] for flag in COMMON if flag.split()[0] != "--method"])
def test_the_common_settings_exist(lewm: Lewm, flag: str):
    assert f"{flag} " in lewm("train", "debug", "--help").out.partition("usage:")[2]


def test_train_help_shows_the_presets_values(lewm: Lewm):
    assert "Optimiser steps. (default: 8)" in lewm("train", "debug", "--help").out.replace(" │ ", " ")


def test_envs_lists_the_environments(lewm: Lewm):
    answer = lewm("envs")
    assert answer.status == 0
    assert "tworoom lewm/TwoRoom-v0 2 actions" in answer.out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "Unknown command 'trian'. Did you mean 'train'?"),
        (["train", "debgu"], "Unknown preset 'debgu'. Did you mean 'debug'?"),
        (["train", "debug", "--env", "tworom"], "Unknown environment 'tworom'. Did you mean 'tworoom'?"),
        (["collect", "tworom"], "Unknown environment 'tworom'. Did you mean 'tworoom'?"),
        (["train", "debug", "--train.ema=0.9"], "--train.ema is gone since lewm 0.2.0"),
        (["eval", "pusht", "--plan.recorded", "3"], "--plan.recorded is now --plan.icem.recorded."),
        (["train"], "PRESET is missing. usage: lewm train PRESET"),
        (["eval", "--seed", "1"], "CHECKPOINT is missing. usage: lewm eval CHECKPOINT"),
        (["envs", "tworoom"], "takes no arguments"),
        (["train", "debug", "--train.steps", "0"], "train.steps must be positive, got 0."),
        (["train", "debug", "--method", "lewn"], "Unknown method 'lewn'. Did you mean 'lewm'?"),
        (["train", "debug", "--method"], "--method needs a value."),
        (["train", "debug", "--model.embed-dim", "9"], "--model.embed-dim is now --method.embed-dim."),
        (["train", "debug", "--sigreg.weight=1"], "--sigreg.weight is now --method.sigreg.weight."),
        (["collect", "tworoom", "--episodes", "0"], "collect.episodes must be positive, got 0."),
        (["train", "debug"], "No dataset: pass --data FILE"),
        (["train", "debug", "--data", "no/such.h5"], "no/such.h5"),
    ],
)
def test_mistakes_are_explained(
    lewm: Lewm, arguments: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    lewm(*arguments).assert_refused(hint)
    assert list(tmp_path.iterdir()) == [], "a mistake must leave no files"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["train", "debug", "--train.stepz", "3"], "--train.steps"),
        (["train", "debug", "--method.encoder.dept", "3"], "--method.encoder.depth"),
        (["collect", "tworoom", "--episode", "3"], "--episodes"),
    ],
)
def test_unknown_options_name_the_nearest(lewm: Lewm, arguments: list[str], nearest: str):
    answer = lewm(*arguments)
    assert answer.status == 2
    assert f"{nearest} " in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("option", ["--plan.elites", "--collect.episodes"])
def test_training_takes_no_settings_of_other_verbs(lewm: Lewm, option: str):
    """Its data are what they are, and how it is evaluated is not for it to say."""
    answer = lewm("train", "debug", option, "9")
    assert answer.status == 2
    assert f"Unrecognized options: {option}" in answer.err


def test_options_have_types(lewm: Lewm):
    answer = lewm("train", "debug", "--train.steps", "many")
    assert answer.status == 2
    assert "--train.steps" in answer.err


def test_an_interruption_has_its_own_status(lewm: Lewm, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lewm.cli.envs.run", interrupted)
    answer = lewm("envs")
    assert answer.status == 130
    assert "The same command continues" in answer.err


def test_bugs_are_not_hidden(lewm: Lewm, monkeypatch: pytest.MonkeyPatch):
    def buggy(_: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lewm.cli.envs.run", buggy)
    with pytest.raises(ZeroDivisionError):
        lewm("envs")


def test_a_reader_that_goes_away_is_no_drama():
    command = [sys.executable, "-m", "lewm", "envs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_collect_train_eval_info(lewm: Lewm, tmp_path: Path):
    data, run = tmp_path / "tworoom.h5", tmp_path / "run"
    collecting = ("collect", "tworoom", "--episodes", 8, "--resolution", 28, "--workers", 1, "--out", data)
    assert "8 episodes (8 new)" in lewm(*collecting).out
    assert "8 episodes (0 new)" in lewm(*collecting).out

    training = ("train", "debug", "--train.steps", 3, "--data", data, "--out", run, "--device", "cpu")
    answer = lewm(*training)
    checkpoint = run / "checkpoints" / "step_0000003"
    assert (answer.status, answer.err) == (0, "")
    assert f"3 steps; checkpoint: {checkpoint}" in answer.out, "in one piece, so that it can be copied"
    lewm(*training, "--train.lr", 0.5).assert_refused("train.lr (0.001 -> 0.5)")
    assert lewm(*training, "--resume", "never").status == 1

    answer = lewm("eval", run, "--eval.episodes", 3, "--device", "cpu")
    assert answer.status == 0
    for name in ("policy", "random policy"):
        assert f"{name} " in answer.out
        assert f"{name}, strict " in answer.out
    assert "already solved at the start" in answer.out
    assert "of 3" in answer.out
    (results,) = (run / "evaluations" / checkpoint.name).iterdir()
    assert f"Results: {results}" in answer.out
    document = json.loads(results.read_text())
    assert len(document["episodes"]) == 3
    # What was not said comes from the run.
    assert document["config"]["plan"]["samples"] == 8
    assert document["config"]["eval"] == {"episodes": 3, "budget": 10, "manifest": None, "workers": 0}
    assert document["config"]["train"]["steps"] == 3

    assert "3 steps on" in lewm("info", run).out


def test_training_and_the_demo_do_not_meet(lewm: Lewm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`lewm train demo` after `lewm demo`, neither told where to write."""
    monkeypatch.chdir(tmp_path)
    report = tmp_path / DemoArgs.out / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("of a demo")
    collecting = ("collect", "tworoom", "--episodes", 8, "--resolution", 28, "--workers", 1)
    assert lewm(*collecting).status == 0
    sizes = "--method.encoder.image-size 28 --train.steps 1 --train.warmup-steps 0 --train.batch-size 8"
    tiny = (*sizes.split(), "--device", "cpu")
    answer = lewm("train", "demo", "--data", "data/tworoom.h5", *tiny)
    assert (answer.status, answer.err) == (0, "")
    assert "checkpoint: runs/train_demo/checkpoints/step_0000001" in answer.out
    assert [path.name for path in report.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(("given", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings GNU's OpenMP on Linux only")
def test_threads_that_wait_spin_shortly(debug_run: Path, given: dict[str, str], found: str):
    """Unless somebody wants otherwise: on a busy machine, spinning takes the cores from those that would work."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = inherited | given | {"OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-m", "lewm", "info", str(debug_run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{found}'" in done.stderr
