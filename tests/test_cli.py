"""The command line: verbs, answers, and errors that a user can act on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from PIL import Image

from lewm import cli
from lewm.checked import to_dict
from lewm.cli import VERBS
from lewm.config import PRESETS, Config, preset
from lewm.evaluate.manifest import build_manifest
from lewm.plan.tuned import tuned_plan
from lewm.version import __version__


@dataclass(frozen=True)
class Answer:
    """What a command left on the terminal, with all white space made single."""

    status: int
    out: str
    err: str


Lewm = Callable[..., Answer]


@pytest.fixture
def lewm(capsys: pytest.CaptureFixture[str]) -> Iterator[Lewm]:
    """Runs `lewm ARGUMENTS` in this process."""

    def call(*arguments: object) -> Answer:
        try:
            status = cli.run([str(argument) for argument in arguments])
        except SystemExit as end:  # how tyro ends --help and wrong options
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Answer(status, " ".join(captured.out.split()), " ".join(captured.err.split()))

    before = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, before)


def assert_refused(answer: Answer, *parts: str) -> None:
    """Status 1, and one sentence on stderr: no traceback, nothing on stdout."""
    assert answer.status == 1
    assert answer.err.startswith("Error: ")
    assert "Traceback" not in answer.err
    assert answer.out == ""
    for part in parts:
        assert part in answer.err


# -- help -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb_and_preset(lewm: Lewm, arguments: list[str]):
    answer = lewm(*arguments)
    assert answer.status == 0
    for verb in VERBS:
        assert f"lewm {verb} " in answer.out
    for name in PRESETS:
        assert name in answer.out


def test_version(lewm: Lewm):
    assert lewm("--version") == Answer(0, f"lewm {__version__}", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--help"], "--fresh"),
        (["collect", "--help"], "--episodes"),
        (["train", "--help"], "PRESET is one of debug, demo, tworoom"),
        (["train", "debug", "--help"], "--model.encoder.depth"),
        (["train", "debug", "--help"], "--resume"),
        (["eval", "--help"], "CHECKPOINT"),
        (["compare", "--help"], "episode by episode"),
        (["info", "--help"], "dataset file"),
        (["import-official", "--help"], "--frame-skip"),
    ],
)
def test_each_verb_explains_itself(lewm: Lewm, arguments: list[str], expected: str):
    answer = lewm(*arguments)
    assert answer.status == 0
    assert expected in answer.out


def test_train_help_shows_the_presets_values(lewm: Lewm):
    assert "Optimiser steps. (default: 8)" in lewm("train", "debug", "--help").out.replace(" │ ", " ")


def test_envs_lists_the_environments(lewm: Lewm):
    answer = lewm("envs")
    assert answer.status == 0
    assert "tworoom lewm/TwoRoom-v0 2 actions" in answer.out


# -- mistakes -------------------------------------------------------------------------------------------------


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
        (["train", "debug", "--plan.elites", "9"], "plan.elites must be between 2 and plan.samples (8), got 9."),
        (["collect", "tworoom", "--episodes", "0"], "collect.episodes must be positive, got 0."),
        (["train", "debug"], "No dataset: pass --data FILE"),
        (["train", "debug", "--data", "no/such.h5"], "no/such.h5"),
    ],
)
def test_mistakes_are_explained(
    lewm: Lewm, arguments: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert_refused(lewm(*arguments), hint)
    assert list(tmp_path.iterdir()) == [], "a mistake must leave no files"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["train", "debug", "--train.stepz", "3"], "--train.steps"),
        (["train", "debug", "--model.encoder.dept", "3"], "--model.encoder.depth"),
        (["collect", "tworoom", "--episode", "3"], "--episodes"),
    ],
)
def test_unknown_options_name_the_nearest(lewm: Lewm, arguments: list[str], nearest: str):
    answer = lewm(*arguments)
    assert answer.status == 2
    assert f"{nearest} " in answer.err
    assert answer.out == ""


def test_options_have_types(lewm: Lewm):
    answer = lewm("train", "debug", "--train.steps", "many")
    assert answer.status == 2
    assert "--train.steps" in answer.err


def test_an_interruption_has_its_own_status(lewm: Lewm, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "envs", interrupted)
    answer = lewm("envs")
    assert answer.status == 130
    assert "The same command continues" in answer.err


def test_bugs_are_not_hidden(lewm: Lewm, monkeypatch: pytest.MonkeyPatch):
    def buggy(_: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(VERBS, "envs", buggy)
    with pytest.raises(ZeroDivisionError):
        lewm("envs")


def test_a_reader_that_goes_away_is_no_drama():
    command = [sys.executable, "-m", "lewm", "envs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


# -- info -----------------------------------------------------------------------------------------------------


def test_info_on_a_dataset(lewm: Lewm, debug_config: Config):
    answer = lewm("info", debug_config.data)
    assert answer.status == 0
    for part in ("environment lewm/TwoRoom-v0", "episodes 8,", "of 28 px", "actions 2 numbers", "seed 0"):
        assert part in answer.out


def test_info_on_a_run_and_on_its_checkpoint(lewm: Lewm, debug_run: Path):
    of_run = lewm("info", debug_run)
    assert of_run.status == 0
    for part in ("ViT/14 at 28 px", f"written by lewm {__version__}", "history 3", "8 steps", "lewm/TwoRoom-v0"):
        assert part in of_run.out
    assert lewm("info", debug_run / "checkpoints" / "step_0000008") == of_run


def test_info_on_garbage(lewm: Lewm, debug_config: Config, debug_run: Path, tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("not a dataset")
    assert_refused(lewm("info", text), "notes.txt")
    cut = tmp_path / "cut.h5"
    assert debug_config.data is not None
    cut.write_bytes(debug_config.data.read_bytes()[:20_000])
    assert_refused(lewm("info", cut), "cut.h5")
    assert_refused(lewm("info", tmp_path / "missing"), "no such folder")
    assert_refused(lewm("info", tmp_path / "missing.h5"), "missing.h5")
    assert_refused(lewm("info", tmp_path), "model.safetensors")
    damaged = shutil.copytree(debug_run / "checkpoints" / "step_0000008", tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(lewm("info", damaged), "model.safetensors")


# -- import-official ------------------------------------------------------------------------------------------


def test_import_official_refuses_what_is_not_official(lewm: Lewm, tmp_path: Path):
    weights, config, out = tmp_path / "weights.pt", tmp_path / "config.json", tmp_path / "imported"
    assert_refused(lewm("import-official", weights, config, out), "config.json")
    config.write_text("{}")
    assert_refused(lewm("import-official", weights, config, out))
    weights.write_bytes(b"not a state dict")
    assert_refused(lewm("import-official", weights, config, out))
    assert_refused(lewm("import-official", weights, config, out, "--dataset", tmp_path / "none.h5"), "none.h5")
    assert not out.exists()


# -- the pipeline ---------------------------------------------------------------------------------------------


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
    assert_refused(lewm(*training, "--train.lr", 0.5), "train.lr (0.001 -> 0.5)")
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
    report = tmp_path / cli.DemoArgs.out / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("of a demo")
    collecting = ("collect", "tworoom", "--episodes", 8, "--resolution", 28, "--workers", 1)
    assert lewm(*collecting).status == 0
    tiny = ("--model.encoder.image-size", 28, "--train.steps", 1, "--train.batch-size", 8, "--device", "cpu")
    answer = lewm("train", "demo", "--data", "data/tworoom.h5", *tiny)
    assert (answer.status, answer.err) == (0, "")
    assert "checkpoint: runs/train_demo/checkpoints/step_0000001" in answer.out
    assert [path.name for path in report.parent.iterdir()] == ["report.html"]


def test_eval_can_be_told_where_to_write(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    answer = lewm("eval", debug_run, "--eval.episodes", 1, "--out", out, "--seed", 4, "--device", "cpu")
    assert answer.status == 0
    assert str(out) in answer.out
    assert json.loads(out.read_text())["config"]["seed"] == 4
    assert not (debug_run / "evaluations").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan.horizon", "9"], "A plan of 9 blocks of 5 steps does not fit into a budget of 10 steps."),
        (["--eval.episodes", "201"], "eval.episodes is 201"),
        (["--env", "twroom"], "Did you mean 'tworoom'?"),
        (["--plan.elites", "0"], "plan.elites must be between 2 and plan.samples (8), got 0."),
        (["--plan.elites", "9"], "plan.elites must be between 2 and plan.samples (8), got 9."),
        (["--fixed-flops", "1000"], "1.00e+03 do not suffice. Raise --fixed-flops"),
        (["--manifest", "no/such.json"], "There is no manifest at no/such.json"),
        (["--videos", "3"], "videos must be between 0 and eval.episodes (2), got 3."),
        (["--eval.workers", "-1"], "eval.workers must be at least 0, got -1."),
        (["--out", "."], ". is to be results of an evaluation, whose name ends in .json."),
    ],
)
def test_eval_refuses_the_impossible(lewm: Lewm, debug_run: Path, tmp_path: Path, options: list[str], message: str):
    answer = lewm("eval", debug_run, "--device", "cpu", "--out", tmp_path / "result.json", *options)
    assert_refused(answer, message)
    assert list(tmp_path.iterdir()) == []


def test_eval_with_everything(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out, pairs = tmp_path / "new" / "result.json", tmp_path / "pairs.json"
    build_manifest("tworoom", count=2, goal_offset=10, path=pairs)
    options = ("--solver", "mppi", "--fixed-flops", 1e7, "--manifest", pairs, "--eval.workers", 2, "--videos", 1)
    answer = lewm("eval", debug_run, "--device", "cpu", "--out", out, *options)
    assert (answer.status, answer.err) == (0, "")
    document = json.loads(out.read_text())
    assert document["goal_offset"] == 10
    assert document["config"]["plan"]["solver"] == "mppi"
    iterations = document["config"]["plan"]["iterations"]
    assert iterations > preset("debug").plan.iterations, "more than the run's own"
    assert f"{iterations} iterations of mppi: 9." in answer.out
    assert document["config"]["eval"] == {"episodes": 2, "budget": 10, "manifest": str(pairs), "workers": 2}
    videos = out.with_name("result_videos")
    assert f"Videos: {videos}" in answer.out
    assert [path.name for path in videos.iterdir()] == ["episode_000.gif"]
    with Image.open(videos / "episode_000.gif") as gif:
        assert gif.n_frames == 11


def test_recorded_actions_are_for_the_solver_that_is_named_last(lewm: Lewm, debug_run: Path, tmp_path: Path):
    options = ("--device", "cpu", "--out", tmp_path / "result.json", "--plan.icem.recorded", 1, "--eval.episodes", 1)
    assert_refused(lewm("eval", debug_run, *options), "plan.icem.recorded is for the solver icem, got 1 with cem")
    assert list(tmp_path.iterdir()) == []
    answer = lewm("eval", debug_run, *options, "--solver", "icem")
    assert (answer.status, answer.err) == (0, "")
    assert json.loads((tmp_path / "result.json").read_text())["config"]["plan"]["icem"]["recorded"] == 1


def test_tuned_plans_are_the_environments_but_for_what_is_asked(lewm: Lewm, debug_run: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    options = ("--device", "cpu", "--out", out, "--eval.episodes", 1, "--tuned", "--plan.icem.noise-exponent", 0)
    answer = lewm("eval", debug_run, *options)
    assert (answer.status, answer.err) == (0, "")
    tuned = tuned_plan("tworoom", preset("debug").plan)
    asked = replace(tuned, icem=replace(tuned.icem, noise_exponent=0.0))
    assert json.loads(out.read_text())["config"]["plan"] == to_dict(asked)


def test_a_solver_must_exist(lewm: Lewm, debug_run: Path):
    answer = lewm("eval", debug_run, "--solver", "cme")
    assert answer.status == 2
    assert "cem" in answer.err


def test_compare(lewm: Lewm, debug_run: Path, tmp_path: Path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for out, episodes in ((first, 2), (second, 1)):
        assert lewm("eval", debug_run, "--device", "cpu", "--out", out, "--eval.episodes", episodes).status == 0
    answer = lewm("compare", first, first)
    assert answer.status == 0
    for protocol in ("paper", "strict"):
        assert f" {protocol} " in answer.out
    assert "McNemar" in answer.out
    assert_refused(lewm("compare", first, second), "(2 and 1, not the same)", "--eval.episodes")
    assert_refused(lewm("compare", first, tmp_path / "third.json"), "third.json cannot be read")
