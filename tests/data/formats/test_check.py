"""`lewm data check` finds what is wrong, all of it, and counts what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from lewm import cli
from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.formats.check import GAP, SHEET_EPISODES, TILE, check
from lewm.data.hdf5 import CHECKSUMS
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import DataError, FileError

WriteTiny = Callable[..., Path]


def set_values(path: Path, name: str, rows: object, value: object) -> None:
    with h5py.File(path, "r+") as file:
        file[name][rows] = value
        file.attrs.pop(CHECKSUMS, None)  # changed on purpose


def chunk_places(path: Path) -> list[tuple[int, int]]:
    """Offset and size in the file of every frame's bytes."""
    with h5py.File(path) as file:
        pixels = file["pixels"].id
        chunks = [pixels.get_chunk_info(i) for i in range(pixels.get_num_chunks())]
        return [(chunk.byte_offset, chunk.size) for chunk in chunks]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "tworoom.h5"
    collect("tworoom", path, CollectConfig(episodes=3, resolution=28, workers=1))
    return path


def test_a_sound_file_has_no_problems(collected: Path, tmp_path: Path) -> None:
    sheet, progress = tmp_path / "new" / "sheet.png", list[tuple[int, int]]()
    report = check(collected, sheet, lambda done, total: progress.append((done, total)))
    with EpisodeStore(collected) as store:
        frames, actions = store.num_frames, store.actions
    assert report.problems == ()
    assert progress[-1] == (frames, frames)
    assert f"{frames:,} of 28 px; all read, checksums (Adler-32) match" in report.facts["frames"]
    assert report.facts["environment"] == "lewm/TwoRoom-v0"
    assert report.facts["episodes"].startswith("3: rows ")
    taken = actions[np.isfinite(actions).all(axis=1)]
    np.testing.assert_allclose(report.actions[:, 0], taken.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(report.actions[:, 1], taken.std(axis=0), atol=1e-5)
    np.testing.assert_array_equal(report.actions[:, 2:4], [[-1, 1], [-1, 1]])
    np.testing.assert_allclose(report.actions[:, 4], (np.abs(taken) == 1).mean(axis=0))
    with Image.open(sheet) as picture:
        assert picture.height == 3 * (TILE + GAP) + GAP, "a line per episode"
        colours = {colour for _, colour in picture.getcolors(maxcolors=picture.width * picture.height) or []}
    assert {(0, 0, 0), (255, 255, 255)} <= colours, "walls and rooms"


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_byte_in_a_frame_is_found(collected: Path, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(collected.read_bytes())
    places = chunk_places(collected)
    frame = int(rng.integers(len(places)))
    offset, size = places[frame]
    data[offset + int(rng.integers(size))] ^= 1 << int(rng.integers(8)) if seed else 0xFF
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(data)
    with EpisodeStore(collected) as store:
        before = store.read_frames(np.array([frame]))
    problems = check(damaged).problems
    if not problems:  # a bit that means nothing, as those that pad the stream to whole bytes
        with EpisodeStore(damaged) as store:
            np.testing.assert_array_equal(store.read_frames(np.array([frame])), before)
        pytest.skip("this bit carries no information")
    assert len(problems) == 1
    assert f"Frame {frame} cannot be read" in problems[0]


def test_all_damage_is_reported_not_only_the_first(collected: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.h5"
    data = bytearray(collected.read_bytes())
    places = chunk_places(collected)
    broken = [0, 1, 63, 64, len(places) - 1]  # neighbours, and both sides of where work is divided
    for frame in broken:
        offset, size = places[frame]
        data[offset + size // 2] ^= 0xFF
    damaged.write_bytes(data)
    sheet = tmp_path / "sheet.png"
    report = check(damaged, sheet)
    problems = report.problems
    assert report.facts["frames"].endswith("5 cannot be read")
    assert [int(problem.split()[1]) for problem in problems] == broken
    with Image.open(sheet) as picture:
        assert (200, 30, 30) in {c for _, c in picture.getcolors(maxcolors=picture.width * picture.height) or []}


def test_what_is_not_finite_is_found_in_every_column(write_tiny: WriteTiny) -> None:
    path = write_tiny([4, 5])
    set_values(path, "action", 6, np.nan)
    set_values(path, "action", 2, np.inf)
    set_values(path, "state", 8, np.nan)
    set_values(path, "proprio", 0, -np.inf)
    problems = " ".join(check(path).problems)
    for place in ("action is not finite in episode 0 at step 2", "action is not finite in episode 1 at step 2"):
        assert place in problems
    assert "state is not finite in episode 1 at step 4" in problems
    assert "proprio is not finite in episode 0 at step 0" in problems
    assert "at step 3" not in problems, "the last row of an episode has no action"


def test_numbering_that_disagrees_is_found(write_tiny: WriteTiny) -> None:
    path = write_tiny([4, 5])
    set_values(path, "episode_idx", 4, 0)
    set_values(path, "step_idx", 7, 9)
    problems = check(path).problems
    assert problems == (
        "episode_idx disagrees with ep_len from row 4 on: 0, not 1.",
        "step_idx disagrees with ep_len from row 7 on: 9, not 3.",
    )


def test_lengths_that_do_not_fit_are_found(write_tiny: WriteTiny) -> None:
    path = write_tiny([4, 5])
    set_values(path, "ep_len", 1, 4)
    problems = " ".join(check(path).problems)
    assert "8" in problems
    assert "must tile the 9 rows" in problems
    set_values(path, "ep_len", 0, -4)
    assert any("do not tile" in problem for problem in check(path).problems)


def test_whatever_else_a_file_has_is_said(write_tiny: WriteTiny) -> None:
    path = write_tiny([4, 5])
    with h5py.File(path, "r+") as file:
        file.create_group("notes")
        file["scale"] = 3.0
        file["short"] = np.zeros(4)
    problems = " ".join(check(path).problems)
    for name in ("notes", "scale", "short"):
        assert name in problems


def test_many_problems_of_a_kind_are_counted(write_tiny: WriteTiny) -> None:
    path = write_tiny([60])
    set_values(path, "state", slice(0, 50), np.nan)
    problems = check(path).problems
    assert len(problems) == 21
    assert problems[-1] == "... and 30 more rows of state."


def test_repeated_and_empty_frames_are_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (10, 8, 8, 3), np.uint8)
    pixels[3] = pixels[2]
    pixels[5] = (10, 20, 30)
    episode = {"pixels": pixels, "action": np.zeros((10, 1), np.float32)}
    # The second begins with the frame that the first ends with: that is no repetition.
    again = {**episode, "pixels": pixels[::-1]}
    path = tmp_path / "repeated.h5"
    write_episodes(path, [episode, again], {})
    report = check(path)
    assert report.problems == ()
    assert report.facts["repeated frames"].startswith("10.0 %")
    assert report.facts["empty frames"].startswith("10.0 %")


@pytest.mark.parametrize(
    ("options", "verified"),
    [
        ({}, "uncompressed without checksums: only sizes were verified"),
        ({"compression": "lzf"}, "compressed without checksums: only sizes were verified"),
        ({"fletcher32": True}, "checksums (Fletcher-32) match"),
        ({"compression": "gzip", "chunks": (4, 4, 4, 3)}, "checksums (Adler-32) match"),
    ],
)
def test_other_peoples_files_are_checked_as_far_as_they_allow(
    write_tiny: WriteTiny, options: dict[str, object], verified: str
) -> None:
    path = write_tiny([4, 5])
    with h5py.File(path, "r+") as file:
        pixels = file["pixels"][:]
        del file["pixels"]
        file.create_dataset("pixels", data=pixels, **options)
        file.attrs.clear()
        del file["episode_idx"], file["step_idx"], file["proprio"], file["state"]
    report = check(path)
    assert report.problems == ()
    assert verified in report.facts["frames"]
    assert report.facts["environment"] == "not recorded"


def test_frames_without_a_checksum_are_not_passed_off_as_verified(tmp_path: Path) -> None:
    path = tmp_path / "noise.h5"
    with h5py.File(path, "w") as file:
        pixels = file.create_dataset("pixels", (3, 16, 16, 3), "u1", chunks=(1, 16, 16, 3), compression="gzip")
        for frame in range(3):  # as HDF5 does with what gzip cannot make smaller
            pixels.id.write_direct_chunk((frame, 0, 0, 0), np.random.default_rng(frame).bytes(768), filter_mask=1)
        file.update({"action": np.zeros((3, 1), np.float32), "ep_len": [3], "ep_offset": [0]})
    report = check(path)
    assert report.problems == ()
    assert "3 incompressible chunks have none" in report.facts["frames"]


def test_a_file_with_some_frames_only(tmp_path: Path) -> None:
    def episode(length: int, first: int) -> dict[str, np.ndarray]:
        steps = np.arange(first, length, 3)
        pixels = np.random.default_rng(length).integers(0, 256, (len(steps), 4, 4, 3), np.uint8)
        return {"pixels": pixels, "action": np.zeros((length, 1), np.float32), "frame_step": steps}

    path = tmp_path / "strided.h5"
    write_episodes(path, [episode(10, 1), episode(8, 0)], {"frame_stride": 3})
    report = check(path, tmp_path / "sheet.png")
    assert report.problems == ()
    assert report.facts["frames"].startswith("6 of 4 px; all read")
    assert report.facts["episodes"].startswith("2: rows 8 to 10")


@pytest.mark.parametrize("name", ["state", "action", "ep_len"])
def test_damaged_columns_are_named(write_tiny: WriteTiny, tmp_path: Path, name: str) -> None:
    path = write_tiny([30, 30])
    with h5py.File(path, "r+") as file:
        values = file[name][:]
        del file[name]
        file.create_dataset(name, data=values, chunks=values.shape, fletcher32=True)
        offset = file[name].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[offset + 3] ^= 1
    path.write_bytes(data)
    assert any(problem.startswith(f"{name} cannot be read") for problem in check(path, tmp_path / "x.png").problems)


def test_the_contact_sheet_shows_a_few_of_many_episodes(write_tiny: WriteTiny, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    check(write_tiny([2] * 40), sheet)
    with Image.open(sheet) as picture:
        assert picture.height == SHEET_EPISODES * (TILE + GAP) + GAP


def test_a_contact_sheet_takes_no_other_files_place(write_tiny: WriteTiny, tmp_path: Path) -> None:
    path, notes, link = write_tiny([4]), tmp_path / "notes.png", tmp_path / "link.png"
    notes.write_text("not a picture")
    link.symlink_to(path)
    before = path.read_bytes()
    for place in (path, link, notes, tmp_path):
        with pytest.raises(FileError, match=r"Choose another place|Rename it|name of a file"):
            check(path, place)
    assert cli.run(["data", "check", str(path), "--contact-sheet", str(path)]) == 1
    assert path.read_bytes() == before
    assert (notes.read_text(), link.is_symlink()) == ("not a picture", True)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a folder in which not even root may write")
def test_a_dataset_in_a_read_only_folder_is_checked(write_tiny: WriteTiny, capsys: pytest.CaptureFixture[str]) -> None:
    with write_tiny([4]).open("rb") as file:
        place = f"/proc/self/fd/{file.fileno()}"
        assert cli.run(["data", "check", place]) == 0
    out = capsys.readouterr().out
    assert f"No contact sheet was drawn: {place}.contact.png cannot be written" in out
    assert "--contact-sheet" in out
    assert "No problems found." in out


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.h5"
    text.write_text("not HDF5")
    with pytest.raises(DataError, match=r"notes\.h5 is not a whole HDF5 file"):
        check(text)
    with pytest.raises(DataError, match="no dataset file"):
        check(tmp_path / "missing.h5")
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    with pytest.raises(DataError, match="pixels"):
        check(tmp_path / "empty.h5")
    with h5py.File(tmp_path / "float.h5", "w") as file:
        file["pixels"] = np.zeros((3, 4, 4, 3))
    with pytest.raises(DataError, match="pixels must be uint8"):
        check(tmp_path / "float.h5")


def test_the_command_line(write_tiny: WriteTiny, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny([4, 5])
    assert cli.run(["data", "check", str(path)]) == 0
    out = capsys.readouterr().out
    for part in ("No problems found.", "at min or max", "tiny.h5.contact.png", "GB per million frames"):
        assert part in out
    assert path.with_name("tiny.h5.contact.png").is_file()
    set_values(path, "state", 8, np.nan)
    set_values(path, "proprio", 0, np.nan)
    assert cli.run(["data", "check", str(path)]) == 1
    captured = capsys.readouterr()
    assert "problems (2):" in captured.err
    assert "No problems" not in captured.out
