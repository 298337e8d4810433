"""Surprise: it rises where something was changed and nowhere else, and interrupted work goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ruler import Ruler, RulerConfig, episodes

from lewm import cli
from lewm.data.store import EpisodeStore
from lewm.envs.registry import ENTRIES, env_entry, env_type
from lewm.errors import ConfigError, DataError
from lewm.methods.files import identity
from lewm.presets import preset
from lewm.types import ActionStats, DataFacts
from lewm.understand import surprise as module
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.subject import Subject, open_subject
from lewm.understand.surprise import surprise
from lewm.understand.surprise_figure import draw
from lewm.understand.surprise_findings import ROWS, SurpriseSettings, auroc, compare
from lewm.understand.surprise_rows import Row, RowJournal, read_rows
from lewm.understand.trajectories import CHANGES, UNDISTURBED, moves, register_changes

KINDS = ("json", "md", "png")
SETTINGS = SurpriseSettings(trajectories=8, before=2, after=2)


def subject_of(model: Any, world: str | None = "tworoom") -> Subject:
    return Subject("ruler", model, identity(model), cast(Any, None), env_entry(world) if world else None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return episodes(tmp_path_factory.mktemp("data") / "data.h5", 24, stride=5)


def ask(data: Path, out: Path, settings: SurpriseSettings = SETTINGS, **model: Any) -> Findings:
    with EpisodeStore(data) as store:
        return surprise(subject_of(Ruler(RulerConfig(**model))), store, settings, out)


def test_surprise_rises_at_planted_changes_only(data: Path, tmp_path: Path) -> None:
    findings = ask(data, tmp_path)
    curves, place = findings.numbers["curves"], findings.numbers["offsets"].index(0)
    for test in findings.numbers["tests"]:
        assert test["p"] < 0.01
        assert test["effect"] > 1
        assert test["auroc"] >= 0.95
    far = np.array(curves["agent: 90 px"]["error"]["median"])
    assert far[place] == pytest.approx(90**2, rel=0.1)
    assert np.delete(far, place).max() < 1
    assert max(curves[UNDISTURBED]["error"]["median"]) < 1
    near = next(test for test in findings.numbers["tests"] if test["name"] == "agent: 5 px")
    assert near["auroc"] > near["difference_auroc"] + 0.2


def test_a_model_that_is_wrong_about_actions_is_not_surprised_by_small_changes(data: Path, tmp_path: Path) -> None:
    """The control: the error is that of the prediction, not of the picture."""
    findings = ask(data, tmp_path, reversed=True)
    near = next(test for test in findings.numbers["tests"] if test["name"] == "agent: 5 px")
    assert near["auroc"] < 0.8


def test_shuffled_labels_stay_flat() -> None:
    """Changed and undisturbed errors of the same kind: no test sees anything, and the areas are near one half."""
    rng, changes = np.random.default_rng(0), CHANGES["tworoom"]
    errors = {name: np.exp(2 * rng.normal(size=(200, 3))) for name in (UNDISTURBED, *(c.name for c in changes))}
    for test in compare(errors, errors, 1, changes, seed=0):
        assert test.p is not None
        assert test.holm is not None
        assert test.holm > 0.01
        assert 0.4 < test.auroc < 0.6
        assert test.interval[0] < 0.5 < test.interval[1]


def test_what_is_undefined_is_none() -> None:
    changes = CHANGES["tworoom"][:1]
    errors = {UNDISTURBED: np.ones((4, 1)), changes[0].name: np.full((4, 1), 2.0)}
    (test,) = compare(errors, errors, 0, changes, seed=0)
    assert (test.p, test.holm, test.effect, test.auroc) == (None, None, None, 1.0)
    assert auroc(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5


def test_every_frame_has_a_row_and_findings_can_be_read_again(data: Path, tmp_path: Path) -> None:
    findings = ask(data, tmp_path)
    rows = read_rows(tmp_path / ROWS)
    assert len(rows) == SETTINGS.trajectories * (len(CHANGES["tworoom"]) + 1) * 5
    assert {row.offset for row in rows} == {-2, -1, 0, 1, 2}
    assert all(row.step == 5 * (row.offset + 4) for row in rows)
    before = {(row.episode, row.offset): row.error for row in rows if row.change == UNDISTURBED and row.offset < 0}
    assert all(row.error == before[row.episode, row.offset] for row in rows if row.offset < 0)
    write_findings(tmp_path, findings, draw)
    read = read_findings(tmp_path, "surprise", findings.question)
    assert read == findings
    assert (tmp_path / "surprise.png").stat().st_size > 10_000
    assert "NaN" not in (tmp_path / "surprise.json").read_text()


def test_an_interrupted_measurement_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(data, tmp_path / "whole")
    real, lived = module.matched, list[int]()

    def counted(*arguments: Any) -> Any:
        if len(lived) == 3:
            raise KeyboardInterrupt
        lived.append(arguments[3])
        return real(*arguments)

    monkeypatch.setattr(module, "matched", counted)
    with pytest.raises(KeyboardInterrupt):
        ask(data, tmp_path / "cut")
    (part,) = (tmp_path / "cut").glob("*.part.csv")
    part.write_bytes(part.read_bytes()[:-20])  # a kill amid the third one's rows
    again = list[int]()
    monkeypatch.setattr(module, "matched", lambda *arguments: (again.append(arguments[3]), real(*arguments))[1])
    assert ask(data, tmp_path / "cut") == whole
    assert (tmp_path / "cut" / ROWS).read_bytes() == (tmp_path / "whole" / ROWS).read_bytes()
    assert not set(again) & set(lived[:2])
    assert lived[2] in again
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [ROWS]


def test_no_flipped_byte_of_unfinished_work_changes_what_is_found(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Row(episode, 7, "agent: colour", "colour", offset, 5, 0.25, 1e-3) for episode in (1, 2) for offset in (0, 1)
    ]
    with RowJournal(tmp_path / "part.csv", 2) as journal:
        journal.add(1, rows[:2])
        journal.add(3, [])
        journal.add(2, rows[2:])
    content, rng = (tmp_path / "part.csv").read_bytes(), np.random.default_rng(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "part.csv").write_bytes(damaged)
        read = RowJournal(tmp_path / "part.csv", 2)
        assert read.of(1) in (None, rows[:2])
        assert read.of(2) in (None, rows[2:])
        assert read.of(3) in (None, [])
        assert not (read.of(1) and read.of(3) == [] and read.of(2)), "something is wrong with one of them"
    whole = ask(data, tmp_path / "whole")
    monkeypatch.setattr(RowJournal, "remove", lambda _: None)
    ask(data, tmp_path / "again")
    (part,) = (tmp_path / "again").glob("*.part.csv")
    other_digit = lambda found: found[1] + b"." + b"%d" % (9 - int(found[2]))  # noqa: E731
    part.write_bytes(re.sub(rb"(\d)\.(\d)", other_digit, part.read_bytes(), count=9))
    assert ask(data, tmp_path / "again") == whole


def test_what_cannot_be_asked_is_refused(data: Path, tmp_path: Path) -> None:
    with EpisodeStore(data) as store:
        with pytest.raises(ConfigError, match="no world of ours"):
            surprise(subject_of(Ruler(), world=None), store, SETTINGS, tmp_path)
        facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)), episodes=1)
        actor = preset("debug", "gcbc").method.build(facts)
        with pytest.raises(ConfigError, match="'gcbc' predicts no frames"):
            surprise(subject_of(actor), store, SETTINGS, tmp_path)
        with pytest.raises(DataError, match=r"has 0\. Collect more"):
            surprise(subject_of(Ruler()), store, replace(SETTINGS, after=500), tmp_path / "new")
    with pytest.raises(ConfigError, match="trajectories must be at least 2, got 1"):
        SurpriseSettings(trajectories=1)
    assert not list(tmp_path.iterdir())


def test_a_world_of_ones_own_changes_colours_until_it_says_more(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENTRIES, "mine", replace(env_entry("tworoom"), name="mine", gym_id="mine/Room-v0"))
    subject = subject_of(Ruler(), "mine")
    with EpisodeStore(data) as store:
        findings = surprise(subject, store, SETTINGS, tmp_path / "colours")
        assert [test["name"] for test in findings.numbers["tests"]] == ["agent: colour"]
        assert any("register_changes" in sentence for sentence in findings.sentences)
        monkeypatch.setitem(CHANGES, "mine", ())  # so that it goes again
        register_changes("mine", moves("agent", ("agent_x", "agent_y"), "px", 60.0, (), free=1))
        findings = surprise(subject, store, SETTINGS, tmp_path / "moves")
    assert [test["name"] for test in findings.numbers["tests"]] == ["agent: 60 px"]


def test_fewer_trajectories_than_asked_for_are_said(data: Path, tmp_path: Path) -> None:
    findings = ask(data, tmp_path, replace(SETTINGS, trajectories=1000))
    assert any("of the 1000 trajectories" in sentence for sentence in findings.sentences)


@pytest.mark.parametrize("method", ["lewm", "pldm", "dino_wm"])
def test_every_world_model_can_be_asked(method: str, data: Path, tmp_path: Path) -> None:
    stats = ActionStats((0.0, 0.0), (1.0, 1.0))
    settings = preset("debug", method).method
    model = settings.build(DataFacts(stats, environment="lewm/TwoRoom-v0")).save_pretrained(tmp_path / "model")
    command = ["understand", "surprise", str(model), "--data", str(data), "--out", str(tmp_path / "out")]
    assert cli.run([*command, "--trajectories", "2", "--device", "cpu"]) == 0
    found = read_findings(tmp_path / "out", "surprise")
    assert found is not None
    assert found.numbers["trajectories"] == 2


def test_a_trained_model_from_its_files(debug_run: Path, data: Path, tmp_path: Path) -> None:
    with EpisodeStore(data) as store:
        subject = open_subject(debug_run, "cpu")
        findings = surprise(subject, store, replace(SETTINGS, trajectories=2), tmp_path)
    assert findings.question["model"] == subject.digest


def test_the_command_collects_measures_and_does_not_ask_twice(
    debug_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found"
    command = ["understand", "surprise", str(debug_run), "--out", str(out), "--trajectories", "2", "--episodes", "8"]
    command += ["--before", "1", "--after", "1", "--device", "cpu"]
    assert cli.run(command) == 0
    assert "Surprise at the changed frame, 2 matched trajectories" in " ".join(capsys.readouterr().out.split())
    assert {path.name for path in out.iterdir()} == {"episodes.h5", ROWS, *(f"surprise.{kind}" for kind in KINDS)}
    monkeypatch.setattr(module, "matched", None)  # nothing is lived through again
    before = (out / "surprise.json").stat().st_mtime_ns
    assert cli.run(command) == 0
    assert "This was asked before" in capsys.readouterr().out
    assert (out / "surprise.json").stat().st_mtime_ns == before


def test_the_command_refuses_in_one_sentence(
    debug_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert cli.run(["understand", "surprise", str(debug_run), "--out", str(tmp_path / "out"), *arguments]) == 1
        said = capsys.readouterr()
        assert said.err.startswith("Error: ")
        assert "Traceback" not in said.err
        assert not (tmp_path / "out").exists()
        return " ".join(said.err.split())

    assert "trajectories must be at least 2, got 1" in refused("--trajectories", "1")
    assert "no.h5" in refused("--data", str(tmp_path / "no.h5"))
    monkeypatch.setattr(env_type("tworoom"), "objects", ())
    assert "tworoom has no objects" in refused()
