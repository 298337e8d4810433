"""Training windows: short sub-trajectories cut from episodes, and the order in which they are seen.

The alignment, drawn once. Row t of an episode holds frame o_t and the action a_t taken there:

    row       0     1     2     3    ...   L-2     L-1
    frame    o_0   o_1   o_2   o_3   ...  o_L-2   o_L-1
    action   a_0   a_1   a_2   a_3   ...  a_L-2    NaN        o_t, a_t -> o_t+1

A window takes T = history + 1 frames, K = frame_skip rows apart, and the K actions from each one on. It
covers T*K consecutive rows of one episode; here K = 5, T = 4, from row s:

    frame      o_s  --------->  o_s+5  --------->  o_s+10  --------->  o_s+15  ------> beyond the window
    block    a_s..a_s+4      a_s+5..a_s+9      a_s+10..a_s+14      a_s+15..a_s+19

Block i leads from frame i to frame i+1. An episode's NaN can only be the last action of the last block,
whose prediction no loss reads; it is replaced by 0 so that it cannot poison a batch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from lewm.data.frames import FrameSource
from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.rng import stream
from lewm.types import Array, Batch

SPLIT_SEED = 3072  # decides which episodes are held out


class Windows:
    """Every window of the episodes ``ids``, int (E,), in the order of their rows; ``skipped`` are too short for one."""

    def __init__(self, store: EpisodeStore, frames: FrameSource, ids: Array, history: int, frame_skip: int) -> None:
        if frame_skip % store.frame_stride:
            wanted = f"has one frame in {store.frame_stride} rows, so frame_skip must be a multiple of that"
            raise DataError(
                f"{store.path} {wanted}, got {frame_skip}. Change it, or collect with another frame stride."
            )
        self._frames = frames
        self._steps = np.arange((history + 1) * frame_skip).reshape(history + 1, frame_skip)
        starts = [_window_starts(store, episode, self._steps) for episode in ids.tolist()]
        self._starts = np.concatenate([*starts, np.zeros(0, np.int64)])
        if not len(self._starts):
            problem = f"a window needs {self._steps.size} rows, but the longest of {len(ids)} episodes has"
            longest = store.lengths[ids].max(initial=0)
            raise DataError(f"{store.path}: {problem} {longest}. Use a smaller history or frame_skip.")
        self.skipped = sum(len(episode) == 0 for episode in starts)
        self._actions = np.where(np.isfinite(store.actions), store.actions, np.float32(0))

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, indices: Array) -> Array:
        """Rows of the dataset that windows (B,) cover, int (B, T, K); frames are those at K = 0."""
        return self._starts[indices][:, None, None] + self._steps

    def batch(self, indices: Array) -> Batch:
        """Windows (B,): pixels uint8 (B, T, R, R, 3) and raw actions float32 (B, T, K, action_dim), on one device."""
        rows = self.rows(indices)
        pixels = self._frames.gather(rows[:, :, 0])
        return Batch(pixels=pixels, actions=torch.from_numpy(self._actions[rows]).to(pixels.device))


def _window_starts(store: EpisodeStore, episode: int, steps: Array) -> Array:
    """First rows of an episode's windows of ``steps`` (T, K), int64: those that have all frames that they need."""
    first = store.offsets[episode]
    starts = np.arange(first, first + max(store.lengths[episode] - steps.size + 1, 0))
    if store.frame_stride == 1:
        return starts
    begin, end = np.searchsorted(store.frame_rows, (first, first + store.lengths[episode]))
    has_frames = np.isin(starts[:, None] + steps[:, 0], store.frame_rows[begin:end])
    return starts[has_frames.all(axis=1)]


def split_episodes(num_episodes: int, val_fraction: float) -> tuple[Array, Array]:
    """Ids of training and validation episodes, sorted, int (E_train,) and (E_val,); at least one each."""
    # Whole episodes: windows of one overlap, so windows held out at random would have been seen in training.
    if num_episodes < 2:
        raise DataError(f"Training and validation need at least one episode each, got {num_episodes}. Collect more.")
    held_out = min(max(round(num_episodes * val_fraction), 1), num_episodes - 1)
    shuffled = stream(SPLIT_SEED).permutation(num_episodes)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def batch_indices(num_windows: int, batch_size: int, step: int, seed: int) -> Array:
    """Windows of the batch at global ``step`` (from 0), int (batch_size,); pure, so a resumed run sees the same."""
    per_epoch = num_windows // batch_size  # the last, incomplete batch of an epoch is dropped
    if per_epoch == 0:
        raise DataError(f"A batch of {batch_size} windows is too large: the data has {num_windows}. Collect more.")
    epoch, position = divmod(step, per_epoch)
    return _epoch_order(num_windows, epoch, seed)[position * batch_size :][:batch_size].copy()


# Shuffling a million windows takes longer than a training step; three, for validation and calibration beside training.
@lru_cache(maxsize=3)
def _epoch_order(num_windows: int, epoch: int, seed: int) -> Array:
    return stream(seed, epoch).permutation(num_windows)
