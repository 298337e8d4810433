"""Frame sources give the same frames, and the choice between them follows the memory there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from lewm.data.frames import DeviceFrames, DiskFrames, RamFrames, open_frames
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import DataError

TinyStore = Callable[..., EpisodeStore]
FRAME_BYTES = 4 * 4 * 3


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_gathered_frames_are_those_of_the_rows(tiny_store: TinyStore, cache: str, threads: int) -> None:
    frames = open_frames(tiny_store([100, 70]), cache, threads)
    rows = np.array([[0, 169, 5], [5, 64, 63]])
    gathered = frames.gather(rows)
    assert gathered.dtype == torch.uint8
    assert gathered.shape == (2, 3, 4, 4, 3)
    assert (gathered == torch.from_numpy(rows)[:, :, None, None, None]).all()
    assert frames.gather(rows[:1, :1]).shape == (1, 1, 4, 4, 3), "fewer frames than threads"


@pytest.mark.parametrize("resolution", [4, 5])
def test_frames_on_a_device_are_moved_whole(tmp_path: Path, resolution: int) -> None:
    """48 bytes are moved as six numbers of eight, 75 bytes one by one."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, resolution, resolution, 3), np.uint8)
    episode = {"pixels": pixels, "action": np.zeros((9, 2), np.float32)}
    write_episodes(tmp_path / "data.h5", iter([episode]), {"environment": "lewm/Tiny-v0", "seed": 0})
    with closing(EpisodeStore(tmp_path / "data.h5")) as store:
        rows = np.array([[8, 0], [3, 3]])
        gathered = DeviceFrames(store, 2, torch.device("cpu"), "").gather(rows)
    assert np.array_equal(gathered.numpy(), pixels[rows])


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_batch_keeps_its_memory_until_nobody_holds_it(tiny_store: TinyStore, cache: str) -> None:
    frames = open_frames(tiny_store([100]), cache)
    rows = np.arange(30).reshape(5, 6)
    first = frames.gather(rows)
    part, place = first[2:4, 1], first.data_ptr()
    del first
    others = [frames.gather(rows + 40), frames.gather(rows + 60)]
    assert part[:, 0, 0, 0].tolist() == [13, 19], "a part of a batch keeps the whole"
    assert others[0].data_ptr() != place != others[1].data_ptr()
    del part
    while not frames._buffers._free:  # a thread that has read may hold on to it for a moment longer
        time.sleep(0.001)
    again = frames.gather(rows[:2] + 50)
    assert again.data_ptr() == place, "used again"
    assert again[0, :, 0, 0, 0].tolist() == list(range(50, 56))
    assert (others[0][:, :, 0, 0, 0] == torch.from_numpy(rows + 40)).all()


def test_the_free_memory_decides(tiny_store: TinyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def free_for(frames: float) -> None:
        monkeypatch.setattr("lewm.data.frames.free_bytes", lambda _device: int(frames * FRAME_BYTES))

    store, rows = tiny_store([10]), np.arange(10)[None]
    in_memory = open_frames(store)
    assert isinstance(in_memory, RamFrames), "480 bytes fit on any machine"
    assert "decoded frames in cpu memory (0.0 MiB, the budget is" in in_memory.description
    free_for(20)
    assert isinstance(open_frames(store, "auto"), RamFrames), "exactly half"
    free_for(15)
    on_disk = open_frames(store, "auto")
    assert isinstance(on_disk, DiskFrames), "more than half"
    assert "decoded they would take 0.0 MiB, the budget is 0.0 MiB" in on_disk.description
    assert torch.equal(in_memory.gather(rows), on_disk.gather(rows))
    assert isinstance(open_frames(store, "memory"), RamFrames), "asked for by name, it fits"
    free_for(10)
    with pytest.raises(DataError, match=r"does not fit in memory: .*cache=disk"):
        open_frames(store, "memory")


def test_frames_go_to_the_device_if_it_has_room(tiny_store: TinyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"meta": 20, "cpu": 1000}
    monkeypatch.setattr("lewm.data.frames.free_bytes", lambda device: free[device.type] * FRAME_BYTES)
    store = tiny_store([10])
    assert open_frames(store, device="meta").gather(np.zeros((1, 1), int)).device.type == "meta"
    free["meta"] = 19
    assert open_frames(store, device="meta").gather(np.zeros((1, 1), int)).device.type == "cpu"
