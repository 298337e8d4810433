"""Which embeddings a probe sees, and which episodes it learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lewm.data.features import Features
from lewm.data.generate import DEMONSTRATION
from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.rng import stream
from lewm.types import Array

LEAST_GROUPS = 3  # one for each part
SHARE = 0.1  # of the episodes, or of what they replay, for validation; as many are for the test
GATHERED = 1024  # frames whose tokens are in memory together
_SPLIT, _THINNED = 1, 2  # what random streams are for

# What is found with one split: by target and probe, its MSE, r, r of each number, and typical error.
Measured = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class View:
    """What a probe sees. frames: how many embeddings, up to the one whose frame is asked about.

    places: which of the dataset's frames these are, int (n, frames).  episodes: theirs, int (n,).
    groups: which of them belong together, int (n,): replays of one demonstration, else those of one episode.
    """

    frames: int
    places: Array
    episodes: Array
    groups: Array


@dataclass(frozen=True)
class ViewResult:
    """What probes read from one view. size: of their inputs.  measured: with each split."""

    view: View
    size: int
    measured: tuple[Measured, ...]


def view_of(store: EpisodeStore, frames: int, skip: int, visible: Array, most: int, seed: int) -> View:
    """All frames that are visible (F,) and have ``frames - 1`` before them in their episode, ``skip`` rows apart."""
    apart, rest = divmod(skip, store.frame_stride)
    if frames > 1 and rest:
        problem = f"has one frame in {store.frame_stride} steps, but the model's lie {skip} apart"
        raise DataError(f"{store.path} {problem}. Collect it with a --frame-stride that divides {skip}.")
    places = np.arange(store.num_frames)[:, None] - apart * np.arange(frames)[::-1]
    episodes = np.searchsorted(store.offsets, store.frame_rows, side="right") - 1
    whole = places[:, 0] >= 0
    whole &= (episodes[np.maximum(places[:, 0], 0)] == episodes) & visible
    chosen = np.flatnonzero(whole)
    if len(chosen) > most:
        chosen = np.sort(stream(seed, frames, _THINNED).choice(chosen, most, replace=False))
    groups = _demonstrations(store) if DEMONSTRATION in store.columns else episodes
    return View(frames, places[chosen], episodes[chosen], groups[chosen])


def _demonstrations(store: EpisodeStore) -> Array:
    """The number of the demonstration that each frame is of, int (F,)."""
    numbers = store.read_column(DEMONSTRATION)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        problem = f"has {DEMONSTRATION} {numbers.dtype} {numbers.shape}, not an integer for each row"
        raise DataError(f"{store.path} {problem}. Repair it, or leave the column out.")
    return numbers[store.frame_rows]


def split_groups(groups: Array, seed: int, split: int, store: EpisodeStore) -> tuple[Array, Array, Array]:
    """Which of the frames of groups (n,) are for training, validation and test: int each, no group in two."""
    present = np.unique(groups)
    if len(present) < LEAST_GROUPS:
        kind = DEMONSTRATION if DEMONSTRATION in store.columns else "episode"
        problem = f"has frames of {len(present)} {kind}{'s' * (len(present) != 1)} to look at"
        needed = f"probes need {LEAST_GROUPS} at least, for training, validation and test"
        raise DataError(f"{store.path} {problem}, but {needed}. Collect more.")
    order = stream(seed, split, _SPLIT).permutation(present)
    count = max(1, round(SHARE * len(present)))
    parts = order[2 * count :], order[:count], order[count : 2 * count]
    train, validation, test = (np.flatnonzero(np.isin(groups, part)) for part in parts)
    return train, validation, test


def load_embeddings(features: Features, store: EpisodeStore, tokens: str) -> Array:
    """Of all frames, float32 (F, D). Tokens (N, D) of a frame are averaged, or follow each other if "flat"."""
    parts = []
    for start in range(0, store.num_frames, GATHERED):
        z = features.gather(store.frame_rows[start : start + GATHERED, None])[:, 0].float()
        if z.ndim > 2:
            z = z.mean(dim=1) if tokens == "mean" else z.flatten(1)
        parts.append(z.cpu().numpy())
    return np.concatenate(parts)
