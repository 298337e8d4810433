"""Where the frames of a dataset are while a model trains: decoded once in memory, or read as needed.

Decoding is the expensive part of loading, so frames are kept decoded wherever they fit: on the training device, else in
the machine's memory. Only what fits in neither is read from disk at every use.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.types import Array

BLOCK_FRAMES = 64  # that a thread decodes at a time: much work per task, little memory
SHARES = {"auto": 0.5, "memory": 0.9}  # of the free memory: half, as the run needs room too, unless asked for by name


class DiskFrames:
    """Frames read from the file whenever they are asked for. ``description`` says where they are, and why."""

    def __init__(self, store: EpisodeStore, threads: int, why: str) -> None:
        self.description = f"frames read from disk by {threads} threads ({why})"
        self._store, self._threads, self._pool = store, threads, ThreadPoolExecutor(threads)

    def gather(self, rows: Array) -> torch.Tensor:
        """Frames of rows int (B, T), uint8 (B, T, R, R, 3), on the CPU."""
        shares = np.array_split(rows.flatten(), self._threads)
        frames = np.concatenate(list(self._pool.map(self._store.read_frames, shares)))
        return torch.from_numpy(frames).unflatten(0, rows.shape)


class MemoryFrames:
    """All frames, decoded once into one tensor on ``device``."""

    def __init__(self, store: EpisodeStore, threads: int, device: torch.device, why: str) -> None:
        self.description = f"decoded frames in {device} memory ({why})"
        shape = (store.num_frames, store.resolution, store.resolution, 3)
        self._frames = torch.empty(shape, dtype=torch.uint8, device=device)

        def decode(start: int) -> None:
            block = self._frames[start : start + BLOCK_FRAMES]
            block.copy_(torch.from_numpy(store.read_frames(np.arange(start, start + len(block)))))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(decode, range(0, store.num_frames, BLOCK_FRAMES)))  # as a list: raises what a thread raised

    def gather(self, rows: Array) -> torch.Tensor:
        """Frames of rows int (B, T), uint8 (B, T, R, R, 3), on the device."""
        index = torch.from_numpy(rows).to(self._frames.device)
        return self._frames.index_select(0, index.flatten()).unflatten(0, rows.shape)


FrameSource = DiskFrames | MemoryFrames
Cache = Literal["auto", "memory", "disk"]  # auto: wherever half of what is free suffices; the others insist


def open_frames(
    store: EpisodeStore, cache: Cache = "auto", threads: int = 2, device: torch.device | str = "cpu"
) -> FrameSource:
    """The frames of a dataset, decoded on ``device`` or else in memory where they fit, otherwise on disk."""
    if cache == "disk":
        return DiskFrames(store, threads, "as asked for")
    needed = store.num_frames * store.resolution**2 * 3
    for place in (torch.device(device), torch.device("cpu")):
        budget = int(_free_bytes(place) * SHARES[cache])
        sizes = f"{needed / 2**20:.1f} MiB, the budget is {budget / 2**20:.1f} MiB"
        if needed <= budget:
            return MemoryFrames(store, threads, place, sizes)
    if cache == "memory":
        raise DataError(f"{store.path} does not fit in memory: decoded it takes {sizes}. Use cache=disk, or less data.")
    return DiskFrames(store, threads, f"decoded they would take {sizes}")


def _free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: what is installed is the best that can be known
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
