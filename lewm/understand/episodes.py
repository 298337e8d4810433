"""Episodes for models to be looked at with: of the kind that they were trained on, and seen by no training.

They are the held-out seed's, from its millionth on. Training sets have other seeds, which `lewm collect` sees to;
evaluation problems are cut from the same seed, but from its first thousands of episodes. Replays are of demonstrations
that are held out as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lewm import checkpoint
from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.features import features_folder
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError
from lewm.files import remove
from lewm.methods.files import run_settings
from lewm.types import ProgressCallback
from lewm.understand.subject import Subject

# Each seed of a question has so many held-out episodes, the first of them in the second million.
EPISODES_PER_SEED = 1_000_000
LARGEST_SEED = 1_000_000

# How shipped models' data were collected, beside the defaults (runs/paper/worlds.tsv).
_WORLD_KINDS: dict[str, dict[str, float]] = {"cube": {"exploration": 0.6, "mistakes": 0.7}}


def held_out_episodes(
    subject: Subject,
    path: Path,
    episodes: int,
    seed: int = 0,
    demos: Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> Path:
    """Make ``path`` a dataset of at least so many held-out episodes of the model's world; returns it.

    Collected once, gone on with after an interrupt, extended if more are asked for. demos: demonstrations to replay.
    on_progress: counts episodes.
    """
    if subject.world is None:
        raise ConfigError(f"{subject.source} does not say which world it was trained in. Give episodes with --data.")
    if not 1 <= episodes <= EPISODES_PER_SEED:
        raise ConfigError(f"episodes must be between 1 and {EPISODES_PER_SEED:,}, got {episodes}.")
    if not 0 <= seed < LARGEST_SEED:  # below it lie the episodes of evaluation
        raise ConfigError(f"seed must be between 0 and {LARGEST_SEED - 1:,}, got {seed}.")
    settings = _settings(subject, episodes, demos)
    first = (1 + seed) * EPISODES_PER_SEED
    _forget_embeddings_of_fewer(path, episodes)
    collect(subject.world.name, path, settings, on_progress=on_progress, held_out_from=first)
    return path


def _forget_embeddings_of_fewer(path: Path, episodes: int) -> None:
    """Embeddings are of a whole file: those of one that is going to be extended would be refused ever after."""
    if path.is_file():
        with EpisodeStore(path) as store:
            if store.num_episodes < episodes:
                remove(features_folder(store, "", "").parent)


def another_kind(subject: Subject, store: EpisodeStore) -> str | None:
    """A sentence that says how episodes were made otherwise than those of the training; None: in no known way."""
    trained = _trained_on(subject)
    if "generator" not in store.attributes:  # nobody knows how they were made
        return None
    differences = [
        f"{name} {found:g} and not {wanted:g}"
        for name in ("exploration", "mistakes")
        if (wanted := trained.get(name)) is not None and (found := store.attributes.get(name, 0.0)) != wanted
    ]
    replays = bool(store.attributes.get("demonstrations"))
    if trained.get("demonstrations") is not None and replays != bool(trained["demonstrations"]):
        kinds = ("the scripted expert's", "replays of demonstrations")
        differences.append(f"{kinds[replays]} and not {kinds[not replays]} (see --demos)")
    if not differences:
        return None
    return f"These episodes are of another kind than the model was trained on: {'; '.join(differences)}."


def _settings(subject: Subject, episodes: int, demos: Path | None) -> CollectConfig:
    """How a model's training episodes were collected, with frames of its size and at its pace."""
    trained, model = _trained_on(subject), subject.model
    return CollectConfig(
        episodes,
        resolution=model.image_size,
        frame_stride=model.frame_skip,
        demos=None if demos is None else str(demos),
        exploration=float(trained.get("exploration") or 0.0),
        mistakes=float(trained.get("mistakes") or 0.0),
    )


def _trained_on(subject: Subject) -> dict[str, Any]:
    """What is known of a model's training data: exploration, mistakes, demonstrations ("" or their digest).

    The model's card says it, or the dataset if that is still there; else it is what the world's data usually are.
    """
    folder = checkpoint.resolve(subject.source)
    document = checkpoint.load_document(folder)
    if data := document.get("data"):
        return dict(data)
    dataset = run_settings(document, folder, []).data
    if dataset is not None and dataset.is_file():
        with EpisodeStore(dataset) as store:
            return {name: store.attributes.get(name) for name in ("exploration", "mistakes", "demonstrations")}
    return dict(_WORLD_KINDS.get(subject.world.name, {})) if subject.world else {}
