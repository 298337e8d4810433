"""Probes find what is in embeddings, not what is not, and see nothing of a test episode."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from lewm import cli
from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import BusyError, ConfigError, DataError
from lewm.files import only_writer
from lewm.methods.frozen import FrozenEncoder
from lewm.methods.registry import method_config
from lewm.presets import PRESETS
from lewm.types import ActionStats, DataFacts
from lewm.understand import probe as probe_module
from lewm.understand.findings import Findings, read_findings
from lewm.understand.probe import ask, investigate, parts_of, probe, probed
from lewm.understand.probe_findings import draw
from lewm.understand.probe_settings import ProbeSettings
from lewm.understand.regression import MlpSettings, Scale, fit_mlps
from lewm.understand.subject import Subject, open_episodes, open_subject
from lewm.understand.views import split_groups, view_of

SIZE, STRIDE, EPISODES, FRAMES = 28, 5, 200, 4
# What the planted dataset's states hold, in this order.
PLANTED, ABSENT, OF_EPISODE, SPEED, FIXED = (f"state {number}" for number in range(5))
QUICK = ProbeSettings(splits=2, epochs=12)
FILES = ["episodes.h5", "episodes.h5.features", "probe.json", "probe.md", "probe.png"]


class Cells(nn.Module):
    """An encoder whose embedding is what some pixels show, so that what it holds is known."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[..., 0, :12, 0].float() / 255


@pytest.fixture(scope="module")
def subject(debug_run: Path) -> Subject:
    """A model of no world, with that encoder."""
    opened = open_subject(debug_run, "cpu")
    return replace(opened, encoder=FrozenEncoder("cells", "c" * 64, Cells(), (12,), SIZE), world=None)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes in which a dot of grey moves evenly. Other pixels tell the episode, but not the state's number of it."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("planted") / "data.h5"

    def episode() -> dict[str, np.ndarray]:
        rows = STRIDE * FRAMES
        speed = rng.uniform(-1, 1)
        place = rng.uniform(0.3, 0.7) + speed * 0.01 * np.arange(rows)
        code = rng.integers(0, 256, 11)
        pixels = np.zeros((FRAMES, SIZE, SIZE, 3), np.uint8)
        pixels[:, 0, 0, 0] = np.round(255 * place[::STRIDE])
        pixels[:, 0, 1:12, 0] = code
        own, fixed = np.full(rows, rng.normal()), np.full(rows, 3.0)
        states = np.stack([place, rng.normal(size=rows), own, np.full(rows, speed), fixed], axis=1)
        action = np.zeros((rows, 2), np.float32)
        frame_step = np.arange(0, rows, STRIDE)
        return {"action": action, "pixels": pixels, "frame_step": frame_step, "state": states}

    write_episodes(path, (episode() for _ in range(EPISODES)), {"frame_stride": STRIDE})
    return path


@pytest.fixture(scope="module")
def found(subject: Subject, planted: Path) -> Findings:
    with EpisodeStore(planted) as store:
        return probe(subject, store, QUICK)


def r_of(found: Findings, name: str, embeddings: int = 1, kind: str = "linear") -> float | None:
    (view,) = (v for v in found.numbers["models"][0]["views"] if v["embeddings"] == embeddings)
    r: float | None = view["found"][name][kind]["r"]
    return r


def test_a_planted_quantity_is_found_and_an_absent_one_is_not(found: Findings) -> None:
    for kind, least in (("linear", 0.99), ("mlp", 0.98)):
        r, absent = r_of(found, PLANTED, kind=kind), r_of(found, ABSENT, kind=kind)
        assert r is not None
        assert r > least
        assert absent is not None
        assert abs(absent) < 0.25


def test_nothing_of_a_test_episode_is_seen(found: Findings) -> None:
    """Frames tell their episode: had probes seen another frame of it, they would know its number."""
    for kind in ("linear", "mlp"):
        r = r_of(found, OF_EPISODE, kind=kind)
        assert r is not None
        assert abs(r) < 0.45


def test_frames_of_known_episodes_would_give_the_number_away(planted: Path) -> None:
    """The counterpart: an MLP that has seen each episode reads it."""
    with EpisodeStore(planted) as store:
        states = store.read_column("state")[store.frame_rows]
        codes = store.read_frames(store.frame_rows)[:, 0, :12, 0].astype(np.float32)
    own = states[:, 2:3]
    known, asked = np.arange(len(own)) % FRAMES != 1, np.arange(len(own)) % FRAMES == 1
    x, y = Scale.of(codes), Scale.of(own)
    parts = x.to(codes[known]), [y.to(own[known])], x.to(codes[asked]), [y.to(own[asked])]
    predict = fit_mlps(*parts, MlpSettings(epochs=60), (0,), torch.device("cpu"))
    (predicted,) = predict(x.to(codes[asked]))
    assert np.corrcoef(predicted[:, 0], own[asked, 0])[0, 1] > 0.8


def test_a_speed_shows_in_three_frames_only(found: Findings) -> None:
    one, three = r_of(found, SPEED, 1), r_of(found, SPEED, 3)
    assert one is not None
    assert three is not None
    assert one < 0.5
    assert three > 0.95


def test_what_never_varies_has_no_r_and_a_sentence(found: Findings) -> None:
    assert r_of(found, FIXED) is None
    assert any(FIXED in sentence and "undefined" in sentence for sentence in found.sentences)
    assert "nan" not in found.markdown().lower()
    json.dumps(found.numbers, allow_nan=False)


def test_the_page_and_the_figure_say_what_was_read(found: Findings) -> None:
    assert "Read from one embedding: 800 frames of 200 episodes" in found.markdown()
    assert "Read from three embeddings: 400 frames of 200 episodes" in found.markdown()
    assert len(draw(found).axes) == 2


def test_splits_share_no_episode_and_leave_none_out(planted: Path) -> None:
    with EpisodeStore(planted) as store:
        view = view_of(store, 1, 5, np.ones(store.num_frames, bool), 10**6, 0)
        parts = split_groups(view.groups, 0, 1, store)
        episodes = [set(view.episodes[part]) for part in parts]
    assert sorted(np.concatenate(parts)) == list(range(EPISODES * FRAMES))
    assert [len(part) for part in episodes] == [160, 20, 20]
    assert not episodes[0] & episodes[1]
    assert not episodes[2] & (episodes[0] | episodes[1])


def test_views_stay_in_their_episode_and_leave_out_the_invisible(planted: Path) -> None:
    with EpisodeStore(planted) as store:
        visible = np.ones(store.num_frames, bool)
        visible[3] = False
        view = view_of(store, 3, 10, visible, 10**6, 0)
        assert len(view.places) == 0  # 3 frames 10 rows apart need 21 rows, and episodes have 20
        view = view_of(store, 3, 5, visible, 10**6, 0)
        assert view.places[:2].tolist() == [[0, 1, 2], [4, 5, 6]]
        assert (store.frame_rows[view.places] // (STRIDE * FRAMES) == view.episodes[:, None]).all()
        assert len(view_of(store, 1, 5, visible, 100, 0).places) == 100
        with pytest.raises(DataError, match="frame-stride"):
            view_of(store, 3, 7, visible, 100, 0)


def test_too_few_episodes_are_refused(subject: Subject, tmp_path: Path) -> None:
    columns = {"action": np.zeros((15, 2), np.float32), "pixels": np.zeros((15, SIZE, SIZE, 3), np.uint8)}
    write_episodes(tmp_path / "one.h5", [{**columns, "state": np.zeros((15, 2))}], {})
    with EpisodeStore(tmp_path / "one.h5") as store, pytest.raises(DataError, match="1 episode to look at"):
        probe(subject, store, QUICK)


def test_episodes_shorter_than_the_history_are_read_from_one_embedding_only(subject: Subject, tmp_path: Path) -> None:
    columns = {"action": np.zeros((3, 2), np.float32), "pixels": np.zeros((3, SIZE, SIZE, 3), np.uint8)}
    write_episodes(tmp_path / "short.h5", [{**columns, "state": np.zeros((3, 2))}] * 4, {})
    with EpisodeStore(tmp_path / "short.h5") as store:
        found = probe(subject, store, replace(QUICK, splits=1))
    assert [view["embeddings"] for view in found.numbers["models"][0]["views"]] == [1]
    assert any("Too few episodes" in sentence for sentence in found.sentences)


def test_models_are_probed_on_the_same_splits(subject: Subject, planted: Path, found: Findings) -> None:
    blind = FrozenEncoder("blind", "b" * 64, Blind(), (2,), SIZE)
    other = replace(subject, digest="d" * 64, encoder=blind)
    with EpisodeStore(planted) as store:
        both = probe(subject, store, QUICK, [other])
    first, second = both.numbers["models"]
    assert first["views"] == found.numbers["models"][0]["views"]
    r = second["views"][0]["found"][PLANTED]["linear"]["r"]
    assert r is None or abs(r) < 0.3
    assert len({model["name"] for model in both.numbers["models"]}) == 2
    rows = [row[1] for row in both.tables[0].rows]
    assert rows[0] == first["name"]
    assert rows[1] == second["name"]


class Blind(nn.Module):
    """An encoder of what stays the same."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[..., 5, :2, 0].float()


def test_finished_splits_are_not_computed_again(
    subject: Subject, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Findings
) -> None:
    count, fit = 0, probe_module.fit_mlps

    def stopped(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    monkeypatch.setattr(probe_module, "fit_mlps", stopped)
    with EpisodeStore(planted) as store:
        with pytest.raises(KeyboardInterrupt):
            probe(subject, store, QUICK, parts=parts_of(tmp_path))
        assert len(list(parts_of(tmp_path).glob("*.json"))) == 3
        again = probe(subject, store, QUICK, parts=parts_of(tmp_path))
        assert count == 5
        assert again == found
        probe(subject, store, replace(QUICK, epochs=1), parts=parts_of(tmp_path))  # another question
        assert count == 9


def test_a_finished_split_that_was_changed_is_computed_again(
    subject: Subject, planted: Path, tmp_path: Path, found: Findings
) -> None:
    parts = parts_of(tmp_path)
    with EpisodeStore(planted) as store:
        probe(subject, store, QUICK, parts=parts)
        first, second, third, _ = sorted(parts.glob("*.json"))
        first.write_text(re.sub(r'"r": (-?)0\.(\d)', lambda m: f'"r": {m[1]}0.{9 - int(m[2])}', first.read_text()))
        second.write_bytes(second.read_bytes()[:-9])
        third.write_text("[]")
        assert probe(subject, store, QUICK, parts=parts) == found


def test_states_that_were_changed_are_another_question(subject: Subject, planted: Path, tmp_path: Path) -> None:
    """Embeddings stay as they are: frames and actions are the same."""
    shutil.copy(planted, tmp_path / "data.h5")
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        del file.attrs["checksums"]  # what is written is meant
        file["state"][0, 0] += 1.0
    with EpisodeStore(planted) as one, EpisodeStore(tmp_path / "data.h5") as other:
        assert one.digest == other.digest
        assert ask(subject, one, QUICK) != ask(subject, other, QUICK)


def test_replays_of_one_demonstration_are_in_one_part(subject: Subject, tmp_path: Path) -> None:
    """All replays of a demonstration share a number: had probes seen another replay, they would know it."""
    rng = np.random.default_rng(3)
    codes, numbers = rng.integers(0, 256, (20, 12)), rng.normal(size=20)

    def replay(demonstration: int) -> dict[str, np.ndarray]:
        pixels = np.zeros((FRAMES, SIZE, SIZE, 3), np.uint8)
        pixels[:, 0, :12, 0] = np.clip(codes[demonstration] + rng.integers(-2, 3, (FRAMES, 12)), 0, 255)
        states = np.full((FRAMES, 1), numbers[demonstration])
        columns = {"action": np.zeros((FRAMES, 2), np.float32), "pixels": pixels, "state": states}
        return columns | ({"demonstration": np.full(FRAMES, 10 * demonstration)} if known else {})

    errors = []
    for known in (False, True):
        path = tmp_path / f"{known}.h5"
        write_episodes(path, (replay(i % 20) for i in range(200)), {"demonstrations": "d" * 64})
        with EpisodeStore(path) as store:
            asked = probe(subject, store, ProbeSettings(splits=3, epochs=5))
            view = view_of(store, 1, 5, np.ones(store.num_frames, bool), 10**6, 0)
            parts = [set(view.groups[part]) for part in split_groups(view.groups, 0, 0, store)]
        errors.append(asked.numbers["models"][0]["views"][0]["found"]["state 0"]["linear"]["mse"])
        assert ("20 demonstrations, none of which is in two parts" in asked.markdown()) == known
        assert ("The dataset does not say which they replay" in asked.markdown()) != known
    assert errors[0] < 0.5, "it has seen replays of the same"
    assert errors[1] > 1.5 * errors[0]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert len(set.union(*parts)) == 20


def test_a_model_that_sees_nothing_is_said_to(subject: Subject, planted: Path) -> None:
    blind = replace(subject, digest="e" * 64, encoder=FrozenEncoder("blind", "e" * 64, Blind(), (2,), SIZE))
    with EpisodeStore(planted) as store:
        page = probe(blind, store, replace(QUICK, splits=1, epochs=1)).markdown()
    assert f"{FIXED}: r is undefined, because nothing varies there" in page
    assert f"{PLANTED}: r is undefined, because what the probe reads does not vary" in page


def test_two_processes_do_not_probe_in_one_folder(subject: Subject, planted: Path, tmp_path: Path) -> None:
    with EpisodeStore(planted) as store:
        with only_writer(tmp_path / ".probe.lock", "busy"), pytest.raises(BusyError, match="Another process probes"):
            probed(subject, store, QUICK, tmp_path)
        assert not list(tmp_path.iterdir())
        found = probed(subject, store, replace(QUICK, splits=1, epochs=1), tmp_path)
        assert read_findings(tmp_path, "probe", found.question) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[2:], "finished splits are gone"


def test_questions_differ_by_what_is_asked(subject: Subject, planted: Path) -> None:
    with EpisodeStore(planted) as store:
        asked = ask(subject, store, QUICK)
        assert ask(subject, store, replace(QUICK)) == asked
        assert json.loads(json.dumps(asked)) == asked
        changed = [ask(subject, store, replace(QUICK, splits=3)), ask(subject, store, QUICK, [subject])]
        changed += [ask(subject, store, QUICK, seed=1), ask(subject, store, replace(QUICK, properties=("state 1",)))]
    assert asked not in changed


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_probes_writes_and_does_nothing_twice(
    debug_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found"
    command = f"understand probe {debug_run} --out {out} --episodes 6 --probe.splits 1 --probe.epochs 2 --device cpu"
    assert cli.run(command.split()) == 0
    assert "agent position" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} >= {"probe.md", "probe.json", "probe.png", "episodes.h5"}
    assert "paper's LeWM" in (out / "probe.md").read_text(encoding="utf-8")
    written = (out / "probe.json").stat().st_mtime_ns
    assert cli.run(command.split()) == 0
    assert "asked before" in capsys.readouterr().out
    assert (out / "probe.json").stat().st_mtime_ns == written
    assert cli.run([*command.split(), "--probe.properties", "agent positon"]) != 0
    assert "Did you mean 'agent position'" in " ".join("".join(capsys.readouterr()).split())


def test_data_of_another_resolution_or_world_are_refused(
    debug_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collect("tworoom", tmp_path / "small.h5", CollectConfig(3, resolution=14, workers=1))
    command = f"understand probe {debug_run} --out {tmp_path} --device cpu --data"
    assert cli.run([*command.split(), str(tmp_path / "small.h5")]) != 0
    assert "frames of 14 pixels" in " ".join("".join(capsys.readouterr()).split())
    assert not (tmp_path / "probe.json").exists()


def test_a_report_asks_in_the_same_way(debug_run: Path, tmp_path: Path, debug_config: Any) -> None:
    opened = open_subject(debug_run, "cpu")
    with open_episodes(debug_config.data, opened) as store:
        first = investigate(opened, store, tmp_path, quick=True)
        assert read_findings(tmp_path, "probe") == first
        assert investigate(opened, store, tmp_path, quick=True) == first


@pytest.mark.slow
def test_a_killed_command_goes_on(debug_run: Path, tmp_path: Path) -> None:
    options = ["--episodes", "30", "--probe.splits", "40", "--probe.epochs", "50", "--device", "cpu"]
    command = [sys.executable, "-m", "lewm", "understand", "probe", str(debug_run), "--out", str(tmp_path), *options]
    parts = parts_of(tmp_path)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while len(list(parts.glob("*.json"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "probe.json").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.parametrize("method", ["pldm", "dino_wm"])
def test_other_methods_are_probed_in_the_same_table(
    method: str, debug_run: Path, debug_config: Any, tmp_path: Path
) -> None:
    settings, _ = method_config(method).for_preset(PRESETS["debug"])
    facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)), environment="lewm/TwoRoom-v0")
    settings.build(facts).save_pretrained(tmp_path / method)
    subject, other = (open_subject(source, "cpu") for source in (debug_run, tmp_path / method))
    with open_episodes(debug_config.data, subject) as store:
        both = probe(subject, store, replace(QUICK, splits=1, epochs=1), [other])
        tokens = probe(other, store, replace(QUICK, splits=1, epochs=1, tokens="flat"))
    assert [row[1] for row in both.tables[0].rows[:2]] == ["debug (lewm)", f"{method} ({method})"]
    said = any("tokens of a frame are averaged" in sentence for sentence in both.sentences)
    size = math.prod(other.encoder.shape)
    if method == "dino_wm":
        assert said
        assert both.numbers["models"][1]["views"][0]["inputs"] == other.encoder.shape[1]
        assert tokens.numbers["models"][0]["views"][0]["inputs"] == size
    else:
        assert not said
        assert both.numbers["models"][1]["views"][0]["inputs"] == size


def test_a_model_that_does_not_encode_is_refused(tmp_path: Path) -> None:
    settings, _ = method_config("gcbc").for_preset(PRESETS["debug"])
    settings.build(DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)))).save_pretrained(tmp_path / "actor")
    with pytest.raises(ConfigError, match="does not encode"):
        open_subject(tmp_path / "actor", "cpu")


OWN_WORLD = """
from lewm import cli

assert cli.run("collect puck --episodes 20 --resolution 28 --workers 1 --out puck.h5".split()) == 0
assert cli.run("train debug --env puck --data puck.h5 --out run --train.steps 3 --device cpu".split()) == 0
asked = "understand probe run --episodes 8 --probe.splits 1 --probe.epochs 2 --out found --device cpu"
assert cli.run(asked.split()) == 0
"""


@pytest.mark.slow
def test_a_users_own_world_is_probed_number_by_number(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "add-an-environment.md"
    example = guide.read_text(encoding="utf-8").split("## A whole one", 1)[1].split("```python\n", 1)[1]
    (tmp_path / "my_world.py").write_text(example.split("```", 1)[0])
    environment = os.environ | {"LEWM_ENVS": "my_world"}
    subprocess.run([sys.executable, "-P", "-c", OWN_WORLD], cwd=tmp_path, env=environment, check=True)
    found = read_findings(tmp_path / "found", "probe")
    assert found is not None
    assert list(found.numbers["models"][0]["views"][0]["found"]) == ["x", "y", "vx", "vy"]
