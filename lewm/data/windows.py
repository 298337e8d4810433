"""Training windows: short sub-trajectories cut from episodes, and the order in which they are seen.

The alignment, drawn once. Row t of an episode holds frame o_t and the action a_t taken there:

    row       0     1     2     3    ...   L-2     L-1
    frame    o_0   o_1   o_2   o_3   ...  o_L-2   o_L-1
    action   a_0   a_1   a_2   a_3   ...  a_L-2    NaN        o_t, a_t -> o_t+1

A window takes T frames, K = frame_skip rows apart, and the K actions from each one on. It covers T*K
consecutive rows of one episode; here K = 5, T = 4, from row s:

    frame      o_s  --------->  o_s+5  --------->  o_s+10  --------->  o_s+15  ------> beyond the window
    block    a_s..a_s+4      a_s+5..a_s+9      a_s+10..a_s+14      a_s+15..a_s+19

Block i leads from frame i to frame i+1. An episode's NaN can only be the last action of the last block. A method
that predicts frames reads no action of that block: there NaN becomes 0, so that it cannot poison a batch. For one that
does read it (``Inputs.last_block``), such windows are left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from lewm.data.goals import Goals
from lewm.data.proprio import read_proprio
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError
from lewm.rng import stream
from lewm.types import Array, Batch, Inputs

SPLIT_SEED = 3072  # decides which episodes are held out


class Source(Protocol):
    """Where a batch's frames, or features of them, come from: see ``lewm.data.frames`` and ``lewm.data.features``."""

    def gather(self, rows: Array) -> torch.Tensor:
        """Those of rows int (B, T): (B, T, ...)."""
        ...


class Windows:
    """Every window of the episodes ``ids``, int (E,), in the order of their rows; ``skipped`` are too short for one.

    inputs: what a window holds.  frames: where pixels come from, or features if ``inputs`` names an encoder; None: no
    batch is asked for, or none that shows anything.
    """

    def __init__(self, store: EpisodeStore, frames: Source | None, ids: Array, inputs: Inputs) -> None:
        _check_inputs(inputs, store)
        self._inputs, self._frames = inputs, frames
        self._steps = np.arange(inputs.frames * inputs.frame_skip).reshape(inputs.frames, inputs.frame_skip)
        starts = [_window_starts(store, episode, self._steps.size) for episode in ids.tolist()]
        if inputs.last_block:
            acts = np.isfinite(store.actions).all(axis=1)
            starts = [first[acts[first + self._steps[-1, -1]]] for first in starts]
        self._starts = np.concatenate([*starts, np.zeros(0, np.int64)])
        if not len(self._starts):
            rows = f"{self._steps.size} rows{', each with an action' if inputs.last_block else ''}"
            longest = store.lengths[ids].max(initial=0)
            problem = f"a window needs {rows}, but the longest of {len(ids)} episodes has {longest}"
            raise DataError(f"{store.path}: {problem}. Use a smaller history or frame_skip.")
        self.skipped = sum(len(episode) == 0 for episode in starts)
        self._actions = np.where(np.isfinite(store.actions), store.actions, np.float32(0))
        self._proprio = read_proprio(store) if inputs.proprio else None
        self._goals = Goals(store, ids, inputs)

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, indices: Array) -> Array:
        """Rows of the dataset that windows (B,) cover, int (B, T, K); frames are those at K = 0."""
        return self._starts[indices][:, None, None] + self._steps

    def batch(self, indices: Array, key: tuple[int, ...] = (), part: slice = slice(None)) -> Batch:
        """``part`` of the batch of windows ``indices``, int (B,), with what ``inputs`` asks for, on one device.

        key: of the batch, of which everything random in it is a pure function; whoever asks for which part of it.
        """
        rows = self.rows(indices[part])
        shown = self._gather(rows[:, :, 0])
        device = torch.device("cpu") if shown is None else shown.device

        def on_device(array: Array) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        goals, steps = {}, {}
        anchors = self._starts[indices] + self._steps[self._inputs.anchor, 0]
        for name, (goal_rows, ahead) in self._goals.draw(anchors, key).items():
            frames = self._gather(goal_rows[part, None])
            assert frames is not None  # where nothing is shown, goals are refused
            goals[name], steps[name] = frames[:, 0], on_device(ahead[part])
        return Batch(
            actions=on_device(self._actions[rows]),
            pixels=shown if self._inputs.features is None else None,
            features=None if self._inputs.features is None else shown,
            proprio=None if self._proprio is None else on_device(self._proprio[rows[:, :, 0]]),
            goals=goals,
            steps=steps,
        )

    def _gather(self, rows: Array) -> torch.Tensor | None:
        """Pixels or features of rows int (B, T); None where the method reads neither."""
        if not _shows(self._inputs):
            return None
        assert self._frames is not None
        return self._frames.gather(rows)


def _shows(inputs: Inputs) -> bool:
    return inputs.features is not None or inputs.image_size is not None


def _check_inputs(inputs: Inputs, store: EpisodeStore) -> None:
    """Refuse inputs that do not fit a dataset, or themselves."""
    if inputs.frame_skip % store.frame_stride:
        wanted = f"has one frame in {store.frame_stride} rows, so frame_skip must be a multiple of that"
        remedy = "Change it, or collect with another frame stride"
        raise DataError(f"{store.path} {wanted}, got {inputs.frame_skip}. {remedy}.")
    if not -inputs.frames <= inputs.anchor < inputs.frames:
        raise ConfigError(f"The anchor must be one of a window's {inputs.frames} frames, got {inputs.anchor}.")
    if inputs.goals and not _shows(inputs):
        raise ConfigError(f"The goals {', '.join(inputs.goals)} are frames, but the method asks for no pixels.")


def _window_starts(store: EpisodeStore, episode: int, size: int) -> Array:
    """First rows of an episode's windows of ``size`` rows, int64: wherever a frame is, the others that it needs are."""
    begin, end = store.offsets[episode], store.offsets[episode] + store.lengths[episode]
    first, last = np.searchsorted(store.frame_rows, (begin, end - size + 1))
    return store.frame_rows[first:last]


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
