"""Compressed frames within an HDF5 file, read and written past HDF5's own, slower and single-threaded machinery.

A frame is one chunk, compressed as HDF5's gzip filter does it, so every HDF5 reader understands the file. Only the
tools are faster: ISA-L compresses (5 times as fast as zlib at level 3), libdeflate decompresses (4 times as fast).
"""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from dataclasses import dataclass

import deflate
import h5py
import numpy as np
from isal import isal_zlib

from lewm.data.hdf5 import checksum
from lewm.types import Array

# ISA-L's own scale, 0 to 3. Level 0 is a third larger, level 3 takes five times as long and is no smaller.
LEVEL = 2


class ChunkError(Exception):
    """Frame ``frame`` is missing or damaged; whoever knows the file and the row says so to the user."""

    def __init__(self, frame: int, problem: str) -> None:
        super().__init__(problem)
        self.frame = frame


@dataclass(frozen=True)
class _Table:
    """Where the chunks are, (F,) each; a size of 0: nowhere."""

    offsets: Array
    sizes: Array
    is_raw: Array


class FrameChunks:
    """The frames of a dataset that has one gzip chunk per frame. Threads may share it: reading holds no lock.

    sizes_checksum: of the bytes that each takes, if it is known.
    """

    def __init__(self, pixels: h5py.Dataset, sizes_checksum: str | None = None) -> None:
        self._pixels, self._sizes_checksum = pixels, sizes_checksum
        # HDF5's own descriptor: the file may have got a successor of the same name since it was opened.
        self._descriptor: int = pixels.file.id.get_vfd_handle()
        self._looking_up = threading.Lock()
        self._known_table: _Table | None = None

    @staticmethod
    def fits(pixels: h5py.Dataset) -> bool:
        """Whether a dataset is stored in this way."""
        return pixels.chunks == (1, *pixels.shape[1:]) and filters_of(pixels) == [h5py.h5z.FILTER_DEFLATE]

    @property
    def _table(self) -> _Table:
        """Looked up once, at the first read: a million chunks take two seconds."""
        if self._known_table is None:
            with self._looking_up:
                self._known_table = self._known_table or self._checked_table()
        return self._known_table

    def _checked_table(self) -> _Table:
        table = _look_up(self._pixels)
        if self._sizes_checksum not in (None, checksum(table.sizes)):
            raise ValueError("the index of its frames is not what was written")
        return table

    @property
    def sizes(self) -> Array:
        """Bytes of each frame in the file, int64 (F,)."""
        return self._table.sizes

    def stored(self, frame: int) -> tuple[bytes, bool]:
        """The bytes of a frame as they are in the file, and whether they are uncompressed."""
        table = self._table
        offset, size, is_raw = int(table.offsets[frame]), int(table.sizes[frame]), bool(table.is_raw[frame])
        return self._fetch(frame, offset, size), is_raw

    def _fetch(self, frame: int, offset: int, size: int) -> bytes:
        try:
            stored = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise ChunkError(frame, str(error)) from error
        if len(stored) != size or size == 0:
            raise ChunkError(frame, f"{len(stored)} of {size} bytes are there" if size else "it was never written")
        return stored

    def read(self, frames: Array, out: Array) -> None:
        """Decompress frames int (n,) into ``out``, uint8 (n, R, R, 3)."""
        if not out.flags.c_contiguous:
            contiguous = np.empty(out.shape, np.uint8)
            self.read(frames, contiguous)
            out[:] = contiguous
            return
        table, inflate = self._table, inflater(out)
        chunks = zip(*(column[frames].tolist() for column in (table.offsets, table.sizes, table.is_raw)), strict=True)
        # Little happens per frame besides the two calls that release the interpreter's lock: threads wait for the rest.
        for position, (frame, (offset, size, is_raw)) in enumerate(zip(frames.tolist(), chunks, strict=True)):
            stored = self._fetch(frame, offset, size)
            if is_raw:  # HDF5's own writer leaves alone what does not shrink
                stored = zlib.compress(stored, 0)
            if problem := inflate(position, stored):
                raise ChunkError(frame, problem)


class InflateByCopy:
    """Decompresses zlib data into the items of an array, uint8 (n, ...), which they must fill exactly."""

    def __init__(self, out: Array) -> None:
        self._out, self._size = out, out[:1].nbytes

    def __call__(self, position: int, stored: bytes) -> str:
        """Decompress into item ``position``; returns what is wrong, or nothing."""
        try:
            item = deflate.zlib_decompress(stored, self._size)
        except deflate.DeflateError as error:
            return str(error)
        if len(item) != self._size:
            return PROBLEMS[2]
        self._out[position] = np.frombuffer(item, np.uint8).reshape(self._out.shape[1:])
        return ""


class InflateInPlace(InflateByCopy):
    """The same without the copy, which costs a quarter of the time. The array must be C-contiguous."""

    def __init__(self, out: Array) -> None:
        super().__init__(out)
        self._address, self._decompressor = out.ctypes.data, LIBDEFLATE.libdeflate_alloc_decompressor()

    def __del__(self) -> None:
        if decompressor := getattr(self, "_decompressor", None):  # unless it was interrupted as it was made
            LIBDEFLATE.libdeflate_free_decompressor(decompressor)

    def __call__(self, position: int, stored: bytes) -> str:
        place = self._address + position * self._size
        problem = LIBDEFLATE_DECOMPRESS(self._decompressor, stored, len(stored), place, self._size, None)
        return PROBLEMS[problem]


PROBLEMS = ("", "bad data", "too little data", "too much data")  # by libdeflate's codes

# The package's own C library; not on every platform can it be seen from outside.
LIBDEFLATE = ctypes.PyDLL(deflate._deflate.__file__)
inflater: type[InflateByCopy] = InflateByCopy
if hasattr(LIBDEFLATE, "libdeflate_zlib_decompress"):
    inflater = InflateInPlace
    _POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
    LIBDEFLATE.libdeflate_alloc_decompressor.restype = _POINTER
    LIBDEFLATE.libdeflate_free_decompressor.argtypes = [_POINTER]
    LIBDEFLATE.libdeflate_free_decompressor.restype = None
    # CDLL, unlike PyDLL, releases the interpreter's lock. Of its arguments the last says where to write the size of the
    # result; None: it has to be as large as its place.
    LIBDEFLATE_DECOMPRESS = ctypes.CDLL(deflate._deflate.__file__).libdeflate_zlib_decompress
    LIBDEFLATE_DECOMPRESS.argtypes = [_POINTER, ctypes.c_char_p, _SIZE, _POINTER, _SIZE, _POINTER]


def write_frame(pixels: h5py.Dataset, index: int, frame: Array) -> None:
    """Compress a frame, uint8 (R, R, 3), into its place."""
    write_stored(pixels, index, isal_zlib.compress(np.ascontiguousarray(frame), LEVEL), is_raw=False)


def write_stored(pixels: h5py.Dataset, index: int, stored: bytes, is_raw: bool) -> None:
    """Put bytes that ``FrameChunks.stored`` gave into their place, as they are."""
    pixels.id.write_direct_chunk((index, 0, 0, 0), stored, filter_mask=int(is_raw))


def filters_of(dataset: h5py.Dataset) -> list[int]:
    """HDF5's codes of the compression that a dataset is stored with."""
    properties = dataset.id.get_create_plist()
    return [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]


def chunk_sizes(pixels: h5py.Dataset) -> Array:
    """Bytes that each chunk of any dataset takes in the file, int64, in the order of their places; none: no chunks."""
    found: list[tuple[tuple[int, ...], int]] = []
    if pixels.chunks and len(pixels):
        pixels.id.chunk_iter(lambda chunk: found.append((chunk.chunk_offset, chunk.size)))
    return np.array([size for _, size in sorted(found)], np.int64)


def _look_up(pixels: h5py.Dataset) -> _Table:
    count = len(pixels)
    table = _Table(np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, bool))

    def note(chunk: h5py.h5d.StoreInfo) -> None:
        index, *rest = chunk.chunk_offset
        if index >= count or any(rest):  # a damaged index: the frame that is meant is missing
            return
        if table.sizes[index]:
            raise ValueError(f"its index names frame {index} twice")
        table.offsets[index], table.sizes[index] = chunk.byte_offset, chunk.size
        table.is_raw[index] = chunk.filter_mask != 0

    if count:  # asked one by one, each would cost a walk through all
        pixels.id.chunk_iter(note)
    return table
