"""From a dataset to training windows, in two stages: what is quick to know, and the frames, which may take a while."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lewm.config import Config
from lewm.data.frames import open_frames
from lewm.data.stats import action_stats, recorded_actions
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows, split_episodes
from lewm.errors import DataError
from lewm.types import ActionStats, Array, Inputs


@dataclass(frozen=True)
class Dataset:
    """An open dataset that fits the config. Ids of episodes, int (E,).

    action_stats, recorded_actions (N, T, action_dim): of those for training.
    """

    store: EpisodeStore
    train_ids: Array
    val_ids: Array
    action_stats: ActionStats
    recorded_actions: Array

    def facts(self) -> dict[str, Any]:
        """What tells it from another dataset, in few words."""
        content = hashlib.sha256(self.store.lengths.tobytes())
        content.update(np.ascontiguousarray(self.store.actions).data)
        return {"episodes": self.store.num_episodes, "SHA-256 of the actions": content.hexdigest()[:16]}


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
    store = EpisodeStore(config.data)
    store.check_environment(config.env, config.model.action_dim)
    if store.resolution != config.model.encoder.image_size:
        raise DataError(
            f"{config.data} has frames of {store.resolution} pixels, but the model takes "
            f"{config.model.encoder.image_size}. Collect at that resolution or set model.encoder.image-size."
        )
    train_ids, val_ids = split_episodes(store.num_episodes, config.loader.val_fraction)
    in_training = np.isin(np.repeat(np.arange(store.num_episodes), store.lengths), train_ids)
    recorded = recorded_actions(store.actions, store.lengths, train_ids)
    return Dataset(store, train_ids, val_ids, action_stats(store.actions[in_training]), recorded)


def load_windows(config: Config, dataset: Dataset, device: torch.device) -> TrainingData:
    """Decode the frames to where they fit, and cut the episodes into windows."""
    model, loader, store = config.model, config.loader, dataset.store
    frames = open_frames(store, loader.cache, loader.threads, device=device)
    inputs = Inputs(model.history + 1, model.frame_skip, model.action_dim, model.encoder.image_size)
    training, validation = (Windows(store, frames, ids, inputs) for ids in (dataset.train_ids, dataset.val_ids))
    if len(training) < config.train.batch_size:
        raise DataError(
            f"{config.data} gives {len(training)} training windows, fewer than one batch of "
            f"{config.train.batch_size}. Collect more episodes or lower train.batch-size."
        )
    return TrainingData(training, validation, frames.description)
