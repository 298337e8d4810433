"""What the agent senses of itself, which is not the state of the world: the column ``proprio`` of a dataset.

The attribute ``proprio`` of a file names its numbers. Files of others have none: theirs are what their makers took for
proprioception. Those that lewm wrote before it had the attribute hold all of the state, the block or the cube included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lewm.data.new_file import FORMAT
from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.types import Array

PROPRIO = "proprio"  # both the column and the attribute

# Of files without the attribute, by their environment: how long its state was, and what of it the agent sensed.
WITHOUT_NAMES = {
    "lewm/TwoRoom-v0": (2, (0, 1)),
    "lewm/PushT-v0": (7, (0, 1)),
    "lewm/Reacher-v0": (4, (0, 1, 2, 3)),
    "lewm/Cube-v0": (47, (*range(14), *range(21, 35), *range(41, 46))),
}


def named(names: Iterable[str]) -> str:
    """The attribute for numbers of these names."""
    return ", ".join(names)


def read_proprio(store: EpisodeStore) -> Array:
    """At every row, float32 (N, P). A file that lewm wrote and that does not say what it has is refused."""
    if PROPRIO not in store.columns:
        problem = f"has no column 'proprio', which the method reads, only {', '.join(store.columns)}"
        remedy = "Choose other data, or collect again with an environment that gives its proprio_names"
        raise DataError(f"{store.path} {problem}. {remedy}.")
    proprio = store.read_column(PROPRIO).reshape(store.num_rows, -1)
    if not _says_what(store):
        chosen = _sensed(store, proprio.shape[1])
        if chosen is None:
            problem = (
                f"has {proprio.shape[1]} numbers of 'proprio', perhaps the state of the whole world: it does not say"
            )
            raise DataError(f"{store.path} {problem}. Collect it again.")
        proprio = proprio[:, chosen]
    proprio = proprio.astype(np.float32)
    missing = ~np.isfinite(proprio[store.frame_rows]).all(axis=1)
    if missing.any():
        row = store.frame_rows[np.argmax(missing)]
        raise DataError(f"{store.path} has no finite proprio at row {row}. Repair it, or drop its episode.")
    return proprio


def describe_proprio(store: EpisodeStore) -> str:
    """For people: what a method would read."""
    if PROPRIO not in store.columns:
        return "none"
    count = store.read_column(PROPRIO).reshape(store.num_rows, -1).shape[1]
    if names := store.attributes.get(PROPRIO):
        return f"{count} numbers: {names}"
    if _says_what(store):
        return f"{count} numbers, as the makers of the file define them"
    chosen = _sensed(store, count)
    if chosen is None:
        return f"{count} numbers, unknown of what: methods refuse them"
    return f"{len(chosen)} of its {count} numbers: an older file, whose column is the state of the whole world"


def _says_what(store: EpisodeStore) -> bool:
    """Whether the column is proprioception as it is: by its attribute, or as the file is of others."""
    by_lewm = store.attributes.get("format") == FORMAT and store.environment is not None
    return bool(store.attributes.get(PROPRIO)) or not by_lewm


def _sensed(store: EpisodeStore, count: int) -> list[int] | None:
    """What of the state the agent of an older file senses; None: it cannot be known."""
    size, chosen = WITHOUT_NAMES.get(store.environment or "", (0, ()))
    return list(chosen) if size == count else None
