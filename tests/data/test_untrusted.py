"""HDF5 files that are damaged, or made to do harm: each is one clear line, and nothing in them is believed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from lewm.config import CollectConfig
from lewm.data import hdf5, untrusted
from lewm.data.collect import collect
from lewm.data.formats.check import check
from lewm.data.formats.convert import convert
from lewm.data.hdf5 import CHECKSUMS
from lewm.data.store import EpisodeStore, merge_files, write_episodes
from lewm.errors import DataError

WriteTiny = Callable[..., Path]
SECRET = np.arange(64, dtype=np.float32).tobytes()


def outside(folder: Path) -> Path:
    """A file of somebody else."""
    path = folder / "secret.bin"
    path.write_bytes(SECRET)
    return path


def store_externally(file: h5py.File, folder: Path) -> None:
    del file["state"]
    file.create_dataset("state", (8, 1), np.float32, external=[(str(outside(folder)), 0, 32)])


def store_virtually(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = np.zeros((8, 1))
    layout = h5py.VirtualLayout((8, 1), np.float64)
    layout[:] = h5py.VirtualSource(folder / "other.h5", "x", (8, 1))
    del file["state"]
    file.create_virtual_dataset("state", layout)


def link_externally(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = np.zeros((8, 1))
    del file["state"]
    file["state"] = h5py.ExternalLink(str(folder / "other.h5"), "x")


def link_softly(file: h5py.File, folder: Path) -> None:
    link_externally(file, folder)
    file.move("state", "hidden")
    file["state"] = h5py.SoftLink("/hidden")


def show_frames_of_another(file: h5py.File, folder: Path) -> None:
    del file["pixels"]
    (folder / "pixels.bin").write_bytes(bytes(8 * 48))
    file.create_dataset("pixels", (8, 4, 4, 3), np.uint8, external=[(str(folder / "pixels.bin"), 0, 8 * 48)])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (store_externally, "state lies in other files"),
        (store_virtually, "state lies in other files"),
        (show_frames_of_another, "pixels lies in other files"),
        (link_externally, "state is a link to somewhere else"),
        (link_softly, "(state|hidden) is a link to somewhere else"),
    ],
)
def test_what_lies_in_other_files_is_not_read(
    write_tiny: WriteTiny, tmp_path: Path, spoil: Callable[[h5py.File, Path], None], message: str
) -> None:
    path = write_tiny([5, 3])
    with h5py.File(path, "r+") as file:
        del file.attrs[CHECKSUMS]
        spoil(file, tmp_path)
    for use in (EpisodeStore, check, lambda path: convert(path, tmp_path / "copy.h5")):
        with pytest.raises(DataError, match=f"cannot be trusted: {message}"):
            use(path)
    assert not (tmp_path / "copy.h5").exists()


def claim_rows(name: str) -> Callable[[h5py.File], None]:
    def claim(file: h5py.File) -> None:
        shape = file[name].shape
        del file[name]
        file.create_dataset(name, (1 << 38, *shape[1:]), np.float32, chunks=(1 << 16, *shape[1:]))

    return claim


def claim_at_once(file: h5py.File) -> None:
    del file["state"]
    file.create_dataset("state", (1 << 38, 1), np.float64)


def claim_frames(file: h5py.File) -> None:
    del file["pixels"]
    file.create_dataset("pixels", (1 << 40, 4, 4, 3), np.uint8, chunks=(1, 4, 4, 3), compression="gzip")


def claim_size(file: h5py.File) -> None:
    del file["pixels"]
    side = 1 << 14
    file.create_dataset("pixels", (8, side, side, 3), np.uint8, chunks=(1, side, side, 3), compression="gzip")


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (claim_rows("action"), "action claims to have .* not all there"),
        (claim_rows("state"), "state claims to have .* not all there"),
        (claim_at_once, "state claims to have .* not all there"),
        (claim_frames, "action must be floating point of shape .1099511627776"),
        (claim_size, "at most 4096 px are read"),
    ],
)
def test_sizes_are_checked_before_memory_is_asked_for(
    write_tiny: WriteTiny, claim: Callable[[h5py.File], None], message: str
) -> None:
    path = write_tiny([5, 3])
    with h5py.File(path, "r+") as file:
        del file.attrs[CHECKSUMS]
        claim(file)
    with pytest.raises(DataError, match=message):
        EpisodeStore(path)


def test_texts_and_objects_are_never_read(write_tiny: WriteTiny, tmp_path: Path) -> None:
    path = write_tiny([5, 3])
    with h5py.File(path, "r+") as file:
        file.create_dataset("task", data=["push"] * 8, dtype=h5py.string_dtype())
    with EpisodeStore(path) as store, pytest.raises(DataError, match="'task' holds texts or objects, not numbers"):
        store.read_column("task")
    for form in ("hdf5", "folder", "lerobot"):
        with pytest.raises(DataError, match="'task' holds texts or objects"):
            convert(path, tmp_path / "new", form)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_rows_and_places_that_do_not_exist_are_refused(write_tiny: WriteTiny) -> None:
    with EpisodeStore(write_tiny([5, 3])) as store, EpisodeStore(write_tiny([5, 3], "s.h5", stride=2)) as strided:
        for each in (store, strided):
            for row in (-1, 8, 1 << 40):
                with pytest.raises(DataError, match=f"has no row {row}: its rows are 0 to 7"):
                    each.read_frames(np.array([0, row]))
            memory = np.full((3, 4, 4, 3), 7, np.uint8)
            for place in (memory[:1], memory[:, :2], memory.astype(np.float32), memory):
                with pytest.raises(ValueError, match="frames of 2 rows need uint8"):
                    each.read_frames(np.array([0, 2]), place)
            assert (memory == 7).all()


# -- checksums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["action", "state", "proprio", "ep_len", "episode_idx"])
def test_a_changed_column_is_noticed(write_tiny: WriteTiny, name: str) -> None:
    path = write_tiny([5, 3])
    with h5py.File(path, "r+") as file:
        place = file[name].id.get_offset()
    data = bytearray(path.read_bytes())
    data[place + 1] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"{name} is not what was written"), EpisodeStore(path) as store:
        store.read_column(name)
    report = check(path)
    assert any(f"{name} is not what was written" in problem for problem in report.problems)
    assert "differ" in report.facts["checksums"]


def test_a_changed_attribute_is_noticed_and_a_change_on_purpose_is_possible(write_tiny: WriteTiny) -> None:
    path = write_tiny([5, 3])
    with h5py.File(path, "r+") as file:
        file.attrs["environment"] = "lewm/Other-v0"
    with pytest.raises(DataError, match=r"attributes are not those that were written .*removes the attribute 'checks"):
        EpisodeStore(path)
    assert any("attributes are not those" in problem for problem in check(path).problems)
    with h5py.File(path, "r+") as file:
        del file.attrs[CHECKSUMS]
    with EpisodeStore(path) as store:
        assert store.environment == "lewm/Other-v0"


def test_a_renamed_column_is_missed(write_tiny: WriteTiny) -> None:
    path = write_tiny([5, 3])
    with h5py.File(path, "r+") as file:
        file.move("state", "stale")
    with pytest.raises(DataError, match="the column 'state' was written, and is not there"):
        EpisodeStore(path)


def test_a_file_without_checksums_is_as_good_as_ever(write_tiny: WriteTiny, tmp_path: Path) -> None:
    path = write_tiny([5, 3])
    with EpisodeStore(path) as store:
        digest = store.digest
    assert check(path).facts["checksums"] == "of attributes and 7 of 7 columns: all match"
    with h5py.File(path, "r+") as file:
        del file.attrs[CHECKSUMS]
    with EpisodeStore(path) as store:
        assert store.digest == digest, "and is the same dataset"
        assert CHECKSUMS not in store.attributes
    report = check(path, tmp_path / "x.png")
    assert report.problems == ()
    assert report.facts["checksums"].startswith("none of columns and attributes: the file was made by others")
    merge_files([path], path, {"seed": 3})
    assert "7 of 7 columns: all match" in check(path).facts["checksums"]


def content(path: Path) -> str:
    """SHA-256 of all that a reader of the file gets."""
    with EpisodeStore(path) as store:
        found = hashlib.sha256(store.read_frames(store.frame_rows).tobytes())
        for name in store.columns:
            column = store.read_column(name)
            found.update(f"{name} {column.dtype} {column.shape}".encode() + column.tobytes())
        numbers = (store.lengths.tolist(), store.frame_stride, store.digest, sorted(store.attributes.items()))
        found.update(repr(numbers).encode())
        return found.hexdigest()


def flipped_and_read(sound: Path, places: list[int], rng: random.Random) -> None:
    """Each of these bytes of a file is changed, and the file read: it is refused, or has the same content."""
    data, expected, path = sound.read_bytes(), content(sound), sound.with_name("flipped.h5")
    for place in places:
        changed = bytearray(data)
        changed[place] ^= rng.randrange(1, 256)
        path.write_bytes(changed)
        with contextlib.suppress(DataError):
            assert content(path) == expected, f"byte {place} is {changed[place]} in place of {data[place]}"
        check_or_refuse(path)


def check_or_refuse(path: Path) -> None:
    with contextlib.suppress(DataError):
        check(path)


@pytest.fixture
def busy_file(tmp_path: Path) -> Path:
    """One with all kinds of columns and attributes, more frames than a node of the index holds, noise everywhere."""
    rng = np.random.default_rng(0)

    def episode(length: int) -> dict[str, np.ndarray]:
        action = rng.normal(size=(length, 2)).astype(np.float32)
        action[-1] = np.nan
        pixels = rng.integers(0, 256, (length, 4, 4, 3), np.uint8)
        columns = {"proprio": rng.normal(size=(length, 2)).astype(np.float32), "state": rng.normal(size=(length, 3))}
        return {"pixels": pixels, "action": action, **columns, "success": np.zeros(length, np.uint8)}

    path = tmp_path / "busy.h5"
    attributes = {"environment": "lewm/TwoRoom-v0", "seed": 3, "generator": '{"a": 1}', "exploration": 0.5}
    write_episodes(path, map(episode, (6, 5, 70)), attributes)
    return path


def test_a_few_flips_of_one_byte(busy_file: Path) -> None:
    rng = random.Random(1)
    flipped_and_read(busy_file, [rng.randrange(busy_file.stat().st_size) for _ in range(40)], rng)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_flips_of_one_byte(busy_file: Path) -> None:
    rng = random.Random(2)
    flipped_and_read(busy_file, [rng.randrange(busy_file.stat().st_size) for _ in range(1000)], rng)


# -- the process that looks first -----------------------------------------------------------------------------------


def test_a_file_that_crashes_the_library_is_refused(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a real crash depends on HDF5's version, here the other process is made to die of a certain file."""
    code = (
        Path(untrusted.__file__)
        .read_text()
        .replace(
            "def problem_of(path: str) -> str:",
            'def problem_of(path: str) -> str:\n    import os\n    "bad" in path and os.abort()\n',
        )
    )
    fatal = tmp_path / "fatal.py"
    fatal.write_text(code.replace("os.abort()\n\n", "os.abort()\n"))
    looking = hdf5._Probe()
    monkeypatch.setattr(hdf5, "PROBE", looking)
    monkeypatch.setattr(untrusted, "__file__", str(fatal))
    good, bad = write_tiny([5], "good.h5"), tmp_path / "bad.h5"
    bad.write_bytes(good.read_bytes())
    os.utime(bad, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(DataError, match=r"bad.h5 cannot be trusted: it is damaged in a way that makes HDF5 fail"):
            EpisodeStore(bad)
        EpisodeStore(good).close()
    looking.close()


def test_a_file_that_keeps_the_library_busy_is_refused(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_tiny([5])
    endless = tmp_path / "endless.py"
    endless.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(hdf5, "PROBE", hdf5._Probe())
    monkeypatch.setattr(hdf5, "PATIENCE", 0.2)
    monkeypatch.setattr(untrusted, "__file__", str(endless))
    started = time.monotonic()
    with pytest.raises(DataError, match="makes HDF5 fail"):
        EpisodeStore(path)
    assert time.monotonic() - started < 10
    assert hdf5.PROBE._process is None


def test_a_process_that_somebody_ended_is_no_fault_of_the_next_file(write_tiny: WriteTiny) -> None:
    EpisodeStore(write_tiny([5], "one.h5")).close()
    looking = hdf5.PROBE._process
    assert looking
    looking.kill()
    looking.wait()
    EpisodeStore(write_tiny([6], "two.h5")).close()


def test_the_process_that_looks_ends_with_the_one_that_reads(write_tiny: WriteTiny) -> None:
    code = "import sys, time\nfrom lewm.data import hdf5\nfrom lewm.data.store import EpisodeStore\n"
    code += "EpisodeStore(sys.argv[1]); print(hdf5.PROBE._process.pid, flush=True); time.sleep(60)"
    reader = subprocess.Popen([sys.executable, "-c", code, str(write_tiny([5]))], stdout=subprocess.PIPE, text=True)
    assert reader.stdout
    looking = int(reader.stdout.readline())
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    deadline = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{looking}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.02)


# -- a dataset is never the price -----------------------------------------------------------------------------------


def test_a_dataset_with_a_wrong_index_is_not_extended(tmp_path: Path) -> None:
    """Its frames may be there to be repaired; a merged file would have taken its place with what the index says."""
    path = tmp_path / "room.h5"
    collect("tworoom", path, CollectConfig(episodes=2, resolution=28, workers=1))
    with h5py.File(path) as file:
        chunk = file["pixels"].id.get_chunk_info(7)
    data = bytearray(path.read_bytes())
    place = data.find(chunk.byte_offset.to_bytes(8, "little"))
    data[place : place + 8] = (chunk.byte_offset + 1).to_bytes(8, "little")
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(DataError, match=r"damaged: the frame at row 7 of .* cannot be read"):
            collect("tworoom", path, CollectConfig(episodes=3, resolution=28, workers=1))
        assert path.read_bytes() == data
    assert not (tmp_path / "room.h5.lock").exists()
    assert json.loads(h5py.File(path).attrs["generator"])
