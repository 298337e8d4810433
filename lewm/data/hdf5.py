"""HDF5 files from anywhere: nothing in them is believed before it has been looked at in another process.

What lewm writes names the SHA-256 of every column and of the attributes, in an attribute of the root. Files that have
no such attribute are read as they are.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lewm.data import untrusted
from lewm.errors import DataError
from lewm.files import json_digest
from lewm.types import Array

CHECKSUMS = "checksums"  # the attribute
PATIENCE = 60.0  # seconds that looking through a file may take, and besides:
SLOWEST = 10e6  # bytes a second, of which only a part is read
ATTRIBUTES, FRAME_SIZES = "(attributes)", "(bytes of each frame)"  # what has a checksum besides columns


@contextlib.contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Name a file of which HDF5 cannot make sense; it has several kinds of errors for that."""
    try:
        yield
    except untrusted.ERRORS as error:
        said = f"{error}" or type(error).__name__
        raise DataError(f"{path} is damaged: {said}. Collect or download it again.") from error


def open_for_reading(path: Path) -> h5py.File:
    """A file that is what it seems: no part of it lies elsewhere, and what it says it holds is there."""
    if not path.is_file():
        raise DataError(f"There is no dataset file at {path}. Check the path, or make one with `lewm collect`.")
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # brings Blosc, which the official files are compressed with
    try:
        if problem := PROBE.problem_of(path):
            raise DataError(f"{path} cannot be trusted: {problem}. Collect or download it again.")
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} is not a whole HDF5 file ({error}). Collect or download it again.") from error


class _Probe:
    """The other process, started when it is first asked; see ``lewm.data.untrusted``. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._sound: set[tuple[int, ...]] = set()  # files that need not be looked at again

    def problem_of(self, path: Path) -> str:
        """What is wrong with a file, as far as it can do harm; or nothing."""
        status = path.stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        with self._lock:
            if identity in self._sound:
                return ""
            try:
                problem = self._ask(path, PATIENCE + status.st_size / SLOWEST)
            except BaseException:  # interrupted: its answer must not be taken for that to the next question
                self.close()
                raise
            if problem is None:
                self.close()
                return "it is damaged in a way that makes HDF5 fail"
            if not problem:
                self._sound.add(identity)
            return problem

    def _ask(self, path: Path, patience: float) -> str | None:
        """The answer; None: the process died of it, or was too long about it."""
        process = self._running()
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(os.fspath(path.absolute())).encode() + b"\n")
            process.stdin.flush()
        answered = select.poll()
        answered.register(process.stdout, select.POLLIN)
        if not answered.poll(patience * 1000):
            return None
        line = process.stdout.readline()
        return str(json.loads(line)) if line else None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # it belongs to the process from which we were forked
            self._process = None
        if self._process is not None and self._process.poll() is not None:  # somebody has ended it meanwhile
            self.close()
        if self._process is None:
            # Where Ctrl-C does not reach it; it ends with us, who hold its input.
            command, quiet = [sys.executable, "-P", untrusted.__file__], subprocess.DEVNULL
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": quiet}
            environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(command, env=environ, start_new_session=True, **pipes)
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """End the process, if it is ours."""
        process, self._process = self._process, None
        if process and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


PROBE = _Probe()
atexit.register(PROBE.close)


def read_attributes(file: h5py.File) -> dict[str, Any]:
    """Those of a file's root, as plain values; without the checksums."""
    return {name: _plain(value) for name, value in file.attrs.items() if name != CHECKSUMS}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return "" if isinstance(value, h5py.Empty) else value


def read_whole(column: h5py.Dataset) -> Array:
    """All of a column, (N, ...), if it has numbers and there is memory for them."""
    name, size = column.name[1:], math.prod(column.shape) * column.dtype.itemsize
    if column.dtype.hasobject:
        raise ValueError(f"the column {name!r} holds texts or objects, not numbers")
    if size > (room := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise ValueError(f"the column {name!r} takes {size / 2**30:.1f} GiB, and this machine has {room / 2**30:.1f}")
    return np.asarray(column[()])


# -- checksums ------------------------------------------------------------------------------------------------------


class ColumnSum:
    """SHA-256 of a column that comes in pieces (n, ...), in whatever pieces it comes."""

    def __init__(self) -> None:
        self._sum, self._rows, self._form = hashlib.sha256(), 0, ""

    def add(self, piece: Array) -> None:
        """The next rows."""
        self._form = f"{piece.dtype.str} {piece.shape[1:]}"
        self._sum.update(np.ascontiguousarray(piece).tobytes())
        self._rows += len(piece)

    def hexdigest(self) -> str:
        """Of all rows, and of their form."""
        total = self._sum.copy()
        total.update(f"{self._form} {self._rows}".encode())
        return total.hexdigest()


def checksum(column: Array) -> str:
    """SHA-256 of a column (N, ...) and of its form."""
    whole = ColumnSum()
    whole.add(column)
    return whole.hexdigest()


def write_checksums(file: h5py.File, sums: Mapping[str, str]) -> None:
    """Add those of columns, by their names, and that of the attributes, which must all be there."""
    file.attrs[CHECKSUMS] = json.dumps({**sums, ATTRIBUTES: json_digest(read_attributes(file))}, sort_keys=True)


def read_checksums(file: h5py.File) -> dict[str, str]:
    """By the names of columns; none: the file does not have any. The attributes have been compared with theirs."""
    if CHECKSUMS not in file.attrs:
        return {}
    found = json.loads(file.attrs[CHECKSUMS])
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"the attribute {CHECKSUMS!r} cannot be read")
    if found.pop(ATTRIBUTES, None) != json_digest(read_attributes(file)):
        raise ValueError(f"its attributes are not those that were written ({ADVICE})")
    if missing := sorted(set(found) - set(file) - {FRAME_SIZES}):
        raise ValueError(f"the column {missing[0]!r} was written, and is not there ({ADVICE})")
    return found


ADVICE = f"whoever has changed it on purpose removes the attribute {CHECKSUMS!r}"


def compare(sums: Mapping[str, str], name: str, column: Array) -> None:
    """Refuse a column (N, ...) that is not the one that was written; where that is not known, it is accepted."""
    if name in sums and checksum(column) != sums[name]:
        raise ValueError(f"{name} is not what was written ({ADVICE})")
