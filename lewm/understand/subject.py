"""Whom the questions are about: a model that encodes, and recorded episodes for it to look at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from lewm import checkpoint
from lewm.data.features import Features, build_features
from lewm.data.store import EpisodeStore
from lewm.envs.registry import EnvEntry, env_entry
from lewm.errors import ConfigError, DataError
from lewm.methods.base import Method
from lewm.methods.dino_wm import DinoWM
from lewm.methods.files import identity, load
from lewm.methods.frozen import FrozenEncoder
from lewm.types import Array, ProgressCallback


@dataclass(frozen=True)
class Subject:
    """A model that is looked at, never trained here.

    source: how it was asked for.  model: on its device, in evaluation mode.  digest: of all that it is.
    encoder: its embeddings, (D,) or tokens (N, D), of frames.  world: where it was trained; None: in no world of ours.
    """

    source: str
    model: Method
    digest: str
    encoder: FrozenEncoder
    world: EnvEntry | None

    @property
    def name(self) -> str:
        """For titles: what its folder is called, and its method."""
        return f"{Path(self.source).name or self.source} ({self.model.settings.NAME})"

    @property
    def device(self) -> torch.device:
        return self.model.device


def open_subject(source: str | Path, device: str | torch.device = "auto") -> Subject:
    """Load a model of any method that encodes frames; another is refused."""
    model = load(source, device)
    digest, environment = identity(model), model.facts.environment
    world = env_entry(environment) if environment else None
    return Subject(str(source), model, digest, _encoder(str(source), model, digest), world)


def _encoder(source: str, model: Method, digest: str) -> FrozenEncoder:
    """What a model's embeddings are; DINO-WM's are the tokens of the frozen encoder that it looks through."""
    if isinstance(model, DinoWM):
        if model.settings.features:
            return model.frozen_encoder
        shape = (model.tokens, model.seen_width)
        return FrozenEncoder(_folder_name(source), digest, _Seen(model), shape, model.image_size)
    if not hasattr(model, "encode"):
        method = model.settings.NAME
        raise ConfigError(f"{source} is of the method {method!r}, which does not encode. Name a model that does.")
    size = model.image_size
    black = torch.zeros(1, size, size, 3, dtype=torch.uint8, device=model.device)
    with torch.no_grad():
        shape = tuple(cast(Any, model).encode(black).shape[1:])
    return FrozenEncoder(_folder_name(source), digest, model, shape, size)


class _Seen(nn.Module):
    """The eyes of a DINO-WM that looks at pixels."""

    def __init__(self, model: DinoWM) -> None:
        super().__init__()
        self.encode = model.see


def _folder_name(source: str) -> str:
    """By which a model's embeddings are kept: the same, whatever way leads to it."""
    return Path(source).resolve().name or source


def model_folder(source: str | Path) -> Path:
    """The folder that holds the model's files."""
    return checkpoint.resolve(source)


@contextlib.contextmanager
def open_episodes(path: str | Path, subject: Subject) -> Iterator[EpisodeStore]:
    """A dataset that the model can look at: of its own world, and with frames of its size."""
    with EpisodeStore(path) as store:
        if subject.world is not None:
            store.check_environment(subject.world.gym_id, subject.world.action_dim)
        if store.resolution != subject.model.image_size:
            problem = f"{store.path} has frames of {store.resolution} pixels, but {subject.source} takes"
            raise DataError(f"{problem} {subject.model.image_size}. Collect it with that --resolution.")
        yield store


@contextlib.contextmanager
def embeddings(
    subject: Subject,
    store: EpisodeStore,
    on_progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
) -> Iterator[Features]:
    """The embedding of every frame of a dataset, computed once and kept beside it as features are."""
    encoder = subject.encoder

    def encode(frames: torch.Tensor) -> torch.Tensor | Array:
        return encoder.kept(frames.to(subject.device))

    build_features(store, encoder.name, encoder.digest, encode, on_progress, announce=announce)
    with Features(store, encoder.name, encoder.digest) as features:
        yield features


def question(verb: str, subject: Subject, store: EpisodeStore | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What was asked, as JSON: two findings of equal questions are the same."""
    dataset, columns = (store.digest, store.columns_digest) if store is not None else (None, None)
    return {"verb": verb, "model": subject.digest, "dataset": dataset, "columns": columns, "settings": settings}
