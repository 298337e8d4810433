"""Writing LeRobot datasets; ``lewm.data.formats.lerobot`` has the layout and reads it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lewm.data.formats.exchange import EpisodeSource
from lewm.data.formats.lerobot import (
    CAMERA,
    CHUNK_FILES,
    DATA_PATH,
    EPISODES_PATH,
    FEATURES,
    INDICES,
    VERSION,
    VIDEO_PATH,
)
from lewm.data.new_file import Attributes, Columns
from lewm.errors import DataError
from lewm.files import completing
from lewm.types import Array
from lewm.video import Mp4Writer, VideoQuality, import_lerobot_extra

FILE_ROWS = 50_000  # a file is closed after the episode that reaches so many
STATS_STRIDE = 10  # frames between two that enter the statistics of the pixels


def write_lerobot(path: Path, source: EpisodeSource, fps: int = 10, quality: VideoQuality = "lossless") -> None:
    """Write a LeRobot dataset, whole or not at all. ``fps``: rows per second."""
    with completing(path) as folder:
        with _Writer(folder, fps, quality, str(source.attributes.get("environment", "unknown"))) as writer:
            for episode in source.episodes:
                writer.add(episode)
        writer.write_meta(source.attributes)


@dataclass
class _Moments:
    """Running statistics of the rows (n, d) of one feature."""

    count: int = 0
    low: Array = field(default_factory=lambda: np.array(np.inf))
    high: Array = field(default_factory=lambda: np.array(-np.inf))
    total: Array = field(default_factory=lambda: np.array(0.0))
    squares: Array = field(default_factory=lambda: np.array(0.0))

    def add(self, rows: Array) -> None:
        rows = rows.astype(np.float64)
        self.count += len(rows)
        self.low, self.high = np.minimum(self.low, rows.min(0)), np.maximum(self.high, rows.max(0))
        self.total, self.squares = self.total + rows.sum(0), self.squares + (rows**2).sum(0)

    def as_json(self, shape: tuple[int, ...]) -> dict[str, Any]:
        mean = self.total / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        values = {"min": self.low, "max": self.high, "mean": mean, "std": std}
        return {name: value.reshape(shape).tolist() for name, value in values.items()} | {"count": [self.count]}


class _Writer(contextlib.AbstractContextManager["_Writer"]):
    """A LeRobot dataset under construction. On leaving the context its data and video files are complete."""

    def __init__(self, folder: Path, fps: int, quality: VideoQuality, task: str) -> None:
        self._pa, self._parquet = import_lerobot_extra("pyarrow"), import_lerobot_extra("pyarrow.parquet")
        import_lerobot_extra("av")
        self._folder, self._fps, self._quality, self._task = folder, fps, quality, task
        self._files = contextlib.ExitStack()
        self._file, self._file_rows = -1, FILE_ROWS  # full, so that the first episode opens one
        self._rows = 0
        self._episodes: list[dict[str, Any]] = []
        self._stats: dict[str, _Moments] = {}
        self._forms: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtype and shape of our columns
        self._without_action: list[int] = []
        folder.mkdir()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._files.__exit__(kind, error, trace)

    def add(self, episode: Columns) -> None:
        """Append an episode to the current files, or to new ones if they are full."""
        number, pixels = len(self._episodes), episode["pixels"]
        if "frame_step" in episode:
            raise DataError("LeRobot needs a frame for every row, and this dataset has some only. Convert to a folder.")
        columns = {name: column for name, column in episode.items() if name != "pixels"}
        forms = {name: (str(column.dtype), column.shape[1:]) for name, column in columns.items()}
        self._forms = self._forms or forms
        if forms != self._forms or len({len(column) for column in episode.values()}) != 1:
            raise DataError(f"Episode {number} has other columns than those before it, or some of other lengths.")
        if self._episodes and pixels.shape[1:3] != self._size:
            raise DataError(f"Episode {number} has frames of {pixels.shape[1:3]} pixels, those before it {self._size}.")
        if not np.isfinite(columns["action"][-1]).all():
            self._without_action.append(number)
            columns["action"] = columns["action"].copy()
            columns["action"][-1] = columns["action"][-2] if len(pixels) > 1 else 0
        table = self._table({_feature(name): column.reshape(len(column), -1) for name, column in columns.items()})
        if self._file_rows >= FILE_ROWS:
            self._next_files(table.schema, (pixels.shape[1], pixels.shape[2]))
        self._data.write_table(table)
        self._video.write(pixels)
        self._measure(CAMERA, pixels[::STATS_STRIDE].reshape(-1, 3) / 255)
        self._episodes.append(self._description(number, len(pixels)))
        self._file_rows += len(pixels)
        self._rows += len(pixels)

    def _table(self, columns: Columns) -> Any:
        """The rows of the next episode: its columns (L, d), and LeRobot's numbering."""
        length, number = len(columns["action"]), len(self._episodes)
        steps = np.arange(length)
        arrays = {}
        for name, column in columns.items():
            self._measure(name, column)
            values = self._pa.array(column.ravel())
            size = column.shape[1]
            arrays[name] = values if size == 1 else self._pa.FixedSizeListArray.from_arrays(values, size)
        arrays["timestamp"] = (steps / self._fps).astype(np.float32)
        arrays |= {"frame_index": steps, "episode_index": np.full(length, number)}
        arrays |= {"index": self._rows + steps, "task_index": np.zeros(length, np.int64)}
        for name in INDICES:
            self._measure(name, np.asarray(arrays[name])[:, None])
        return self._pa.table(arrays)

    def _measure(self, name: str, rows: Array) -> None:
        self._stats.setdefault(name, _Moments()).add(rows)

    def _next_files(self, schema: Any, size: tuple[int, int]) -> None:
        self._files.close()
        self._file, self._file_rows, self._size = self._file + 1, 0, size
        data, video = (self._folder / template.format(**self._place()) for template in (DATA_PATH, VIDEO_PATH))
        for path in (data, video):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._data = self._files.enter_context(self._parquet.ParquetWriter(data, schema))
        self._video = self._files.enter_context(Mp4Writer(video, self._fps, size, self._quality))

    def _place(self) -> dict[str, Any]:
        chunk, file = divmod(self._file, CHUNK_FILES)
        return {"video_key": CAMERA, "chunk_index": chunk, "file_index": file}

    def _description(self, number: int, length: int) -> dict[str, Any]:
        """The row of meta/episodes for an episode that begins where the current files end."""
        place = {name: value for name, value in self._place().items() if name != "video_key"}
        times = (self._file_rows / self._fps, (self._file_rows + length) / self._fps)
        return {
            **{"episode_index": number, "tasks": [self._task], "length": length},
            **{"dataset_from_index": self._rows, "dataset_to_index": self._rows + length},
            **{f"data/{name}": value for name, value in place.items()},
            **{f"videos/{CAMERA}/{name}": value for name, value in place.items()},
            **dict(zip((f"videos/{CAMERA}/{end}_timestamp" for end in ("from", "to")), times, strict=True)),
            **{"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0},
        }

    def write_meta(self, attributes: Attributes) -> None:
        """Write the folder meta/, when everything else is written."""
        if not self._episodes:
            raise DataError("There is no episode to write; give at least one.")
        meta = self._folder / "meta"
        (self._folder / EPISODES_PATH).parent.mkdir(parents=True)
        self._parquet.write_table(self._pa.Table.from_pylist(self._episodes), self._folder / EPISODES_PATH)
        self._parquet.write_table(self._tasks(), meta / "tasks.parquet")
        stats = {n: m.as_json((3, 1, 1) if n == CAMERA else (-1,)) for n, m in self._stats.items()}
        ours = {
            "rows": self._rows,
            "attributes": dict(attributes),
            "columns": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in self._forms.items()},
            "episodes_without_last_action": self._without_action,
            "video_quality": self._quality,
        }
        for name, document in (("info", self._info()), ("stats", stats), ("lewm", ours)):
            (meta / f"{name}.json").write_text(json.dumps(document, indent=4) + "\n", encoding="utf-8")

    def _tasks(self) -> Any:
        """The table of tasks, of which there is one. LeRobot reads it with pandas, and the names from its index."""
        fields = (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        names = ("name", "field_name", "pandas_type", "numpy_type", "metadata")
        columns = [dict(zip(names, (name, name, kind, numpy, None), strict=True)) for name, kind, numpy in fields]
        pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        table = self._pa.table({"task_index": np.zeros(1, np.int64), "task": [self._task]})
        return table.replace_schema_metadata({"pandas": json.dumps(pandas)})

    def _info(self) -> dict[str, Any]:
        height, width = self._size
        video = {"height": height, "width": width, "codec": Mp4Writer.codec, "pix_fmt": self._video.pixel_format}
        video |= {"is_depth_map": False, "fps": self._fps, "channels": 3}
        features: dict[str, Any] = {
            CAMERA: {
                **{"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"]},
                "info": {f"video.{name}": value for name, value in video.items()} | {"has_audio": False},
            }
        }
        for name, (dtype, shape) in self._forms.items():
            features[_feature(name)] = {"dtype": dtype, "shape": [int(np.prod(shape))], "names": None}
        for name in INDICES:
            features[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
        return {
            **{"codebase_version": VERSION, "robot_type": None, "fps": self._fps, "features": features},
            **{"total_episodes": len(self._episodes), "total_frames": self._rows, "total_tasks": 1},
            **{"chunks_size": CHUNK_FILES, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200},
            **{"splits": {"train": f"0:{len(self._episodes)}"}, "data_path": DATA_PATH, "video_path": VIDEO_PATH},
        }


def _feature(name: str) -> str:
    """What LeRobot calls one of our columns."""
    return FEATURES.get(name, name)
