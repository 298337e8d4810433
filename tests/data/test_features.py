"""Features of a frozen encoder: computed once, whatever happens on the way, and never taken for what they are not."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lewm.data.features import CHECKSUMS, FORM, READERS, VALUES, Features, build_features, features_folder
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows
from lewm.errors import DataError, FileError
from lewm.types import GoalSampling, Inputs

TinyStore = Callable[..., EpisodeStore]
NAME, DIGEST, OTHER = "group/encoder v1", "0123456789abcdef" * 4, "f123456789abcdef" * 4


def encode(frames: torch.Tensor) -> torch.Tensor:
    """A grid of 2 x 3 numbers, of which the first is the frame's grey."""
    return frames[:, 0, 0, 0].half()[:, None, None] + torch.arange(6).half().view(2, 3) * 256


@pytest.fixture
def store(tiny_store: TinyStore) -> EpisodeStore:
    return tiny_store([100, 70])


@pytest.fixture
def built(store: EpisodeStore) -> Path:
    """A finished folder with six blocks of 32 frames, the last of them shorter."""
    return build_features(store, NAME, DIGEST, encode, batch=32)


@pytest.mark.parametrize("cache", ["disk", "ram"])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize("stride", [1, 3])
def test_features_are_those_of_the_rows(tiny_store: TinyStore, cache: Any, kind: torch.dtype, stride: int) -> None:
    store = tiny_store([100, 70], stride=stride, phases=[stride - 1, 0])
    build_features(store, NAME, DIGEST, lambda frames: encode(frames).to(kind), batch=7)
    rows = store.frame_rows[np.random.default_rng(0).integers(0, store.num_frames, (6, 4))]
    with Features(store, NAME, DIGEST, cache, threads=3) as features:
        gathered = features.gather(rows)
        assert features.shape == (2, 3)
        assert "features" in features.description
    assert gathered.dtype == kind
    assert gathered.shape == (6, 4, 2, 3)
    assert torch.equal(gathered, encode(torch.from_numpy(store.read_frames(rows.ravel()))).view(6, 4, 2, 3).to(kind))


@pytest.mark.parametrize("size", [3, 4])
def test_features_on_a_device_are_moved_whole(store: EpisodeStore, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 bytes, and of 8, which are moved as one number."""
    frames_module = sys.modules["lewm.data.frames"]
    monkeypatch.setattr(
        frames_module,
        "RamFrames",
        lambda file, threads, why, _pinned: frames_module.DeviceFrames(file, threads, torch.device("cpu"), why),
    )
    build_features(store, NAME, DIGEST, lambda frames: frames[:, 0, 0, :1].half().expand(-1, size))
    with Features(store, NAME, DIGEST, "ram") as features:
        assert features.gather(np.array([[3, 169]])).tolist() == [[[3.0] * size, [169.0] * size]]


def test_they_are_computed_once_and_others_may_read_them(store: EpisodeStore) -> None:
    seen: list[tuple[int, int]] = []
    folder = build_features(store, NAME, DIGEST, encode, lambda done, total: seen.append((done, total)), batch=64)
    assert seen == [(0, 170), (64, 170), (128, 170), (170, 170)]
    assert folder == Path(f"{store.path}.features") / "group-encoder-v1-0123456789abcdef"
    assert sorted(path.name for path in folder.iterdir()) == sorted([CHECKSUMS, FORM, VALUES])
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no lock stays"
    np.testing.assert_array_equal(np.load(folder / VALUES)[:, 0, 0], np.arange(170))

    def never(_frames: torch.Tensor) -> torch.Tensor:
        raise AssertionError("they are there")

    assert build_features(store, NAME, DIGEST, never) == folder


@pytest.mark.usefixtures("built")
def test_the_free_memory_decides_where_they_are(store: EpisodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 170 * 6 * 2
    for free, expected in ((2 * size, "decoded features in cpu memory"), (2 * size - 2, "features read from disk")):
        monkeypatch.setattr("lewm.data.frames.free_bytes", lambda _device, free=free: free)
        with Features(store, NAME, DIGEST) as features:
            assert features.description.startswith(expected)


@pytest.mark.usefixtures("built")
def test_many_threads_read_the_same(store: EpisodeStore) -> None:
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 170, (5, 10)) for _ in range(60)]
    with Features(store, NAME, DIGEST, "disk", threads=2) as features, ThreadPoolExecutor(8) as pool:
        for rows, found in zip(requests, pool.map(lambda rows: features.gather(rows).clone(), requests), strict=True):
            assert (found[..., 0, 0].numpy() == rows).all()


@pytest.mark.usefixtures("built")
def test_windows_of_features(store: EpisodeStore) -> None:
    with Features(store, NAME, DIGEST) as features:
        inputs = Inputs(3, 2, 2, features=NAME, goals={"far": GoalSampling()})
        batch = Windows(store, features, np.array([1]), inputs).batch(np.array([0, 5]), (1,))
    assert batch.features is not None
    assert batch.features[:, :, 0, 0].tolist() == [[100, 102, 104], [105, 107, 109]]
    assert torch.equal(batch.goals["far"][:, 0, 0], torch.tensor([104, 109]) + batch.steps["far"])


# -- interruptions --------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from lewm.data import features
from lewm.data.store import EpisodeStore
sys.path.insert(0, sys.argv[2])
from test_features import DIGEST, NAME, encode

moment, count = sys.argv[3], int(sys.argv[4])

def counted(function, name):
    calls = iter(range(1000))
    def call(*arguments):
        if name == moment and next(calls) == count:
            if name == "torn":
                arguments[0].write(arguments[1][:20])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call

features._write = counted(counted(features._write, "write"), "torn")
features.os.fsync = counted(features.os.fsync, "fsync")
with EpisodeStore(sys.argv[1]) as store:
    features.build_features(store, NAME, DIGEST, counted(encode, "encode"), batch=32)
"""


def build_killed(store: EpisodeStore, moment: str, count: int) -> None:
    """Build in a process that is killed just before its ``count``-th call of something."""
    command = [sys.executable, "-c", KILLED, str(store.path), str(Path(__file__).parent), moment, str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("moment", "count"),
    [("encode", 0), ("encode", 3), ("fsync", 0), ("fsync", 1), ("fsync", 4), ("write", 4), ("write", 5), ("torn", 5)],
)
def test_a_build_that_is_killed_goes_on(store: EpisodeStore, built: Path, moment: str, count: int) -> None:
    expected = content(built)
    shutil.rmtree(built)
    build_killed(store, moment, count)
    if (built / FORM).exists():
        with pytest.raises(DataError, match=r"lacks \d of 6 blocks of features.* goes on where it stopped"):
            Features(store, NAME, DIGEST)
    finished = (built / CHECKSUMS).read_bytes().count(b"\n") if (built / CHECKSUMS).exists() else 0
    encoded: list[int] = []

    def watched(frames: torch.Tensor) -> torch.Tensor:
        encoded.append(len(frames))
        return encode(frames)

    resumed = (built / FORM).exists()
    build_features(store, NAME, DIGEST, watched, batch=32)
    assert len(encoded) == 6 - finished + (not resumed), "nothing is computed again that is finished"
    assert content(built) == expected
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_a_batch_of_another_size_goes_on_with_the_one_it_began_with(store: EpisodeStore, built: Path) -> None:
    expected = content(built)
    shutil.rmtree(built)
    build_killed(store, "encode", 3)
    sizes: list[int] = []

    def watched(frames: torch.Tensor) -> torch.Tensor:
        sizes.append(len(frames))
        return encode(frames)

    build_features(store, NAME, DIGEST, watched, batch=100)
    assert set(sizes) == {32, 10}
    assert content(built) == expected


def test_two_writers_are_kept_apart(store: EpisodeStore) -> None:
    folder = features_folder(store, NAME, DIGEST)
    folder.parent.mkdir()
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FileError, match="Another process computes the features"):
            build_features(store, NAME, DIGEST, encode)
    build_features(store, NAME, DIGEST, encode)


def test_who_can_say_so_waits_for_the_other_writer(store: EpisodeStore) -> None:
    folder = features_folder(store, NAME, DIGEST)
    folder.parent.mkdir()
    said: list[str] = []
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def announce(sentence: str) -> None:
            said.append(sentence)
            fcntl.flock(lock, fcntl.LOCK_UN)  # the other one ends while this one waits

        build_features(store, NAME, DIGEST, encode, announce=announce)
    assert said[0] == f"Another process computes the features in {folder}. Waiting for it."
    assert len(said) == 2
    said.clear()
    build_features(store, NAME, DIGEST, encode, announce=said.append)
    assert not said


def test_a_full_disk_is_named_and_what_is_there_counts(store: EpisodeStore) -> None:
    """A process that may only write small files fails as on a full disk, in the second of six blocks."""
    code = KILLED.replace(
        "with EpisodeStore",
        "import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "features._begin = (lambda begin: lambda *arguments: (begin(*arguments), resource.setrlimit("
        "resource.RLIMIT_FSIZE, (128 + 50 * 12, resource.RLIM_INFINITY)))[0])(features._begin)\nwith EpisodeStore",
    )
    command = [sys.executable, "-c", code, str(store.path), str(Path(__file__).parent), "", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "FileError: " in done.stderr.splitlines()[-1]
    assert "cannot be written (File too large)" in done.stderr.splitlines()[-1]
    folder = features_folder(store, NAME, DIGEST)
    assert (folder / CHECKSUMS).read_bytes().count(b"\n") == 1
    build_features(store, NAME, DIGEST, encode)
    with Features(store, NAME, DIGEST) as features:
        assert (features.gather(np.arange(170)[None])[0, :, 0, 0].numpy() == np.arange(170)).all()


def test_what_is_going_to_be_written_is_said_before(store: EpisodeStore) -> None:
    said: list[str] = []
    folder = features_folder(store, NAME, DIGEST)
    build_killed(store, "write", 4)  # the numbers of the third block: each has its numbers and its checksum
    for _ in range(2):
        build_features(store, NAME, DIGEST, encode, batch=32, announce=said.append)
    there = "170 frames, 64 of them there already, each 2 x 3 float16"
    assert said == [f"Features of {NAME}: {there}; 1.3 kB go to {folder}."], "only once is there anything to do"


def test_a_disk_without_the_room_is_refused_before_anything_is_written(
    store: EpisodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system says how much it has left; here 1 byte too little, and then enough."""
    usage, needed = shutil.disk_usage(store.path.parent), 170 * 196 * 112 * 2
    place = re.escape(str(store.path))

    def tokens(frames: torch.Tensor) -> torch.Tensor:
        return frames[:, 0, 0, :1].half().repeat(1, 196 * 112).unflatten(1, (196, 112))

    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed - 1))
    with pytest.raises(FileError, match=rf"need 7\.5 MB, but the disk of {place}\.features has 7\.5 MB left\. Free"):
        build_features(store, NAME, DIGEST, tokens)
    assert not features_folder(store, NAME, DIGEST).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed))
    build_features(store, NAME, DIGEST, tokens)
    with Features(store, NAME, DIGEST, "disk") as features:
        assert features.shape == (196, 112)
        assert features.gather(np.array([[0, 169]]))[0, :, 195, 111].tolist() == [0.0, 169.0]


def test_few_frames_and_features_are_held_at_a_time(tiny_store: TinyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk: the encoder waits for it, and frames are not read far ahead of the encoder."""
    store = tiny_store([200])
    reads, encoded, sync = [0], [0], os.fsync
    checksums = features_folder(store, NAME, DIGEST) / CHECKSUMS
    read = store.read_frames

    def counted_read(rows: np.ndarray, *arguments: Any) -> np.ndarray:
        reads[0] += 1
        return read(rows, *arguments)

    def slow_sync(descriptor: int) -> None:
        time.sleep(0.01)
        sync(descriptor)

    def counted_encode(frames: torch.Tensor) -> torch.Tensor:
        """The first block is encoded twice: what its features are like is not known before."""
        encoded[0] += 1
        on_disk = checksums.read_bytes().count(b"\n") if checksums.exists() else 0
        assert encoded[0] <= 2 or encoded[0] - 1 <= on_disk + 3, "one is being encoded, two wait to be written"
        assert reads[0] <= encoded[0] + READERS + 1
        return encode(frames)

    monkeypatch.setattr(store, "read_frames", counted_read)
    monkeypatch.setattr(os, "fsync", slow_sync)
    build_features(store, NAME, DIGEST, counted_encode, batch=8)
    assert encoded[0] == 25 + 1


def test_a_path_that_is_longer_than_a_name_may_be(store: EpisodeStore) -> None:
    folder = build_features(store, f"tokens:/{'deep/' * 60}model", DIGEST, encode)
    assert len(folder.name) < 150
    assert folder.name.endswith(f"deep-model-{DIGEST[:16]}")


# -- what is refused ------------------------------------------------------------------------------------------------


def refused(store: EpisodeStore, message: str, digest: str = DIGEST) -> None:
    """Neither read nor written over, with one line that says why."""
    with pytest.raises(DataError, match=message) as caught:
        Features(store, NAME, digest)
    assert "\n" not in str(caught.value)


def test_features_of_another_encoder_are_refused(store: EpisodeStore, built: Path) -> None:
    refused(store, f"no features by {NAME} {OTHER}, only those of another .*group-encoder-v1-0123.* Compute", OTHER)
    moved = built.rename(features_folder(store, NAME, OTHER))
    refused(store, f"has features by {NAME} {DIGEST}, not by {NAME} {OTHER}", OTHER)
    with pytest.raises(DataError, match=f"has features by {NAME} {DIGEST}, not by"):
        build_features(store, NAME, OTHER, encode)
    shutil.rmtree(moved)
    refused(store, f"no features by {NAME} {DIGEST}, none at all")


def test_features_of_another_dataset_are_refused(store: EpisodeStore, built: Path, tiny_store: TinyStore) -> None:
    before = content(built)
    other = tiny_store([70, 100])  # as many frames, in the same place
    assert other.path == store.path
    refused(other, r"has features of another dataset than .*tiny\.h5 now is. Remove")
    with pytest.raises(DataError, match="another dataset"):
        build_features(other, NAME, DIGEST, encode)
    assert content(built) == before


@pytest.mark.parametrize("cut", [1, 500, None])
def test_a_truncated_file_is_refused(store: EpisodeStore, built: Path, cut: int | None) -> None:
    size = (built / VALUES).stat().st_size
    os.truncate(built / VALUES, 0 if cut is None else size - cut)
    refused(store, rf"features\.npy has .* of {size:,} bytes\. Remove")
    (built / VALUES).unlink()
    refused(store, rf"features\.npy has 0 of {size:,} bytes\. Remove")


@pytest.mark.parametrize("cache", ["disk", "ram"])
@pytest.mark.parametrize("seed", range(6))
def test_one_flipped_byte_is_noticed_before_its_block_is_used(
    store: EpisodeStore, built: Path, cache: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    frame, byte = int(rng.integers(170)), int(rng.integers(12))
    values = bytearray((built / VALUES).read_bytes())
    values[128 + 12 * frame + byte] ^= 1 << int(rng.integers(8))
    (built / VALUES).write_bytes(values)
    block = frame // 32
    first, last = 32 * block, min(32 * block + 31, 169)
    damaged = rf"features of frames {first} to {last} are not those that were computed.* Remove"
    if cache == "ram":  # where all are read at opening
        with pytest.raises(DataError, match=damaged):
            Features(store, NAME, DIGEST, cache)
        return
    with Features(store, NAME, DIGEST, cache) as features:
        for row in (first, last, frame):
            with pytest.raises(DataError, match=damaged):
                features.gather(np.array([[row]]))
        others = np.setdiff1d(np.arange(170), np.arange(first, last + 1))[None]
        assert (features.gather(others)[..., 0, 0].numpy() == others).all()


@pytest.mark.parametrize("name", [FORM, CHECKSUMS])
def test_damage_beside_the_numbers_is_noticed(store: EpisodeStore, built: Path, name: str) -> None:
    """A bit of each byte in turn: features are refused, or they are the right ones."""
    sound, rows = (built / name).read_bytes(), np.arange(170)[None]
    outcomes = set[bool]()
    for number in range(2 * len(sound)):
        changed = bytearray(sound)
        changed[number // 2] ^= 1 << int(np.random.default_rng(number).integers(8))
        (built / name).write_bytes(changed)
        try:
            with Features(store, NAME, DIGEST, "disk") as features:
                assert (features.gather(rows)[..., 0, 0].numpy() == rows).all()
            outcomes.add(True)
        except DataError:
            outcomes.add(False)
    assert False in outcomes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x: encode(x).double(), "float16 or float32 .* got torch.float64"),
        (lambda x: encode(x).bfloat16(), "float16 or float32 .* got torch.bfloat16"),
        (lambda x: encode(x)[1:], r"of shape \(32, ...\), got torch.float16 \(31, 2, 3\)"),
        (lambda x: encode(x)[:, 0, 0], r"got torch.float16 \(32,\)"),
        (lambda x: encode(x).masked_fill(encode(x) == 40, torch.nan), "NaN or infinity for frame 40 of"),
        (lambda x: encode(x)[:, : 2 - (x == 64).any().int()], "float16.* as before. Remove"),
    ],
)
def test_an_encoder_that_gives_something_else_is_refused(
    store: EpisodeStore, bad: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_features(store, NAME, DIGEST, bad, batch=32)


def test_a_newer_format_is_refused(store: EpisodeStore, built: Path) -> None:
    document = json.loads((built / FORM).read_text())
    (built / FORM).write_text(json.dumps(document | {"version": 99}))
    refused(store, "version 99, unknown here")


def test_numbers_may_come_as_an_array(store: EpisodeStore) -> None:
    build_features(store, NAME, DIGEST, lambda frames: frames.numpy()[:, 0, 0].astype(np.float32))
    with Features(store, NAME, DIGEST) as features:
        assert features.gather(np.array([[5]])).tolist() == [[[5.0, 5.0, 5.0]]]


def test_an_interrupt_keeps_what_is_finished(store: EpisodeStore) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_features(store, NAME, DIGEST, encode, interrupt, batch=32)
    assert (features_folder(store, NAME, DIGEST) / CHECKSUMS).read_bytes().count(b"\n") == 2
