"""`lewm data check`: is a dataset file whole, and does it hold what one expects?

Everything is read. What is wrong is collected, not raised, so that one look shows all of it: a file that
``EpisodeStore`` refuses is still examined as far as HDF5 can open it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lewm.data.chunks import filters_of
from lewm.data.hdf5 import checksum, naming_damage, open_for_reading, read_attributes, read_checksums, read_whole
from lewm.data.new_file import Columns
from lewm.data.store import NOT_PER_ROW, EpisodeStore
from lewm.data.untrusted import ERRORS
from lewm.errors import DataError, FileError
from lewm.files import PICTURE, check_output, completing
from lewm.machine import cores
from lewm.types import Array, ProgressCallback

BLOCK_FRAMES = 64  # that a thread decodes at a time
SHOWN_PROBLEMS = 20  # of one kind; the others are counted
SHEET_EPISODES, SHEET_FRAMES, TILE, GAP = 6, 8, 112, 4

ReadFrames = Callable[[Array], Array]  # indices of stored frames int (n,) -> uint8 (n, R, R, 3)


@dataclass(frozen=True)
class CheckReport:
    """What a dataset holds, and what is wrong with it.

    problems: one sentence each; none: the file is sound.
    facts: names and values, ready to print.
    actions: per action dimension mean, std, min, max and the share of actions at either of these two, (action_dim, 5).
    contact_sheet: a sentence on where it is, or why it is nowhere; empty, if none was asked for.
    """

    problems: tuple[str, ...]
    facts: dict[str, str]
    actions: Array
    contact_sheet: str


@dataclass(frozen=True)
class _Scan:
    """What reading frames found. unreadable: (frame, why).  duplicates: equal to the frame before in their episode."""

    frames: int = 0
    duplicates: int = 0
    uniform: int = 0
    unreadable: tuple[tuple[int, str], ...] = ()

    def __add__(self, other: _Scan) -> _Scan:
        sums = (self.frames + other.frames, self.duplicates + other.duplicates, self.uniform + other.uniform)
        return _Scan(*sums, self.unreadable + other.unreadable)


def check(
    path: str | Path, contact_sheet: Path | None = None, on_progress: ProgressCallback | None = None
) -> CheckReport:
    """Read a whole dataset file and report on it; draw a contact sheet if told where. ``on_progress`` counts frames.

    Raises only where there is nothing to examine (no file, not HDF5, no frames in it), or if the sheet would take
    something else's place. A place that cannot be written is no reason not to read.
    """
    path = Path(path)
    refusal = ""
    if contact_sheet:
        check_output(contact_sheet, PICTURE, [path])
    with contextlib.ExitStack() as stack, naming_damage(path):
        try:
            store = stack.enter_context(EpisodeStore(path))
        except (DataError, OSError) as error:
            store, refusal = None, str(error)
        file = stack.enter_context(_opened(path, refusal))
        columns, unreadable = _read_columns(file)
        changed, sums = _compare(file, columns)
        problems = [*([refusal] if refusal else []), *(unreadable or _column_problems(columns)), *changed]

        def read(frames: Array) -> Array:
            if store:
                return store.read_frames(store.frame_rows[frames])
            return np.asarray(file["pixels"][frames[0] : frames[-1] + 1])  # they are always consecutive

        starts = _first_frames(columns, len(file["pixels"]))
        drawn = _draw_contact_sheet(contact_sheet, read, len(file["pixels"]), starts) if contact_sheet else ""
        scan = _scan(read, len(file["pixels"]), starts, on_progress)
        problems += _shortened([f"Frame {frame} cannot be read: {why}" for frame, why in scan.unreadable], "frames")
        facts = _facts(path, file, columns, scan) | {"checksums": sums}
        return CheckReport(tuple(problems), facts, _action_table(_column(columns, "action")), drawn)


def _opened(path: Path, refusal: str) -> h5py.File:
    file = open_for_reading(path)
    pixels = file.get("pixels")
    has_frames = isinstance(pixels, h5py.Dataset) and pixels.dtype == np.uint8 and pixels.ndim == 4 and len(pixels)
    if not has_frames or pixels.shape[3] != 3 or not all(map(h5py.h5z.filter_avail, filters_of(pixels))):
        file.close()
        raise DataError(refusal)
    return file


# -- columns ----------------------------------------------------------------------------------------------------------


def _read_columns(file: h5py.File) -> tuple[dict[str, Array], list[str]]:
    """Everything but pixels, and what is wrong with those whose bytes cannot be read."""
    columns, problems = {}, []
    for name, column in sorted(file.items()):
        if isinstance(column, h5py.Dataset) and name != "pixels":
            try:
                columns[name] = read_whole(column)
            except ERRORS as error:
                problems.append(f"{name} cannot be read ({error}).")
    return columns, problems


def _compare(file: h5py.File, columns: Columns) -> tuple[list[str], str]:
    """What is not as its checksum says, a sentence each; and for people what was compared."""
    try:
        sums = read_checksums(file)
    except ERRORS as error:
        return [f"Its checksums cannot be used: {error}."], "of columns and attributes, unusable"
    if not sums:
        return [], "none of columns and attributes: the file was made by others, or by an earlier version of lewm"
    changed = [name for name, column in columns.items() if name in sums and checksum(column) != sums[name]]
    known = f"of attributes and {len(sums.keys() & columns.keys())} of {len(columns)} columns"
    verdict = f"{', '.join(changed)} differ" if changed else "all match"
    return [f"{name} is not what was written: its checksum differs." for name in changed], f"{known}: {verdict}"


def _column(columns: Columns, name: str) -> Array:
    """A column, or an empty one where there is none."""
    return columns.get(name, np.zeros(0, np.int64))


def _column_problems(columns: Columns) -> list[str]:
    """What is wrong with everything but the pixels. Where the rows are not even clear, nothing else is looked at."""
    lengths, offsets = (_column(columns, name) for name in ("ep_len", "ep_offset"))
    counts = lengths.ndim == 1 and lengths.dtype.kind in "iu" and len(lengths) and (lengths > 0).all()
    if not counts or not np.array_equal(offsets, np.cumsum(lengths) - lengths):
        return [f"ep_len {lengths.shape} and ep_offset {offsets.shape} do not tile the rows with episodes."]
    rows = int(lengths.sum())
    shapes = {name: column.shape for name, column in columns.items() if name not in NOT_PER_ROW}
    unequal = {name: shape for name, shape in shapes.items() if shape[:1] != (rows,)}
    if unequal:
        return [f"{name} has shape {shape}, but the episodes have {rows} rows." for name, shape in unequal.items()]
    episodes, steps = np.repeat(np.arange(len(lengths)), lengths), np.arange(rows) - np.repeat(offsets, lengths)
    problems = [*_misnumbered(columns, "episode_idx", episodes), *_misnumbered(columns, "step_idx", steps)]
    last = offsets + lengths - 1
    for name in ("action", "state", "proprio"):
        problems += _non_finite(columns, name, episodes, steps, may_lack=last if name == "action" else last[:0])
    return problems


def _misnumbered(columns: Columns, name: str, expected: Array) -> list[str]:
    found = columns.get(name, expected)
    if np.array_equal(found, expected):
        return []
    row = int(np.argmax(found != expected))
    return [f"{name} disagrees with ep_len from row {row} on: {found[row]}, not {expected[row]}."]


def _non_finite(columns: Columns, name: str, episodes: Array, steps: Array, may_lack: Array) -> list[str]:
    """Rows of a column that hold NaN or infinity, except where none is expected."""
    values = _column(columns, name)
    if values.dtype.kind != "f":
        return []
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    bad[may_lack] = False
    found = [f"{name} is not finite in episode {episodes[row]} at step {steps[row]}." for row in np.flatnonzero(bad)]
    return _shortened(found, f"rows of {name}")


def _shortened(problems: list[str], kind: str) -> list[str]:
    more = len(problems) - SHOWN_PROBLEMS
    return [*problems[:SHOWN_PROBLEMS], f"... and {more:,} more {kind}."] if more > 0 else problems


def _first_frames(columns: Columns, count: int) -> Array:
    """Which of ``count`` stored frames are the first of their episodes, int (E,); the very first is, in any case."""
    offsets = _column(columns, "ep_offset")
    rows = columns.get("frame_row", np.arange(count))
    if rows.shape != (count,) or offsets.ndim != 1 or offsets.dtype.kind not in "iu":  # as damage has it
        return np.zeros(1, np.int64)
    first = np.unique(np.searchsorted(rows, offsets))
    return np.union1d(first[first < count], 0)


# -- frames -----------------------------------------------------------------------------------------------------------


def _scan(read: ReadFrames, count: int, starts: Array, on_progress: ProgressCallback | None) -> _Scan:
    """Decode every frame, several at a time."""
    total, threads = _Scan(), cores()
    begins = np.zeros(count, bool)
    begins[starts] = True
    blocks = [range(start, min(start + BLOCK_FRAMES, count)) for start in range(0, count, BLOCK_FRAMES)]
    with ThreadPoolExecutor(threads) as pool:
        try:
            for found in pool.map(lambda block: _scan_block(read, block, begins), blocks):
                total += found
                if on_progress:
                    on_progress(total.frames, count)
        except BaseException:  # interrupted: what has not begun need not
            pool.shutdown(cancel_futures=True)
            raise
    return total


def _scan_block(read: ReadFrames, block: range, begins: Array) -> _Scan:
    """Decode a block, and the frame before it to compare with; frame by frame where it does not go at once."""
    first = block.start if begins[block.start] else max(block.start - 1, 0)
    try:
        frames = read(np.arange(first, block.stop))
    except (DataError, *ERRORS) as error:
        if len(block) == 1:
            if first < block.start:  # is it this one that cannot be read, or the one before?
                with contextlib.suppress(DataError, *ERRORS):
                    read(np.array([block.start]))
                    return _Scan(frames=1)
            return _Scan(frames=1, unreadable=((block.start, str(error)),))
        return sum((_scan_block(read, range(i, i + 1), begins) for i in block), _Scan())
    flat = frames.reshape(len(frames), -1)
    same = (flat[1:] == flat[:-1]).all(axis=1) & ~begins[first + 1 : block.stop]
    own = flat[block.start - first :]
    uniform = (own[:, 3:] == own[:, :-3]).all(axis=1)  # every pixel is like the one before it
    return _Scan(len(block), int(same.sum()), int(uniform.sum()))


def _draw_contact_sheet(path: Path, read: ReadFrames, count: int, starts: Array) -> str:
    """A PNG of some frames, one line for each of a few episodes, from its first frame to its last. Says where it is."""
    font = ImageFont.load_default(size=12)
    shown = np.unique(np.linspace(0, len(starts) - 1, SHEET_EPISODES).round().astype(int))
    label, step = 64, TILE + GAP
    sheet = Image.new("RGB", (label + SHEET_FRAMES * step, len(shown) * step + GAP), (27, 32, 42))
    draw = ImageDraw.Draw(sheet)
    for line, episode in enumerate(shown):
        stop = starts[episode + 1] if episode + 1 < len(starts) else count
        top = GAP + line * step
        draw.text((GAP, top), f"episode\n{episode}", fill=(200, 205, 215), font=font)
        for column, frame in enumerate(np.linspace(starts[episode], stop - 1, SHEET_FRAMES).round().astype(int)):
            sheet.paste(_tile(read, frame), (label + column * step, top))
    try:
        with completing(path) as temporary:
            sheet.save(temporary, "PNG")
    except FileError as error:
        return f"No contact sheet was drawn: {error} With --contact-sheet PATH it goes elsewhere."
    return f"Contact sheet: {path}"


def _tile(read: ReadFrames, frame: int) -> Image.Image:
    """A frame in the size of the contact sheet; red where it cannot be read."""
    try:
        picture = Image.fromarray(read(np.array([frame]))[0])
    except (DataError, *ERRORS):
        return Image.new("RGB", (TILE, TILE), (200, 30, 30))
    smaller = picture.width > TILE
    return picture.resize((TILE, TILE), Image.Resampling.BOX if smaller else Image.Resampling.NEAREST)


# -- the report -------------------------------------------------------------------------------------------------------


def _facts(path: Path, file: h5py.File, columns: Columns, scan: _Scan) -> dict[str, str]:
    pixels, size, bad = file["pixels"], path.stat().st_size, len(scan.unreadable)
    forms = {name: column for name, column in file.items() if isinstance(column, h5py.Dataset)}
    repeated, uniform = (100 * part / scan.frames for part in (scan.duplicates, scan.uniform))
    return {
        "file": f"{path} ({size / 2**20:.1f} MiB, {size / len(pixels) / 1000:.2f} GB per million frames)",
        "environment": str(read_attributes(file).get("environment", "not recorded")),
        "frames": f"{scan.frames:,} of {pixels.shape[1]} px; {f'{bad:,} cannot be read' if bad else _verified(pixels)}",
        "columns": ", ".join(f"{name} {form.dtype}{list(form.shape[1:])}" for name, form in forms.items()),
        **_episode_facts(columns),
        "repeated frames": f"{repeated:.1f} % are identical to the one before them",
        "empty frames": f"{uniform:.1f} % have a single colour",
    }


def _episode_facts(columns: Columns) -> dict[str, str]:
    lengths = _column(columns, "ep_len")
    if not lengths.size or lengths.dtype.kind not in "iu":
        return {}
    shortest, low, median, high, longest = (f"{value:.0f}" for value in np.percentile(lengths, (0, 25, 50, 75, 100)))
    spread = f"rows {shortest} to {longest}, half of them {low} to {high}, median {median}"
    return {"episodes": f"{len(lengths):,}: {spread}, mean {lengths.mean():.1f}"}


def _verified(pixels: h5py.Dataset) -> str:
    """What reading a frame proves, which depends on how it is stored."""
    if pixels.fletcher32:
        return "all read, checksums (Fletcher-32) match"
    if pixels.compression != "gzip":
        how = "compressed" if filters_of(pixels) else "uncompressed"
        return f"all read, but {how} without checksums: only sizes were verified"
    # HDF5 stores a chunk as it is where compressing would not make it smaller.
    masks: list[int] = []
    pixels.id.chunk_iter(lambda chunk: masks.append(chunk.filter_mask))
    raw = np.count_nonzero(masks)
    return "all read, checksums (Adler-32) match" + (f", but {raw:,} incompressible chunks have none" if raw else "")


def _action_table(actions: Array) -> Array:
    """Statistics of the actions (N, action_dim) that were taken, float64 (action_dim, 5); see ``CheckReport``."""
    if actions.ndim != 2 or actions.dtype.kind != "f":
        return np.zeros((0, 5))
    taken = actions[np.isfinite(actions).all(axis=1)].astype(np.float64)
    if not len(taken):
        return np.zeros((0, 5))
    low, high = taken.min(axis=0), taken.max(axis=0)
    at_bounds = ((taken == low) | (taken == high)).mean(axis=0)
    return np.stack([taken.mean(axis=0), taken.std(axis=0), low, high, at_bounds], axis=1)
