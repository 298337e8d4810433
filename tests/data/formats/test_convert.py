"""`lewm data convert`: what goes through another format and back is the same; what cannot is refused, whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest

from lewm import cli
from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.formats.convert import COLLECTION_ATTRIBUTES, convert, fit_frames
from lewm.data.formats.exchange import EpisodeSource
from lewm.data.formats.lerobot_writer import write_lerobot
from lewm.data.hdf5 import CHECKSUMS
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import DataError, FileError

WriteTiny = Callable[..., Path]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convert") / "tworoom.h5"
    collect("tworoom", path, CollectConfig(episodes=3, resolution=28, workers=1))
    return path


@pytest.fixture
def strided(tmp_path: Path) -> Path:
    """A file with every third frame only."""

    def episode(length: int, first: int) -> dict[str, np.ndarray]:
        steps = np.arange(first, length, 3)
        pixels = np.random.default_rng(length).integers(0, 256, (len(steps), 4, 4, 3), np.uint8)
        action = np.arange(length, dtype=np.float32)[:, None]
        action[-1] = np.nan
        return {"pixels": pixels, "action": action, "frame_step": steps}

    path = tmp_path / "strided.h5"
    write_episodes(path, [episode(10, 1), episode(9, 0)], {"frame_stride": 3, "environment": "lewm/Tiny-v0"})
    return path


def _without_collection(attributes: dict[str, object]) -> dict[str, object]:
    """Attributes without those that say that the episodes are as they were collected."""
    return {name: value for name, value in attributes.items() if name not in COLLECTION_ATTRIBUTES}


def assert_same_content(first: Path, second: Path) -> None:
    with EpisodeStore(first) as a, EpisodeStore(second) as b:
        assert _without_collection(a.attributes) == _without_collection(b.attributes)
        assert a.columns == b.columns
        for name in a.columns:
            expected, got = a.read_column(name), b.read_column(name)
            assert (expected.dtype, expected.shape) == (got.dtype, got.shape), name
            np.testing.assert_array_equal(expected, got)
        np.testing.assert_array_equal(a.frame_rows, b.frame_rows)
        np.testing.assert_array_equal(a.read_frames(a.frame_rows), b.read_frames(b.frame_rows))


@pytest.mark.parametrize("form", ["folder", "lerobot", "hdf5"])
def test_there_and_back_is_identical(collected: Path, tmp_path: Path, form: str) -> None:
    there, back = tmp_path / "there", tmp_path / "back.h5"
    progress: list[tuple[int, int]] = []
    assert convert(collected, there, form, on_progress=lambda done, total: progress.append((done, total))) == form
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert convert(there, back) == "hdf5"
    assert_same_content(collected, back)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.h5", "there"], "nothing temporary stays"


def test_from_one_foreign_format_to_the_other(collected: Path, tmp_path: Path) -> None:
    convert(collected, tmp_path / "a", "folder")
    convert(tmp_path / "a", tmp_path / "b", "lerobot")
    convert(tmp_path / "b", tmp_path / "c", "folder")
    convert(tmp_path / "c", tmp_path / "d.hdf5")
    assert_same_content(collected, tmp_path / "d.hdf5")


def test_a_file_with_some_frames_only(strided: Path, tmp_path: Path) -> None:
    convert(strided, tmp_path / "folder", "folder")
    frames = [path.name for path in sorted((tmp_path / "folder" / "episode_000000").glob("*.png"))]
    assert frames == ["frame_000001.png", "frame_000004.png", "frame_000007.png"]
    convert(tmp_path / "folder", tmp_path / "back.h5")
    assert_same_content(strided, tmp_path / "back.h5")
    with pytest.raises(DataError, match="a frame for every row"):
        convert(strided, tmp_path / "lerobot", "lerobot")
    assert not (tmp_path / "lerobot").exists()


def test_a_folder_made_by_hand(tmp_path: Path) -> None:
    """Pictures and actions, without a description: one action fewer than pictures is how people record."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 5, 6, 8, 3), np.uint8)
    for number, frames in enumerate(pixels):
        place = tmp_path / "mine" / f"episode_{number:06d}"
        place.mkdir(parents=True)
        for i, frame in enumerate(frames):
            cv2.imwrite(str(place / f"frame_{i:06d}.png"), frame[:, :, ::-1])
        np.savez(place / "columns.npz", action=rng.normal(size=(4, 2)).astype(np.float32))
    with pytest.raises(DataError, match=r"8 × 6 pixels, not square.*--crop"):
        convert(tmp_path / "mine", tmp_path / "mine.h5")
    convert(tmp_path / "mine", tmp_path / "mine.h5", crop=True)
    with EpisodeStore(tmp_path / "mine.h5") as store:
        assert store.lengths.tolist() == [5, 5]
        assert np.isnan(store.actions[[4, 9]]).all()
        np.testing.assert_array_equal(store.read_frames(np.arange(5, 10)), pixels[1, :, :, 1:7])


def test_resizing_averages_and_forgets_the_collection(collected: Path, tmp_path: Path) -> None:
    convert(collected, tmp_path / "small.h5", resolution=14)
    with EpisodeStore(collected) as full, EpisodeStore(tmp_path / "small.h5") as small:
        rows = np.arange(4)
        means = full.read_frames(rows).reshape(4, 14, 2, 14, 2, 3).mean(axis=(2, 4))
        np.testing.assert_allclose(small.read_frames(rows), means, atol=0.51)
        assert small.environment == full.environment
    with pytest.raises(DataError, match="Use the same settings"):
        collect("tworoom", tmp_path / "small.h5", CollectConfig(episodes=4, resolution=14, workers=1))


@pytest.mark.parametrize("form", ["folder", "lerobot"])
def test_what_could_have_been_edited_is_not_taken_for_collected(collected: Path, tmp_path: Path, form: str) -> None:
    """A folder's pictures, or a LeRobot dataset's films, may have been exchanged: nobody can tell."""
    convert(collected, tmp_path / "there", form)  # type: ignore[arg-type]
    if form == "folder":
        picture = tmp_path / "there" / "episode_000001" / "frame_000003.png"
        cv2.imwrite(str(picture), np.zeros((28, 28, 3), np.uint8))
    convert(tmp_path / "there", tmp_path / "back.h5")
    before = (tmp_path / "back.h5").read_bytes()
    with EpisodeStore(tmp_path / "back.h5") as store:
        assert not {"generator", "seed"} & set(store.attributes)
        assert store.environment == "lewm/TwoRoom-v0"
    with pytest.raises(DataError, match=r"generator is None there.*choose another file"):
        collect("tworoom", tmp_path / "back.h5", CollectConfig(episodes=4, resolution=28, workers=1))
    assert (tmp_path / "back.h5").read_bytes() == before


def test_nothing_is_written_into_the_source_or_into_a_model(write_tiny: WriteTiny, tmp_path: Path) -> None:
    path, folder, model = write_tiny([3]), tmp_path / "folder", tmp_path / "model"
    convert(path, folder, "folder")
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).touch()
    for source, target in ((folder, folder / "new.h5"), (path, model / "new.h5"), (folder, folder / "a" / "new.h5")):
        with pytest.raises(FileError, match=r"lies inside .* Choose another place"):
            convert(source, target)
    assert sorted(entry.name for entry in folder.iterdir()) == ["dataset.json", "episode_000000"]
    assert len(list(model.iterdir())) == 2


def test_fit_frames_keeps_what_fits() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    np.testing.assert_array_equal(fit_frames(frames), frames)
    np.testing.assert_array_equal(fit_frames(frames, 8), frames)
    assert fit_frames(frames[:0], 4).shape == (0, 4, 4, 3)
    assert fit_frames(frames, 16).shape == (2, 16, 16, 3)


def spoil_png(folder: Path) -> None:
    (folder / "episode_000001" / "frame_000002.png").write_bytes(b"no picture")


def remove_png(folder: Path) -> None:
    (folder / "episode_000001" / "frame_000002.png").unlink()


def shrink_png(folder: Path) -> None:
    cv2.imwrite(str(folder / "episode_000001" / "frame_000002.png"), np.zeros((3, 3, 3), np.uint8))


def remove_episode(folder: Path) -> None:
    shutil.rmtree(folder / "episode_000001")


def remove_last_episode(folder: Path) -> None:
    shutil.rmtree(folder / "episode_000002")


def spoil_columns(folder: Path) -> None:
    (folder / "episode_000001" / "columns.npz").write_bytes(b"no archive")


def pickle_columns(folder: Path) -> None:
    np.savez(folder / "episode_000001" / "columns.npz", action=np.array([{}], dtype=object))


def drop_action(folder: Path) -> None:
    np.savez(folder / "episode_000001" / "columns.npz", state=np.zeros(3))


def shorten_column(folder: Path) -> None:
    path = folder / "episode_000001" / "columns.npz"
    with np.load(path) as archive:
        columns = dict(archive)
    np.savez(path, **columns | {"state": columns["state"][:-1]})


def spoil_description(folder: Path) -> None:
    (folder / "dataset.json").write_text("{")


def list_description(folder: Path) -> None:
    (folder / "dataset.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_png, r"frame_000002\.png is no readable picture"),
        (remove_png, r"episode_000001 has \d+ actions, so it needs a frame every 1 rows"),
        (shrink_png, "all of one size"),
        (remove_episode, "incomplete set of episodes"),
        (remove_last_episode, "incomplete set of episodes.* 3 in all, got 2 folders"),
        (spoil_columns, r"columns\.npz cannot be read"),
        (pickle_columns, r"columns\.npz cannot be read"),
        (drop_action, "no array 'action', only state"),
        (shorten_column, r"rows of state\. Make them agree"),
        (spoil_description, r"dataset\.json cannot be read"),
        (list_description, r"dataset\.json must hold a JSON object"),
    ],
)
def test_a_spoilt_folder_is_refused_and_leaves_nothing(
    collected: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    convert(collected, tmp_path / "folder", "folder")
    spoil(tmp_path / "folder")
    for target, form in (("new.h5", None), ("new", "lerobot")):
        with pytest.raises(DataError, match=message):
            convert(tmp_path / "folder", tmp_path / target, form)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("form", ["folder", "lerobot", "hdf5"])
def test_a_damaged_file_leaves_nothing(write_tiny: WriteTiny, tmp_path: Path, form: str) -> None:
    path = write_tiny([3, 3])
    with h5py.File(path, "r+") as file:
        del file.attrs[CHECKSUMS]
        file["pixels"].id.write_direct_chunk((4, 0, 0, 0), b"nonsense")
    with pytest.raises(DataError, match="row 4 of 6 cannot be read"):
        convert(path, tmp_path / "new", form)  # type: ignore[arg-type]
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.h5"]


def test_mistakes_are_explained(write_tiny: WriteTiny, tmp_path: Path) -> None:
    path = write_tiny([3])
    (tmp_path / "there").mkdir()
    for options, message in (
        ({"target": tmp_path / "new"}, "Say --to hdf5, folder or lerobot"),
        ({"target": tmp_path / "there", "to": "folder"}, "there exists already"),
        ({"target": path}, "exists already"),
        ({"target": tmp_path / "new.h5", "camera": "top"}, "has no camera 'top'"),
        ({"target": tmp_path / "new.h5", "resolution": 0}, "resolution between 1 and"),
        ({"target": tmp_path / "new", "to": "lerobot", "fps": 0}, "must be between 1 and"),
    ):
        with pytest.raises(DataError, match=message):
            convert(path, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"There is no dataset at .*there: expected"):
        convert(tmp_path / "there", tmp_path / "new.h5")
    with pytest.raises(DataError, match=r"There is no dataset at .*nowhere: expected"):
        convert(tmp_path / "nowhere", tmp_path / "new.h5")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["there", "tiny.h5"]


@pytest.mark.parametrize("form", ["folder", "lerobot", "hdf5"])
def test_an_interruption_leaves_nothing(write_tiny: WriteTiny, tmp_path: Path, form: str) -> None:
    path = write_tiny([3, 3, 3])

    def interrupt(done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "new", form, on_progress=interrupt)  # type: ignore[arg-type]
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.h5"]


@pytest.mark.parametrize("form", ["folder", "lerobot", "hdf5"])
def test_a_place_that_cannot_be_written_is_named(write_tiny: WriteTiny, form: str) -> None:
    path = write_tiny([3])
    with pytest.raises(FileError, match="cannot be written"):
        convert(path, path / "below", form)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["folder", "lerobot"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), np.uint8)
    write_episodes(tmp_path / "noise.h5", [{"pixels": noise, "action": np.zeros((9, 1), np.float32)}], {})
    # A process that may only write small files fails as on a full disk.
    limit = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
    limit += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code = f"{limit} from lewm.data.formats.convert import convert; convert('noise.h5', 'new', {form!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert "lewm.errors.FileError: new cannot be written" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["noise.h5"]


def test_the_command_line(write_tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny([3, 4])
    assert cli.run(["data", "convert", str(path), str(tmp_path / "out"), "--to", "folder"]) == 0
    assert "Converted to" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["episodes"] == 2
    assert cli.run(["data", "convert", str(path), str(tmp_path / "out"), "--to", "folder"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_resizing_a_wide_video(tmp_path: Path) -> None:
    """What a robot's camera gives: the middle is kept, in the size that was asked for."""
    pixels = np.zeros((5, 24, 32, 3), np.uint8)
    pixels[:, :, 4:28] = 200  # the middle square
    source = EpisodeSource({}, 1, iter([{"pixels": pixels, "action": np.zeros((5, 2), np.float32)}]))
    write_lerobot(tmp_path / "wide", source)
    with pytest.raises(DataError, match=r"32 × 24 pixels, not square"):
        convert(tmp_path / "wide", tmp_path / "new.h5", resolution=12)
    convert(tmp_path / "wide", tmp_path / "new.h5", resolution=12, crop=True)
    with EpisodeStore(tmp_path / "new.h5") as store:
        np.testing.assert_array_equal(store.read_frames(np.arange(5)), np.full((5, 12, 12, 3), 200))
