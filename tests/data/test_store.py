"""The dataset file: what is written is what is read, and what is wrong is said."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from lewm.data import chunks
from lewm.data.hdf5 import CHECKSUMS, FRAME_SIZES
from lewm.data.store import EpisodeStore, merge_files, write_episodes
from lewm.errors import DataError, FileError

WriteTiny = Callable[..., Path]


def edit(path: Path, change: Callable[[h5py.File], None]) -> Path:
    """Change a file on purpose: it has no checksums any more."""
    with h5py.File(path, "r+") as file:
        file.attrs.pop(CHECKSUMS, None)
        change(file)
    return path


def replace_column(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        column = make(file[name][:])
        del file[name]
        file[name] = column

    return change


def test_a_store_gives_back_what_was_written(write_tiny: WriteTiny) -> None:
    with EpisodeStore(write_tiny([5, 3])) as store:
        assert store.lengths.tolist() == [5, 3]
        assert store.offsets.tolist() == [0, 5]
        assert (store.num_episodes, store.resolution, store.action_dim) == (2, 4, 2)
        assert (store.num_rows, store.num_frames, store.frame_stride) == (8, 8, 1)
        assert store.frame_rows.tolist() == list(range(8))
        assert store.environment == "lewm/Tiny-v0"
        assert store.attributes["seed"] == 3
        assert store.attributes["format"] == "lewm-episodes"
        assert store.read_column("state")[:, 0].tolist() == list(range(8))
        assert store.actions[:4].tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
        assert np.isnan(store.actions[[4, 7]]).all()
        frames = store.read_frames(np.array([6, 0, 6]))
        assert frames.shape == (3, 4, 4, 3)
        assert [np.unique(frame).tolist() for frame in frames] == [[6], [0], [6]]
        given = np.zeros((2, 4, 4, 3), np.uint8)
        assert store.read_frames(np.array([3, 7]), given) is given
        assert given[:, 0, 0, 0].tolist() == [3, 7]


def test_a_store_with_some_of_the_frames_knows_which(write_tiny: WriteTiny) -> None:
    with EpisodeStore(write_tiny([8, 1, 7], stride=3, phases=[1, 2, 0])) as store:
        assert (store.num_rows, store.num_frames, store.frame_stride) == (16, 6, 3)
        assert store.frame_rows.tolist() == [1, 4, 7, 9, 12, 15], "the second episode ends before its first frame"
        assert store.frames_at(np.array([[4, 15], [9, 1]])).tolist() == [[1, 5], [3, 0]]
        assert store.read_frames(np.array([12, 4]))[:, 0, 0, 0].tolist() == [12, 4]
        assert len(store.read_column("state")) == len(store.actions) == 16
        for row in (0, 5):
            with pytest.raises(DataError, match=f"no frame at row {row}: one row in 3 has one"):
                store.read_frames(np.array([4, row]))


def test_a_file_of_the_first_format_is_read(write_tiny: WriteTiny) -> None:
    def age(file: h5py.File) -> None:
        pixels = file["pixels"][:]
        del file["pixels"], file.attrs["frame_stride"]
        file.create_dataset("pixels", data=pixels, chunks=(1, 4, 4, 3), compression="gzip", compression_opts=3)
        file.attrs["format_version"] = 1

    with EpisodeStore(edit(write_tiny([5, 3]), age)) as store:
        assert (store.num_rows, store.num_frames, store.frame_stride) == (8, 8, 1)
        assert store.read_frames(np.arange(8))[:, 0, 0, 0].tolist() == list(range(8))


def test_frames_of_a_replaced_file_are_still_those_that_were_opened(write_tiny: WriteTiny) -> None:
    with EpisodeStore(write_tiny([50])) as store:
        write_tiny([3])  # a rename over the old one, before anything of it was read
        assert store.read_frames(np.array([49]))[0, 0, 0, 0] == 49


def test_a_reader_that_knows_only_the_official_layout_finds_the_episodes(write_tiny: WriteTiny) -> None:
    with h5py.File(write_tiny([5, 3, 4]), "r") as file:
        lengths, offsets = file["ep_len"][:], file["ep_offset"][:]
        assert (lengths.dtype, offsets.dtype) == (np.int32, np.int64)
        for episode, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
            rows = slice(offset, offset + length)
            assert (file["episode_idx"][rows] == episode).all()
            assert file["step_idx"][rows].tolist() == list(range(length))
            assert np.isnan(file["action"][rows]).any(axis=1).tolist() == [False] * (length - 1) + [True]
            assert file["pixels"][rows][:, 0, 0, 0].tolist() == list(range(offset, offset + length))
        assert file["pixels"].chunks == (1, 4, 4, 3)
        assert file["pixels"].compression == "gzip"


def test_official_files_without_attributes_are_read(write_tiny: WriteTiny) -> None:
    path = edit(write_tiny([4, 4]), lambda file: file.attrs.clear())
    with EpisodeStore(path) as store:
        assert store.environment is None
        store.check_environment("lewm/Anything-v0", action_dim=2)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (1, 4, 4, 3)},
        {"chunks": (1, 4, 4, 3), "compression": "gzip", "shuffle": True},
        {"chunks": (3, 4, 4, 3), "compression": "gzip"},
        {"chunks": (1, 4, 4, 3), "compression": "lzf"},
        {"chunks": None},
    ],
)
def test_frames_are_the_same_however_they_are_stored(write_tiny: WriteTiny, options: dict) -> None:
    plain, other = write_tiny([40], "plain.h5"), write_tiny([40], "other.h5")

    def store_differently(file: h5py.File) -> None:
        pixels = file["pixels"][:]
        del file["pixels"]
        file.create_dataset("pixels", data=pixels, **options)

    rows = np.array([0, 39, 7, 7, 21])
    with EpisodeStore(plain) as expected, EpisodeStore(edit(other, store_differently)) as got:
        np.testing.assert_array_equal(got.read_frames(rows), expected.read_frames(rows))


@pytest.mark.parametrize("inflater", [chunks.inflater, chunks.InflateByCopy])
def test_frames_are_read_correctly_by_many_threads(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, inflater: type[chunks.InflateByCopy]
) -> None:
    monkeypatch.setattr(chunks, "inflater", inflater)
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 200, 50) for _ in range(40)]
    with EpisodeStore(write_tiny([200])) as store, ThreadPoolExecutor(8) as pool:
        for rows, frames in zip(requests, pool.map(store.read_frames, requests), strict=True):
            np.testing.assert_array_equal(frames[:, 2, 1, 0], rows)


def test_frames_go_to_any_array(write_tiny: WriteTiny) -> None:
    with EpisodeStore(write_tiny([9])) as store:
        backwards = np.zeros((9, 3, 4, 4), np.uint8).transpose(0, 2, 3, 1)
        store.read_frames(np.arange(9), backwards)
        np.testing.assert_array_equal(backwards, store.read_frames(np.arange(9)))


def test_data_of_another_environment_is_refused(write_tiny: WriteTiny) -> None:
    with EpisodeStore(write_tiny([4])) as store:
        store.check_environment("lewm/Tiny-v0", action_dim=2)
        with pytest.raises(DataError, match="holds episodes of lewm/Tiny-v0"):
            store.check_environment("lewm/Other-v0", action_dim=2)
        with pytest.raises(DataError, match=r"actions of 2 numbers.* takes 5"):
            store.check_environment("lewm/Tiny-v0", action_dim=5)
        with pytest.raises(DataError, match="no column 'reward'"):
            store.read_column("reward")


def test_missing_foreign_and_truncated_files_are_told_apart(tmp_path: Path, write_tiny: WriteTiny) -> None:
    with pytest.raises(DataError, match=r"no dataset file at .*absent.h5.*lewm collect"):
        EpisodeStore(tmp_path / "absent.h5")
    with pytest.raises(DataError, match="no dataset file at"):
        EpisodeStore(tmp_path)
    (tmp_path / "text.h5").write_text("not a dataset")
    with pytest.raises(DataError, match=r"not a whole HDF5 file .*signature not found"):
        EpisodeStore(tmp_path / "text.h5")
    truncated = write_tiny([50])
    os.truncate(truncated, truncated.stat().st_size // 2)
    with pytest.raises(DataError, match=r"not a whole HDF5 file .*truncated file"):
        EpisodeStore(truncated)


@pytest.mark.parametrize("inflater", [chunks.inflater, chunks.InflateByCopy])
@pytest.mark.parametrize("content", [b"not zlib", zlib.compress(bytes(47)), zlib.compress(bytes(49)), b"x"])
def test_a_damaged_frame_is_named(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, inflater: type[chunks.InflateByCopy], content: bytes
) -> None:
    monkeypatch.setattr(chunks, "inflater", inflater)

    def damage(file: h5py.File) -> None:
        file["pixels"].id.write_direct_chunk((2, 0, 0, 0), content)

    with EpisodeStore(edit(write_tiny([6]), damage)) as store, pytest.raises(DataError, match="frame at row 2 of 6"):
        store.read_frames(np.arange(6))


def test_a_frame_that_was_never_written_is_named(write_tiny: WriteTiny) -> None:
    def lengthen(file: h5py.File) -> None:
        for name, column in list(file.items()):
            if name not in ("ep_len", "ep_offset", "pixels"):
                values = column[:]
                del file[name]
                file[name] = np.concatenate([values, values[-1:]])
        file["pixels"].resize(7, axis=0)
        file["ep_len"][0] = 7
        file["action"][5] = 0

    path = edit(write_tiny([6]), lengthen)
    with EpisodeStore(path) as store, pytest.raises(DataError, match=r"row 6 of 7 .*never written"):
        store.read_frames(np.arange(7))


@pytest.mark.parametrize(
    ("column", "make", "message"),
    [
        ("pixels", lambda x: x.astype(np.float32), "pixels must be uint8"),
        ("pixels", lambda x: x[:, :, :2], "pixels must be uint8"),
        ("pixels", lambda x: x[:-1], r"action must be floating point of shape \(8, action size\)"),
        ("action", lambda x: np.zeros(x.shape, np.int64), "action must be floating point"),
        ("action", lambda x: x[:-1], r"action must be .* of shape \(9, action size\)"),
        (
            "action",
            lambda x: np.where(np.arange(9)[:, None] == 6, np.nan, x),
            "no finite action in episode 1 at step 1 of 4",
        ),
        ("ep_len", lambda x: x.astype(np.float64), "ep_len must be one integer per episode"),
        ("ep_len", lambda x: x + 1, "must tile the 9 rows"),
        ("ep_offset", lambda x: x[::-1].copy(), "must tile the 9 rows"),
        ("ep_offset", lambda x: x[:1], "must tile the 9 rows"),
        ("ep_len", lambda x: x[:0], "has no episodes"),
        ("state", lambda x: x[:-1], "state must be one entry for each of the 9 rows"),
    ],
)
def test_inconsistent_columns_are_refused(
    write_tiny: WriteTiny, column: str, make: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    path = edit(write_tiny([5, 4]), replace_column(column, make))
    with pytest.raises(DataError, match=message):
        EpisodeStore(path)


@pytest.mark.parametrize("column", ["pixels", "action", "ep_len", "ep_offset"])
def test_a_missing_column_is_named(write_tiny: WriteTiny, column: str) -> None:
    path = edit(write_tiny([5]), lambda file: file.pop(column))
    with pytest.raises(DataError, match=f"no column '{column}'"):
        EpisodeStore(path)


def test_a_newer_format_asks_for_an_upgrade(write_tiny: WriteTiny) -> None:
    path = edit(write_tiny([5]), lambda file: file.attrs.modify("format_version", 99))
    with pytest.raises(DataError, match=r"format version 99.*Upgrade"):
        EpisodeStore(path)


def test_an_unavailable_compression_filter_names_the_package(write_tiny: WriteTiny) -> None:
    unknown_filter = 32999

    def compress_otherwise(file: h5py.File) -> None:
        shape = file["pixels"].shape
        del file["pixels"]
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1, *shape[1:]))
        properties.set_filter(unknown_filter, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple(shape)
        h5py.h5d.create(file.id, b"pixels", h5py.h5t.NATIVE_UINT8, space, properties)

    path = edit(write_tiny([5]), compress_otherwise)
    with pytest.raises(DataError, match=r"32999.*pip install hdf5plugin"):
        EpisodeStore(path)


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(write_tiny: WriteTiny) -> None:
    path = write_tiny([5])
    before = path.read_bytes()

    def failing_episodes():
        yield {"pixels": np.zeros((2, 4, 4, 3), np.uint8), "action": np.zeros((2, 2), np.float32)}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_episodes(path, failing_episodes(), {})
    with pytest.raises(DataError, match="no episode to write"):
        write_episodes(path, [], {})
    uneven = {"pixels": np.zeros((2, 4, 4, 3), np.uint8), "action": np.zeros((3, 2), np.float32)}
    with pytest.raises(DataError, match=r"Episode 0 .* must be equally long, got rows pixels 2, action 3"):
        write_episodes(path, [uneven], {})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_is_reported_and_changes_nothing(write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny([5])
    before = path.read_bytes()

    def no_space(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FileError, match=r"The disk is full: .*tiny\.h5 could not be written"):
        write_tiny([7])
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_within_hdf5_does_not_crash_the_process(tmp_path: Path) -> None:
    # A limit on file sizes, as a disk that fills up while frames are written.
    code = """
import resource, signal, sys
import numpy as np
from lewm.data.store import write_episodes
from lewm.errors import FileError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
noise = np.random.default_rng(0).integers(0, 255, (100, 64, 64, 3), dtype=np.uint8)
try:
    write_episodes(sys.argv[1], [{"pixels": noise, "action": np.zeros((100, 2), np.float32)}], {})
except FileError as error:
    sys.exit(f"refused: {error}")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "data.h5")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1, "neither success nor a crash"
    assert done.stderr.startswith(f"refused: {tmp_path}/data.h5 cannot be written (File too large)")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing_that_stays(write_tiny: WriteTiny, tmp_path: Path) -> None:
    code = """
import os, signal, sys
import numpy as np
from lewm.data.store import write_episodes
def episodes():
    yield {"pixels": np.zeros((2, 4, 4, 3), np.uint8), "action": np.zeros((2, 2), np.float32)}
    os.kill(os.getpid(), signal.SIGKILL)
write_episodes(sys.argv[1], episodes(), {})
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.h5")]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1, "what it had begun"
    write_tiny([3])
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.h5"]


def test_merged_parts_are_the_file_that_would_have_been_written_at_once(write_tiny: WriteTiny) -> None:
    whole = write_tiny([5, 3, 4, 2], "whole.h5")
    first, second = write_tiny([5, 3], "first.h5"), write_tiny([4, 2], "second.h5")

    def continue_numbering(file: h5py.File) -> None:  # the second part's episodes start at row 8
        for name, shift in (("pixels", 8), ("proprio", 8), ("state", 8), ("action", np.float32([8, -8]))):
            file[name][:] = file[name][:] + np.asarray(shift, file[name].dtype)

    edit(second, continue_numbering)
    merged = whole.with_name("merged.h5")
    attributes = {"environment": "lewm/Tiny-v0", "seed": 3, "frame_stride": 1, "proprio": "row"}
    merge_files([first, second], merged, attributes)
    with h5py.File(whole, "r") as expected, h5py.File(merged, "r") as got:
        # HDF5 compresses what it writes itself to another number of bytes.
        found, wanted = ({**json.loads(file.attrs[CHECKSUMS]), FRAME_SIZES: ""} for file in (got, expected))
        assert found == wanted
        assert {**got.attrs, CHECKSUMS: ""} == {**expected.attrs, CHECKSUMS: ""}
        assert set(got) == set(expected)
        for name in expected:
            np.testing.assert_array_equal(got[name][:], expected[name][:])
            assert got[name].dtype == expected[name].dtype
    merge_files([first, second], first, attributes)
    assert first.read_bytes() == merged.read_bytes(), "merging into one of the parts"


def test_parts_with_some_of_the_frames_are_merged(write_tiny: WriteTiny) -> None:
    parts = [write_tiny([8, 1], "a.h5", 3, [1, 2]), write_tiny([7], "b.h5", 3, [2])]
    merged = parts[0].with_name("merged.h5")
    merge_files(parts, merged, {"frame_stride": 3})
    with EpisodeStore(merged) as store:
        assert store.frame_rows.tolist() == [1, 4, 7, 11, 14]
        assert store.read_frames(store.frame_rows)[:, 0, 0, 0].tolist() == [1, 4, 7, 2, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x[:-1], "frame_row must be one integer for each of the 5 frames"),
        (lambda x: x[::-1], "frame_row must increase within the 12 rows"),
        (lambda x: x + 3, "frame_row must increase within the 12 rows"),
        (lambda x: x.astype(float), "frame_row must be one integer"),
        (lambda x: x - (x == 3), "after row 0, the next frame is not 3 rows on"),
        (lambda x: x + (x == 10), "after row 7, the next frame is not 3 rows on"),
    ],
)
def test_wrong_frame_rows_are_refused(
    write_tiny: WriteTiny, make: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    path = edit(write_tiny([7, 5], stride=3), replace_column("frame_row", make))
    with pytest.raises(DataError, match=message):
        EpisodeStore(path)


def test_a_stride_that_is_not_recorded_is_refused(write_tiny: WriteTiny) -> None:
    path = edit(write_tiny([7, 5], stride=3), lambda file: file.attrs.pop("frame_stride"))
    with pytest.raises(DataError, match="frame_stride 0, not a positive number"):
        EpisodeStore(path)


# -- digests --------------------------------------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    with EpisodeStore(path) as store:
        assert store.digest is store.digest, "computed once"
        return store.digest


def test_the_same_episodes_have_one_digest_however_they_were_made(write_tiny: WriteTiny, tmp_path: Path) -> None:
    path = write_tiny([90, 40])
    expected = digest_of(path)
    merge_files([path], tmp_path / "merged.h5", {"environment": "lewm/Other-v0"})
    assert digest_of(tmp_path / "merged.h5") == expected, "what the attributes say is not content"
    assert digest_of(Path(shutil.copy(path, tmp_path / "copy.h5"))) == expected


def change_frame(frame: int, stored: bytes | None = None) -> Callable[[h5py.File], None]:
    """Puts another picture in a frame's place, of another size, or just these bytes."""

    def change(file: h5py.File) -> None:
        noise = np.random.default_rng(frame).integers(0, 256, (4, 4, 3), np.uint8).tobytes()
        file["pixels"].id.write_direct_chunk((frame, 0, 0, 0), stored or zlib.compress(noise))

    return change


@pytest.mark.parametrize(
    "change",
    [
        replace_column("action", lambda x: x + np.float32(1e-5) * (np.arange(len(x)) == 77)[:, None]),
        change_frame(0),
        change_frame(78),  # whose pixels are not looked at
        change_frame(129),
        # As many bytes as before, in a frame whose pixels are looked at: the first of the 64 and the last.
        change_frame(0, zlib.compress(bytes([9]) * 48)),
        change_frame(129, zlib.compress(bytes([9]) * 48)),
    ],
)
def test_another_dataset_of_the_same_size_has_another_digest(
    write_tiny: WriteTiny, change: Callable[[h5py.File], None]
) -> None:
    def compressed_alike(file: h5py.File) -> None:
        for frame in range(130):
            change_frame(frame, zlib.compress(bytes([frame]) * 48))(file)

    path = edit(write_tiny([90, 40]), compressed_alike)
    before = digest_of(path)
    assert digest_of(edit(path, lambda _file: None)) == before, "opening it for writing changes nothing"
    assert digest_of(edit(path, change)) != before
    assert digest_of(write_tiny([40, 90], "other.h5")) != digest_of(write_tiny([90, 40], "plain.h5"))


def test_the_rows_of_frames_and_their_size_count(write_tiny: WriteTiny, tmp_path: Path) -> None:
    first = write_tiny([12], "a.h5", 4, [0])
    assert digest_of(first) != digest_of(write_tiny([12], "b.h5", 4, [3]))
    black = {"action": np.zeros((3, 2), np.float32)}
    for size in (4, 8):
        write_episodes(tmp_path / f"{size}.h5", [{"pixels": np.zeros((3, size, size, 3), np.uint8), **black}], {})
    assert digest_of(tmp_path / "4.h5") != digest_of(tmp_path / "8.h5")


@pytest.mark.parametrize("options", [{"chunks": (3, 4, 4, 3), "compression": "gzip"}, {"chunks": None}])
def test_other_layouts_have_digests_too(write_tiny: WriteTiny, options: dict) -> None:
    def store_differently(value: int) -> Callable[[h5py.File], None]:
        def change(file: h5py.File) -> None:
            pixels = file["pixels"][:]
            pixels[129] = value
            del file["pixels"]
            file.create_dataset("pixels", data=pixels, **options)

        return change

    plain, same, other = (edit(write_tiny([130], f"{n}.h5"), store_differently(n // 2)) for n in range(3))
    assert digest_of(other) != digest_of(plain) == digest_of(same)


def test_files_that_do_not_belong_together_are_not_merged(write_tiny: WriteTiny, tmp_path: Path) -> None:
    first, other = write_tiny([4], "first.h5"), write_tiny([4], "other.h5")
    edit(other, lambda file: file.pop("proprio"))
    with pytest.raises(DataError, match="differs from the files before it"):
        merge_files([first, other], tmp_path / "merged.h5", {})
    raw = edit(write_tiny([4], "raw.h5"), replace_column("pixels", lambda x: x))
    with pytest.raises(DataError, match="stores its frames in another way"):
        merge_files([first, raw], tmp_path / "merged.h5", {})
    with pytest.raises(DataError, match="no episode to write"):
        merge_files([], tmp_path / "merged.h5", {})
    assert not list(tmp_path.glob("*merged*"))


def test_more_files_than_a_process_may_open_are_merged(write_tiny: WriteTiny) -> None:
    part = write_tiny([2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 10, hard))
    try:
        merge_files([part] * 50, part, {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with EpisodeStore(part) as store:
        assert store.num_episodes == 50
