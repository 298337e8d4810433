"""What files of a model say of the dataset that it was trained on: facts of the file that was read, not of a place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lewm.config import CollectConfig
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError

# What a dataset that lewm collected knows of how that was done.
COLLECTED = ("seed", "demonstrations", "generator", "exploration", "mistakes")


def dataset_record(store: EpisodeStore) -> dict[str, Any]:
    """Its world, its size and how it was collected, as plain JSON values; None for what the file does not say."""
    recorded = {name: _plain(store.attributes.get(name)) for name in COLLECTED}
    counts = {"episodes": store.num_episodes, "steps": store.num_rows, "frames": store.num_frames}
    sizes = {"resolution": store.resolution, "frame_stride": store.frame_stride}
    return {"environment": store.environment, **counts, **sizes, **recorded}


def _plain(value: Any) -> str | int | float | None:
    """A value as JSON has it; None for others, which only foreign files have."""
    plain = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else None


def collect_settings(record: Mapping[str, Any], whose: str) -> CollectConfig:
    """The settings of `lewm collect` that make such a dataset. Demonstrations are known by their content alone.

    whose: what an error calls the record.
    """
    shares = {name: record[name] for name in ("exploration", "mistakes") if record.get(name) is not None}
    demos = record.get("demonstrations")
    sizes = record["episodes"], record["resolution"]
    try:
        return CollectConfig(
            *sizes, frame_stride=record["frame_stride"], demos=f"sha256:{demos}" if demos else None, **shares
        )
    except (ConfigError, TypeError) as error:
        raise DataError(f"{whose} says what no dataset can be: {error} Make it again.") from error
