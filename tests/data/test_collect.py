"""Collection: the same file for any number of workers, whatever happened on the way."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from lewm.config import CollectConfig
from lewm.data import collect as collect_module
from lewm.data.collect import PART_EPISODES, CollectReport, collect
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.data.store import EpisodeStore
from lewm.envs import registry
from lewm.envs.registry import env_entry, make_env, register_env
from lewm.errors import DataError, EnvError, FileError

RESOLUTION = 14
EPISODES = 2 * PART_EPISODES + 5

# As users write them: an environment of their own in a module, and a script without a __main__ guard.
OWN_ENVIRONMENT = """
from lewm.envs.experts import TwoRoomExpert
from lewm.envs.tworoom import TwoRoom

class OwnRoom(TwoRoom):
    def __init__(self, **options):
        super().__init__(**options)
        print("noise that is not an answer")
"""
OWN_SCRIPT = """
import lewm
from lewm.envs import EnvEntry

lewm.register_env(EnvEntry("own", "own/Room-v0", "own:OwnRoom", "own:TwoRoomExpert", 20, 2, ("x", "y"), "A room."))
report = lewm.collect("own", "data.h5", lewm.CollectConfig(episodes=40, resolution=8, workers=3))
assert report.new_episodes == 40
"""


BROKEN_EXPERT = """
from lewm.envs.experts import TwoRoomExpert

class BrokenExpert(TwoRoomExpert):
    def act(self, state, goal):
        raise ValueError("no idea")
"""


def collect_tiny(out: Path, episodes: int = EPISODES, seed: int = 11, **options: Any) -> CollectReport:
    return collect("tworoom", out, CollectConfig(episodes, **{"resolution": RESOLUTION, "workers": 1} | options), seed)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed collection by one process."""
    out = tmp_path_factory.mktemp("reference") / "data.h5"
    report = collect_tiny(out)
    assert (report.episodes, report.new_episodes) == (EPISODES, EPISODES)
    return out


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def assert_same_content(path: Path, expected: Path) -> None:
    """Columns and attributes first, for a telling failure; then every byte."""
    with EpisodeStore(path) as ours, EpisodeStore(expected) as theirs:
        assert ours.attributes == theirs.attributes
        assert ours.columns == theirs.columns
        for name in ours.columns:
            np.testing.assert_array_equal(ours.read_column(name), theirs.read_column(name))
    assert path.read_bytes() == expected.read_bytes()


def test_an_episode_follows_the_environment(reference: Path) -> None:
    episode = generate_episode("tworoom", RESOLUTION, seed=11, index=20)
    env = make_env("tworoom", RESOLUTION)
    np.testing.assert_array_equal(episode["pixels"], env.render_states(episode["state"]))
    env.reset(options={"state": episode["state"][0]})
    assert np.isnan(episode["action"][-1]).all()
    for action, state in zip(episode["action"][:-1], episode["state"][1:], strict=True):
        env.step(action)
        np.testing.assert_array_equal(env.state, state)
    with EpisodeStore(reference) as store:
        rows = slice(store.offsets[20], store.offsets[20] + store.lengths[20])
        np.testing.assert_array_equal(store.read_column("state")[rows], episode["state"])
        np.testing.assert_array_equal(store.actions[rows], episode["action"])
        store.check_environment("lewm/TwoRoom-v0", action_dim=2)
        assert (store.lengths <= env_entry("tworoom").episode_steps + 1).all()
        first_states = store.read_column("state")[store.offsets]
        assert len(np.unique(first_states, axis=0)) == EPISODES, "every episode has its own stream"


def test_the_number_of_workers_does_not_change_the_file(tmp_path: Path, reference: Path) -> None:
    collect_tiny(tmp_path / "data.h5", workers=2)
    assert_same_content(tmp_path / "data.h5", reference)
    assert names_in(tmp_path) == ["data.h5"], "no parts, lock or temporary file remains"


def test_an_extended_file_is_the_one_collected_at_once(tmp_path: Path, reference: Path) -> None:
    out = tmp_path / "data.h5"
    collect_tiny(out, PART_EPISODES + 3)
    assert collect_tiny(out, PART_EPISODES + 4).new_episodes == 1
    assert collect_tiny(out).new_episodes == EPISODES - PART_EPISODES - 4
    assert_same_content(out, reference)
    assert collect_tiny(out, 5).new_episodes == 0, "there are enough"
    assert_same_content(out, reference)


def test_with_a_frame_stride_only_frames_are_missing(tmp_path: Path, reference: Path) -> None:
    report = collect_tiny(tmp_path / "data.h5", workers=2, frame_stride=5)
    with EpisodeStore(tmp_path / "data.h5") as strided, EpisodeStore(reference) as whole:
        assert strided.columns == whole.columns
        for name in whole.columns:
            np.testing.assert_array_equal(strided.read_column(name), whole.read_column(name))
        rows = strided.frame_rows
        np.testing.assert_array_equal(strided.read_frames(rows), whole.read_frames(rows))
        assert report.frames == strided.num_frames == len(rows)
        assert report.rows == whole.num_rows
        firsts = [rows[rows >= offset][0] - offset for offset in strided.offsets]
        assert set(firsts) == set(range(5)), "every phase occurs"
        steps = whole.read_column("step_idx")[rows]
        assert (np.diff(rows)[steps[1:] >= 5] == 5).all()


def test_with_exploration_starts_are_the_same_and_actions_are_not(tmp_path: Path, reference: Path) -> None:
    paths = [tmp_path / f"{workers}.h5" for workers in (1, 2)]
    for workers, path in zip((1, 2), paths, strict=True):
        collect_tiny(path, workers=workers, exploration=0.9)
    assert_same_content(*paths)
    with EpisodeStore(paths[0]) as exploring, EpisodeStore(reference) as plain:
        starts = [store.read_column("state")[store.offsets] for store in (exploring, plain)]
        np.testing.assert_array_equal(*starts)
        assert exploring.lengths.mean() > plain.lengths.mean(), "who wanders off arrives later"


def test_the_report_counts_what_is_in_the_file(tmp_path: Path, reference: Path) -> None:
    out = tmp_path / "data.h5"
    shutil.copy(reference, out)
    report = collect_tiny(out)
    with EpisodeStore(out) as store:
        ends = store.offsets + store.lengths - 1
        # An episode of TwoRoom ends when it succeeds, and with the 114th row otherwise.
        reached = store.lengths < env_entry("tworoom").episode_steps + 1
        assert (store.read_column("success")[ends][reached] == 1).all()
        assert reached.sum() <= report.successes < EPISODES
        assert report.successes == store.read_column("success").sum(), "nobody goes on after the goal"
        assert (report.rows, report.frames) == (store.num_rows, store.num_frames)
    assert report.gb_per_million_frames == pytest.approx(out.stat().st_size / report.frames * 1e6 / 1e9)


def wait_for_a_part(process: subprocess.Popen, parts: Path) -> None:
    deadline = time.monotonic() + 30
    while not list(parts.glob("*.h5")):
        assert process.poll() is None, "the collection ended by itself"
        assert time.monotonic() < deadline, "no part appeared"
        time.sleep(0.005)


@pytest.fixture
def start_collecting() -> Iterator[Callable[[Path, int], subprocess.Popen]]:
    """Starts a collection, with so many workers, that does not end by itself for hours; after a test it is killed."""
    started: list[subprocess.Popen] = []

    def start(out: Path, workers: int) -> subprocess.Popen:
        settings = {"episodes": 100_000, "resolution": RESOLUTION, "seed": 11, "workers": workers, "out": out}
        options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "lewm", "collect", "tworoom", *options]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_collection_is_continued_and_nothing_is_lost(
    tmp_path: Path, reference: Path, workers: int, start_collecting: Callable[[Path, int], subprocess.Popen]
) -> None:
    out, parts = tmp_path / "data.h5", tmp_path / "data.h5.parts"
    process = start_collecting(out, workers)
    wait_for_a_part(process, parts)
    process.kill()
    process.communicate()
    # It was to have more episodes than the reference: only the parts that both have are of use.
    usable = [part for part in parts.glob("*.h5") if int(part.stem.split("-")[1]) <= EPISODES]
    (parts / ".part.999.tmp").write_text("left by a kill while writing")
    (parts / "merged.h5").write_bytes(reference.read_bytes())  # left by a kill between merging and renaming
    report = collect_tiny(out)
    assert report.new_episodes == EPISODES - len(usable) * PART_EPISODES < EPISODES
    assert_same_content(out, reference)
    assert names_in(tmp_path) == ["data.h5"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_collection_cleanly(
    tmp_path: Path, number: signal.Signals, start_collecting: Callable[[Path, int], subprocess.Popen]
) -> None:
    out, parts = tmp_path / "data.h5", tmp_path / "data.h5.parts"
    process = start_collecting(out, 2)
    wait_for_a_part(process, parts)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Interrupted." in errors
    assert "Traceback" not in errors
    assert names_in(tmp_path) == ["data.h5.parts"], "no half-written file, no lock"
    assert {path.suffix for path in parts.iterdir()} == {".h5"}
    for part in parts.iterdir():
        with EpisodeStore(part) as store:
            assert store.num_episodes == PART_EPISODES


@pytest.mark.skipif(not Path("/proc").exists(), reason="lists processes")
def test_workers_do_not_outlive_a_killed_parent(
    tmp_path: Path, start_collecting: Callable[[Path, int], subprocess.Popen]
) -> None:
    process = start_collecting(tmp_path / "data.h5", 2)
    wait_for_a_part(process, tmp_path / "data.h5.parts")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.02)


def test_a_simulator_that_is_not_installed_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lewm.envs.reacher_expert", None)  # as if its imports failed
    with pytest.raises(EnvError, match=r"^Environment 'reacher' needs the package .*lewm\[mujoco\]"):
        collect("reacher", tmp_path / "data.h5", CollectConfig(2, RESOLUTION, workers=1))
    assert names_in(tmp_path) == []


def test_other_settings_are_refused_and_named(tmp_path: Path, reference: Path) -> None:
    out = tmp_path / "data.h5"
    shutil.copy(reference, out)
    with pytest.raises(DataError, match="seed is 11 there, but 12 was asked for"):
        collect_tiny(out, EPISODES + 1, seed=12)
    with pytest.raises(DataError, match="resolution is 14 there, but 28 was asked for"):
        collect_tiny(out, resolution=28)
    with pytest.raises(DataError, match="frame_stride is 1 there, but 5 was asked for"):
        collect_tiny(out, frame_stride=5)
    with pytest.raises(DataError, match=r"exploration is 0\.0 there, but 0\.5 was asked for"):
        collect_tiny(out, exploration=0.5)
    assert out.read_bytes() == reference.read_bytes()


def test_parts_of_another_collection_are_not_touched(tmp_path: Path, reference: Path) -> None:
    parts = tmp_path / "data.h5.parts"
    parts.mkdir()
    foreign = parts / f"{PART_EPISODES:08d}-{2 * PART_EPISODES:08d}.h5"
    shutil.copy(reference, foreign)
    with pytest.raises(DataError, match=r"parts/.*seed is 11 there.* remove it"):
        collect_tiny(tmp_path / "data.h5", episodes=3, seed=12)
    assert foreign.exists()


def test_nothing_but_a_dataset_is_replaced(tmp_path: Path) -> None:
    notes, folder, link = tmp_path / "notes.h5", tmp_path / "folder.h5", tmp_path / "link.h5"
    notes.write_text("not a dataset")
    folder.mkdir()
    link.symlink_to(notes)
    for out in (notes, folder, link, tmp_path / "data", tmp_path / "data.json"):
        with pytest.raises(FileError, match=r"Choose another place|name of a file|Rename it"):
            collect_tiny(out, 2)
    assert notes.read_text() == "not a dataset"
    assert sorted(names_in(tmp_path)) == ["folder.h5", "link.h5", "notes.h5"]
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).touch()
    with pytest.raises(FileError, match="lies inside the model"):
        collect_tiny(model / "data.h5", 2)


def test_what_else_is_beside_parts_stays(tmp_path: Path) -> None:
    parts = tmp_path / "data.h5.parts"
    parts.mkdir()
    (parts / "notes.txt").write_text("mine")
    (parts / "pictures").mkdir()
    assert collect_tiny(tmp_path / "data.h5", 2).episodes == 2
    assert (parts / "notes.txt").read_text() == "mine"
    assert sorted(names_in(parts)) == ["notes.txt", "pictures"]


def test_a_worker_that_cannot_write_says_so(tmp_path: Path) -> None:
    """A process that may only write small files fails as on a full disk, and so do its workers."""
    code = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); import sys; from lewm import cli; sys.exit(cli.run("
    code += "['collect', 'tworoom', '--episodes', '32', '--resolution', '28', '--workers', '2', '--out', 'data.h5']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"Error: data\.h5\.parts/.*\.h5 cannot be written \(File too large\).*\n", done.stderr)
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_writers_of_one_file_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "data.h5"
    with (tmp_path / "data.h5.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FileError, match="Another process is collecting"):
            collect_tiny(out, 2)
    assert collect_tiny(out, 2).episodes == 2, "a lock file that nobody holds does not matter"


def test_a_failing_episode_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_three(name: str, size: int, seed: int, index: int, *others: Any, **more: Any) -> dict[str, np.ndarray]:
        if index == 3:
            raise ValueError("the simulator exploded")
        return generate_episode(name, size, seed, index, *others, **more)

    monkeypatch.setattr(collect_module, "generate_episode", fail_at_three)
    with pytest.raises(DataError, match=r"Episode 3 of tworoom .*ValueError\('the simulator exploded'\)"):
        collect_tiny(tmp_path / "data.h5", 5)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_worker_reports_its_failing_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_EXPERT)
    monkeypatch.syspath_prepend(tmp_path)  # where workers look as well
    monkeypatch.setattr(registry, "ENTRIES", dict(registry.ENTRIES))
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    register_env(replace(env_entry("tworoom"), name="broken", gym_id="own/Broken-v0", expert="broken:BrokenExpert"))
    with pytest.raises(DataError, match=r"Episode \d+ of broken .*ValueError\('no idea'\)"):
        collect("broken", tmp_path / "data.h5", CollectConfig(EPISODES, RESOLUTION, workers=2))


def test_progress_counts_episodes_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    total = PART_EPISODES + 2
    settings = CollectConfig(total, RESOLUTION, workers=1)
    collect("tworoom", tmp_path / "d.h5", settings, on_progress=lambda *counts: seen.append(counts))
    assert seen == [(0, total), (PART_EPISODES, total), (total, total)]


def child_processes() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.skipif(not Path("/proc").exists(), reason="lists processes")
def test_an_interrupt_anywhere_ends_the_workers_before_the_lock_is_given_up(tmp_path: Path) -> None:
    before = child_processes()
    seen_at_work: set[str] = set()

    def interrupt(done: int, _total: int) -> None:
        seen_at_work.update(child_processes() - before)
        if done:
            raise KeyboardInterrupt

    out = tmp_path / "data.h5"
    with pytest.raises(KeyboardInterrupt):
        collect("tworoom", out, CollectConfig(20 * PART_EPISODES, RESOLUTION, workers=2), on_progress=interrupt)
    assert len(seen_at_work) == 2
    assert child_processes() == before
    assert names_in(tmp_path) == ["data.h5.parts"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_script_without_a_main_guard_collects_its_own_environment(tmp_path: Path) -> None:
    scripts, work = tmp_path / "scripts", tmp_path / "work"
    scripts.mkdir()
    work.mkdir()
    (scripts / "own.py").write_text(OWN_ENVIRONMENT)
    (scripts / "script.py").write_text(OWN_SCRIPT)
    command = [sys.executable, str(scripts / "script.py")]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert names_in(work) == ["data.h5"]
    with EpisodeStore(work / "data.h5") as store:
        store.check_environment("own/Room-v0", action_dim=2)
        assert store.num_episodes == 40


def test_a_worker_that_dies_is_reported_and_its_finished_parts_are_kept(tmp_path: Path) -> None:
    def kill_one(done: int, _total: int) -> None:
        victims = child_processes() - before
        if done and victims:
            os.kill(int(min(victims)), signal.SIGKILL)

    before = child_processes()
    out = tmp_path / "data.h5"
    with pytest.raises(DataError, match=r"process died.*Collect again"):
        collect("tworoom", out, CollectConfig(8 * PART_EPISODES, RESOLUTION, workers=2), on_progress=kill_one)
    assert list((tmp_path / "data.h5.parts").glob("*.h5"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("twoo_room", {}, "Did you mean 'tworoom'"),
        ("tworoom", {"mistakes": 0.1}, "tworoom has no expert that makes mistakes"),
        ("tworoom", {"demos": "demos.npz"}, "tworoom has no expert that replays"),
        ("tworoom", {"seed": HELD_OUT_SEED}, "held out"),
        ("tworoom", {"seed": -1}, "at least 0, got -1"),
    ],
)
def test_bad_requests_create_nothing(tmp_path: Path, env: str, options: dict[str, Any], message: str) -> None:
    seed = options.pop("seed", 0)
    with pytest.raises((DataError, EnvError), match=message):
        collect(env, tmp_path / "folder" / "data.h5", CollectConfig(5, **options), seed)
    assert names_in(tmp_path) == []
