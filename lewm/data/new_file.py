"""A dataset file while it is written: episode by episode, whole or not at all. ``lewm.data.store`` has its layout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from lewm.data.chunks import chunk_sizes
from lewm.data.hdf5 import FRAME_SIZES, checksum, write_checksums
from lewm.errors import DataError
from lewm.files import completing
from lewm.types import Array
from lewm.version import __version__

FORMAT = "lewm-episodes"
FORMAT_VERSION = 2  # 1: every row has a frame, no column is called success

# Besides pixels: what the store itself writes. The rest is the collector's.
NUMBERING = ("episode_idx", "step_idx", "frame_row", "ep_len", "ep_offset")

Columns = Mapping[str, Array]
Attributes = Mapping[str, str | int | float]


def check_episode(number: int, episode: Columns, before: Mapping[str, object]) -> dict[str, object]:
    """Refuse an episode that no file can hold, or not beside those before it.

    before: what this function returned for one of them; empty, if it is the first.
    """
    which = f"Episode {number} cannot be written: "
    for name, column in episode.items():
        if not name or "/" in name or "\0" in name or name == "." or name in NUMBERING:
            raise DataError(f"{which}{name!r} cannot be the name of a column. Rename it.")
        if column.dtype.kind not in "biuf" or column.ndim == 0:
            raise DataError(f"{which}{name} must hold numbers, a row each, got {column.dtype} {column.shape}. Drop it.")
    action, pixels = (episode.get(name, np.zeros(0)) for name in ("action", "pixels"))
    if action.dtype.kind != "f" or action.ndim != 2 or not action.size:
        raise DataError(f"{which}action must be floating point (rows, size), got {action.dtype} {action.shape}.")
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[2:] != (pixels.shape[1], 3) or not pixels.shape[1]:
        raise DataError(f"{which}pixels must be uint8 (rows, R, R, 3), got {pixels.dtype} {pixels.shape}.")
    steps = episode.get("frame_step", np.arange(len(action)))
    counts = {name: len(column) for name, column in episode.items() if name not in ("pixels", "frame_step")}
    if len(set(counts.values())) != 1 or len(steps) != len(pixels):
        found = ", ".join(f"{name} {count}" for name, count in ({"pixels": len(pixels)} | counts).items())
        raise DataError(f"{which}its columns must be equally long, got rows {found}.")
    if (np.diff(steps, prepend=-1, append=len(action)) <= 0).any():
        raise DataError(f"{which}frame_step must increase within its {len(action)} rows.")
    form = {name: (str(column.dtype), column.shape[1:]) for name, column in episode.items()}
    for name in {**before, **form} if before else ():
        if form.get(name) != before.get(name):
            was, now = (each.get(name, "nothing") for each in (before, form))
            raise DataError(f"{which}{name} is {now} there, and {was} in those before it. Make them alike.")
    return dict(form)


def check_actions(number: int, actions: Array) -> None:
    """Refuse an episode's actions (L, action_dim) if one is not finite, but for the last."""
    bad = ~np.isfinite(actions).all(axis=1)
    if bad[:-1].any():
        raise DataError(f"Episode {number} has no finite action at step {np.argmax(bad)}. Repair or drop it.")


@contextlib.contextmanager
def new_file(path: Path, check: Callable[[Path], object]) -> Iterator[h5py.File]:
    """A new HDF5 file that takes its name when it is complete, on disk and passes ``check``; no trace otherwise."""
    with completing(path) as temporary:
        file = h5py.File(temporary, "w")
        try:
            yield file
            file.flush()
            file.close()
            _check_as(path, temporary, check)
        except BaseException as error:
            _give_up(file)
            if isinstance(error, RuntimeError):  # how HDF5 reports a write that fails on closing
                raise OSError(str(error)) from error
            raise


def _check_as(path: Path, temporary: Path, check: Callable[[Path], object]) -> None:
    """Look at a file before it takes its name, by which it is called if something is wrong."""
    try:
        check(temporary)
    except DataError as error:
        raise DataError(f"{str(error).replace(str(temporary), str(path))} Nothing was written.") from error


def _give_up(file: h5py.File) -> None:
    """Close a file that could not be written, or is not to be."""
    if not file:  # it is closed
        return
    # HDF5 writes what it holds on closing, and crashes at exit if it could not. So the rest of this file goes where
    # there is always room; that it is no proper file is expected.
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), file.id.get_vfd_handle())
    with contextlib.suppress(OSError, RuntimeError):
        file.close()


def grow_pixels(file: h5py.File, count: int, resolution: int) -> tuple[h5py.Dataset, int]:
    """The pixels of ``file`` with room for ``count`` more frames, and the row of the first of them."""
    if "pixels" not in file:
        frame = (resolution, resolution, 3)
        layout = {"shape": (0, *frame), "maxshape": (None, *frame), "chunks": (1, *frame), "dtype": np.uint8}
        file.create_dataset("pixels", **layout, compression="gzip", track_times=False)
    start = len(file["pixels"])
    file["pixels"].resize(start + count, axis=0)
    return file["pixels"], start


def write_numbering(
    file: h5py.File, lengths: Sequence[int], frame_rows: Array, attributes: Attributes
) -> dict[str, str]:
    """What follows from the episodes' lengths and the frames' rows int (F,), and the attributes; returns checksums."""
    if not lengths:
        raise DataError("There is no episode to write; give at least one.")
    ep_len = np.asarray(lengths, np.int64)
    ep_offset, rows = np.cumsum(ep_len) - ep_len, np.arange(ep_len.sum())
    columns = {"ep_len": ep_len.astype(np.int32), "ep_offset": ep_offset}
    columns["episode_idx"] = np.repeat(np.arange(len(ep_len)), ep_len)
    columns["step_idx"] = rows - np.repeat(ep_offset, ep_len)
    if not np.array_equal(frame_rows, rows):
        columns["frame_row"] = frame_rows.astype(np.int64)
    for name, column in columns.items():
        file.create_dataset(name, data=column, track_times=False)  # times would make equal content unequal
    file.attrs.update({**attributes, "format": FORMAT, "format_version": FORMAT_VERSION, "lewm_version": __version__})
    return {name: checksum(column) for name, column in columns.items()}


def write_sums(file: h5py.File, sums: dict[str, str]) -> None:
    """Add the checksums of columns, and that of the bytes that each frame takes."""
    write_checksums(file, sums | {FRAME_SIZES: checksum(chunk_sizes(file["pixels"]))})


def like(file: h5py.File, column: h5py.Dataset, rows: int) -> h5py.Dataset:
    """A new column of the same kind with so many rows."""
    # Given its place at once, not with the first part: the same content is the same file, however it was parted.
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    shape, name = (rows, *column.shape[1:]), column.name[1:]
    return file.create_dataset(name, shape, column.dtype, dcpl=early, track_times=False)
