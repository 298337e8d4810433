"""Episodes on disk: one HDF5 file in the layout of the official LeWorldModel datasets.

One dataset per column over the rows of all episodes, N rows and E episodes in all:

    pixels       uint8    (N, R, R, 3)       gzip, one chunk per frame
    action       float32  (N, action_dim)    taken at this row's frame; NaN in the last row of each episode
    proprio      float32  (N, ...)           what the agent senses of itself
    state        float64  (N, state_dim)     the environment's full state: for evaluation, never for training
    episode_idx  int64    (N,)
    step_idx     int64    (N,)
    ep_len       int32    (E,)               rows of each episode
    ep_offset    int64    (E,)               its first row

Files are written whole or not at all, and the same episodes give the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lewm.errors import DataError
from lewm.types import Array
from lewm.version import __version__

FORMAT = "lewm-episodes"
FORMAT_VERSION = 1

# Measured on TwoRoom: a fifth smaller than level 1, and decodes as fast; from level 4 on, writing takes twice the time.
GZIP_LEVEL = 3

Columns = Mapping[str, Array]
Attributes = Mapping[str, str | int]


class EpisodeStore(contextlib.AbstractContextManager["EpisodeStore"]):
    """A dataset file, open for reading and checked: what is wrong with it is said here, not mid-training.

    Files without our root attributes (the official datasets) are welcome; their ``environment`` is None.
    ``attributes`` are the root's, ``columns`` the names of those with one entry per row, ``lengths`` and ``offsets``
    int64 (E,) of the episodes, ``actions`` float32 (N, action_dim).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # HDF5 is not thread-safe: every access to the file goes through this lock.
        self._lock = threading.Lock()
        self._file = _open_for_reading(self.path)
        try:
            self.attributes = self._checked_attributes()
            self._pixels = self._checked_pixels()
            self.num_frames, self.resolution = self._pixels.shape[:2]
            self.lengths, self.offsets = self._checked_episodes()
            self.actions = self._checked_actions()
            self.columns = self._checked_columns()
        except BaseException:
            self._file.close()
            raise
        self.environment: str | None = self.attributes.get("environment")
        self.num_episodes = len(self.lengths)
        self.action_dim: int = self.actions.shape[1]
        one_chunk_per_frame = self._pixels.chunks == (1, *self._pixels.shape[1:])
        self._has_gzip_frames = one_chunk_per_frame and _filters(self._pixels) == [h5py.h5z.FILTER_DEFLATE]

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def read_column(self, name: str) -> Array:
        """A whole column, (N, ...), in the file's type; not for pixels, which may not fit in memory."""
        with self._lock:
            return np.asarray(self._column(name)[:])

    def read_frames(self, rows: Array) -> Array:
        """Frames of rows int (n,), uint8 (n, R, R, 3). Threads may share it: only fetching the bytes is serialised."""
        frames = np.empty((len(rows), self.resolution, self.resolution, 3), np.uint8)
        for frame, row in zip(frames, rows.tolist(), strict=True):
            try:
                frame[:] = self._read_frame(row)
            except (OSError, RuntimeError, ValueError, zlib.error) as error:
                problem = f"the frame at row {row} of {self.num_frames} cannot be read ({error})"
                raise DataError(f"{self.path} is damaged: {problem}. Collect or download it again.") from error
        return frames

    def _read_frame(self, row: int) -> Array:
        with self._lock:
            if not self._has_gzip_frames:
                return np.asarray(self._pixels[row])
            is_uncompressed, stored = self._pixels.id.read_direct_chunk((row, 0, 0, 0))
        raw = stored if is_uncompressed else zlib.decompress(stored)
        return np.frombuffer(raw, np.uint8).reshape(self._pixels.shape[1:])

    def check_environment(self, gym_id: str, action_dim: int) -> None:
        """Refuse data of another environment, or whose actions have another size."""
        found, size = self.environment, self.action_dim
        self._require(found in (None, gym_id), f"holds episodes of {found}, not of {gym_id}. Choose other data.")
        self._require(size == action_dim, f"has actions of {size} numbers, but {gym_id} takes {action_dim}.")

    def _require(self, ok: object, otherwise: str) -> None:
        if not ok:
            raise DataError(f"{self.path} {otherwise}")

    def _require_form(self, column: h5py.Dataset, ok: object, form: str) -> None:
        self._require(ok, f"is unfit: {column.name[1:]} must be {form}, got {column.dtype} {column.shape}. Convert it.")

    def _column(self, name: str) -> h5py.Dataset:
        column = self._file.get(name)
        has_it = isinstance(column, h5py.Dataset)
        self._require(has_it, f"has no column {name!r}, only {', '.join(self._file) or 'nothing'}. Add it first.")
        missing = [code for code in _filters(column) if not h5py.h5z.filter_avail(code)]
        self._require(not missing, f"has {name} compressed by HDF5 filter {missing}: run `pip install hdf5plugin`.")
        return column

    def _checked_attributes(self) -> dict[str, Any]:
        attributes = {k: v.item() if isinstance(v, np.generic) else v for k, v in self._file.attrs.items()}
        version = attributes.get("format_version", 0) if attributes.get("format") == FORMAT else 0
        self._require(version <= FORMAT_VERSION, f"has format version {version}, unknown here. Upgrade lewm.")
        return attributes

    def _checked_pixels(self) -> h5py.Dataset:
        pixels = self._column("pixels")
        fits = pixels.dtype == np.uint8 and pixels.ndim == 4 and pixels.shape[2:] == (pixels.shape[1], 3)
        self._require_form(pixels, fits, "uint8 of shape (rows, R, R, 3)")
        return pixels

    def _checked_episodes(self) -> tuple[Array, Array]:
        """Lengths and offsets, int64 (E,) each: episodes must tile the rows without gap or overlap."""
        columns = [self._column(name) for name in ("ep_len", "ep_offset")]
        for column in columns:
            self._require_form(column, column.ndim == 1 and column.dtype.kind in "iu", "one integer per episode")
        lengths, offsets = (column[:].astype(np.int64) for column in columns)
        self._require(len(lengths), "has no episodes. Collect some with `lewm collect`.")
        tiled = (lengths > 0).all() and np.array_equal([*offsets, self.num_frames], np.cumsum([0, *lengths]))
        self._require(tiled, f"is damaged: ep_len and ep_offset must tile the {self.num_frames} rows. Make it again.")
        return lengths, offsets

    def _checked_actions(self) -> Array:
        """All actions, float32 (N, action_dim); only the last row of an episode may be without one."""
        column = self._column("action")
        fits = column.dtype.kind == "f" and column.ndim == 2 and len(column) == self.num_frames and column.shape[1] > 0
        self._require_form(column, fits, f"floating point of shape ({self.num_frames}, action size)")
        actions = column[:].astype(np.float32)
        missing = ~np.isfinite(actions).all(axis=1)
        missing[self.offsets + self.lengths - 1] = False
        row = int(np.argmax(missing))
        episode = int(np.searchsorted(self.offsets, row, side="right")) - 1
        step = f"step {row - self.offsets[episode]} of {self.lengths[episode]}"
        self._require(not missing[row], f"has no finite action in episode {episode} at {step}. Repair or drop it.")
        return actions

    def _checked_columns(self) -> tuple[str, ...]:
        names = tuple(sorted(set(self._file) - {"ep_len", "ep_offset"}))
        for column in map(self._column, names):
            has_all_rows = column.shape[:1] == (self.num_frames,)
            self._require_form(column, has_all_rows, f"one entry for each of the {self.num_frames} rows of pixels")
        return names


def write_episodes(path: str | Path, episodes: Iterable[Columns], attributes: Attributes) -> None:
    """Write a complete file, atomically; ``episodes`` is consumed one at a time.

    An episode is columns (L, ...): ``pixels``, ``action`` and any others, the same in all of them. Numbering is added
    here. ``attributes`` are the root's, besides format and version.
    """
    with _atomic_file(Path(path)) as file:
        small: list[Columns] = []
        for episode in episodes:
            if len({len(column) for column in episode.values()}) != 1:
                raise DataError(f"The columns of episode {len(small)} must be equally long; nothing was written.")
            pixels, start = _grow_pixels(file, *episode["pixels"].shape[:2])
            pixels[start:] = episode["pixels"]
            small.append({name: column for name, column in episode.items() if name != "pixels"})
        _write_the_rest(file, small, [len(episode["action"]) for episode in small], attributes)


def merge_files(parts: Sequence[str | Path], path: str | Path, attributes: Attributes) -> None:
    """Concatenate files that were made here into one, atomically; ``path`` may be among ``parts``."""
    with _atomic_file(Path(path)) as file:
        small, lengths = list[Columns](), list[int]()
        for part in parts:
            with EpisodeStore(part) as store:
                store._require(store._has_gzip_frames, "stores its frames in another way. Collect it again.")
                names = [name for name in store.columns if name not in ("pixels", "episode_idx", "step_idx")]
                small.append({name: store.read_column(name) for name in names})
                lengths += store.lengths.tolist()
                pixels, start = _grow_pixels(file, store.num_frames, store.resolution)
                alike = pixels.shape[1] == store.resolution and list(small[0]) == names
                store._require(alike, "differs from the files before it in columns or resolution. Collect it again.")
                for row in range(store.num_frames):  # copied as they are, without inflating them
                    is_uncompressed, stored = store._pixels.id.read_direct_chunk((row, 0, 0, 0))
                    pixels.id.write_direct_chunk((start + row, 0, 0, 0), stored, filter_mask=is_uncompressed)
        _write_the_rest(file, small, lengths, attributes)


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[h5py.File]:
    """A new HDF5 file that takes its name only when it is complete and on disk; no trace of it otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = h5py.File(temporary, "w")
        try:
            yield file
            file.flush()
        except BaseException:
            # HDF5 cannot give up a file: it writes what it holds on closing, and crashes at exit if it could not.
            # So the rest of this one goes where there is always room; that it is no proper file is expected.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), file.id.get_vfd_handle())
            with contextlib.suppress(OSError, RuntimeError):
                file.close()
            raise
        file.close()
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        # HDF5 reports a failed write as OSError, or as RuntimeError when the write happens on closing.
        if not isinstance(error, OSError | RuntimeError):
            raise
        is_full = os.strerror(errno.ENOSPC) in str(error)
        room = f"; {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there" if is_full else ""
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise DataError(f"{path} cannot be written ({reason}){room}. Make room, or choose another place.") from error


def _grow_pixels(file: h5py.File, count: int, resolution: int) -> tuple[h5py.Dataset, int]:
    """The pixels of ``file`` with room for ``count`` more frames, and the row of the first of them."""
    if "pixels" not in file:
        frame = (resolution, resolution, 3)
        layout = {"shape": (0, *frame), "maxshape": (None, *frame), "chunks": (1, *frame), "dtype": np.uint8}
        file.create_dataset("pixels", **layout, compression="gzip", compression_opts=GZIP_LEVEL, track_times=False)
    start = len(file["pixels"])
    file["pixels"].resize(start + count, axis=0)
    return file["pixels"], start


def _write_the_rest(file: h5py.File, pieces: Sequence[Columns], lengths: Sequence[int], attributes: Attributes) -> None:
    """Everything but pixels: the other columns, the numbering that follows from the lengths, the attributes."""
    if not lengths:
        raise DataError("There is no episode to write; give at least one.")
    ep_len = np.asarray(lengths, np.int64)
    ep_offset = np.cumsum(ep_len) - ep_len
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    columns["episode_idx"] = np.repeat(np.arange(len(ep_len), dtype=np.int64), ep_len)
    columns["step_idx"] = np.arange(ep_len.sum(), dtype=np.int64) - np.repeat(ep_offset, ep_len)
    columns |= {"ep_len": ep_len.astype(np.int32), "ep_offset": ep_offset}
    for name, column in columns.items():
        file.create_dataset(name, data=column, track_times=False)  # times would make equal content unequal
    file.attrs.update({**attributes, "format": FORMAT, "format_version": FORMAT_VERSION, "lewm_version": __version__})


def _open_for_reading(path: Path) -> h5py.File:
    if not path.is_file():
        raise DataError(f"There is no dataset file at {path}. Check the path, or make one with `lewm collect`.")
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # brings Blosc, which the official files are compressed with
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} is not a whole HDF5 file ({error}). Collect or download it again.") from error


def _filters(dataset: h5py.Dataset) -> list[int]:
    """HDF5's codes of the compression that a dataset is stored with."""
    properties = dataset.id.get_create_plist()
    return [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
