"""Where the frames of a dataset, or features of them, are while a model trains: once in memory, or read as needed.

Decoding is the expensive part of loading, so frames are kept decoded wherever they fit: on the training device, else in
the machine's memory. Only what fits in neither is read from disk at every use.
"""

from __future__ import annotations

import math
import os
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from lewm.errors import DataError
from lewm.machine import free_memory
from lewm.types import Array

BLOCK_FRAMES = 64  # that a thread decodes at a time: much work per task, little memory
# Of the free memory: half, as the run needs room too, unless asked for by name.
SHARES = {"auto": 0.5, "memory": 0.9, "ram": 0.9}


class FrameFile(Protocol):
    """What frames are read from, in these shapes: an ``EpisodeStore``, or a file of features.

    noun: what its frames are called.  frame_shape, frame_type: of one of them.
    """

    path: Path
    noun: str
    num_frames: int
    frame_rows: Array
    frame_shape: tuple[int, ...]
    frame_type: np.dtype[Any]

    def frames_at(self, rows: Array) -> Array: ...
    def read_frames(self, rows: Array, out: Array) -> Array: ...


class _HostFrames(ABC):
    """Batches that threads put together in the machine's memory, pinned if a GPU will fetch them from there."""

    def __init__(self, store: FrameFile, threads: int, pinned: bool, description: str) -> None:
        self.description = description  # where the frames are, and why
        self._store, self._threads, self._pool = store, threads, ThreadPoolExecutor(threads)
        self._pinned, self._buffers = pinned, _Buffers()

    def gather(self, rows: Array) -> torch.Tensor:
        """Frames of rows int (B, T), (B, T, *frame_shape), on the CPU; in pinned memory if so made."""
        shape, kind = (rows.size, *self._store.frame_shape), _torch_type(self._store)
        # PyTorch keeps and reuses pinned memory by itself.
        frames = torch.empty(shape, dtype=kind, pin_memory=True) if self._pinned else self._buffers.take(shape, kind)
        shares = (np.array_split(array, self._threads) for array in (rows.flatten(), frames.numpy()))
        list(self._pool.map(self._read, *shares))  # as a list: raises what a thread raised
        return frames.unflatten(0, rows.shape)

    @abstractmethod
    def _read(self, rows: Array, out: Array) -> None:
        """Put the frames of rows int (N,) into out (N, *frame_shape)."""


class DiskFrames(_HostFrames):
    """Frames read from the file whenever they are asked for."""

    def __init__(self, store: FrameFile, threads: int, why: str, pinned: bool = False) -> None:
        super().__init__(store, threads, pinned, f"{store.noun} read from disk by {threads} threads ({why})")

    def _read(self, rows: Array, out: Array) -> None:
        self._store.read_frames(rows, out)


class RamFrames(_HostFrames):
    """All frames, decoded once into the machine's memory."""

    def __init__(self, store: FrameFile, threads: int, why: str, pinned: bool = False) -> None:
        super().__init__(store, threads, pinned, f"decoded {store.noun} in cpu memory ({why})")
        self._frames = _decode_all(store, threads, torch.device("cpu")).numpy()

    def _read(self, rows: Array, out: Array) -> None:
        # Clipping changes nothing, as all rows exist; but without it NumPy would copy everything twice.
        np.take(self._frames, self._store.frames_at(rows), axis=0, out=out, mode="clip")


class DeviceFrames:
    """All frames, decoded once into the memory of ``device``."""

    def __init__(self, store: FrameFile, threads: int, device: torch.device, why: str) -> None:
        self.description = f"decoded {store.noun} in {device} memory ({why})"
        self._store = store
        self._frames = _decode_all(store, threads, device)
        # Moved by eight bytes at a time where that goes: one by one, a GPU spends its time on addresses.
        self._moved_as = torch.int64 if _frame_bytes(store) % 8 == 0 else self._frames.dtype

    def gather(self, rows: Array) -> torch.Tensor:
        """Frames of rows int (B, T), (B, T, *frame_shape), on the device."""
        index = torch.from_numpy(self._store.frames_at(rows)).to(self._frames.device)
        frames = self._frames.flatten(1).view(self._moved_as).index_select(0, index.flatten())
        return frames.view(self._frames.dtype).view(*rows.shape, *self._frames.shape[1:])


def _torch_type(store: FrameFile) -> torch.dtype:
    return torch.from_numpy(np.empty(0, store.frame_type)).dtype


def _frame_bytes(store: FrameFile) -> int:
    return math.prod(store.frame_shape) * store.frame_type.itemsize


def _decode_all(store: FrameFile, threads: int, device: torch.device) -> torch.Tensor:
    """All frames of a file on ``device``, (F, *frame_shape)."""
    frames = torch.empty((store.num_frames, *store.frame_shape), dtype=_torch_type(store), device=device)

    def decode(start: int) -> None:
        block, rows = frames[start : start + BLOCK_FRAMES], store.frame_rows[start : start + BLOCK_FRAMES]
        if device.type == "cpu":
            store.read_frames(rows, block.numpy())
        else:
            staged = torch.empty(block.shape, dtype=block.dtype, pin_memory=device.type == "cuda")
            store.read_frames(rows, staged.numpy())
            block.copy_(staged)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode, range(0, store.num_frames, BLOCK_FRAMES)))  # as a list: raises what a thread raised
    return frames


class _Buffers:
    """Memory for batches, used again once nobody holds the last one: fresh memory costs as much as decoding into it."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * kind.itemsize
        try:
            buffer = self._free.pop()  # not looked at before: another thread may take it in between
        except IndexError:
            buffer = np.empty(size, np.uint8)
        if len(buffer) < size:
            buffer = np.empty(size, np.uint8)
        lent = buffer[:size]  # the tensor holds on to this very object: its end is the end of the loan
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return torch.from_numpy(lent).view(kind).view(shape)


FrameSource = DiskFrames | RamFrames | DeviceFrames
# auto: wherever half of what is free suffices; the others insist: on the device's or the machine's memory, on the
# machine's, on the disk.
Cache = Literal["auto", "memory", "ram", "disk"]


def open_frames(
    store: FrameFile, cache: Cache = "auto", threads: int = 2, device: torch.device | str = "cpu"
) -> FrameSource:
    """The frames of a file, decoded on ``device`` or else in memory where they fit, otherwise on disk."""
    pinned = torch.device(device).type == "cuda"
    if cache == "disk":
        return DiskFrames(store, threads, "as asked for", pinned)
    needed = store.num_frames * _frame_bytes(store)
    for place in map(torch.device, ("cpu",) if cache == "ram" else (device, "cpu")):
        budget = int(free_bytes(place) * SHARES[cache])
        sizes = f"{needed / 2**20:.1f} MiB, the budget is {budget / 2**20:.1f} MiB"
        if needed <= budget and place.type == "cpu":
            return RamFrames(store, threads, sizes, pinned)
        if needed <= budget:
            return DeviceFrames(store, threads, place, sizes)
    if cache in ("memory", "ram"):
        raise DataError(f"{store.path} does not fit in memory: decoded it takes {sizes}. Use cache=disk, or less data.")
    return DiskFrames(store, threads, f"decoded they would take {sizes}", pinned)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")  # of one training run, each of which asks
    return free_memory() // max(1, int(processes) if processes.isdecimal() else 1)
