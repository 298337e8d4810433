"""From a dataset to training windows, in two stages: what is quick to know, and the frames, which may take a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lewm.config import CollectConfig, Config
from lewm.data.features import Features, build_features
from lewm.data.frames import FrameSource, open_frames
from lewm.data.proprio import read_proprio
from lewm.data.record import collect_settings, dataset_record
from lewm.data.stats import BACKGROUND_FRAMES, action_stats, background, recorded_actions, spread_frames
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows, split_episodes
from lewm.errors import DataError
from lewm.methods.frozen import FrozenEncoder, frozen_encoder
from lewm.types import Array, DataFacts

NOTE_INTERVAL = 10.0  # seconds between two notes on how far long work is


@dataclass(frozen=True)
class Dataset:
    """An open dataset that fits the config. Ids of episodes for training and held out, int (E,).

    encoder: whose features the method reads in place of pixels, None: it reads none.
    """

    store: EpisodeStore
    train_ids: Array
    val_ids: Array
    encoder: FrozenEncoder | None = None

    def summary(self) -> dict[str, Any]:
        """What tells it from another dataset, in few words."""
        return {"episodes": self.store.num_episodes, "digest": self.store.digest}

    def record(self) -> dict[str, Any]:
        """What files of a model say of it."""
        return dataset_record(self.store)

    def collected(self) -> CollectConfig:
        """The settings of `lewm collect` that make it."""
        return collect_settings(self.record(), str(self.store.path))

    def facts(self, config: Config) -> DataFacts:
        """What a model of this config learns of the episodes for training before it is trained."""
        store = self.store
        in_training = np.isin(np.repeat(np.arange(store.num_episodes), store.lengths), self.train_ids)
        return DataFacts(
            actions=action_stats(store.actions[in_training]),
            recorded=torch.from_numpy(recorded_actions(store.actions, store.lengths, self.train_ids)),
            background=background(store, self.train_ids) if config.method.needs_background else None,
            digest=store.digest,
            episodes=store.num_episodes,
            environment=config.env,
            encoder=self.encoder.digest if self.encoder else None,
            proprio=action_stats(read_proprio(store)[in_training]) if config.method.inputs().proprio else None,
        )

    def windows(self, config: Config, frames: Features | FrameSource | None = None) -> tuple[Windows, Windows]:
        """Of training and of held-out episodes; without ``frames``, all that can be known before they are read."""
        inputs = config.method.inputs()
        training, validation = (Windows(self.store, frames, ids, inputs) for ids in (self.train_ids, self.val_ids))
        if len(training) < config.train.batch_size:
            raise DataError(
                f"{config.data} gives {len(training)} training windows, fewer than one batch of "
                f"{config.train.batch_size}. Collect more episodes or lower train.batch-size."
            )
        return training, validation

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
    encoder = frozen_encoder(inputs.features) if inputs.features else None
    _check_size(config, store.resolution, encoder)
    return Dataset(store, *split_episodes(store.num_episodes, config.loader.val_fraction), encoder)


def _check_size(config: Config, found: int, encoder: FrozenEncoder | None) -> None:
    """Refuse frames of another size than what looks at them takes."""
    taken = encoder.image_size if encoder else config.method.inputs().image_size
    if taken in (None, found):
        return
    looks = encoder.name if encoder else "the model"
    remedy = f"--method.features {encoder.for_frames(found)}" if encoder else "--method.encoder.image-size"
    raise DataError(
        f"{config.data} has frames of {found} pixels, but {looks} takes {taken}. Collect at that resolution, or choose "
        f"another encoder with {remedy}."
    )


def compute_features(dataset: Dataset, device: torch.device, note: Callable[[str], None]) -> None:
    """Compute what of the features that the method reads is not there yet; ``note`` is told now and then how far."""
    if dataset.encoder is None:
        return
    encoder, told = dataset.encoder.to(device), time.monotonic()
    here = dataset.store.environment
    if encoder.world and here and encoder.world != here:
        note(f"{encoder.name} was trained in {encoder.world}, and this data is of {here}.")

    def on_progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > NOTE_INTERVAL:
            note(f"Features of {encoder.name}: {done:,} of {total:,} frames.")
            told = time.monotonic()

    whose = encoder.name, encoder.digest
    build_features(dataset.store, *whose, lambda frames: encoder.kept(frames.to(device)), on_progress, announce=note)


def load_windows(config: Config, dataset: Dataset, device: torch.device) -> TrainingData:
    """Bring frames, or features of them, to where they fit, and cut the episodes into windows."""
    loader, store = config.loader, dataset.store
    frames: Features | FrameSource
    if dataset.encoder is None:
        frames = open_frames(store, loader.cache, loader.threads, device)
    else:
        whose = dataset.encoder.name, dataset.encoder.digest
        frames = Features(store, *whose, loader.cache, loader.threads, device)
    return TrainingData(*dataset.windows(config, frames), frames.description)
