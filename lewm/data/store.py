"""Episodes on disk: one HDF5 file in the layout of the official LeWorldModel datasets.

One dataset per column over the rows of all episodes, N rows and E episodes in all:

    pixels       uint8    (N, R, R, 3)       gzip, one chunk per frame
    action       float32  (N, action_dim)    taken at this row; NaN in the last row of each episode
    proprio      float32  (N, P)             what the agent senses of itself: the attribute of that name says what
    state        float64  (N, state_dim)     the environment's full state: for evaluation, never for training
    success      uint8    (N,)               whether this state counts as the goal of its episode; likewise
    episode_idx  int64    (N,)
    step_idx     int64    (N,)
    ep_len       int32    (E,)               rows of each episode
    ep_offset    int64    (E,)               its first row

A file may have the frames of some rows only, F < N of them. It then says which:

    pixels       uint8    (F, R, R, 3)
    frame_row    int64    (F,)               the row of each frame, increasing

and its attribute ``frame_stride`` is the number of rows between two frames of an episode.

Files are written whole or not at all, and the same episodes give the same bytes (on the same kind of processor, to
which the compressor adapts). Frames are compressed with a checksum each; ``lewm.data.hdf5`` has those of the rest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lewm.data.chunks import ChunkError, FrameChunks, chunk_sizes, filters_of, write_frame, write_stored
from lewm.data.hdf5 import (
    FRAME_SIZES,
    ColumnSum,
    checksum,
    compare,
    naming_damage,
    open_for_reading,
    read_attributes,
    read_checksums,
    read_whole,
)
from lewm.data.new_file import (
    FORMAT,
    FORMAT_VERSION,
    NUMBERING,
    Attributes,
    Columns,
    check_episode,
    grow_pixels,
    like,
    new_file,
    write_numbering,
    write_sums,
)
from lewm.errors import DataError
from lewm.types import Array

DIGESTED_FRAMES = 64
MERGED_FRAMES = 64  # that are looked at together

NOT_PER_ROW = ("pixels", "frame_row", "ep_len", "ep_offset")


class EpisodeStore(contextlib.AbstractContextManager["EpisodeStore"]):
    """A dataset file, open for reading and checked: what is wrong with it is said here, not mid-training.

    Files without our root attributes (the official datasets) are welcome; their ``environment`` is None.
    ``attributes`` are the root's, ``columns`` the names of those with one entry per row besides pixels, ``lengths``
    and ``offsets`` int64 (E,) of the episodes, ``actions`` float32 (N, action_dim). There are ``num_rows`` (N) rows and
    ``num_frames`` (F) frames; ``frame_rows`` int64 (F,) has the row of each frame, ``frame_stride`` the number of rows
    between two of them.
    """

    noun, frame_type = "frames", np.dtype(np.uint8)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # HDF5 is not thread-safe: every access through it needs this lock. Compressed frames are read past it.
        self._lock = threading.Lock()
        self._file = open_for_reading(self.path)
        try:
            with naming_damage(self.path):
                self.attributes = self._checked_attributes()
                self._checksums = read_checksums(self._file)
                self._pixels = self._checked_pixels()
                self.num_frames, self.resolution = self._pixels.shape[:2]
                self.frame_shape: tuple[int, ...] = (self.resolution, self.resolution, 3)
                self.num_rows = self._checked_rows()
                self.frame_rows, self.frame_stride = self._checked_frame_rows()
                self.lengths, self.offsets = self._checked_episodes()
                self._check_spacing()
                self.actions = self._checked_actions()
                self.columns = self._checked_columns()
                self._chunks = self._checked_chunks()
        except BaseException:
            self._file.close()
            raise
        self.environment: str | None = self.attributes.get("environment")
        self.num_episodes = len(self.lengths)
        self.action_dim: int = self.actions.shape[1]

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def read_column(self, name: str) -> Array:
        """A whole column, (N, ...), in the file's type; not for pixels, which may not fit in memory."""
        with self._lock, naming_damage(self.path):
            return self._read(name)

    def _read(self, name: str) -> Array:
        column = read_whole(self._column(name))
        compare(self._checksums, name, column)
        return column

    def frames_at(self, rows: Array) -> Array:
        """Which of the F frames are those of rows int (...): int64 (...); a row without one is an error."""
        outside = (rows < 0) | (rows >= self.num_rows)
        if outside.any():
            raise DataError(f"{self.path} has no row {rows[outside][0]}: its rows are 0 to {self.num_rows - 1}.")
        if self.num_frames == self.num_rows:
            return rows
        frames = np.searchsorted(self.frame_rows, rows)
        missing = np.append(self.frame_rows, -1)[frames] != rows
        if missing.any():
            row = rows[missing][0]
            raise DataError(f"{self.path} has no frame at row {row}: one row in {self.frame_stride} has one.")
        return frames

    def read_frames(self, rows: Array, out: Array | None = None) -> Array:
        """Frames of rows int (n,), uint8 (n, R, R, 3); into ``out``, if given.

        Threads may share it: compressed frames are fetched and inflated without a lock.
        """
        if out is None:
            out = np.empty((len(rows), *self.frame_shape), np.uint8)
        check_place(rows, out, (*self.frame_shape,), self.frame_type)
        frames = self.frames_at(rows)
        try:
            if self._chunks:
                with naming_damage(self.path):
                    self._chunks.read(frames, out)
            else:
                self._read_through_hdf5(frames, out)
        except ChunkError as error:
            row = self.frame_rows[error.frame]
            problem = f"the frame at row {row} of {self.num_rows} cannot be read ({error})"
            raise DataError(f"{self.path} is damaged: {problem}. Collect or download it again.") from error
        return out

    def _read_through_hdf5(self, frames: Array, out: Array) -> None:
        for place, frame in zip(out, frames.tolist(), strict=True):
            try:
                with self._lock:
                    place[:] = self._pixels[frame]
            except (OSError, RuntimeError, ValueError) as error:
                raise ChunkError(frame, str(error)) from error

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of what tells this dataset from any other, in seconds even for a million frames.

        That is the lengths of its episodes, their actions, the rows and the size of its frames, how many bytes each
        chunk of them takes in the file, and the pixels of at most ``DIGESTED_FRAMES``, evenly spaced.
        """
        content = hashlib.sha256()
        chosen = self.frame_rows[np.linspace(0, self.num_frames - 1, min(DIGESTED_FRAMES, self.num_frames)).astype(int)]
        with naming_damage(self.path):
            sizes = self._chunks.sizes if self._chunks else chunk_sizes(self._pixels)
        parts = (self.lengths, self.actions, self.frame_rows, sizes, self.read_frames(chosen))
        for part in parts:
            content.update(f"{part.dtype} {part.shape}".encode() + part.tobytes())
        return content.hexdigest()

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
        missing = [code for code in filters_of(column) if not h5py.h5z.filter_avail(code)]
        self._require(not missing, f"has {name} compressed by HDF5 filter {missing}: run `pip install hdf5plugin`.")
        return column

    def _checked_attributes(self) -> dict[str, Any]:
        attributes = read_attributes(self._file)
        version = attributes.get("format_version", 0) if attributes.get("format") == FORMAT else 0
        known = isinstance(version, int) and version <= FORMAT_VERSION
        self._require(known, f"has format version {version}, unknown here. Upgrade lewm.")
        return attributes

    def _checked_pixels(self) -> h5py.Dataset:
        pixels = self._column("pixels")
        fits = pixels.dtype == np.uint8 and pixels.ndim == 4 and pixels.shape[2:] == (pixels.shape[1], 3)
        self._require_form(pixels, fits, "uint8 of shape (rows, R, R, 3)")
        return pixels

    def _checked_rows(self) -> int:
        """How many there are, N: frames are only believed to exist where as many rows have an action."""
        if "frame_row" in self._file:
            return len(self._column("action"))
        actions = self._column("action")
        form = f"floating point of shape ({self.num_frames}, action size)"
        self._require_form(actions, actions.shape[:1] == (self.num_frames,), form)
        return self.num_frames

    def _checked_frame_rows(self) -> tuple[Array, int]:
        """The row of each frame, int64 (F,), and the number of rows between two of them."""
        if "frame_row" not in self._file:
            return np.arange(self.num_rows), 1
        column, stride = self._column("frame_row"), self.attributes.get("frame_stride", 0)
        fits = column.shape == (self.num_frames,) and column.dtype.kind in "iu"
        self._require_form(column, fits, f"one integer for each of the {self.num_frames} frames")
        rows = self._read("frame_row").astype(np.int64)
        ordered = (np.diff(rows, prepend=-1, append=self.num_rows) > 0).all()
        self._require(ordered, f"is damaged: frame_row must increase within the {self.num_rows} rows. Make it again.")
        self._require(isinstance(stride, int) and stride > 0, f"has frame_stride {stride!r}, not a positive number.")
        return rows, stride

    def _checked_episodes(self) -> tuple[Array, Array]:
        """Lengths and offsets, int64 (E,) each: episodes must tile the rows without gap or overlap."""
        columns = [self._column(name) for name in ("ep_len", "ep_offset")]
        for column in columns:
            self._require_form(column, column.ndim == 1 and column.dtype.kind in "iu", "one integer per episode")
        lengths, offsets = (self._read(name).astype(np.int64) for name in ("ep_len", "ep_offset"))
        self._require(len(lengths), "has no episodes. Collect some with `lewm collect`.")
        tiled = (lengths > 0).all() and np.array_equal([*offsets, self.num_rows], np.cumsum([0, *lengths]))
        self._require(tiled, f"is damaged: ep_len and ep_offset must tile the {self.num_rows} rows. Make it again.")
        return lengths, offsets

    def _check_spacing(self) -> None:
        """Frames of an episode lie ``frame_stride`` rows apart, as its attribute says."""
        episodes = np.searchsorted(self.offsets, self.frame_rows, side="right")
        uneven = (np.diff(self.frame_rows) != self.frame_stride) & (np.diff(episodes) == 0)
        row = self.frame_rows[np.argmax(uneven)] if uneven.any() else None
        self._require(row is None, f"is damaged: after row {row}, the next frame is not {self.frame_stride} rows on.")

    def _checked_actions(self) -> Array:
        """All actions, float32 (N, action_dim); only the last row of an episode may be without one."""
        column = self._column("action")
        fits = column.dtype.kind == "f" and column.ndim == 2 and len(column) == self.num_rows and column.shape[1] > 0
        self._require_form(column, fits, f"floating point of shape ({self.num_rows}, action size)")
        actions = self._read("action").astype(np.float32)
        missing = np.asarray(~np.isfinite(actions).all(axis=1))
        missing[self.offsets + self.lengths - 1] = False
        row = int(np.argmax(missing))
        episode = int(np.searchsorted(self.offsets, row, side="right")) - 1
        step = f"step {row - self.offsets[episode]} of {self.lengths[episode]}"
        self._require(not missing[row], f"has no finite action in episode {episode} at {step}. Repair or drop it.")
        self._require(np.isfinite(actions).all(axis=1).any(), "has no finite action at all. Give some.")
        return actions

    def _checked_columns(self) -> tuple[str, ...]:
        names = tuple(sorted(set(self._file) - set(NOT_PER_ROW)))
        for column in map(self._column, names):
            has_all_rows = column.shape[:1] == (self.num_rows,)
            self._require_form(column, has_all_rows, f"one entry for each of the {self.num_rows} rows")
        return names

    def _checked_chunks(self) -> FrameChunks | None:
        """How to read frames past HDF5; None: they are not stored as lewm does it."""
        expected = self._checksums.get(FRAME_SIZES)
        if FrameChunks.fits(self._pixels):
            return FrameChunks(self._pixels, expected)
        self._require(expected is None, "is damaged: its frames are not stored as they were written. Make it again.")
        return None


def check_place(rows: Array, out: Array, frame_shape: tuple[int, ...], kind: np.dtype[Any]) -> None:
    """Refuse an array for the frames of rows int (n,) that is not (n, *frame_shape): they would go beyond its end."""
    wanted = (len(rows), *frame_shape)
    if out.shape != wanted or out.dtype != kind:
        raise ValueError(f"The frames of {len(rows)} rows need {kind} {wanted} to go to, got {out.dtype} {out.shape}.")


def write_episodes(path: str | Path, episodes: Iterable[Columns], attributes: Attributes) -> None:
    """Write a complete file, atomically; ``episodes`` is consumed one at a time.

    An episode is columns (L, ...): ``pixels``, ``action`` and any others, the same in all of them. Numbering is added
    here. One that has the frames of some steps only says which: ``frame_step`` int (F,), increasing, for pixels
    (F, R, R, 3); ``attributes`` then name the ``frame_stride``. They are the root's, besides format and version.
    """
    with new_file(Path(path), _check_readable) as file:
        small, lengths, frame_rows, rows, form = list[Columns](), list[int](), list[Array](), 0, dict[str, object]()
        for episode in episodes:
            columns = {name: column for name, column in episode.items() if name not in ("pixels", "frame_step")}
            form = check_episode(len(small), episode, form)
            steps = episode.get("frame_step", np.arange(len(episode["action"])))
            pixels, start = grow_pixels(file, *episode["pixels"].shape[:2])
            for index, frame in enumerate(episode["pixels"], start):
                write_frame(pixels, index, frame)
            frame_rows.append(steps + rows)
            small.append(columns)
            lengths.append(len(columns["action"]))
            rows += lengths[-1]
        sums = write_numbering(file, lengths, np.concatenate([*frame_rows, np.zeros(0, np.int64)]), attributes)
        for name in small[0]:
            column = np.concatenate([columns[name] for columns in small])
            file.create_dataset(name, data=column, track_times=False)
            sums[name] = checksum(column)
        write_sums(file, sums)


def merge_files(parts: Sequence[str | Path], path: str | Path, attributes: Attributes) -> None:
    """Concatenate files that were made here into one, atomically; ``path`` may be among ``parts``.

    One part is looked at at a time, so neither their number nor their size is limited by memory or open files.
    """
    with new_file(Path(path), _check_readable) as file:
        lengths, frame_rows, columns = list[int](), list[Array](), dict[str, h5py.Dataset]()
        for part in parts:  # first all numbering, so that every column can be made in its final size
            with EpisodeStore(part) as store:
                store._require(store._chunks, "stores its frames in another way. Collect it again.")
                frame_rows.append(store.frame_rows + sum(lengths))
                lengths += store.lengths.tolist()
        sums = write_numbering(file, lengths, np.concatenate([*frame_rows, np.zeros(0, np.int64)]), attributes)
        row, growing = 0, dict[str, ColumnSum]()
        for part in parts:
            with EpisodeStore(part) as store:
                names = [name for name in store.columns if name not in NUMBERING]
                columns = columns or {name: like(file, store._column(name), sum(lengths)) for name in names}
                alike = list(columns) == names and (row == 0 or file["pixels"].shape[1] == store.resolution)
                store._require(alike, "differs from the files before it in columns or resolution. Collect it again.")
                for name in names:
                    part_of_column = store.read_column(name)
                    columns[name][row : row + store.num_rows] = part_of_column
                    growing.setdefault(name, ColumnSum()).add(part_of_column)
                _append_stored_frames(file, store)
                row += store.num_rows
        write_sums(file, sums | {name: each.hexdigest() for name, each in growing.items()})


def _append_stored_frames(file: h5py.File, store: EpisodeStore) -> None:
    """Copy a store's frames as they are, once it is known that they can be read: the copy may take their place."""
    assert store._chunks
    pixels, start = grow_pixels(file, store.num_frames, store.resolution)
    for first in range(0, store.num_frames, MERGED_FRAMES):
        rows = store.frame_rows[first : first + MERGED_FRAMES]
        store.read_frames(rows)
        for frame in range(first, first + len(rows)):
            write_stored(pixels, start + frame, *store._chunks.stored(frame))


def _check_readable(path: Path) -> None:
    EpisodeStore(path).close()
