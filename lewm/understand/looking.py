"""How verbs look at frames: embeddings of pictures, paths of them through episodes, and what distances are large."""

from __future__ import annotations

import numpy as np
import torch

from lewm.data.features import Features
from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.types import Array, ProgressCallback
from lewm.understand.subject import Subject

FRAMES_AT_ONCE = 64
ALL_SAME = "All embeddings are the same. The model has collapsed, or all frames show the same. Take others."
POOLED = "Its tokens are averaged over the frame."  # said of models whose encoder gives tokens


def look(subject: Subject, frames: Array, on_progress: ProgressCallback | None = None) -> Array:
    """Embeddings float64 (N, D) of frames uint8 (N, R, R, 3); tokens are averaged over the frame."""
    embedded = []
    for first in range(0, len(frames), FRAMES_AT_ONCE):
        part = torch.from_numpy(np.ascontiguousarray(frames[first : first + FRAMES_AT_ONCE])).to(subject.device)
        embedded.append(_pooled(subject.encoder(part)).cpu())
        if on_progress:
            on_progress(min(first + FRAMES_AT_ONCE, len(frames)), len(frames))
    return torch.cat(embedded).double().numpy()


def _pooled(z: torch.Tensor) -> torch.Tensor:
    """Embeddings (N, D) as they are, tokens (N, tokens, D) by their mean."""
    return z if z.ndim == 2 else z.flatten(1, -2).mean(1)


def remarks_on(subject: Subject) -> tuple[str, ...]:
    """What has to be said of embeddings that ``look`` gives."""
    return (POOLED,) if len(subject.encoder.shape) > 1 else ()


def frame_rows(subject: Subject, store: EpisodeStore) -> list[Array]:
    """Of each episode, the rows of frames that lie one action block of the model apart, int (T,)."""
    skip, stride = subject.model.frame_skip, store.frame_stride
    if skip % stride:
        problem = f"{store.path} has a frame every {stride} steps, but {subject.source} takes one every {skip}"
        raise DataError(f"{problem}. Collect it with --frame-stride {skip}.")
    ends = store.offsets + store.lengths
    bounds = zip(np.searchsorted(store.frame_rows, store.offsets), np.searchsorted(store.frame_rows, ends), strict=True)
    return [store.frame_rows[first:last][:: skip // stride] for first, last in bounds]


def paths(subject: Subject, store: EpisodeStore, features: Features) -> list[torch.Tensor]:
    """The path of each episode through the latent space, float32 (T, D): a point every action block."""
    rows = [each for each in frame_rows(subject, store) if len(each)]
    return [_pooled(features.gather(each[None])[0].float()).cpu() for each in rows]


def between_episodes(z_EFD: Array) -> float:
    """The mean squared distance between frames (E, F, D) of different episodes: what is far in this latent space."""
    if len(z_EFD) < 2:
        raise DataError("Frames of different episodes are compared, and there is one. Give two episodes or more.")
    means, squares = z_EFD.mean(1), np.square(z_EFD).sum(-1).mean(1)
    pairs = squares[:, None] + squares[None] - 2 * means @ means.T  # of episodes, the mean over their frames
    return float(pairs[~np.eye(len(pairs), dtype=bool)].mean())
