"""LeRobot datasets, version 3: columns in Parquet, frames in MP4, both with many episodes per file.

    meta/info.json                                   sizes, fps, path templates, the type and shape of every feature
    meta/stats.json, meta/tasks.parquet
    meta/episodes/chunk-000/file-000.parquet         per episode: its rows, its files, its time in the video
    meta/lewm.json                                   ours: what the others have no place for
    data/chunk-000/file-000.parquet                  the rows
    videos/observation.image/chunk-000/file-000.mp4  the frames, row i of an episode at its from_timestamp + i / fps

How the columns are called on either side:

    pixels   observation.image
    action   action                          the last row, which has none here, repeats the one before it there
    proprio  observation.state
    state    observation.environment_state
    others   keep their names

LeRobot wants an action in every row; meta/lewm.json remembers which last ones are no real actions. Datasets that others
recorded have one in every row, and keep it. Version 2.1, one file per episode, can be read as well.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lewm.data.formats.exchange import EpisodeSource, FitFrames, decode_picture, plain_attributes, read_description
from lewm.data.new_file import Columns
from lewm.errors import DataError, unknown_name
from lewm.types import Array
from lewm.video import Mp4Reader, import_lerobot_extra

VERSION = "v3.0"
READABLE_VERSIONS = ("v3.0", "v2.1", "v2.0")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
CHUNK_FILES = 1000  # files per folder, LeRobot's default
CAMERA = "observation.image"
FEATURES = {"proprio": "observation.state", "state": "observation.environment_state"}
NUMBERS = ("episode_index", "frame_index")
INDICES = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def is_lerobot(path: Path) -> bool:
    """Whether a folder looks like a LeRobot dataset."""
    return (path / "meta" / "info.json").is_file()


def read_lerobot_columns(folder: Path, names: Sequence[str]) -> tuple[dict[str, Array], Array, Array]:
    """Columns (N, ...) of a dataset by LeRobot's names, and lengths and ids of its episodes, int64 (E,) each.

    Rows are in the order of episodes, whatever the order of files; videos are not needed.
    """
    info = _read_info(folder)
    for name in names:
        if name not in info["features"]:
            raise DataError(f"{folder}: {unknown_name('feature', name, info['features'])}")
    parquet = import_lerobot_extra("pyarrow.parquet")
    wanted = [*dict.fromkeys([*names, *NUMBERS])]
    tables = []
    for path in sorted((folder / "data").glob("*/*.parquet")):
        try:
            tables.append(parquet.read_table(path, columns=wanted))
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are of these kinds
            raise DataError(f"{path} cannot be read ({error}). Download it again.") from error
    if not sum(map(len, tables)):
        raise DataError(f"{folder} has no rows in data/*/*.parquet. Download it again.")
    table = import_lerobot_extra("pyarrow").concat_tables(tables)
    episode, frame = (_to_numpy(table[name].combine_chunks(), f"{folder}: {name}") for name in NUMBERS)
    if any(numbers.ndim != 1 or numbers.dtype.kind not in "iu" for numbers in (episode, frame)):
        raise DataError(f"{folder}: {' and '.join(NUMBERS)} must be whole numbers. Repair them first.")
    order = np.lexsort((frame, episode))
    ids, lengths = np.unique(episode, return_counts=True)
    expected = np.arange(len(frame)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if not np.array_equal(frame[order], expected):
        raise DataError(f"{folder}: frame_index must count from 0 in each of {len(ids)} episodes. Repair it first.")
    columns = {name: _to_numpy(table[name].combine_chunks(), f"{folder}: {name}")[order] for name in names}
    return columns, lengths.astype(np.int64), ids.astype(np.int64)


def read_lerobot(folder: Path, camera: str | None = None, fit: FitFrames = np.asarray) -> EpisodeSource:
    """Episodes of a LeRobot dataset, under the names that lewm uses.

    camera: which of several, a feature's name.
    fit: applied to frames one at a time: at their full size, an episode's might not fit in memory.
    """
    info = _read_info(folder)
    camera = _chosen_camera(folder, info["features"], camera)
    features = _numeric_features(info["features"])
    if "action" not in features:
        raise DataError(f"{folder} has no feature 'action', only {', '.join(features)}. lewm learns from actions.")
    columns, lengths, ids = read_lerobot_columns(folder, [*features, "timestamp"])
    timestamps = columns.pop("timestamp").astype(np.float64)
    our_names = {theirs: ours for ours, theirs in FEATURES.items()}
    named = {our_names.get(name, name): columns[name] for name in features}
    beside = folder / "meta" / "lewm.json"
    ours = _read_ours(beside, len(timestamps))
    try:
        for name in ours.get("columns", {}).keys() & named.keys():
            form = ours["columns"][name]
            named[name] = named[name].astype(form["dtype"]).reshape(-1, *form["shape"])
        without_action = set(ours.get("episodes_without_last_action", ()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        remedy = "Remove it to take the dataset as it is"
        raise DataError(f"{beside} does not fit the dataset ({error}). {remedy}.") from error
    if info["features"][camera]["dtype"] == "video":
        frames = _video_frames(folder, info, camera, lengths, ids, timestamps)
    else:
        frames = _image_frames(folder, camera, lengths, ids)

    def episodes() -> Iterator[Columns]:
        ends = np.cumsum(lengths)
        for number, pixels, end, length in zip(ids.tolist(), frames, ends, lengths, strict=True):
            fitted = np.concatenate([fit(frame[None]) for frame in pixels])
            episode = {"pixels": fitted} | {name: column[end - length : end] for name, column in named.items()}
            if number in without_action:
                episode["action"] = episode["action"].copy()
                episode["action"][-1] = np.nan
            yield episode

    return EpisodeSource(plain_attributes(ours, beside), len(lengths), episodes())


def _read_info(folder: Path) -> dict[str, Any]:
    if not is_lerobot(folder):
        raise DataError(f"{folder} is no LeRobot dataset: it has no meta/info.json. Check the path.")
    info = read_description(folder / "meta" / "info.json", "Download it again.")
    version = info.get("codebase_version")
    if version not in READABLE_VERSIONS:
        known = f"{', '.join(READABLE_VERSIONS)} can be read"
        raise DataError(f"{folder} has LeRobot version {version}; {known}. Convert it with LeRobot's own scripts.")
    features, fps = info.get("features"), info.get("fps")
    forms = features.values() if isinstance(features, dict) else ()
    if not forms or not all(isinstance(form, dict) and isinstance(form.get("dtype"), str) for form in forms):
        raise DataError(f"{folder}: meta/info.json must give the dtype of every feature. Download it again.")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise DataError(f"{folder}: meta/info.json must give fps, a positive number, got {fps!r}. Download it again.")
    return info


def _read_ours(path: Path, rows: int) -> dict[str, Any]:
    """What lewm wrote beside the dataset; nothing, if others made it."""
    ours = read_description(path, "Download it again.") if path.is_file() else {}
    if ours and ours.get("rows") != rows:
        problem = f"{path} is for {ours.get('rows')} rows, but the dataset has {rows}: it was edited since"
        raise DataError(f"{problem}. Remove that file to take the dataset as it is.")
    return ours


def _chosen_camera(folder: Path, features: Mapping[str, Any], camera: str | None) -> str:
    cameras = [name for name, feature in features.items() if feature["dtype"] in ("video", "image")]
    if camera and camera not in cameras:
        raise DataError(f"{folder}: {unknown_name('camera', camera, cameras)}")
    if not camera and len(cameras) != 1:
        listed = f"{len(cameras)} cameras ({', '.join(cameras)})" if cameras else "no camera"
        raise DataError(f"{folder} has {listed}, and lewm takes one. Choose it with --camera.")
    return camera or cameras[0]


def _numeric_features(features: Mapping[str, Any]) -> list[str]:
    """Those that become columns: numbers that are not mere numbering."""
    kinds = ("float", "int", "uint", "bool")
    return [n for n, feature in features.items() if feature["dtype"].startswith(kinds) and n not in INDICES]


def _to_numpy(column: Any, what: str) -> Array:
    """A Parquet column without gaps as an array (N,) or, made of lists of one size, (N, ...)."""
    shape = [len(column)]
    if column.null_count:
        raise DataError(f"{what} has {column.null_count} empty rows. Fill or drop them first.")
    while hasattr(column.type, "value_type"):  # a list, perhaps of lists
        column = column.flatten()
        size, rest = divmod(len(column), max(int(np.prod(shape)), 1))
        if rest or column.null_count:
            raise DataError(f"{what} must have as many numbers in every row. Repair or drop it first.")
        shape.append(size)
    values = column.to_numpy(zero_copy_only=False).reshape(shape)
    return values.astype(np.uint8) if values.dtype == bool else values


def _video_frames(
    folder: Path, info: Mapping[str, Any], camera: str, lengths: Array, ids: Array, timestamps: Array
) -> Iterator[Iterator[Array]]:
    """The frames, uint8 (H, W, 3), of one episode after another."""
    tolerance = 0.25 / info["fps"]
    ends = np.cumsum(lengths)
    with contextlib.ExitStack() as stack:
        reader: Mp4Reader | None = None
        places = _video_places(folder, info, camera, lengths, ids)
        for (path, start), end, length in zip(places, ends, lengths, strict=True):
            if reader is None or reader.path != path:
                stack.close()
                reader = stack.enter_context(Mp4Reader(path))
            yield reader.read(start + timestamps[end - length : end], tolerance)


def _video_places(
    folder: Path, info: Mapping[str, Any], camera: str, lengths: Array, ids: Array
) -> list[tuple[Path, float]]:
    """Where each episode's video is: a file, and the time in it at which it begins."""
    if info["codebase_version"] != VERSION:  # one file per episode
        _compare_with(folder, _lengths_of_version_2(folder / "meta" / "episodes.jsonl"), lengths, ids)
        size = max(int(info.get("chunks_size", CHUNK_FILES)), 1)
        numbers = [{"episode_chunk": i // size, "episode_index": i} for i in ids.tolist()]
        return [(_video_path(folder, info, video_key=camera, **number), 0.0) for number in numbers]
    parquet = import_lerobot_extra("pyarrow.parquet")
    names = ["episode_index", "length"]
    names += [f"videos/{camera}/{what}" for what in ("chunk_index", "file_index", "from_timestamp")]
    rows: list[tuple[Any, ...]] = []
    for path in sorted((folder / "meta" / "episodes").glob("*/*.parquet")):
        try:
            rows += zip(*parquet.read_table(path, columns=names).to_pydict().values(), strict=True)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path} cannot be read ({error}). Download it again.") from error
    rows.sort(key=lambda row: row[0])
    if len(rows) != len(ids):
        raise DataError(f"{folder} describes {len(rows)} episodes in meta/episodes, but data/ has {len(ids)}.")
    _compare_with(folder, {number: length for number, length, *_ in rows}, lengths, ids)
    return [
        (_video_path(folder, info, video_key=camera, chunk_index=chunk, file_index=file), start)
        for _, _, chunk, file, start in rows
    ]


def _lengths_of_version_2(path: Path) -> dict[int, int]:
    """Rows of each episode by its id, as meta/episodes.jsonl has them; empty, if there is no such file."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
        return {line["episode_index"]: line["length"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}). Download it again.") from error


def _compare_with(folder: Path, described: Mapping[int, int], lengths: Array, ids: Array) -> None:
    """Refuse a dataset that describes other episodes than it has. A description may have more of them, or nothing."""
    for number, length in zip(ids.tolist(), lengths.tolist(), strict=True) if described else ():
        if described.get(number) != length:
            expected = f"{described[number]} rows" if number in described else "no such episode"
            problem = f"episode {number} has {length} rows in data/, but meta/ has {expected}"
            raise DataError(f"{folder}: {problem}. Repair it.")


def _video_path(folder: Path, info: Mapping[str, Any], **numbers: Any) -> Path:
    """The file that the dataset's template names; one outside of the dataset is refused."""
    template = info.get("video_path")
    try:
        place = Path(str(template).format(**numbers))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: video_path {template!r} cannot be used ({error!r}). Download it again.") from error
    if template is None or place.is_absolute() or ".." in place.parts:
        raise DataError(f"{folder}: video_path {template!r} must lead to files in the dataset, not to {place}.")
    return folder / place


def _image_frames(folder: Path, camera: str, lengths: Array, ids: Array) -> Iterator[Iterator[Array]]:
    """The frames, uint8 (H, W, 3), of one episode after another, where Parquet files hold them as encoded images."""
    encoded: list[tuple[int, int, bytes]] = []
    remaining = zip(ids.tolist(), lengths.tolist(), strict=True)
    number, length = next(remaining)
    paths = (folder / "data").glob("*/*.parquet")
    for path in sorted(paths, key=lambda path: (_first_episode(path), path)):
        for batch in _batches(path, camera):
            encoded += batch
            while length and len(encoded) >= length:
                ours, encoded = encoded[:length], encoded[length:]
                if [row[:2] for row in ours] != [(number, frame) for frame in range(length)]:
                    raise DataError(f"{path}: the rows of episode {number} are not in order. Sort them first.")
                unreadable = f"{path}, episode {number}: an image cannot be decoded. Download it again."
                yield (decode_picture(image, unreadable) for _, _, image in ours)
                number, length = next(remaining, (-1, 0))


def _first_episode(path: Path) -> int:
    column = import_lerobot_extra("pyarrow.parquet").read_table(path, columns=["episode_index"])["episode_index"]
    return min(column.to_pylist(), default=0)


def _batches(path: Path, camera: str) -> Iterator[list[tuple[int, int, bytes]]]:
    """Episode, frame and encoded image of some rows after the other."""
    try:
        file = import_lerobot_extra("pyarrow.parquet").ParquetFile(path)
        for batch in file.iter_batches(64, columns=[*NUMBERS, camera]):
            rows = batch.to_pydict()
            images = [image["bytes"] for image in rows[camera]]
            yield list(zip(*(rows[name] for name in NUMBERS), images, strict=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}). Download it again.") from error
