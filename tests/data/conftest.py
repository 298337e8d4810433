"""Artificial episodes whose content says where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lewm.data.store import EpisodeStore, write_episodes

RESOLUTION = 4


def numbered_episodes(
    lengths: Sequence[int], stride: int = 1, phases: Sequence[int] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Episodes in which every pixel is the row's number modulo 256, and the action (row, -row).

    With a stride they have only one frame in so many, from the one on that ``phases`` names for each.
    """
    start = 0
    for length, phase in zip(lengths, phases or [0] * len(lengths), strict=True):
        rows = np.arange(start, start + length)
        action = np.stack([rows, -rows], axis=1).astype(np.float32)
        action[-1] = np.nan
        pixels = np.broadcast_to(rows[:, None, None, None], (length, RESOLUTION, RESOLUTION, 3))
        frames = np.arange(phase, length, stride)
        yield {
            "pixels": pixels[frames].astype(np.uint8),
            "frame_step": frames,
            "action": action,
            "proprio": rows[:, None].astype(np.float32),
            "state": rows[:, None].astype(np.float64),
        }
        start += length


@pytest.fixture
def write_tiny(tmp_path: Path) -> Callable[..., Path]:
    """Writes numbered episodes of the given lengths and returns the file's path."""

    def write(
        lengths: Sequence[int], name: str = "tiny.h5", stride: int = 1, phases: Sequence[int] | None = None
    ) -> Path:
        path = tmp_path / name
        attributes = {"environment": "lewm/Tiny-v0", "seed": 3, "frame_stride": stride, "proprio": "row"}
        write_episodes(path, numbered_episodes(lengths, stride, phases), attributes)
        return path

    return write


@pytest.fixture
def tiny_store(write_tiny: Callable[..., Path]) -> Iterator[Callable[..., EpisodeStore]]:
    """Opens numbered episodes of the given lengths."""
    opened: list[EpisodeStore] = []

    def open_store(lengths: Sequence[int], **options: Any) -> EpisodeStore:
        opened.append(EpisodeStore(write_tiny(lengths, **options)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()
