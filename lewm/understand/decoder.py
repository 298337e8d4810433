"""A decoder of one model's embeddings: how it is trained, and the small file that holds it.

The model stays as it is. The file names the model by its digest, and no other model's embeddings are drawn with it.
Every step is a function of the seed and its number: training that was interrupted ends, on the CPU, with the bits of
one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lewm import checkpoint
from lewm.checked import Checked, to_dict
from lewm.config import TrainConfig
from lewm.data.stats import background
from lewm.data.store import EpisodeStore
from lewm.data.windows import batch_indices, split_episodes
from lewm.errors import CheckpointError, ConfigError, DataError, TrainingError
from lewm.files import Kind, check_output, completing, disk_errors, json_digest, only_writer
from lewm.model.decoder import FOREGROUND_WEIGHT, Decoder
from lewm.rng import derive_seed, stream
from lewm.train.loop import stop_on_signals
from lewm.train.optim import learning_rate, load_optimizer_tensors, optimizer_tensors
from lewm.types import ALONE, Array, Peers, ProgressCallback
from lewm.understand.subject import Subject, embeddings

DECODER = Kind("a decoder", (".safetensors",), lambda head: b'"lewm-decoder"' in head)
FORMAT, VERSION = "lewm-decoder", 1
HELD_OUT = 0.1  # share of the episodes that a decoder does not see
READ_FRAMES, ENCODED_FRAMES, READERS = 64, 128, 8
SAVE_SECONDS = 30.0
CLIP, WEIGHT_DECAY = 1.0, 1e-4
INITIAL, ORDER, CHOICE = 1, 2, 3  # what a random stream is for


@dataclass(frozen=True)
class DecoderSettings(Checked):
    """How a decoder is trained."""

    SECTION: ClassVar[str] = "decoder"

    steps: int = 2000  # Optimiser steps.
    batch_size: int = 32  # Frames per step.
    lr: float = 2e-3  # Peak learning rate, after a short warm-up; a cosine brings it down.
    foreground: float = FOREGROUND_WEIGHT  # Weight of pixels that differ from the background; others have 1.
    frames: int = 40_000  # At most so many frames are learned from: they are kept in memory.
    width: int | None = None  # Of the decoder; None: 256, or 128 below 112 pixels.
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("steps", "batch_size", "lr", "foreground", "frames")
        self._require(self.width is None or 4 <= self.width <= 4096, "width", "between 4 and 4,096")
        self._require(self.seed >= 0, "seed", "at least 0")

    def schedule(self) -> TrainConfig:
        """What the house's learning rate is a function of."""
        warmup = min(100, self.steps // 10)
        return TrainConfig(steps=self.steps, lr=self.lr, warmup_steps=warmup)


# -- the file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawer:
    """A decoder that is ready, on the model's device. about: what its file says of how it came to be."""

    decoder: Decoder
    about: dict[str, Any]


def decoder_place(folder: Path) -> Path:
    """Where the decoder is, among a model's findings."""
    return folder / "decoder.safetensors"


def load_decoder(path: Path, subject: Subject) -> Drawer:
    """The decoder in a file, which must be this model's."""
    about = read_about(path, subject.source)
    check_owner(about, path, subject.digest, subject.source)
    tensors = checkpoint.read_tensors(path)
    decoder = _empty(subject, about["settings"]["width"])
    checkpoint.check_tensors(tensors, decoder.state_dict(), path)
    if about["weights"] != checkpoint.weights_digest(tensors):
        raise CheckpointError(f"{path} is not what was written (its SHA-256 differs). Train the decoder again.")
    decoder.load_state_dict(tensors)
    return Drawer(decoder.to(subject.device).eval(), about)


def own_decoder(subject: Subject) -> Drawer | None:
    """The decoder that a model was trained with (``method.reconstruction``), None: with none."""
    decoder = getattr(subject.model, "decoder", None)
    about = {"settings": {"foreground": FOREGROUND_WEIGHT}, "own": True}
    return Drawer(decoder, about) if isinstance(decoder, Decoder) else None


def check_owner(about: dict[str, Any], path: Path, digest: str, source: str) -> None:
    """Refuse another model's decoder."""
    if about["model"] != digest:
        whose = f"({about['source']}, digest {about['model'][:12]}; that of {source} is {digest[:12]})"
        remedy = f"Train one for this model: lewm understand decode {source} --train"
        raise CheckpointError(f"{path} is the decoder of another model {whose}. {remedy}.")


def read_about(path: Path, source: str = "CHECKPOINT") -> dict[str, Any]:
    """What a decoder's file says of it. source: the model that one is wanted for."""
    if not path.is_file():
        raise CheckpointError(f"There is no decoder at {path}. Train one: lewm understand decode {source} --train.")
    problem = f"{path} is no decoder that lewm wrote"
    try:
        with disk_errors(path), safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(FORMAT, "null"))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{problem} ({error}). Train it again.") from error
    if not isinstance(about, dict) or not {"version", "model", "source", "settings", "weights"} <= set(about):
        raise CheckpointError(f"{problem}. Name another file, or train one.")
    if about["version"] > VERSION:
        raise CheckpointError(f"{path} was written by a newer lewm. Run `pip install --upgrade lewm`.")
    if about.pop("digest", None) not in (None, json_digest(about)):
        raise CheckpointError(f"{path} is not what was written (its SHA-256 differs). Train the decoder again.")
    return about


def _write(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Write a decoder, or one in training, whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = about | {"weights": checkpoint.weights_digest(plain)}
    about |= {"digest": json_digest(about)}
    with completing(path) as temporary:
        temporary.write_bytes(save(plain, {FORMAT: json.dumps(about)}))


def _empty(subject: Subject, width: int | None, behind: Array | None = None) -> Decoder:
    (size,) = subject.encoder.shape
    return Decoder(size, subject.model.image_size, behind, width)


# -- training ------------------------------------------------------------------------------------------------------


def held_out(store: EpisodeStore) -> tuple[Array, Array]:
    """Ids of episodes that a decoder learns from, and of those it never sees: int (E,) each."""
    return split_episodes(store.num_episodes, HELD_OUT)


def check_embedding(subject: Subject) -> str | None:
    """Why embeddings of this model cannot be drawn; None: they can."""
    shape = subject.encoder.shape
    return None if len(shape) == 1 else f"its embedding is {' x '.join(map(str, shape))} numbers, not one vector"


def train_decoder(
    subject: Subject,
    store: EpisodeStore,
    settings: DecoderSettings,
    path: Path,
    on_progress: ProgressCallback | None = None,
) -> Drawer:
    """The decoder of a model, trained on frozen embeddings of a dataset and written to ``path``.

    What was trained before with these settings on this data is taken as it is, and what was interrupted goes on. An
    interruption ends with KeyboardInterrupt, after what was learned is on disk.
    """
    if reason := check_embedding(subject):
        raise ConfigError(f"{subject.source} cannot be decoded: {reason}.")
    check_output(path, DECODER, [store.path])
    question = {"model": subject.digest, "dataset": store.digest, "settings": to_dict(settings)}
    about = {"version": VERSION, "source": subject.source, **question}
    if path.is_file() and question.items() <= read_about(path).items():
        return load_decoder(path, subject)
    busy = f"Another process trains {path}. Wait until it is done, or choose another folder with --out."
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    with only_writer(path.with_name(f"{path.name}.lock"), busy):
        training = _Training(subject, store, settings)
        if part.is_file() and question.items() <= read_about(part).items():
            training.resume(part, int(read_about(part)["step"]))
        with stop_on_signals(training):
            for _saved in training.run(on_progress):
                _write(part, training.tensors(), about | {"step": training.step})
        if training.step < settings.steps:
            raise KeyboardInterrupt
        _write(path, dict(training.decoder.state_dict()), about)
        part.unlink(missing_ok=True)
    return load_decoder(path, subject)


class _Training:
    """Everything that changes from step to step, and the frames that it learns from."""

    processes: Peers = ALONE

    def __init__(self, subject: Subject, store: EpisodeStore, settings: DecoderSettings) -> None:
        self.settings, self.device, self.step, self.stop_requested = settings, subject.device, 0, False
        episodes, _ = held_out(store)
        rows = _chosen_rows(store, episodes, settings)
        self.frames = _in_memory(store, rows, self.device)
        self.z_ND = _embedded(subject, store, rows, self.frames)
        if settings.batch_size > len(rows):
            raise DataError(f"A batch of {settings.batch_size} frames is too large: the data has {len(rows)}.")
        torch.manual_seed(derive_seed(settings.seed, INITIAL))
        self.decoder = _empty(subject, settings.width, background(store, episodes)).to(self.device)
        parameters = self.decoder.parameters()
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, settings.lr, weight_decay=WEIGHT_DECAY, fused=fused)

    def run(self, on_progress: ProgressCallback | None) -> Iterator[None]:
        """Train to the end or until a stop is requested; yields whenever it is time to save."""
        saved, total = time.monotonic(), self.settings.steps
        while self.step < total and not self.stop_requested:
            loss = self._take_step()
            if on_progress:
                on_progress(self.step, total)
            if time.monotonic() - saved > SAVE_SECONDS and self.step < total:
                self._check(loss)
                yield
                saved = time.monotonic()
        if self.stop_requested and self.step < total:
            yield
        elif self.step:
            self._check(next(iter(self.decoder.parameters())).sum())

    def _take_step(self) -> torch.Tensor:
        chosen = batch_indices(
            len(self.z_ND), self.settings.batch_size, self.step, derive_seed(self.settings.seed, ORDER)
        )
        index = torch.from_numpy(chosen).to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings.schedule(), self.step)
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
            loss = self.decoder.loss(self.z_ND[index], self.frames[index], self.settings.foreground)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), CLIP)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def _check(self, number: torch.Tensor) -> None:
        if not math.isfinite(number.item()):
            raise TrainingError(f"The decoder's loss is not finite at step {self.step}. Lower --lr.")

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it takes to go on."""
        moments = optimizer_tensors(self.optimizer, self.decoder)
        return {**self.decoder.state_dict(), **{f"moments/{name}": tensor for name, tensor in moments.items()}}

    def resume(self, path: Path, step: int) -> None:
        """Go on from what ``tensors`` gave."""
        tensors = checkpoint.read_tensors(path)
        moments = {name: tensors.pop(name) for name in list(tensors) if name.startswith("moments/")}
        checkpoint.check_tensors(tensors, self.decoder.state_dict(), path)
        self.decoder.load_state_dict(tensors)
        own = {name.removeprefix("moments/"): tensor for name, tensor in moments.items()}
        load_optimizer_tensors(self.optimizer, self.decoder, own, path)
        self.step = step


def _chosen_rows(store: EpisodeStore, episodes: Array, settings: DecoderSettings) -> Array:
    """Rows of frames to learn from, int (N,), in order: of whole episodes, as many as fit, chosen at random."""
    counts = np.diff(np.searchsorted(store.frame_rows, np.append(store.offsets, store.num_rows)))
    shuffled = stream(settings.seed, CHOICE).permutation(episodes)
    fits = np.cumsum(counts[shuffled]) <= settings.frames
    chosen = np.isin(np.repeat(np.arange(store.num_episodes), counts), shuffled[fits])
    if not chosen.any():
        raise DataError(f"No episode of {store.path} has at most {settings.frames} frames. Raise --frames.")
    return store.frame_rows[chosen]


def _in_memory(store: EpisodeStore, rows: Array, device: torch.device) -> torch.Tensor:
    """The frames of rows (N,) on a device, uint8 (N, R, R, 3)."""
    frames = torch.empty((len(rows), *store.frame_shape), dtype=torch.uint8, device=device)

    def read(start: int) -> None:
        part = slice(start, start + READ_FRAMES)
        frames[part].copy_(torch.from_numpy(store.read_frames(rows[part])))

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(0, len(rows), READ_FRAMES)))  # as a list: raises what a thread raised
    return frames


def _embedded(subject: Subject, store: EpisodeStore, rows: Array, frames: torch.Tensor) -> torch.Tensor:
    """Embeddings of the frames, float32 (N, D); kept beside the dataset if most of it is wanted."""
    if 2 * len(rows) >= store.num_frames:
        with embeddings(subject, store) as features:
            return features.gather(rows[:, None])[:, 0].to(frames.device, copy=True)
    return torch.cat([subject.encoder(part) for part in frames.split(ENCODED_FRAMES)])
