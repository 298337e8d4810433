"""Demonstrations: what can be replayed is loaded, what cannot is refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.formats.demonstrations import choose_demonstration, demonstrations_digest, load_demonstrations
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.data.store import EpisodeStore
from lewm.envs import registry
from lewm.envs.base import Expert
from lewm.envs.registry import env_entry
from lewm.errors import DataError, EnvError
from lewm.rng import stream
from lewm.types import Demonstration

LENGTHS = (4, 2, 3)


def arrays(lengths: tuple[int, ...] = LENGTHS, **changed: Any) -> dict[str, np.ndarray]:
    rows = np.arange(sum(lengths), dtype=np.float32)
    columns = {"state": rows[:, None] + np.arange(5), "action": np.stack([rows, -rows], axis=1)}
    return columns | {"episode_ends": np.cumsum(lengths), **changed}


def tiny(episodes: int, demos: str | None) -> CollectConfig:
    return CollectConfig(episodes, resolution=8, workers=1, demos=demos)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def write(**columns: np.ndarray) -> str:
        np.savez(tmp_path / "demos.npz", **columns)
        return str(tmp_path / "demos.npz")

    return write


def test_an_npz_file_is_cut_into_demonstrations(save: Callable[..., str]) -> None:
    demonstrations = load_demonstrations(save(**arrays()))
    assert [len(d.states) for d in demonstrations] == [4, 2, 3]
    assert [len(d.actions) for d in demonstrations] == [4, 2, 3]
    assert demonstrations[1].states.tolist() == [[4, 5, 6, 7, 8], [5, 6, 7, 8, 9]]
    assert demonstrations[2].actions.tolist() == [[6, -6], [7, -7], [8, -8]]
    assert demonstrations[0].states.dtype == demonstrations[0].actions.dtype == np.float64


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": np.zeros((9, 4))}, r"state must be numbers of shape \(9, 5\), got float64 \(9, 4\)"),
        ({"action": np.zeros((8, 2))}, r"action must be numbers of shape \(9, 2\), got float64 \(8, 2\)"),
        ({"action": np.full((9, 2), "a")}, "action must be numbers"),
        ({"state": np.where(np.arange(9) == 6, np.nan, 0)[:, None] * np.ones(5)}, "finite, but row 6 is"),
        ({"episode_ends": np.array([4, 4, 9])}, "at least 2 rows, but episode 1 spans rows 4 to 4"),
        ({"episode_ends": np.array([6, 4, 9])}, "at least 2 rows, but episode 1"),
        ({"episode_ends": np.array([4, 5, 9])}, "at least 2 rows, but episode 1"),
        ({"episode_ends": np.array([4, 6])}, "last of episode_ends must be the number of rows, 9, got 6"),
        ({"episode_ends": np.array([4, 6, 12])}, "last of episode_ends must be the number of rows, 9, got 12"),
        ({"episode_ends": np.array([4.0, 9.0])}, "one integer per episode"),
        ({"episode_ends": np.zeros(0, int)}, "one integer per episode"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    save: Callable[..., str], changed: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_demonstrations(save(**arrays(**changed)))


def test_files_that_are_no_demonstrations_are_refused(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(state=np.zeros((3, 5)), other=np.zeros(1))
    with pytest.raises(DataError, match=r"needs the arrays .* but has state, other\. Add action, episode_ends"):
        load_demonstrations(path)
    whole = Path(save(**arrays())).read_bytes()
    for content in (b"", b"not a file", whole[: len(whole) // 2]):
        (tmp_path / "broken.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"is not a whole \.npz file"):
            load_demonstrations(str(tmp_path / "broken.npz"))
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(DataError, match="but has none"):
        load_demonstrations(str(tmp_path / "single.npy"))
    with pytest.raises(DataError, match=r"no demonstrations at .*absent\.npz"):
        load_demonstrations(str(tmp_path / "absent.npz"))
    with pytest.raises(DataError, match="no demonstrations at"):
        load_demonstrations(str(tmp_path))


def test_a_dataset_id_without_network_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_args: Any, **_options: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DataError, match=r"'someone/pusht' is not a file here.*no route to host.*network"):
        load_demonstrations("someone/pusht")


def write_lerobot(folder: Path, lengths: tuple[int, ...] = LENGTHS, **columns: np.ndarray) -> Path:
    """A LeRobot dataset without videos."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.concatenate([np.arange(length) for length in lengths])
    table = {name: pyarrow.array(list(column)) for name, column in columns.items()}
    table |= {"episode_index": episode, "frame_index": frame, "index": np.arange(len(frame))}
    (folder / "data" / "chunk-000").mkdir(parents=True)
    (folder / "meta").mkdir()
    parquet.write_table(pyarrow.table(table), folder / "data" / "chunk-000" / "file-000.parquet")
    features = {name: {"dtype": "float32", "shape": list(column.shape[1:])} for name, column in columns.items()}
    features |= {name: {"dtype": "int64", "shape": [1]} for name in ("episode_index", "frame_index", "index")}
    info = {"codebase_version": "v3.0", "fps": 10, "total_episodes": len(lengths), "features": features}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


def test_a_lerobot_folder_gives_the_same_demonstrations(save: Callable[..., str], tmp_path: Path) -> None:
    expected = arrays()
    columns = {"observation.state": expected["state"], "action": expected["action"]}
    folder = write_lerobot(tmp_path / "dataset", **columns)
    ours, theirs = load_demonstrations(str(folder)), load_demonstrations(save(**expected))
    assert demonstrations_digest(ours) == demonstrations_digest(theirs)


def test_the_pose_of_the_block_is_found_from_its_corners(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    poses = np.column_stack([rng.uniform(100, 400, (9, 2)), rng.uniform(-3, 3, 9)])
    corners = np.array([[-60, 0], [60, 0], [60, 30], [-60, 30], [-15, 30], [-15, 120], [15, 120], [15, 30]])
    cos, sin = np.cos(poses[:, 2]), np.sin(poses[:, 2])
    turned = np.einsum("ijn,kj->nki", np.array([[cos, -sin], [sin, cos]]), corners) + poses[:, None, :2]
    agent = rng.uniform(0, 512, (9, 2))
    columns = {"observation.state": agent, "observation.environment_state": turned.reshape(9, 16)}
    folder = write_lerobot(tmp_path / "dataset", action=np.zeros((9, 2)), **columns)
    states = np.concatenate([d.states for d in load_demonstrations(str(folder))])
    np.testing.assert_allclose(states, np.column_stack([agent, poses]), atol=1e-9)


def test_a_lerobot_dataset_without_the_block_is_refused(tmp_path: Path) -> None:
    columns = {"observation.state": np.zeros((9, 2)), "action": np.zeros((9, 2))}
    folder = write_lerobot(tmp_path / "dataset", **columns)
    with pytest.raises(DataError, match=r"lacks what a replay needs.*It has observation\.state \(2,\).*keypoints"):
        load_demonstrations(str(folder))


def test_the_digest_is_of_the_content(save: Callable[..., str]) -> None:
    digest = demonstrations_digest(load_demonstrations(save(**arrays())))
    assert digest == demonstrations_digest(load_demonstrations(save(**arrays(other=np.ones(1)))))
    for lengths in ((4, 3, 2), (2, 4, 3)):
        assert digest != demonstrations_digest(load_demonstrations(save(**arrays(lengths))))
    changed = arrays()
    changed["action"][3, 1] += 1
    assert digest != demonstrations_digest(load_demonstrations(save(**changed)))


def test_every_tenth_demonstration_is_held_out() -> None:
    demonstrations = [Demonstration(np.full((2, 5), i), np.zeros((2, 2))) for i in range(25)]
    chosen = {
        held_out: {int(choose_demonstration(demonstrations, stream(i), held_out).states[0, 0]) for i in range(300)}
        for held_out in (True, False)
    }
    assert chosen[True] == {0, 10, 20}
    assert chosen[False] == set(range(25)) - chosen[True]
    with pytest.raises(DataError, match=r"Of 1 demonstrations .* none is left"):
        choose_demonstration(demonstrations[:1], stream(0), held_out=False)


class Replay(Expert):
    """Starts at the demonstration's first agent position in TwoRoom and takes its actions; the rest is the goal."""

    def __init__(self, _rng: np.random.Generator, demonstration: Demonstration) -> None:
        self._demonstration, self._step = demonstration, 0
        self.steps = len(demonstration.actions) - 1

    def begin(self, _state: np.ndarray, _goal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._demonstration.states[0, :2], self._demonstration.states[-1, :2]

    def act(self, _state: np.ndarray, _goal: np.ndarray) -> np.ndarray:
        self._step += 1
        return self._demonstration.actions[self._step - 1]


@pytest.fixture
def replayed_room(monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment that has an expert for demonstrations."""
    entry = replace(env_entry("tworoom"), name="replayed", gym_id="test/Replayed-v0", replay=f"{__name__}:Replay")
    monkeypatch.setitem(registry.ENTRIES, entry.name, entry)
    return entry.name


def room_demonstrations(count: int) -> dict[str, np.ndarray]:
    """Number i starts at (30 + i, 40) and walks i % 3 + 2 steps down; two of three end far from their last state."""
    states, actions, lengths = [], [], []
    for i in range(count):
        length = i % 3 + 3
        state = np.zeros((length, 5))
        state[:, 0], state[:, 1] = 30 + i, 40 + 5 * np.arange(length) + (25 if i % 3 else 0) * np.arange(length)
        state[0, 1] = 40
        states.append(state)
        actions.append(np.tile([0.0, 1.0], (length, 1)))
        lengths.append(length)
    columns = {"state": np.concatenate(states), "action": np.concatenate(actions)}
    return {**columns, "episode_ends": np.cumsum(lengths)}


def test_a_collection_replays_demonstrations_that_are_not_held_out(
    replayed_room: str, save: Callable[..., str], tmp_path: Path
) -> None:
    source, out = save(**room_demonstrations(25)), tmp_path / "data.h5"
    report = collect(replayed_room, out, tiny(60, source), seed=1)
    with EpisodeStore(out) as store:
        numbers = store.read_column("state")[store.offsets, 0] - 30
        assert set(numbers.astype(int)) <= set(range(25)) - {0, 10, 20}
        assert len(set(numbers)) > 15
        np.testing.assert_array_equal(store.lengths, numbers % 3 + 3)
        assert report.successes == (numbers % 3 == 0).sum(), "two of three goals are out of reach"
        assert store.attributes["demonstrations"] == demonstrations_digest(load_demonstrations(source))
    demonstrations = load_demonstrations(source)
    held_out = {
        int(generate_episode(replayed_room, 8, HELD_OUT_SEED, i, demonstrations=demonstrations)["state"][0, 0] - 30)
        for i in range(30)
    }
    assert held_out == {0, 10, 20}


def test_a_collection_is_not_continued_with_other_demonstrations(
    replayed_room: str, save: Callable[..., str], tmp_path: Path
) -> None:
    out, demos = tmp_path / "data.h5", room_demonstrations(15)
    collect(replayed_room, out, tiny(3, save(**demos)))
    moved = tmp_path / "elsewhere.npz"
    np.savez_compressed(moved, **demos)
    assert collect(replayed_room, out, tiny(5, str(moved))).new_episodes == 2
    before = out.read_bytes()
    with pytest.raises(DataError, match=r"demonstrations is '[0-9a-f]{64}' there, but"):
        collect(replayed_room, out, tiny(9, save(**room_demonstrations(16))))
    with pytest.raises(DataError, match=r"generator is .* there, but"):
        collect(replayed_room, out, tiny(9, None))
    assert out.read_bytes() == before


def test_bad_demonstrations_create_nothing(replayed_room: str, save: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no demonstrations at"):
        collect(replayed_room, tmp_path / "folder" / "data.h5", tiny(3, str(tmp_path / "absent.npz")))
    source = save(**arrays(action=np.zeros((3, 2))))
    with pytest.raises(DataError, match="action must be numbers"):
        collect(replayed_room, tmp_path / "folder" / "data.h5", tiny(3, source))
    with pytest.raises(EnvError, match="no expert that replays"):
        collect("tworoom", tmp_path / "folder" / "data.h5", tiny(3, source))
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("flag", [8, 6])
def test_an_archive_that_cannot_be_unpacked_is_refused(tmp_path: Path, flag: int) -> None:
    """Flags of an entry that damage has set: a compression that nobody knows, an encryption."""
    path = tmp_path / "demos.npz"
    np.savez_compressed(path, state=np.ones((4, 5)), action=np.ones((4, 2)), episode_ends=np.array([4]))
    data = bytearray(path.read_bytes())
    for place in range(len(data) - 4):
        if data[place : place + 4] == b"PK\x01\x02":  # an entry of the table at the end
            data[place + (10 if flag == 8 else 8)] ^= 99 if flag == 8 else 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is not a whole \.npz file"):
        load_demonstrations(str(path))
