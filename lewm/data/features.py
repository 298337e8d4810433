"""What a frozen encoder makes of every frame of a dataset, computed once and kept beside it.

    DATASET.h5.features/NAME-DIGEST/features.json    which encoder, which dataset, and their form
    DATASET.h5.features/NAME-DIGEST/features.npy     (F, ...), float16 or float32, F the dataset's frames
    DATASET.h5.features/NAME-DIGEST/checksums.txt    a line for each block that is finished: its number and SHA-256

A block is what the encoder is given at a time. Its numbers are on disk before its checksum is, so a build that is
killed goes on with the blocks that have none. No number is used before the checksum of its block is found to fit,
which covers features.json as well.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lewm.data.frames import Cache, open_frames
from lewm.data.store import EpisodeStore, check_place
from lewm.errors import DataError, FileError
from lewm.files import completing, disk_errors, json_digest, only_writer, read_json, remove, write_json
from lewm.machine import cores
from lewm.types import Array, ProgressCallback

FORM, VALUES, CHECKSUMS = "features.json", "features.npy", "checksums.txt"
VERSION = 1
DTYPES = ("<f2", "<f4")
BLOCK_FRAMES = 128  # fills a GPU with a small encoder, and is little to do again
READERS = min(8, cores())  # threads that decode frames ahead of the encoder
DIGEST_LETTERS = 16  # of the encoder's, in a folder's name
NAME_LETTERS = 120  # the last of the encoder's, in the same: a path may be longer than a file system takes

# Frames uint8 (n, R, R, 3), on the CPU -> their features (n, ...), float16 or float32.
Encode = Callable[[torch.Tensor], torch.Tensor | Array]


@dataclass(frozen=True)
class _Form:
    """What features.json says. shape: of one frame's features.  offset: of the first number in features.npy."""

    version: int
    encoder: str
    encoder_digest: str
    dataset: str
    frames: int
    block: int
    shape: list[int]
    dtype: str
    offset: int = 0

    def __post_init__(self) -> None:
        numbers = (self.version, self.frames, self.block, self.offset, *self.shape)
        if self.dtype not in DTYPES or not all(isinstance(number, int) for number in numbers) or self.block < 1:
            raise TypeError(f"{self.dtype} {self.shape}, {self.block} a block")

    @property
    def frame_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def blocks(self) -> int:
        return -(-self.frames // self.block)

    def frames_of(self, block: int) -> range:
        return range(block * self.block, min((block + 1) * self.block, self.frames))

    def place(self, frame: int) -> int:
        """Where a frame's features begin in features.npy."""
        return self.offset + frame * self.frame_bytes

    def checksum(self, block: int, content: bytes) -> str:
        """SHA-256 of a block's numbers, and of what they are."""
        return hashlib.sha256(f"{json_digest(asdict(self))} {block} ".encode() + content).hexdigest()


# -- building -------------------------------------------------------------------------------------------------------


def build_features(
    store: EpisodeStore,
    encoder_name: str,
    encoder_digest: str,
    encode: Encode,
    on_progress: ProgressCallback | None = None,
    batch: int = BLOCK_FRAMES,
    announce: Callable[[str], None] | None = None,
) -> Path:
    """Compute the features of all frames that are not there yet; returns their folder.

    encode: the frozen encoder; it is given ``batch`` frames at a time, so a build that goes on calls it as before.
    on_progress: counts frames.  announce: told in a sentence how much is going to be written, and where.
    An interruption at any moment loses a few blocks. Where another process computes the same features, that raises, or
    with ``announce`` is said and waited for.
    """
    folder = features_folder(store, encoder_name, encoder_digest)
    if (folder / FORM).exists() and not _missing(folder, _read_form(folder, store, encoder_name, encoder_digest)):
        return folder
    busy = f"Another process computes the features in {folder}."
    on_wait = None if announce is None else functools.partial(announce, f"{busy} Waiting for it.")
    lock = folder.with_name(f"{folder.name}.lock")
    with only_writer(lock, f"{busy} Wait until it is done.", on_wait), torch.no_grad():
        begun = (folder / FORM).exists()
        if begun:
            form = _read_form(folder, store, encoder_name, encoder_digest)
        else:
            frames = range(min(batch, store.num_frames))
            first = _checked(encode(_read(store, frames)), store, frames)
            whose = (VERSION, encoder_name, encoder_digest, store.digest)
            form = _Form(*whose, store.num_frames, batch, list(first.shape[1:]), first.dtype.str)
        missing = _missing(folder, form)
        if begun and not missing:  # whoever was waited for has done all of it
            return folder
        _check_room(folder, form, missing)
        if announce:
            announce(_announcement(folder, form, missing))
        if not begun:
            form = _begin(folder, form)
        _fill(folder, form, store, encode, on_progress)
    return folder


def features_folder(store: EpisodeStore, encoder_name: str, encoder_digest: str) -> Path:
    """Where the features of a dataset by an encoder are, or would be."""
    name = re.sub(r"[^\w.-]+", "-", encoder_name)[-NAME_LETTERS:].strip("-.")
    return store.path.with_name(f"{store.path.name}.features") / f"{name}-{encoder_digest[:DIGEST_LETTERS]}"


def _check_room(folder: Path, form: _Form, missing: list[int]) -> None:
    """Refuse to begin what the disk cannot take."""
    needed = sum(len(form.frames_of(block)) for block in missing) * form.frame_bytes
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        remedy = "Free some space, or put the dataset on a larger disk"
        raise FileError(
            f"The features of {form.encoder} need {_size(needed)}, but the disk of {folder.parent} has "
            f"{_size(free)} left. {remedy}."
        )


def _announcement(folder: Path, form: _Form, missing: list[int]) -> str:
    left = sum(len(form.frames_of(block)) for block in missing)
    already = f", {form.frames - left:,} of them there already" if left < form.frames else ""
    each = f"{' x '.join(map(str, form.shape))} {np.dtype(form.dtype).name}"
    size = _size(left * form.frame_bytes)
    return f"Features of {form.encoder}: {form.frames:,} frames{already}, each {each}; {size} go to {folder}."


def _size(count: float) -> str:
    """So many bytes, as people read them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _begin(folder: Path, form: _Form) -> _Form:
    """Make the folder with nothing computed yet; returns the form with where its numbers begin."""
    remove(folder)  # what was killed before it knew its form
    with disk_errors(folder):
        folder.mkdir(parents=True)
        with (folder / VALUES).open("wb") as values:
            header = {"descr": form.dtype, "fortran_order": False, "shape": (form.frames, *form.shape)}
            np.lib.format.write_array_header_1_0(values, header)
            form = replace(form, offset=values.tell())
            values.truncate(form.place(form.frames))  # it takes room on disk as it is filled
    write_json(folder / FORM, asdict(form))
    return form


def _read(store: EpisodeStore, frames: range) -> torch.Tensor:
    """Some of the stored frames, uint8 (n, R, R, 3)."""
    return torch.from_numpy(store.read_frames(store.frame_rows[frames.start : frames.stop]))


def _checked(given: torch.Tensor | Array, store: EpisodeStore, frames: range) -> Array:
    """What an encoder gave for frames, (n, ...), as an array, unless it is unfit."""
    features = torch.as_tensor(given).detach().cpu()
    if features.dtype not in (torch.float16, torch.float32) or features.ndim < 2 or len(features) != len(frames):
        wanted = f"float16 or float32 of shape ({len(frames)}, ...)"
        raise DataError(f"The encoder must give {wanted}, got {features.dtype} {tuple(features.shape)}. Change it.")
    if not features.isfinite().all():
        bad = frames[int(features.flatten(1).isfinite().all(1).int().argmin())]
        raise DataError(f"The encoder gives NaN or infinity for frame {bad} of {store.path}. Use more precision.")
    return features.contiguous().numpy()


def _fill(folder: Path, form: _Form, store: EpisodeStore, encode: Encode, on_progress: ProgressCallback | None) -> None:
    """Compute the missing blocks: while one is encoded, later ones are read and earlier ones written."""
    missing = _missing(folder, form)
    done = form.frames - sum(len(form.frames_of(block)) for block in missing)
    with _BlockWriter(folder, form, store) as writer:
        for block, frames in _read_ahead(store, form, missing):
            if on_progress:
                on_progress(done, form.frames)
            writer.take(block, encode(frames))
            done += len(frames)
    if on_progress:
        on_progress(done, form.frames)


def _read_ahead(store: EpisodeStore, form: _Form, blocks: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """The frames of blocks, in their order; as many of the next ones as there are threads are being read."""
    pool, waiting = ThreadPoolExecutor(READERS, "reading"), deque[Future[torch.Tensor]]()
    following = iter(blocks)
    try:
        for block in blocks:
            for later in itertools.islice(following, READERS + 1 - len(waiting)):
                waiting.append(pool.submit(_read, store, form.frames_of(later)))
            yield block, waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _BlockWriter(contextlib.AbstractContextManager["_BlockWriter"]):
    """A thread that puts blocks of features on disk, each with its checksum behind it.

    Whatever ends the context, what it has taken is on disk then; nothing follows a block that could not be written.
    """

    def __init__(self, folder: Path, form: _Form, store: EpisodeStore) -> None:
        self._folder, self._form, self._store = folder, form, store
        finished = sorted(_read_checksums(folder).items())
        with completing(folder / CHECKSUMS) as temporary:  # without the line that a kill has torn
            temporary.write_text("".join(f"{block} {checksum}\n" for block, checksum in finished))
        # Unbuffered: what a full disk does not take must not be tried again on closing.
        with disk_errors(folder):
            self._values, self._checksums = (folder / VALUES).open("r+b", 0), (folder / CHECKSUMS).open("ab", 0)
        self._pool, self._pending, self._failed = ThreadPoolExecutor(1, "writing"), deque[Future[None]](), False

    def take(self, block: int, given: torch.Tensor | Array) -> None:
        """Have a block written, once no more than one before it is still to be."""
        while len(self._pending) > 1:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._write, block, given))

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._pool.shutdown()
        self._values.close()
        self._checksums.close()
        if kind is None:  # else that is what went wrong first
            for written in self._pending:
                written.result()

    def _write(self, block: int, given: torch.Tensor | Array) -> None:
        if self._failed:
            return
        self._failed = True
        form, features = self._form, _checked(given, self._store, self._form.frames_of(block))
        if features.dtype.str != form.dtype or list(features.shape[1:]) != form.shape:
            came = f"{features.dtype} {features.shape[1:]}, not {form.dtype} {tuple(form.shape)} as before"
            raise DataError(f"The encoder gives {came}. Remove {self._folder}, and compute all of it again.")
        content = features.tobytes()
        with disk_errors(self._folder):
            self._values.seek(form.place(form.frames_of(block).start))
            _write(self._values, content)
            os.fsync(self._values.fileno())
            _write(self._checksums, f"{block} {form.checksum(block, content)}\n".encode())
        self._failed = False


def _write(file: io.FileIO, content: bytes) -> None:
    """All of it: a file without a buffer may take a part."""
    while content:
        content = content[file.write(content) :]


# -- reading --------------------------------------------------------------------------------------------------------


class Features(contextlib.AbstractContextManager["Features"]):
    """The features of a dataset by an encoder, open for reading; whose they are is checked here.

    cache, threads, device: where they are kept, as ``lewm.data.frames.open_frames`` has it.
    shape: of one frame's features.  description: a sentence on where they are, and why.
    """

    def __init__(
        self,
        store: EpisodeStore,
        encoder_name: str,
        encoder_digest: str,
        cache: Cache = "auto",
        threads: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self._file = _FeatureFile(store, encoder_name, encoder_digest)
        self._source = open_frames(self._file, cache, threads, device)
        self.shape, self.description = self._file.frame_shape, self._source.description

    def gather(self, rows: Array) -> torch.Tensor:
        """Features of the frames at rows int (B, T): (B, T, *shape), as the encoder gave them. Threads may share it."""
        return self._source.gather(rows)

    def close(self) -> None:
        """Give up the file."""
        self._file.close()

    def __exit__(self, *_error: object) -> None:
        self.close()


class _FeatureFile:
    """A finished features.npy; a ``FrameFile``."""

    noun = "features"

    def __init__(self, store: EpisodeStore, encoder_name: str, encoder_digest: str) -> None:
        self._folder = features_folder(store, encoder_name, encoder_digest)
        self._form = _read_form(self._folder, store, encoder_name, encoder_digest)
        self._checksums = _read_checksums(self._folder)
        if missing := len(_missing(self._folder, self._form)):
            advice = "Start what computes them again: it goes on where it stopped"
            raise DataError(f"{self._folder} lacks {missing} of {self._form.blocks} blocks of features. {advice}.")
        self._sound = np.zeros(self._form.blocks, bool)
        self.path, self.num_frames = self._folder / VALUES, self._form.frames
        self.frame_shape, self.frame_type = tuple(self._form.shape), np.dtype(self._form.dtype)
        self.frame_rows, self.frames_at = store.frame_rows, store.frames_at
        self._values = self.path.open("rb")

    def close(self) -> None:
        self._values.close()

    def read_frames(self, rows: Array, out: Array) -> Array:
        """Features of rows int (n,), into ``out`` (n, *frame_shape). Threads may share it."""
        check_place(rows, out, self.frame_shape, self.frame_type)
        frames = self.frames_at(rows)
        for block in np.unique(frames // self._form.block).tolist():
            if not self._sound[block]:  # two threads may both look, and find the same
                self._check(block)
        for frame, place in zip(frames.tolist(), out, strict=True):
            self._read_into(place, frame)
        return out

    def _check(self, block: int) -> None:
        frames = self._form.frames_of(block)
        numbers = np.empty((len(frames), *self.frame_shape), self.frame_type)
        self._read_into(numbers, frames.start)
        if self._form.checksum(block, numbers.tobytes()) != self._checksums[block]:
            problem = f"the features of frames {frames.start} to {frames.stop - 1} are not those that were computed"
            raise DataError(f"{self.path} is damaged: {problem}. Remove {self._folder}, and compute them again.")
        self._sound[block] = True

    def _read_into(self, numbers: Array, frame: int) -> None:
        """The features from a frame on, as many as fit."""
        if os.preadv(self._values.fileno(), [numbers.data], self._form.place(frame)) != numbers.nbytes:
            raise DataError(f"{self.path} has lost its end. Remove {self._folder}, and compute the features again.")


def _read_form(folder: Path, store: EpisodeStore, encoder_name: str, encoder_digest: str) -> _Form:
    """What is in a folder; features of another encoder or of another dataset are refused, and a file that is cut."""
    if not (folder / FORM).is_file():
        others = re.escape(folder.name.removesuffix(encoder_digest[:DIGEST_LETTERS]))
        found = [path.name for path in sorted(folder.parent.glob("*/")) if re.fullmatch(f"{others}[^-]*", path.name)]
        has = f"only those of another encoder of that name ({', '.join(found)})" if found else "none at all"
        raise DataError(f"{store.path} has no features by {encoder_name} {encoder_digest}, {has}. Compute them first.")
    again = f"Remove {folder}, and compute the features again"
    try:
        form = _Form(**read_json(folder / FORM))
    except (TypeError, FileError) as error:
        raise DataError(f"{folder / FORM} cannot be read ({error}). {again}.") from error
    if form.version != VERSION:
        raise DataError(f"{folder} has version {form.version}, unknown here. {again}.")
    if (form.encoder, form.encoder_digest) != (encoder_name, encoder_digest):
        whose = f"{form.encoder} {form.encoder_digest}, not by {encoder_name} {encoder_digest}"
        raise DataError(f"{folder} has features by {whose}. {again}.")
    if (form.dataset, form.frames) != (store.digest, store.num_frames):
        raise DataError(f"{folder} has features of another dataset than {store.path} now is. {again}.")
    size = (folder / VALUES).stat().st_size if (folder / VALUES).is_file() else 0
    if size != form.place(form.frames):
        raise DataError(f"{folder / VALUES} has {size:,} of {form.place(form.frames):,} bytes. {again}.")
    return form


def _read_checksums(folder: Path) -> dict[int, str]:
    """SHA-256 of the features of each finished block."""
    path = folder / CHECKSUMS
    lines = re.findall(rb"^(\d+) ([0-9a-f]{64})\n", path.read_bytes() if path.is_file() else b"", re.MULTILINE)
    return {int(block): checksum.decode() for block, checksum in lines}


def _missing(folder: Path, form: _Form) -> list[int]:
    """The blocks that are not finished."""
    return sorted(set(range(form.blocks)) - set(_read_checksums(folder)))
