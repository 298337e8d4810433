"""What the readers and writers of every format share: episodes on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lewm.data.store import Attributes, Columns
from lewm.types import Array

FitFrames = Callable[[Array], Array]  # frames (n, H, W, 3) -> (n, R, R, 3), both uint8


@dataclass(frozen=True)
class EpisodeSource:
    """Episodes from anywhere. ``episodes`` yields columns (L, ...), as ``write_episodes`` takes them, one at a time.

    attributes: what is known of all of them, as ``EpisodeStore.attributes``.
    """

    attributes: Attributes
    num_episodes: int
    episodes: Iterator[Columns]
