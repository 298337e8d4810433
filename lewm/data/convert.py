"""`lewm data convert`: from and to HDF5, LeRobot datasets and plain folders.

A plain folder is for looking into, for editing by hand, and for data of one's own:

    dataset.json                        what is known of all episodes; may be missing
    episode_000000/frame_000000.png     one per row, or every n-th row's if dataset.json says "frame_stride": n
    episode_000000/columns.npz          arrays (L, ...): "action" and any others
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import cv2
import numpy as np

from lewm.data.exchange import EpisodeSource, FitFrames
from lewm.data.lerobot import is_lerobot, read_lerobot
from lewm.data.lerobot_writer import write_lerobot
from lewm.data.store import NUMBERING, Columns, EpisodeStore, write_episodes
from lewm.errors import DataError
from lewm.files import completing
from lewm.frames import resized
from lewm.types import Array, ProgressCallback
from lewm.video import VideoQuality

Format = Literal["hdf5", "folder", "lerobot"]
HDF5_SUFFIXES = (".h5", ".hdf5")
DESCRIPTION, COLUMNS = "dataset.json", "columns.npz"
# What the writer of a file adds itself, and what only holds for the very frames that were collected.
WRITERS_ATTRIBUTES = ("format", "format_version", "lewm_version")
COLLECTION_ATTRIBUTES = ("generator", "resolution", "seed")


def convert(
    source: str | Path,
    target: str | Path,
    to: Format | None = None,
    *,
    camera: str | None = None,
    resolution: int | None = None,
    crop: bool = False,
    fps: int = 10,
    quality: VideoQuality = "lossless",
    on_progress: ProgressCallback | None = None,
) -> Format:
    """Write the episodes of ``source`` to ``target``, which must not exist; returns the format it then has.

    to: None: by the target's suffix, .h5 or .hdf5.
    camera: the LeRobot feature whose frames are taken, where there are several.
    resolution: side of the new frames; None: as they are.
    crop: cut frames that are not square to their middle, instead of refusing them.
    fps, quality: of a LeRobot target.
    on_progress: counts episodes.
    """
    source, target = Path(source), Path(target)
    form = to or ("hdf5" if target.suffix in HDF5_SUFFIXES else None)
    if form is None:
        raise DataError(f"What should {target} become? Say --to hdf5, folder or lerobot.")
    if target.exists():
        raise DataError(f"{target} exists already. Choose another name, or remove it first.")
    if fps < 1 or (resolution is not None and resolution < 1):
        raise DataError(f"fps and resolution must be positive, got {fps} and {resolution}.")
    episodes = _read(source, camera, functools.partial(fit_frames, resolution=resolution, crop=crop))
    if resolution is not None or (form == "lerobot" and quality != "lossless"):
        # No longer the frames that were collected: `lewm collect` must not take them for its own and add to them.
        episodes = _without(episodes, COLLECTION_ATTRIBUTES)
    if form == "lerobot":
        write_lerobot(target, episodes, fps, quality, on_progress)
    else:
        (write_folder if form == "folder" else _write_hdf5)(target, _counted(episodes, on_progress))
    return form


def detect_format(path: Path) -> Format:
    """Which of the formats is at ``path``."""
    if path.is_file():
        return "hdf5"
    if is_lerobot(path):
        return "lerobot"
    if (path / DESCRIPTION).is_file() or any(path.glob("episode_*")):
        return "folder"
    expected = f"an HDF5 file, a LeRobot dataset (meta/info.json) or a folder with {DESCRIPTION} or episode_000000/"
    raise DataError(f"There is no dataset at {path}: expected {expected}.")


def _read(path: Path, camera: str | None, fit: FitFrames) -> EpisodeSource:
    form = detect_format(path)
    if camera and form != "lerobot":
        raise DataError(f"{path} is not a LeRobot dataset, so it has no camera {camera!r} to choose. Omit --camera.")
    if form == "lerobot":
        source = read_lerobot(path, camera, fit)
    else:
        source = _fitted(read_folder(path) if form == "folder" else read_hdf5(path), fit)
    return _without(source, WRITERS_ATTRIBUTES)


def _without(source: EpisodeSource, names: tuple[str, ...]) -> EpisodeSource:
    """The same episodes with fewer attributes."""
    return replace(source, attributes={n: value for n, value in source.attributes.items() if n not in names})


def _write_hdf5(path: Path, source: EpisodeSource) -> None:
    write_episodes(path, source.episodes, source.attributes)


def read_hdf5(path: Path) -> EpisodeSource:
    """Episodes of an HDF5 file."""
    store = EpisodeStore(path)

    def episodes() -> Iterator[Columns]:
        with store:
            names = [name for name in store.columns if name not in NUMBERING]
            columns = {name: store.read_column(name) for name in names}
            for offset, length in zip(store.offsets, store.lengths, strict=True):
                first, last = np.searchsorted(store.frame_rows, (offset, offset + length))
                rows = store.frame_rows[first:last]
                episode = {name: columns[name][offset : offset + length] for name in names}
                episode |= {"frame_step": rows - offset} if store.num_frames < store.num_rows else {}
                yield {"pixels": store.read_frames(rows), **episode}

    return EpisodeSource(store.attributes, store.num_episodes, episodes())


# -- fitting frames ---------------------------------------------------------------------------------------------------


def _fitted(source: EpisodeSource, fit: FitFrames) -> EpisodeSource:
    """The same episodes with other frames."""
    return replace(source, episodes=({**episode, "pixels": fit(episode["pixels"])} for episode in source.episodes))


def fit_frames(frames: Array, resolution: int | None = None, crop: bool = False) -> Array:
    """Frames (L, H, W, 3), uint8, as (L, R, R, 3): resized, unless ``resolution`` is None.

    Those that are not square are refused, or cut to their middle with ``crop``.
    """
    height, width = frames.shape[1:3]
    if height != width and not crop:
        raise DataError(f"The frames have {width} × {height} pixels, not square. Pass --crop to keep their middle.")
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = frames[:, top : top + side, left : left + side]
    return square if resolution is None else resized(square, resolution)


def _counted(source: EpisodeSource, on_progress: ProgressCallback | None) -> EpisodeSource:
    """The same episodes, reported as they pass."""

    def episodes() -> Iterator[Columns]:
        for done, episode in enumerate(source.episodes, start=1):
            yield episode
            if on_progress:
                on_progress(done, source.num_episodes)

    return replace(source, episodes=episodes())


# -- plain folders ----------------------------------------------------------------------------------------------------


def write_folder(path: Path, source: EpisodeSource) -> None:
    """Write a plain folder, whole or not at all."""
    with completing(path) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
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
    document = _read_description(path)
    attributes = document.get("attributes", {})
    places = sorted(place for place in path.glob("episode_*") if place.is_dir())
    numbers = [int(match[1]) if (match := re.fullmatch(r"episode_(\d+)", place.name)) else -1 for place in places]
    if numbers != list(range(document.get("episodes", len(places)))):
        came = f"{len(places)} folders from {places[0].name} to {places[-1].name}" if places else "none"
        expected = f"episode_000000 and so on, {document.get('episodes', 'one or more')} in all"
        raise DataError(f"{path} has an incomplete set of episodes: expected {expected}, got {came}.")

    def episodes() -> Iterator[Columns]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for place in places:
                yield _read_episode(place, attributes.get("frame_stride", 1), pool)

    return EpisodeSource(attributes, len(places), episodes())


def _read_description(path: Path) -> dict[str, Any]:
    if not (path / DESCRIPTION).is_file():
        return {}
    try:
        document = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path / DESCRIPTION} cannot be read ({error}). Repair or remove it.") from error
    if not isinstance(document, dict):
        raise DataError(f"{path / DESCRIPTION} must hold a JSON object. Repair or remove it.")
    return document


def _read_episode(place: Path, stride: int, pool: ThreadPoolExecutor) -> Columns:
    """The columns of one episode; the frames of every ``stride``-th row, if that is more than 1."""
    columns = _read_columns(place / COLUMNS)
    paths = sorted(place.glob("frame_*.png"))
    frames = list(pool.map(_read_png, paths))
    if len({frame.shape for frame in frames}) != 1:
        raise DataError(f"{place} must have frames frame_000000.png and so on, all of one size; found {len(frames)}.")
    if stride == 1 and len(columns["action"]) == len(frames) - 1:  # nothing was done at the last frame
        missing = np.full_like(columns["action"][:1], np.nan)
        columns["action"] = np.concatenate([columns["action"], missing])
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
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}). Expected arrays, one of them 'action'.") from error
    if "action" not in columns:
        raise DataError(f"{path} has no array 'action', only {', '.join(columns) or 'nothing'}. Add it.")
    return columns


def _read_png(path: Path) -> Array:
    """A picture as uint8 (H, W, 3)."""
    pixels = cv2.imdecode(np.frombuffer(path.read_bytes() or b"\0", np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise DataError(f"{path} is no readable picture. Replace it.")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
