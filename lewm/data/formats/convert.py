"""`lewm data convert`: from and to HDF5, LeRobot datasets and plain folders."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from lewm.config import LARGEST_IMAGE
from lewm.data.formats.exchange import EpisodeSource, FitFrames
from lewm.data.formats.folder import DESCRIPTION, is_folder, read_folder, write_folder
from lewm.data.formats.lerobot import is_lerobot, read_lerobot
from lewm.data.formats.lerobot_writer import write_lerobot
from lewm.data.new_file import NUMBERING, Columns, check_actions, check_episode
from lewm.data.store import EpisodeStore, write_episodes
from lewm.errors import DataError
from lewm.files import check_place
from lewm.frames import resized
from lewm.types import Array, ProgressCallback
from lewm.video import VideoQuality

Format = Literal["hdf5", "folder", "lerobot"]
HDF5_SUFFIXES = (".h5", ".hdf5")
# What the writer of a file adds itself, and what only holds for the very frames that were collected.
WRITERS_ATTRIBUTES = ("format", "format_version", "lewm_version")
MOST_FPS = 1000
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
    check_place(target, [source])
    if not 1 <= fps <= MOST_FPS or not (resolution is None or 1 <= resolution <= LARGEST_IMAGE):
        limits = f"fps must be between 1 and {MOST_FPS:,}, and resolution between 1 and {LARGEST_IMAGE:,}"
        raise DataError(f"{limits}, got {fps} and {resolution}.")
    episodes = _read(source, camera, functools.partial(fit_frames, resolution=resolution, crop=crop))
    if detect_format(source) != "hdf5" or resolution is not None or (form == "lerobot" and quality != "lossless"):
        # Perhaps not the episodes that were collected: `lewm collect` must not take them for its own and add to them.
        episodes = _without(episodes, COLLECTION_ATTRIBUTES)
    episodes = _counted(_checked(episodes), on_progress)
    if form == "lerobot":
        write_lerobot(target, episodes, fps, quality)
    elif form == "folder":
        write_folder(target, episodes)
    else:
        write_episodes(target, episodes.episodes, episodes.attributes)
    return form


def detect_format(path: Path) -> Format:
    """Which of the formats is at ``path``."""
    if path.is_file():
        return "hdf5"
    if is_lerobot(path):
        return "lerobot"
    if is_folder(path):
        return "folder"
    expected = f"an HDF5 file, a LeRobot dataset (meta/info.json) or a folder with {DESCRIPTION} or episode_000000/"
    raise DataError(f"There is no dataset at {path}: expected {expected}.")


def _read(path: Path, camera: str | None, fit: FitFrames) -> EpisodeSource:
    form = detect_format(path)
    if camera and form != "lerobot":
        raise DataError(f"{path} is not a LeRobot dataset, so it has no camera {camera!r} to choose. Omit --camera.")
    if form == "lerobot":
        return _without(read_lerobot(path, camera, fit), WRITERS_ATTRIBUTES)
    source = read_folder(path) if form == "folder" else read_hdf5(path)
    fitted = ({**episode, "pixels": fit(episode["pixels"])} for episode in source.episodes)
    return _without(replace(source, episodes=fitted), WRITERS_ATTRIBUTES)


def _without(source: EpisodeSource, names: tuple[str, ...]) -> EpisodeSource:
    """The same episodes with fewer attributes."""
    return replace(source, attributes={n: value for n, value in source.attributes.items() if n not in names})


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


def _checked(source: EpisodeSource) -> EpisodeSource:
    """The same episodes, each refused if no file can hold it; whole and single numbers of actions become fractions."""

    def episodes() -> Iterator[Columns]:
        form: dict[str, object] = {}
        for number, found in enumerate(source.episodes):
            episode = {**found, "action": _as_actions(found["action"])}
            form = check_episode(number, episode, form)
            check_actions(number, episode["action"])
            yield episode

    return replace(source, episodes=episodes())


def _as_actions(actions: Array) -> Array:
    """Actions (L,) or (L, action_dim) of any numbers as floating point (L, action_dim)."""
    rows = actions[:, None] if actions.ndim == 1 else actions
    return rows.astype(np.float32) if rows.dtype.kind in "biu" else rows


def _counted(source: EpisodeSource, on_progress: ProgressCallback | None) -> EpisodeSource:
    """The same episodes, reported as they pass."""

    def episodes() -> Iterator[Columns]:
        for done, episode in enumerate(source.episodes, start=1):
            yield episode
            if on_progress:
                on_progress(done, source.num_episodes)

    return replace(source, episodes=episodes())
