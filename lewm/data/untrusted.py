"""A process that looks through HDF5 files before lewm does, since the library trusts what they say.

A damaged file can crash it, keep it busy for ever, or make it ask for terabytes; one that was made for it shows what
lies in other files. Here that costs a process which holds nothing. Only h5py is imported, so that it starts at once.

    in   a path, as a line of JSON
    out  what is wrong with the file, as a line of JSON; "": lewm may read all of it, or hear of an error as it does
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import resource
import sys

import h5py

MEMORY = 4 << 30  # bytes: what a process may ask for that reads one piece of a column after the other
PIECE = 64 << 20  # bytes, of a column
LARGEST_SIDE = 4096  # px, of a frame

ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError, AttributeError)


def problem_of(path: str) -> str:
    """Read all but the frames of a file; returns what is wrong with it besides what h5py says of it in any case."""
    with contextlib.suppress(*ERRORS), h5py.File(path, "r") as file:
        with contextlib.suppress(*ERRORS):
            list(file.attrs.items())
        for name in file:
            # What a link leads to is not looked at: it may be in another file.
            if not isinstance(file.get(name, getlink=True), h5py.HardLink):
                return f"{name} is a link to somewhere else"
            with contextlib.suppress(*ERRORS):
                column = file[name]
                if isinstance(column, h5py.Dataset) and (problem := _problem_of_column(name, column)):
                    return problem
    return ""


def _problem_of_column(name: str, column: h5py.Dataset) -> str:
    properties = column.id.get_create_plist()
    if properties.get_external_count() or properties.get_layout() == h5py.h5d.VIRTUAL:
        return f"{name} lies in other files"
    if name == "pixels":
        if max(column.shape[1:], default=0) > LARGEST_SIDE:
            return f"its frames have the shape {column.shape[1:]}, and at most {LARGEST_SIDE} px are read"
        if column.chunks:
            column.id.chunk_iter(lambda _chunk: None)
        return ""
    if column.dtype.hasobject or not column.shape:
        return ""
    size = math.prod(column.shape) * column.dtype.itemsize
    if column.chunks:
        expected = math.prod(-(-n // chunk) for n, chunk in zip(column.shape, column.chunks, strict=True))
        whole = column.id.get_num_chunks() == expected
    else:
        whole = column.id.get_storage_size() >= size
    if not whole:
        return f"{name} claims to have {size:,} bytes, and they are not all there"
    step = max(PIECE // max(size // max(len(column), 1), 1), 1)
    for start in range(0, len(column), step):
        column[start : start + step]
    return ""


def main() -> None:
    """Answer until there are no more questions."""
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # as in the process that will read the file
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(problem_of(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
