"""From a dataset to training windows, in two stages: what is quick to know, and the frames, which may take a while."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lewm.config import Config
from lewm.data.frames import open_frames
from lewm.data.stats import BACKGROUND_FRAMES, action_stats, background, recorded_actions, spread_frames
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows, split_episodes
from lewm.errors import DataError
from lewm.types import Array, DataFacts


@dataclass(frozen=True)
class Dataset:
    """An open dataset that fits the config. Ids of episodes for training and held out, int (E,)."""

    store: EpisodeStore
    train_ids: Array
    val_ids: Array

    def summary(self) -> dict[str, Any]:
        """What tells it from another dataset, in few words."""
        return {"episodes": self.store.num_episodes, "digest": self.digest()}

    def digest(self) -> str:
        """SHA-256 of what is in it."""
        content = hashlib.sha256(self.store.lengths.tobytes())
        content.update(np.ascontiguousarray(self.store.actions).data)
        return content.hexdigest()

    def facts(self, config: Config) -> DataFacts:
        """What a model of this config learns of the episodes for training before it is trained."""
        store = self.store
        in_training = np.isin(np.repeat(np.arange(store.num_episodes), store.lengths), self.train_ids)
        return DataFacts(
            actions=action_stats(store.actions[in_training]),
            recorded=torch.from_numpy(recorded_actions(store.actions, store.lengths, self.train_ids)),
            background=background(store, self.train_ids) if config.method.needs_background else None,
            digest=self.digest(),
            episodes=store.num_episodes,
            environment=config.env,
        )

    def spread_frames(self) -> Array:
        """Some frames for training, evenly spaced: uint8 (N, R, R, 3)."""
        return spread_frames(self.store, self.train_ids, BACKGROUND_FRAMES)


@dataclass(frozen=True)
class TrainingData:
    """A dataset, cut into windows of training and of held-out episodes. cache: a sentence on where the frames are."""

    training: Windows
    validation: Windows
    cache: str


def open_dataset(config: Config) -> Dataset:
    """Open config.data and check that it fits the rest of the config."""
    if config.data is None:
        raise DataError("No dataset: pass --data FILE, made by `lewm collect` or downloaded from the authors.")
    inputs, store = config.method.inputs(), EpisodeStore(config.data)
    store.check_environment(config.env, inputs.action_dim)
    if inputs.image_size not in (None, store.resolution):
        raise DataError(
            f"{config.data} has frames of {store.resolution} pixels, but the model takes {inputs.image_size}. Collect "
            "at that resolution or set method.encoder.image-size."
        )
    return Dataset(store, *split_episodes(store.num_episodes, config.loader.val_fraction))


def load_windows(config: Config, dataset: Dataset, device: torch.device) -> TrainingData:
    """Decode the frames to where they fit, and cut the episodes into windows."""
    inputs, loader, store = config.method.inputs(), config.loader, dataset.store
    frames = open_frames(store, loader.cache, loader.threads, device=device)
    shape = inputs.frames - 1, inputs.frame_skip
    training, validation = (Windows(store, frames, ids, *shape) for ids in (dataset.train_ids, dataset.val_ids))
    if len(training) < config.train.batch_size:
        raise DataError(
            f"{config.data} gives {len(training)} training windows, fewer than one batch of "
            f"{config.train.batch_size}. Collect more episodes or lower train.batch-size."
        )
    return TrainingData(training, validation, frames.description)
