"""`lewm data convert` never says that it is done where the result cannot be read: what does not fit is named."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lewm.data.formats.convert import convert
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import DataError

FORMS = ("hdf5", "folder", "lerobot")


def make_folder(path: Path, episodes: list[dict[str, np.ndarray]], size: int = 6) -> Path:
    """A plain folder, as people make them; ``size`` in an episode: the side of its frames."""
    rng = np.random.default_rng(0)
    for number, columns in enumerate(episodes):
        place = path / f"episode_{number:06d}"
        place.mkdir(parents=True)
        side = int(columns.get("size", size))
        for frame in range(len(columns["action"])):
            cv2.imwrite(str(place / f"frame_{frame:06d}.png"), rng.integers(0, 256, (side, side, 3), np.uint8))
        np.savez(place / "columns.npz", **{name: column for name, column in columns.items() if name != "size"})
    return path


def actions(rows: int = 4) -> np.ndarray:
    return np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([{"action": actions()}, {"action": actions(), "size": np.array(5)}], "Episode 1 .* pixels is .*5, 5, 3"),
        ([{"action": actions()}, {"action": actions()[:, :1]}], "Episode 1 .* action is "),
        ([{"action": actions(), "reward": np.zeros(4)}, {"action": actions()}], "Episode 1 .* reward is nothing there"),
        ([{"action": actions()}, {"action": actions(), "late": np.zeros(4)}], "Episode 1 .* late is "),
        ([{"action": actions()}, {"action": np.full((4, 2), np.nan, np.float32)}], "no finite action"),
        ([{"action": np.full((4, 2), np.nan, np.float32)}], "no finite action"),
        ([{"action": actions(), "a/b": np.zeros(4)}], "'a/b' cannot be the name of a column"),
        ([{"action": actions(), "ep_len": np.zeros(4)}], "'ep_len' cannot be the name of a column"),
        ([{"action": actions(), "pixels": np.zeros(4)}], "'pixels' must be an array .* by another name"),
        ([{"action": actions(), "task": np.array(["push"] * 4)}], "task must hold numbers"),
        ([{"action": np.zeros((4, 0), np.float32)}], "action must be floating point"),
        ([{"action": np.zeros((4, 2, 2), np.float32)}], "action must be floating point"),
        ([{"action": np.zeros((4, 2), np.complex64)}], "action must hold numbers"),
    ],
)
def test_episodes_that_do_not_fit_are_named(
    tmp_path: Path, form: str, episodes: list[dict[str, np.ndarray]], message: str
) -> None:
    source = make_folder(tmp_path / "source", episodes)
    with pytest.raises(DataError, match=message):
        convert(source, tmp_path / "new", form)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [np.arange(4), np.arange(4.0), np.arange(8).reshape(4, 2), np.arange(4) > 1])
def test_actions_of_other_kinds_become_such_as_can_be_read(tmp_path: Path, form: str, given: np.ndarray) -> None:
    convert(make_folder(tmp_path / "source", [{"action": given}]), tmp_path / "there", form)  # type: ignore[arg-type]
    convert(tmp_path / "there", tmp_path / "back.h5")
    with EpisodeStore(tmp_path / "back.h5") as store:
        np.testing.assert_array_equal(store.actions, given.reshape(4, -1).astype(np.float32))


def test_whole_numbers_may_lack_the_last_action(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "source", [{"action": np.arange(4)}])
    np.savez(folder / "episode_000000" / "columns.npz", action=np.arange(3))
    convert(folder, tmp_path / "new.h5")
    with EpisodeStore(tmp_path / "new.h5") as store:
        np.testing.assert_array_equal(store.actions[:, 0], [0, 1, 2, np.nan])


@pytest.mark.parametrize(
    "description",
    ['{"attributes": 3}', '{"attributes": {"seed": [1]}}', '{"episodes": "2"}', '{"attributes": {"frame_stride": 0}}'],
)
def test_a_description_of_another_kind_is_refused(tmp_path: Path, description: str) -> None:
    folder = make_folder(tmp_path / "source", [{"action": actions()}])
    (folder / "dataset.json").write_text(description)
    with pytest.raises(DataError, match=r"dataset\.json.* Repair"):
        convert(folder, tmp_path / "new.h5")


@pytest.mark.parametrize("change", [{"reward": np.zeros(3)}, {"pixels": np.zeros((3, 5, 5, 3), np.uint8)}, {"a/b": 0}])
def test_a_writer_of_episodes_hears_the_same(tmp_path: Path, change: dict[str, object]) -> None:
    """As a world of one's own would, when it is collected."""
    plain = {"pixels": np.zeros((3, 4, 4, 3), np.uint8), "action": actions(3)}
    changed = {name: np.zeros(3) if isinstance(value, int) else value for name, value in change.items()}
    with pytest.raises(DataError, match=r"Episode 1 cannot be written: .*(a/b|reward|pixels)"):
        write_episodes(tmp_path / "new.h5", [plain, {**plain, **changed}], {})
    with pytest.raises(
        DataError, match=r"new\.h5 has no finite action in episode 0 at step 0 of 3.*Nothing was written"
    ):
        write_episodes(tmp_path / "new.h5", [{**plain, "action": plain["action"] * np.nan}], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_what_a_kill_leaves_is_cleared_by_the_same_command(
    tmp_path: Path, form: str, write_tiny: Callable[..., Path]
) -> None:
    source = write_tiny([4] * 40)
    target = tmp_path / ("new.h5" if form == "hdf5" else "new")
    code = "import os, sys, signal\nfrom lewm.data.formats.convert import convert\n"
    code += "stop = lambda done, total: done == 20 and os.kill(os.getpid(), signal.SIGKILL)\n"
    code += "convert(sys.argv[1], sys.argv[2], sys.argv[3], on_progress=stop)"
    killed = subprocess.run([sys.executable, "-c", code, source, target, form])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "what it had begun"
    convert(source, target, form)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.h5", target.name}
