"""What the readers and writers of every format share: episodes on their way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from lewm.data.new_file import Attributes, Columns
from lewm.errors import DataError
from lewm.types import Array

FitFrames = Callable[[Array], Array]  # frames (n, H, W, 3) -> (n, R, R, 3), both uint8


@dataclass(frozen=True)
class EpisodeSource:
    """Episodes from anywhere. ``episodes`` yields columns (L, ...), as ``write_episodes`` takes them, one at a time.

    attributes: what is known of all of them, as ``EpisodeStore.attributes``.
    """

    attributes: Attributes
    num_episodes: int
    episodes: Iterator[Columns]


def read_description(path: Path, remedy: str) -> dict[str, Any]:
    """What a JSON file says of a dataset. remedy: what to do if it does not hold an object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}). {remedy}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} must hold a JSON object. {remedy}")
    return document


def plain_attributes(document: Mapping[str, Any], path: Path) -> Attributes:
    """What a description says of all episodes."""
    attributes = document.get("attributes", {})
    if not isinstance(attributes, dict) or not all(isinstance(v, str | int | float) for v in attributes.values()):
        raise DataError(f"{path}: attributes must be an object of texts and numbers. Repair it.")
    return attributes


def decode_picture(encoded: bytes | None, otherwise: str) -> Array:
    """An encoded picture as uint8 (H, W, 3). otherwise: what to say if it is none."""
    try:
        pixels = cv2.imdecode(np.frombuffer(encoded or b"\0", np.uint8), cv2.IMREAD_COLOR)
    except (cv2.error, ValueError, TypeError, MemoryError) as error:  # as of a picture that claims to be enormous
        raise DataError(otherwise) from error
    if pixels is None:
        raise DataError(otherwise)
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
