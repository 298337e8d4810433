"""Plain folders: for looking into, for editing by hand, and for data of one's own.

dataset.json                        what is known of all episodes; may be missing
episode_000000/frame_000000.png     one per row, or every n-th row's if dataset.json says "frame_stride": n
episode_000000/columns.npz          arrays (L, ...): "action" and any others
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from lewm.data.formats.demonstrations import NPZ_ERRORS
from lewm.data.formats.exchange import EpisodeSource, decode_picture, plain_attributes, read_description
from lewm.data.new_file import Columns
from lewm.errors import DataError
from lewm.files import completing
from lewm.machine import cores
from lewm.types import Array

DESCRIPTION, COLUMNS = "dataset.json", "columns.npz"


def is_folder(path: Path) -> bool:
    """Whether a folder looks like one of these."""
    return (path / DESCRIPTION).is_file() or any(path.glob("episode_*"))


def write_folder(path: Path, source: EpisodeSource) -> None:
    """Write a plain folder, whole or not at all."""
    with completing(path) as folder, ThreadPoolExecutor(cores()) as pool:
        folder.mkdir()
        count = 0
        for number, episode in enumerate(source.episodes):
            place = folder / f"episode_{number:06d}"
            place.mkdir()
            steps = episode.get("frame_step", np.arange(len(episode["pixels"])))
            names = [place / f"frame_{step:06d}.png" for step in steps]
            list(pool.map(_write_png, names, episode["pixels"]))  # as a list: raises what a thread raised
            columns: dict[str, Any] = {n: column for n, column in episode.items() if n not in ("pixels", "frame_step")}
            np.savez(place / COLUMNS, **columns)
            count = number + 1
        document = {"format": "lewm-folder", "episodes": count, "attributes": dict(source.attributes)}
        (folder / DESCRIPTION).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_png(path: Path, frame: Array) -> None:
    encoded, data = cv2.imencode(".png", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    assert encoded
    path.write_bytes(data.tobytes())


def read_folder(path: Path) -> EpisodeSource:
    """Episodes of a plain folder."""
    known = path / DESCRIPTION
    document = read_description(known, "Repair or remove it.") if known.is_file() else {}
    attributes = plain_attributes(document, known)
    count, stride = document.get("episodes"), attributes.get("frame_stride", 1)
    if not (count is None or type(count) is int) or type(stride) is not int or stride < 1:
        problem = f"episodes must be a number, and frame_stride a positive one, got {count!r} and {stride!r}"
        raise DataError(f"{known}: {problem}. Repair or remove it.")
    places = sorted(place for place in path.glob("episode_*") if place.is_dir())
    numbers = [int(match[1]) if (match := re.fullmatch(r"episode_(\d+)", place.name)) else -1 for place in places]
    if numbers != list(range(len(places))) or count not in (None, len(places)):
        came = f"{len(places)} folders from {places[0].name} to {places[-1].name}" if places else "none"
        expected = f"episode_000000 and so on, {'one or more' if count is None else count} in all"
        raise DataError(f"{path} has an incomplete set of episodes: expected {expected}, got {came}.")

    def episodes() -> Iterator[Columns]:
        with ThreadPoolExecutor(cores()) as pool:
            for place in places:
                yield _read_episode(place, stride, pool)

    return EpisodeSource(attributes, len(places), episodes())


def _read_episode(place: Path, stride: int, pool: ThreadPoolExecutor) -> Columns:
    """The columns of one episode; the frames of every ``stride``-th row, if that is more than 1."""
    columns = _read_columns(place / COLUMNS)
    paths = sorted(place.glob("frame_*.png"))
    frames = list(pool.map(_read_png, paths))
    if len({frame.shape for frame in frames}) != 1:
        raise DataError(f"{place} must have frames frame_000000.png and so on, all of one size; found {len(frames)}.")
    if stride == 1 and len(columns["action"]) == len(frames) - 1:  # nothing was done at the last frame
        action = columns["action"] if columns["action"].dtype.kind == "f" else columns["action"].astype(np.float32)
        columns["action"] = np.concatenate([action, np.full((1, *action.shape[1:]), np.nan, action.dtype)])
    steps = np.array([int(match[1]) if (match := re.search(r"_(\d+)$", path.stem)) else -1 for path in paths])
    rows = len(columns["action"])
    if not np.array_equal(steps, np.arange(steps[0], rows, stride)) or not 0 <= steps[0] < stride:
        named = f"{paths[0].name} to {paths[-1].name}, {len(paths)} in all"
        raise DataError(f"{place} has {rows} actions, so it needs a frame every {stride} rows; it has {named}.")
    for name, column in columns.items():
        if len(column) != rows:
            raise DataError(f"{place} has {rows} actions, but {len(column)} rows of {name}. Make them agree.")
    return {"pixels": np.stack(frames), **columns} | ({"frame_step": steps} if stride > 1 else {})


def _read_columns(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            columns = dict(archive)
    except NPZ_ERRORS as error:
        raise DataError(f"{path} cannot be read ({error}). Expected arrays, one of them 'action'.") from error
    if "action" not in columns:
        raise DataError(f"{path} has no array 'action', only {', '.join(columns) or 'nothing'}. Add it.")
    for name, column in columns.items():
        if name in ("pixels", "frame_step") or not isinstance(column, np.ndarray) or not column.ndim:
            raise DataError(f"{path}: {name!r} must be an array with an entry for each row, by another name.")
    return columns


def _read_png(path: Path) -> Array:
    return decode_picture(path.read_bytes(), f"{path} is no readable picture. Replace it.")
