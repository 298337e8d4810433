"""LeRobot datasets: the layout that LeRobot reads, and reading what LeRobot users have."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lewm.data.formats import lerobot_writer
from lewm.data.formats.convert import convert
from lewm.data.formats.exchange import EpisodeSource
from lewm.data.formats.lerobot import read_lerobot, read_lerobot_columns
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import DataError

LENGTHS = (5, 3, 4)
CAMERA = "observation.image"


def episode(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    length = LENGTHS[number]
    action = rng.normal(size=(length, 2)).astype(np.float32)
    action[-1] = np.nan
    return {
        "pixels": rng.integers(0, 256, (length, 16, 16, 3), np.uint8),
        "action": action,
        "proprio": rng.normal(size=(length, 3)).astype(np.float32),
        "reward": rng.normal(size=length),
        "state": rng.normal(size=(length, 2, 2)),
    }


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "data.h5"
    write_episodes(path, map(episode, range(3)), {"environment": "lewm/Tiny-v0", "seed": 3})
    return path


@pytest.fixture
def exported(dataset: Path, tmp_path: Path) -> Path:
    convert(dataset, tmp_path / "exported", "lerobot", fps=5)
    return tmp_path / "exported"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_the_layout_is_version_3(exported: Path) -> None:
    info = json.loads((exported / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["fps"]) == (3, 12, 5)
    assert info["splits"] == {"train": "0:3"}
    place = {"chunk_index": 0, "file_index": 0}
    assert (exported / info["data_path"].format(**place)).is_file()
    assert (exported / info["video_path"].format(**place, video_key=CAMERA)).is_file()
    types = {name: (feature["dtype"], feature["shape"]) for name, feature in info["features"].items()}
    assert types == {
        CAMERA: ("video", [16, 16, 3]),
        "action": ("float32", [2]),
        "observation.state": ("float32", [3]),
        "observation.environment_state": ("float64", [4]),
        "reward": ("float64", [1]),
        "timestamp": ("float32", [1]),
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", [1])),
    }


def test_rows_have_lerobots_numbering(exported: Path) -> None:
    table = pq.read_table(exported / "data" / "chunk-000" / "file-000.parquet")
    assert table["index"].to_pylist() == list(range(12))
    assert table["episode_index"].to_pylist() == [0] * 5 + [1] * 3 + [2] * 4
    assert table["frame_index"].to_pylist() == [*range(5), *range(3), *range(4)]
    np.testing.assert_allclose(table["timestamp"].to_numpy()[:5], np.arange(5) / 5)
    assert table["action"].type == pa.list_(pa.float32(), 2)


def test_the_last_action_repeats_the_one_before(exported: Path) -> None:
    columns, lengths, _ = read_lerobot_columns(exported, ["action"])
    ends = np.cumsum(lengths)
    assert np.isfinite(columns["action"]).all(), "LeRobot knows no missing actions"
    np.testing.assert_array_equal(columns["action"][ends - 1], columns["action"][ends - 2])
    restored = [found["action"] for found in read_lerobot(exported).episodes]
    assert all(np.isnan(action[-1]).all() and np.isfinite(action[:-1]).all() for action in restored)


def test_an_action_in_the_last_row_survives(tmp_path: Path) -> None:
    """Recorded elsewhere: every row has an action, and lewm keeps them all."""
    episodes = [episode(0), {**episode(1), "action": np.ones((3, 2), np.float32)}]
    write_episodes(tmp_path / "data.h5", episodes, {})
    convert(tmp_path / "data.h5", tmp_path / "exported", "lerobot")
    first, second = (found["action"] for found in read_lerobot(tmp_path / "exported").episodes)
    assert np.isnan(first[-1]).all()
    np.testing.assert_array_equal(second, np.ones((3, 2), np.float32))


def test_episodes_are_described(exported: Path) -> None:
    rows = pq.read_table(exported / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"], row["length"]) for row in rows] == [
        (0, 5, 5),
        (5, 8, 3),
        (8, 12, 4),
    ]
    times = [(row[f"videos/{CAMERA}/from_timestamp"], row[f"videos/{CAMERA}/to_timestamp"]) for row in rows]
    np.testing.assert_allclose(times, [(0, 1), (1, 1.6), (1.6, 2.4)])
    assert all(row["tasks"] == ["lewm/Tiny-v0"] for row in rows)
    tasks = pq.read_table(exported / "meta" / "tasks.parquet")
    assert tasks.to_pylist() == [{"task_index": 0, "task": "lewm/Tiny-v0"}]
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_the_video_has_every_frame_at_its_time(exported: Path) -> None:
    path = exported / "videos" / CAMERA / "chunk-000" / "file-000.mp4"
    with av.open(str(path)) as container:
        decoded = list(container.decode(video=0))
    np.testing.assert_allclose([float(frame.time or 0) for frame in decoded], np.arange(12) / 5, atol=1e-4)
    expected = np.concatenate([episode(number)["pixels"] for number in range(3)])
    np.testing.assert_array_equal([frame.to_ndarray(format="rgb24") for frame in decoded], expected)


def test_statistics_are_those_of_the_rows(exported: Path) -> None:
    stats = json.loads((exported / "meta" / "stats.json").read_text())
    proprio = np.concatenate([episode(number)["proprio"] for number in range(3)])
    np.testing.assert_allclose(stats["observation.state"]["mean"], proprio.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(stats["observation.state"]["std"], proprio.std(axis=0), rtol=1e-5)
    np.testing.assert_allclose(stats["observation.state"]["max"], proprio.max(axis=0), rtol=1e-5)
    assert stats["observation.state"]["count"] == [12]
    assert np.shape(stats[CAMERA]["mean"]) == (3, 1, 1)
    assert 0.4 < np.mean(stats[CAMERA]["mean"]) < 0.6


def test_many_rows_take_several_files(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_writer, "FILE_ROWS", 6)
    monkeypatch.setattr(lerobot_writer, "CHUNK_FILES", 1)
    convert(dataset, tmp_path / "exported", "lerobot")
    files = sorted(str(path.relative_to(tmp_path / "exported")) for path in (tmp_path / "exported").rglob("*.mp4"))
    assert files == [f"videos/{CAMERA}/chunk-00{i}/file-000.mp4" for i in range(2)]
    for number, found in enumerate(read_lerobot(tmp_path / "exported").episodes):
        for name, column in episode(number).items():
            np.testing.assert_array_equal(found[name], column)


def test_compact_videos_are_close_and_no_longer_a_collection(tmp_path: Path) -> None:
    grey = np.linspace(0, 255, 16).astype(np.uint8)
    smooth = np.broadcast_to(grey[None, :, None, None], (6, 16, 16, 3))
    action = np.zeros((6, 1), np.float32)
    settings = {"environment": "lewm/Tiny-v0", "generator": "{}", "seed": 3}
    write_episodes(tmp_path / "smooth.h5", [{"pixels": smooth, "action": action}], settings)
    convert(tmp_path / "smooth.h5", tmp_path / "exported", "lerobot", quality="compact")
    source = read_lerobot(tmp_path / "exported")
    assert source.attributes == {"environment": "lewm/Tiny-v0"}
    (found,) = source.episodes
    assert 0 < np.abs(found["pixels"].astype(int) - smooth).mean() < 4


# -- what others recorded ---------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(exported: Path) -> Path:
    """As LeRobot itself would have written it: without our file."""
    (exported / "meta" / "lewm.json").unlink()
    return exported


def test_a_foreign_dataset_becomes_a_file(foreign: Path, tmp_path: Path) -> None:
    convert(foreign, tmp_path / "new.h5")
    with EpisodeStore(tmp_path / "new.h5") as store:
        assert store.environment is None
        assert store.lengths.tolist() == list(LENGTHS)
        assert set(store.columns) >= {"action", "proprio", "state", "reward"}
        assert np.isfinite(store.actions).all()
        np.testing.assert_array_equal(store.read_frames(np.arange(5, 8)), episode(1)["pixels"])
        np.testing.assert_array_equal(store.read_column("proprio")[:5], episode(0)["proprio"])


def test_rows_in_another_order_are_sorted(foreign: Path) -> None:
    path = foreign / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    expected, lengths, _ = read_lerobot_columns(foreign, ["action"])
    path.unlink()
    for name, start, stop in (("file-000", 8, 12), ("file-001", 0, 8)):
        pq.write_table(table.slice(start, stop - start), path.with_name(f"{name}.parquet"))
    found, found_lengths, _ = read_lerobot_columns(foreign, ["action"])
    np.testing.assert_array_equal(found["action"], expected["action"])
    np.testing.assert_array_equal(found_lengths, lengths)


def test_lists_of_any_size_and_booleans_can_be_read(foreign: Path) -> None:
    path = foreign / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    nested = pa.array([[[i, i + 1], [0, 1]] for i in range(12)], pa.list_(pa.list_(pa.int64())))
    table = table.append_column("nested", nested).append_column("done", pa.array([i % 2 == 0 for i in range(12)]))
    pq.write_table(table, path)
    new = {"nested": {"dtype": "int64", "shape": [2, 2]}, "done": {"dtype": "bool", "shape": [1]}}
    edit_json(foreign / "meta" / "info.json", lambda info: info["features"].update(new))
    columns, _, _ = read_lerobot_columns(foreign, ["nested", "done"])
    assert columns["nested"].shape == (12, 2, 2)
    assert columns["nested"][3].tolist() == [[3, 4], [0, 1]]
    assert columns["done"].dtype == np.uint8


def test_images_in_the_rows_can_be_read(foreign: Path) -> None:
    shutil.rmtree(foreign / "videos")
    path = foreign / "data" / "chunk-000" / "file-000.parquet"
    pixels = np.concatenate([episode(number)["pixels"] for number in range(3)])
    encoded = [{"bytes": cv2.imencode(".png", f[:, :, ::-1])[1].tobytes(), "path": "x.png"} for f in pixels]
    pq.write_table(pq.read_table(path).append_column(CAMERA, pa.array(encoded)), path)
    edit_json(foreign / "meta" / "info.json", lambda info: info["features"][CAMERA].update(dtype="image"))
    for number, found in enumerate(read_lerobot(foreign).episodes):
        np.testing.assert_array_equal(found["pixels"], episode(number)["pixels"])


def test_version_2_with_a_file_per_episode(foreign: Path) -> None:
    table = pq.read_table(foreign / "data" / "chunk-000" / "file-000.parquet")
    shutil.rmtree(foreign / "data")
    shutil.rmtree(foreign / "meta" / "episodes")
    (foreign / "data" / "chunk-000").mkdir(parents=True)
    videos = foreign / "videos" / "chunk-000" / CAMERA
    videos.mkdir(parents=True)
    start = 0
    for number, length in enumerate(LENGTHS):
        pq.write_table(table.slice(start, length), foreign / "data" / "chunk-000" / f"episode_{number:06d}.parquet")
        with lerobot_writer.Mp4Writer(videos / f"episode_{number:06d}.mp4", 5, (16, 16), "lossless") as video:
            video.write(episode(number)["pixels"])
        start += length

    def to_version_2(info: dict[str, Any]) -> None:
        info["codebase_version"] = "v2.1"
        info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"

    edit_json(foreign / "meta" / "info.json", to_version_2)
    for number, found in enumerate(read_lerobot(foreign).episodes):
        np.testing.assert_array_equal(found["pixels"], episode(number)["pixels"])


def test_the_camera_is_chosen(foreign: Path) -> None:
    (foreign / "videos" / CAMERA).rename(foreign / "videos" / "top")

    def rename(info: dict[str, Any]) -> None:
        info["features"]["top"] = info["features"].pop(CAMERA)
        info["features"]["wrist"] = info["features"]["top"]

    edit_json(foreign / "meta" / "info.json", rename)
    path = foreign / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([name.replace(CAMERA, "top") for name in table.column_names]), path)
    with pytest.raises(DataError, match=r"2 cameras \(top, wrist\), and lewm takes one. Choose it with --camera"):
        read_lerobot(foreign)
    with pytest.raises(DataError, match=r"Unknown camera 'tpo'\. Did you mean 'top'"):
        read_lerobot(foreign, "tpo")
    found = next(read_lerobot(foreign, "top").episodes)
    np.testing.assert_array_equal(found["pixels"], episode(0)["pixels"])


# -- what is wrong ----------------------------------------------------------------------------------------------------


def cut_video(folder: Path) -> None:
    path = folder / "videos" / CAMERA / "chunk-000" / "file-000.mp4"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorten_video(folder: Path) -> None:
    with lerobot_writer.Mp4Writer(
        folder / "videos" / CAMERA / "chunk-000" / "file-000.mp4", 5, (16, 16), "lossless"
    ) as video:
        video.write(np.zeros((10, 16, 16, 3), np.uint8))


def change_speed(folder: Path) -> None:
    with lerobot_writer.Mp4Writer(
        folder / "videos" / CAMERA / "chunk-000" / "file-000.mp4", 3, (16, 16), "lossless"
    ) as video:
        video.write(np.zeros((12, 16, 16, 3), np.uint8))


def remove_video(folder: Path) -> None:
    (folder / "videos" / CAMERA / "chunk-000" / "file-000.mp4").unlink()


def cut_data(folder: Path) -> None:
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    path.write_bytes(path.read_bytes()[:100])


def remove_data(folder: Path) -> None:
    shutil.rmtree(folder / "data")


def repeat_rows(folder: Path) -> None:
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    pq.write_table(pq.read_table(path), path.with_name("file-001.parquet"))


def forget_episode(folder: Path) -> None:
    path = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 2), path)


def future_version(folder: Path) -> None:
    edit_json(folder / "meta" / "info.json", lambda info: info.update(codebase_version="v9.0"))


def forget_action(folder: Path) -> None:
    edit_json(folder / "meta" / "info.json", lambda info: info["features"].pop("action"))


def spoil_info(folder: Path) -> None:
    (folder / "meta" / "info.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_video, r"file-000\.mp4 cannot be decoded"),
        (shorten_video, r"has no frame at 2\.000 s: the video ends before it"),
        (change_speed, r"has no frame at 0\.200 s: the next is at 0\.333 s"),
        (remove_video, r"file-000\.mp4 cannot be decoded"),
        (cut_data, r"file-000\.parquet cannot be read"),
        (remove_data, "has no rows"),
        (repeat_rows, "frame_index must count from 0"),
        (forget_episode, "describes 2 episodes in meta/episodes, but data/ has 3"),
        (future_version, r"has LeRobot version v9\.0; v3\.0, v2\.1, v2\.0 can be read"),
        (forget_action, "has no feature 'action'"),
        (spoil_info, r"info\.json cannot be read"),
    ],
)
def test_damage_is_explained_and_leaves_nothing(
    foreign: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(foreign)
    with pytest.raises(DataError, match=message):
        convert(foreign, tmp_path / "new.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.h5", "exported"]


def test_a_dataset_edited_by_others_is_not_misread(exported: Path) -> None:
    """Without its second episode, what we remember of episodes by number would go to the wrong ones."""
    path = exported / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(0, 5), table.slice(8)]), path)
    with pytest.raises(DataError, match=r"lewm\.json is for 12 rows, but the dataset has 9.*Remove that file"):
        read_lerobot(exported)


def test_unknown_columns_are_named(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Unknown feature 'acton'\. Did you mean 'action'"):
        read_lerobot_columns(exported, ["acton"])
    with pytest.raises(DataError, match="is no LeRobot dataset"):
        read_lerobot_columns(tmp_path, ["action"])


@pytest.mark.parametrize("package", ["pyarrow", "pyarrow.parquet", "av"])
def test_a_missing_package_is_named(
    dataset: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for source, target in ((dataset, tmp_path / "new"), (exported, tmp_path / "new.h5")):
        with pytest.raises(DataError, match=r"pip install 'lewm\[lerobot\]'"):
            convert(source, target, None if target.suffix else "lerobot")
        assert not target.exists()


# -- whose frames, whose actions --------------------------------------------------------------------------------------

IDS = (1, 4, 9)  # of a dataset from which others have removed episodes


def renumber(folder: Path) -> Any:
    """The table of the rows, with these ids in place of 0 to 2."""
    table = pq.read_table(folder / "data" / "chunk-000" / "file-000.parquet")
    numbers = pa.array([IDS[number] for number in table["episode_index"].to_pylist()])
    return table.set_column(table.column_names.index("episode_index"), "episode_index", numbers)


def assert_frames_and_actions_belong_together(folder: Path) -> None:
    found = list(read_lerobot(folder).episodes)
    assert len(found) == len(LENGTHS)
    for number, each in enumerate(found):
        np.testing.assert_array_equal(each["pixels"], episode(number)["pixels"])
        np.testing.assert_array_equal(each["action"][:-1], episode(number)["action"][:-1])


def as_version_2(folder: Path, described: dict[int, int] | None = None) -> None:
    """Version 2.1 with a file for each of ``IDS``. described: lengths by id for meta/episodes.jsonl, if it is there."""
    table = renumber(folder)
    for name in ("data", "videos", "meta/episodes"):
        shutil.rmtree(folder / name)
    start = 0
    for index, (number, length) in enumerate(zip(IDS, LENGTHS, strict=True)):
        rows, video = (folder / f"{name}/chunk-{number // 4:03d}" for name in ("data", "videos"))
        rows.mkdir(parents=True, exist_ok=True)
        (video / CAMERA).mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(start, length), rows / f"episode_{number:06d}.parquet")
        path = video / CAMERA / f"episode_{number:06d}.mp4"
        with lerobot_writer.Mp4Writer(path, 5, (16, 16), "lossless") as writer:
            writer.write(episode(index)["pixels"])
        start += length
    if described is not None:
        lines = [json.dumps({"episode_index": number, "length": length}) for number, length in described.items()]
        (folder / "meta" / "episodes.jsonl").write_text("\n".join(lines))

    def change(info: dict[str, Any]) -> None:
        info |= {"codebase_version": "v2.1", "chunks_size": 4}
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"

    edit_json(folder / "meta" / "info.json", change)


def test_version_2_goes_by_the_ids_of_episodes(foreign: Path) -> None:
    as_version_2(foreign, {0: 7, **dict(zip(IDS, LENGTHS, strict=True))})
    assert_frames_and_actions_belong_together(foreign)


@pytest.mark.parametrize("described", [{1: 5, 4: 3}, {1: 5, 4: 3, 9: 5}])
def test_version_2_that_describes_other_episodes_is_refused(foreign: Path, described: dict[int, int]) -> None:
    as_version_2(foreign, described)
    with pytest.raises(DataError, match=r"episode 9 has 4 rows in data/, but meta/ has (no such episode|5 rows)"):
        list(read_lerobot(foreign).episodes)


def test_version_3_goes_by_the_ids_of_episodes(foreign: Path) -> None:
    pq.write_table(renumber(foreign), foreign / "data" / "chunk-000" / "file-000.parquet")
    with pytest.raises(DataError, match="episode 1 has 5 rows in data/, but meta/ has 3 rows"):
        list(read_lerobot(foreign).episodes)
    path = foreign / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    table = table.set_column(table.column_names.index("episode_index"), "episode_index", pa.array(IDS))
    pq.write_table(table.take([2, 0, 1]), path)
    assert_frames_and_actions_belong_together(foreign)


@pytest.mark.parametrize("names", [("b", "a", "c"), ("c", "b", "a")])
def test_images_go_by_the_ids_of_episodes_not_by_names_of_files(foreign: Path, names: tuple[str, ...]) -> None:
    table = renumber(foreign)
    pixels = np.concatenate([episode(number)["pixels"] for number in range(3)])
    encoded = [{"bytes": cv2.imencode(".png", f[:, :, ::-1])[1].tobytes(), "path": "x.png"} for f in pixels]
    table = table.append_column(CAMERA, pa.array(encoded))
    shutil.rmtree(foreign / "videos")
    (foreign / "data" / "chunk-000" / "file-000.parquet").unlink()
    start = 0
    for name, length in zip(names, LENGTHS, strict=True):
        pq.write_table(table.slice(start, length), foreign / "data" / "chunk-000" / f"{name}.parquet")
        start += length
    edit_json(foreign / "meta" / "info.json", lambda info: info["features"][CAMERA].update(dtype="image"))
    assert_frames_and_actions_belong_together(foreign)


@pytest.mark.parametrize(
    "template", ["/{video_key}/file.mp4", "../{video_key}.mp4", "{nothing}.mp4", "{0}.mp4", "{chunk_index.x}", 3, None]
)
def test_videos_elsewhere_are_not_opened(foreign: Path, template: object) -> None:
    edit_json(foreign / "meta" / "info.json", lambda info: info.update(video_path=template))
    with pytest.raises(DataError, match=r"video_path .* (must lead to files in the|cannot be used)|cannot be dec"):
        list(read_lerobot(foreign).episodes)


@pytest.mark.parametrize("fps", [0, -1, "5", True, float("inf"), [5]])
def test_a_speed_that_is_none_is_refused(foreign: Path, fps: object) -> None:
    edit_json(foreign / "meta" / "info.json", lambda info: info.update(fps=fps))
    with pytest.raises(DataError, match=r"must give fps, a positive number"):
        read_lerobot(foreign)


@pytest.mark.parametrize("features", [None, [], {}, {"action": 3}, {"action": {"dtype": 3}}, {"action": {}}])
def test_features_of_another_kind_are_refused(foreign: Path, features: object) -> None:
    edit_json(foreign / "meta" / "info.json", lambda info: info.update(features=features))
    with pytest.raises(DataError, match=r"must give the dtype of every feature"):
        read_lerobot(foreign)


@pytest.mark.parametrize("change", [{"columns": {"action": 3}}, {"columns": 3}, {"episodes_without_last_action": 3}])
def test_what_we_wrote_beside_is_checked(exported: Path, change: dict[str, object]) -> None:
    edit_json(exported / "meta" / "lewm.json", lambda ours: ours.update(change))
    with pytest.raises(DataError, match=r"lewm\.json does not fit the dataset"):
        read_lerobot(exported)


def test_the_writer_does_not_rescale(tmp_path: Path) -> None:
    of_two_sizes = [{**episode(0)}, {**episode(1), "pixels": np.zeros((LENGTHS[1], 8, 8, 3), np.uint8)}]
    with pytest.raises(DataError, match=r"Episode 1 has frames of \(8, 8\) pixels, those before it \(16, 16\)"):
        lerobot_writer.write_lerobot(tmp_path / "new", EpisodeSource({}, 2, iter(of_two_sizes)))
    assert not list(tmp_path.iterdir())
